"""Whether an engine's samples follow the law of plain sampling, on any backend.

The law of a few tokens over a tiny vocabulary is enumerated from its definition, and samples are held to it by a
chi-square test. One test in a thousand would fail by chance; the seeds are fixed, so none does."""

from __future__ import annotations
import __future__

import copy
import inspect
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from tiny_models import PlannedDrafter, Rule, RuleTarget, chain_rule, make_config

from dflash.engine import Engine
from dflash.interfaces import Backend
from dflash.types import Proposal, SamplingParams

VOCAB, LENGTH, PROMPT = 5, 3, [1, 3]
RULE = chain_rule(VOCAB, seed=4, spread=1.2)
SAMPLES = 1000
CHANCE = 1e-3  # a sound rule's p-value is below it once in a thousand
CAUGHT = 1e-9

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6, top-p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "temperature 1.7, top-k 3": {"temperature": 1.7, "top_k": 3},
    "temperature 1.2, top-k 4, top-p 0.8": {"temperature": 1.2, "top_k": 4, "top_p": 0.8},
}

# The law, from its definition -------------------------------------------------------------------------------------


def shaped(logits: Sequence[float], sampling: SamplingParams) -> list[float]:
    """Temperature, then the ``top_k`` likeliest, then the smallest set of likeliest ones that reaches ``top_p``."""
    highest = max(logits)
    weights = [math.exp((logit - highest) / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(weights[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        kept.append(token)
        reached += weights[token] / total
        if reached >= sampling.top_p:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def law(
    sampling: SamplingParams, rule: Rule = RULE, length: int = LENGTH, stop: Sequence[int] = ()
) -> dict[tuple[int, ...], float]:
    """The probability of every output of ``length`` tokens, or fewer where one of ``stop`` ends it."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for output, chance in chances.items():
            if output and output[-1] in stop:
                longer[output] = chance
                continue
            for token, share in enumerate(shaped(rule([*PROMPT, *output]).tolist(), sampling)):
                longer[(*output, token)] = chance * share
        chances = longer
    return chances


def p_value(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """Chi-square of ``counts`` against ``chances``; rare outputs share one cell, impossible ones are never forgiven."""
    total = sum(counts.values())
    cells, rest_seen, rest_expected = [], 0, 0.0
    for output, chance in chances.items():
        if chance == 0 and counts[output]:
            return 0.0
        if chance * total >= 5:
            cells.append((counts[output], chance * total))
        else:
            rest_seen, rest_expected = rest_seen + counts[output], rest_expected + chance * total
    if rest_expected > 0:
        cells.append((rest_seen, rest_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    half_freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


# Sampling with the engine -----------------------------------------------------------------------------------------

Plan = Callable[[list[int], int], list[int]]


def likeliest(context: list[int], count: int) -> list[int]:
    """What a good drafter says: the target's greedy continuation."""
    ids = list(context)
    for _ in range(count):
        ids.append(int(RULE(ids).argmax()))
    return ids[len(context) :]


def unlikeliest(context: list[int], count: int) -> list[int]:
    ids = list(context)
    for _ in range(count):
        ids.append(int(RULE(ids).argmin()))
    return ids[len(context) :]


def stubborn(context: list[int], count: int) -> list[int]:
    return [2] * count


PLANS: dict[str, Plan] = {"likeliest": likeliest, "unlikeliest": unlikeliest, "stubborn": stubborn}


def sample(
    target: RuleTarget,
    sampling: dict[str, Any],
    plan: Plan,
    verifier: Callable[[SamplingParams], Any] | None = None,
    *,
    speculate: bool = True,
    samples: int = SAMPLES,
) -> Counter[tuple[int, ...]]:
    """How often each output of ``LENGTH`` tokens comes, over as many seeds. ``verifier`` replaces the backend's."""
    backend = _cheap(target.backend, verifier)
    engine = Engine(backend, target, PlannedDrafter(target, plan, make_config(block_size=4)))

    def outputs() -> Counter[tuple[int, ...]]:
        counts: Counter[tuple[int, ...]] = Counter()
        for seed in range(samples):
            params = SamplingParams(**sampling, seed=seed)
            result = engine.generate(PROMPT, max_new_tokens=LENGTH, sampling=params, speculate=speculate)
            counts[tuple(result.token_ids)] += 1
        return counts

    return backend.run(outputs)


def _cheap(backend: Backend, verifier: Callable[[SamplingParams], Any] | None) -> Any:
    """With a verifier of the test's choice, and without the cost of measuring memory thousands of times."""
    changed: Any = copy.copy(backend)
    changed.reset_peak_memory = lambda target: None
    changed.peak_memory = lambda target: 0
    if verifier is not None:
        changed.verifier = lambda rule, sampling, target, *, detail=False: verifier(sampling)
    return changed


# Drafts that chance has a part in ---------------------------------------------------------------------------------

SMALL, FOUR = 4, 4
SHARP = chain_rule(SMALL, seed=2, spread=0.8)
_GUESS = chain_rule(SMALL, seed=9, spread=1.2)
DRAWN: dict[str, dict[str, Any]] = {
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1": {"temperature": 1.0},
    "temperature 1.7": {"temperature": 1.7},
    "temperature 1, top-k 2": {"temperature": 1.0, "top_k": 2},
    "temperature 1, top-p 0.8": {"temperature": 1.0, "top_p": 0.8},
    "temperature 1.7, top-k 3, top-p 0.85": {"temperature": 1.7, "top_k": 3, "top_p": 0.85},
}
Draw = Callable[[np.ndarray, SamplingParams, np.ndarray], tuple[Any, Any]]
"""Draft logits [count, V] and uniform numbers [count] to tokens [count] and ``q`` [count, V], arrays of a backend."""


@cache
def _draft_logits(turn: int, last: tuple[int, ...], count: int) -> np.ndarray:
    ids, rows = [0] * turn + list(last), []
    for _ in range(count):
        rows.append(0.5 * SHARP(ids) + _GUESS(ids))
        ids.append(int(SHARP(ids).argmax()))
    return np.stack(rows)


class DrawingDrafter(PlannedDrafter):
    """Drafts as one pass does: a slot's logits depend on the context and on no other slot's token. They are like the
    target's, and unlike enough for each to rule out tokens that the other does not. ``draw`` samples them."""

    def __init__(self, target: RuleTarget, draw: Draw, block_size: int) -> None:
        super().__init__(target, lambda *_: [], make_config(block_size=block_size))
        self._draw = draw

    def propose(
        self,
        anchor: int,
        count: int,
        sampling: SamplingParams,
        *,
        detail: bool = False,
        uniforms: np.ndarray | None = None,
    ) -> Proposal:
        context = [*self.context, anchor]
        logits = _draft_logits((len(context) - 2) % 3, tuple(context[-2:]), count)
        if uniforms is None:
            return self.target.backend.proposal([anchor, *logits.argmax(-1).tolist()], self.target)
        tokens, q = self._draw(logits, sampling, uniforms)
        block = self.target.backend.proposal([anchor, *tokens.tolist()], self.target)
        return Proposal(block.tokens, block.block, count, q=q)


def sample_four(
    target: RuleTarget,
    sampling: dict[str, Any],
    draw: Draw,
    verifier: Callable[[SamplingParams], Any] | None = None,
    *,
    samples: int,
    block_size: int = 3,
    stop: Sequence[int] = (),
    **options: Any,
) -> Counter[tuple[int, ...]]:
    """How often each output of ``FOUR`` tokens comes, over as many seeds. ``target`` follows ``SHARP``. In blocks of
    three an output takes one round, with a bonus, to four. ``options``: rule and draft policy."""
    backend = _cheap(target.backend, verifier)
    engine = Engine(backend, target, DrawingDrafter(target, draw, block_size), check=True)

    def outputs() -> Counter[tuple[int, ...]]:
        return Counter(
            tuple(
                engine.generate(
                    PROMPT,
                    max_new_tokens=FOUR,
                    sampling=SamplingParams(**sampling, seed=seed),
                    stop_token_ids=stop,
                    **options,
                ).token_ids
            )
            for seed in range(samples)
        )

    return backend.run(outputs)


def mutant(of: Any, edit: Sequence[str]) -> Any:
    """A function or a class with one piece of its source, which occurs once, replaced by another."""
    source, (before, after) = textwrap.dedent(inspect.getsource(of)), edit
    assert source.count(before) == 1, f"{of.__name__} no longer says {before!r} once"
    names = dict(vars(sys.modules[of.__module__]))
    exec(
        compile(
            source.replace(before, after), f"mutant of {of.__name__}", "exec", __future__.annotations.compiler_flag
        ),
        names,
    )
    return names[of.__name__]
