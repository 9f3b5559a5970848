"""Whole generations, prefill included, by this engine and by other programs on the same prompts and models.

An **arm** is one way to generate. The arms run prompt by prompt, one after the other, a different one first each time;
each gets the same ids, budget and stop ids, decodes greedily, and waits idly while the others run. Speed is tokens ÷
seconds over all prompts of a repeat. A ratio of two arms is taken within each repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dflash.bench import WARM_UP_TOKENS, spread
from dflash.engine import Engine
from dflash.errors import BackendError, PromptError, UsageError
from dflash.metrics import Metrics
from dflash.prompts import PromptSet

PLAIN, DFLASH = "plain", "dflash"
BASES = ("transformers", "official", PLAIN)
"""The arms that every other one is compared with, where they ran."""


class ArmError(BackendError):
    """An arm that cannot run, or not any more; the others go on."""


@dataclass(frozen=True)
class Answer:
    """What an arm generated, and the seconds it took; ``metrics`` of this engine's arms."""

    tokens: list[int]
    seconds: float
    metrics: Metrics | None = None


class Arm(Protocol):
    """One way to generate. ``about`` goes into the record: versions, and what else a reader must know."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> Mapping[str, Any]: ...

    def run(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        """Greedy, to a stop id or the budget. Raises ``ArmError``."""
        ...


class EngineArm:
    """This engine, through its public ``generate``; with a drafter or without."""

    def __init__(self, engine: Engine, name: str, **options: Any) -> None:
        self.name, self.about = name, {"versions": engine.backend.versions()}
        self._engine, self._options = engine, options | {"speculate": name == DFLASH}

    def run(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        begun = time.perf_counter()
        result = self._engine.generate(list(ids), max_new_tokens=max_new_tokens, **self._options)
        return Answer(result.token_ids, time.perf_counter() - begun, result.metrics)


@dataclass(frozen=True)
class Turn:
    """All arms' answers to one prompt in one repeat, by the arm's name."""

    prompt: str
    repeat: int
    answers: Mapping[str, Answer]


@dataclass
class EndToEnd:
    """What was measured so far. ``missing`` says of arms that did not run, or broke down, why."""

    prompts: PromptSet
    repeats: int
    about: dict[str, Mapping[str, Any]]
    missing: dict[str, str] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    @property
    def partial(self) -> bool:
        return len(self.turns) < len(self.prompts.prompts) * self.repeats

    def to_dict(self) -> dict[str, Any]:
        """Of every arm that ran: speed, ratio to each of ``BASES``, and on how many prompts its tokens were those of
        plain decoding in every repeat."""
        repeats = self._whole_repeats()
        return {
            "prompts": len({turn.prompt for turn in self.turns}),
            "repeats": len(repeats),
            "partial": self.partial,
            "arms": {name: self._figures(name, repeats) for name in self.about if name not in self.missing},
            "not_measured": dict(self.missing),
        }

    def _whole_repeats(self) -> list[list[Turn]]:
        """The turns of each repeat. One that was broken off is no repeat, unless there is nothing else."""
        by_repeat = [[turn for turn in self.turns if turn.repeat == repeat] for repeat in range(self.repeats)]
        return [turns for turns in by_repeat if turns and len(turns) == len(by_repeat[0])]

    def _figures(self, name: str, repeats: Sequence[Sequence[Turn]]) -> dict[str, Any]:
        prompts = {turn.prompt for turn in self.turns}
        different = {t.prompt for t in self.turns if t.answers[name].tokens != t.answers[PLAIN].tokens}
        first = [turn.answers[name] for turn in (repeats[0] if repeats else ())]
        rounds = Metrics.merge(answer.metrics for answer in first if answer.metrics)
        bases = [base for base in BASES if base in self.about and base not in self.missing and base != name]
        return {
            "tokens_per_second": spread([_speed(turns, name) for turns in repeats]),
            "num_tokens": sum(len(answer.tokens) for answer in first),
            "over": {base: spread([_speed(t, name) / _speed(t, base) for t in repeats]) for base in bases},
            "identical_prompts": len(prompts - different),
            "mean_acceptance_length": rounds.mean_acceptance_length,
            **self.about[name],
        }


def _speed(turns: Sequence[Turn], name: str) -> float:
    """Tokens ÷ seconds over all prompts of a repeat."""
    answers = [turn.answers[name] for turn in turns]
    return sum(len(answer.tokens) for answer in answers) / sum(answer.seconds for answer in answers)


def prompt_ids(engine: Engine, prompts: PromptSet, max_new_tokens: int) -> list[list[int]]:
    """The ids of every prompt, as this engine would decode it. Raises ``PromptError`` for one that it would refuse, or
    that leaves no room for ``max_new_tokens``: other programs would go on beyond the target's positions."""
    ids = []
    for prompt in prompts.prompts:
        try:
            with engine.stream(prompt.prompt, max_new_tokens=max_new_tokens) as generation:
                pass  # decodes nothing
        except PromptError as error:
            raise PromptError(f"prompt {prompt.id} of {prompts.name}: {error}") from None
        ids.append(generation.result().prompt_ids)
        if len(ids[-1]) + max_new_tokens > (most := engine.target.info.max_positions):
            raise PromptError(
                f"prompt {prompt.id} of {prompts.name} has {len(ids[-1])} tokens; with {max_new_tokens} new ones it is "
                f"longer than the target's context of {most}"
            )
    return ids


def measure_arms(
    arms: Sequence[Arm],
    prompts: PromptSet,
    ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    repeats: int = 3,
    missing: Mapping[str, str] | None = None,
    report: Callable[[EndToEnd], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> EndToEnd:
    """Measure. ``ids`` are those of ``prompts``, in order; the first arms are this engine's, plain decoding among them.
    An arm that breaks down is measured no more, and none of what it did counts. ``report`` is called after each prompt;
    ``stopped`` is asked before each answer. Raises ``UsageError`` before anything is measured."""
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; it must be at least 1")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; there is nothing to measure without a token")
    result = EndToEnd(prompts, repeats, {arm.name: arm.about for arm in arms}, dict(missing or {}))

    def ask(arm: Arm, prompt: Sequence[int], budget: int) -> Answer | None:
        try:
            return arm.run(prompt, budget)
        except ArmError as error:
            result.missing[arm.name] = str(error)
            return None

    for arm in arms:  # the first pass of a process pays for what no later one does
        if stopped():
            return result
        ask(arm, ids[0], min(WARM_UP_TOKENS, max_new_tokens))
    for repeat in range(repeats):
        for at, prompt in enumerate(prompts.prompts):
            running = [arm for arm in arms if arm.name not in result.missing]
            shift = (at + repeat) % len(running)
            answers: dict[str, Answer] = {}
            for arm in (*running[shift:], *running[:shift]):
                if stopped():
                    return result
                if (answer := ask(arm, ids[at], max_new_tokens)) is not None:
                    answers[arm.name] = answer
            result.turns.append(Turn(prompt.id, repeat, answers))
            report(result)
    return result
