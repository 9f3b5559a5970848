"""What a round costs, by context length and block size: drafting, verifying, and everything else.

A **held** round is the engine's own round at a context that does not grow: it drafts, verifies and takes in features
as ever, and afterwards target and drafter forget what it committed. So one prefill serves many rounds of every block
size, all at exactly that context. **Real** rounds are then streamed from the same state, for the share of a
generation's wall time that is neither drafting nor verifying. Block size 1 is a plain step, without a draft.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any, cast

import numpy as np

from dflash.bench import spread
from dflash.engine import Engine, Request
from dflash.errors import UsageError
from dflash.interfaces import Drafter, Target
from dflash.prompts import PromptSet
from dflash.stopping import Stopper
from dflash.types import Array, Proposal, SamplingParams, StepEvent

CONTEXTS, BLOCK_SIZES, ROUNDS = (256, 1024, 4096), (1, 4, 8, 16), 10
WARM_ROUNDS = 2
PLAIN = 1  # the block size of a plain step
_NO_BUDGET = 1 << 40


@dataclass
class Sample:
    """One prefill of ``context`` tokens in one repeat, and the rounds after it: ``held`` ones by block size, and
    ``real`` ones of the drafter's own block size, each with the wall seconds from one event to the next."""

    repeat: int
    context: int
    held: dict[int, list[StepEvent]] = field(default_factory=dict)
    real: list[tuple[float, StepEvent]] = field(default_factory=list)


@dataclass
class Rounds:
    """What was measured so far; ``samples`` are whole."""

    contexts: tuple[int, ...]
    block_sizes: tuple[int, ...]
    own_block_size: int
    repeats: int
    rounds: int
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def partial(self) -> bool:
        return len(self.samples) < self.repeats * len(self.contexts)

    def to_dict(self) -> dict[str, Any]:
        """``cells`` for every context length and block size, ``real`` for every context length. Seconds are medians of
        a repeat's rounds, spread over the repeats."""
        repeats = {sample.repeat for sample in self.samples}
        return {
            "repeats": len(repeats),
            "rounds": self.rounds,
            "partial": self.partial,
            "cells": [self._cell(context, size) for context in self._measured for size in self.block_sizes],
            "real": [self._real(context) for context in self._measured],
            "notes": list(self.notes),
        }

    @property
    def _measured(self) -> list[int]:
        return [context for context in self.contexts if any(sample.context == context for sample in self.samples)]

    def _cell(self, context: int, size: int) -> dict[str, Any]:
        samples = [sample for sample in self.samples if sample.context == context]

        def of_rounds(figure: Callable[[StepEvent], float]) -> dict[str, float] | None:
            return spread([statistics.median(figure(event) for event in sample.held[size]) for sample in samples])

        speculative = size > PLAIN
        return {
            "context": context,
            "block_size": size,
            "draft_seconds": of_rounds(lambda event: event.draft_seconds),
            "verify_seconds": of_rounds(lambda event: event.verify_seconds),
            "overhead_seconds": of_rounds(lambda event: event.overhead_seconds),
            "seconds": of_rounds(lambda event: event.seconds),
            "draft_over_verify": of_rounds(lambda event: event.draft_seconds / event.verify_seconds)
            if speculative
            else None,
            "overhead_share": of_rounds(lambda event: event.overhead_seconds / event.seconds),
            "verify_over_one_row": spread([_verify_over_one_row(sample, size) for sample in samples]),
            "over_shortest_context": spread([self._over_shortest(sample, size) for sample in samples]),
        }

    def _over_shortest(self, sample: Sample, size: int) -> float | None:
        """A round's time over that at the shortest context, in the same repeat."""
        for other in self.samples:
            if (other.repeat, other.context) == (sample.repeat, min(self.contexts)):
                return _median_seconds(sample, size) / _median_seconds(other, size)
        return None

    def _real(self, context: int) -> dict[str, Any]:
        samples = [sample for sample in self.samples if sample.context == context and sample.real]
        return {
            "context": context,
            "block_size": self.own_block_size,
            "rounds": min((len(sample.real) for sample in samples), default=0),
            "seconds": spread([statistics.median(wall for wall, _ in sample.real) for sample in samples]),
            "overhead_share": spread([_overhead_share(sample.real) for sample in samples]),
        }


def _median_seconds(sample: Sample, size: int) -> float:
    return statistics.median(event.seconds for event in sample.held[size])


def _verify_over_one_row(sample: Sample, size: int) -> float | None:
    """Of rounds that ran right after one another."""
    plain = sample.held.get(PLAIN)
    if plain is None:
        return None
    pairs = zip(sample.held[size], plain, strict=True)
    return statistics.median(block.verify_seconds / row.verify_seconds for block, row in pairs)


def _overhead_share(real: Sequence[tuple[float, StepEvent]]) -> float:
    model = sum(event.draft_seconds + event.verify_seconds for _, event in real)
    return 1 - model / sum(wall for wall, _ in real)


class _HeldTarget:
    """A target that forgets whatever it is told to keep."""

    def __init__(self, inner: Target) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def keep(self, path: Sequence[int]) -> None:
        self._inner.keep(())


class _HeldDrafter:
    """A drafter that takes features in, which is a part of a round, and forgets them."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    def propose(self, anchor: int, count: int, sampling: SamplingParams, *, detail: bool = False) -> Proposal:
        return self._inner.propose(anchor, count, sampling, detail=detail)

    def observe(self, features: Array, token_count: int) -> None:
        length = self._inner.length
        self._inner.observe(features, token_count)
        self._inner.length = length


def context_ids(engine: Engine, prompts: PromptSet, length: int) -> tuple[list[int], str]:
    """``length`` ids to fill a context with, and a phrase that says what they are: ``prompts`` one after another, over
    and over; where the engine has no tokenizer for their text, random ids from a fixed seed."""
    if engine.tokenizer is None and any(isinstance(prompt.prompt, str) for prompt in prompts.prompts):
        ids = np.random.default_rng(0).integers(engine.target.info.vocab_size, size=length)
        return ids.tolist(), "random ids from a fixed seed"
    encode = engine.tokenizer.encode if engine.tokenizer else list
    text = [token for prompt in prompts.prompts for token in cast(list[int], encode(cast(Any, prompt.prompt)))]
    return list(islice(cycle(text), length)), f"the prompts of {prompts.name}, over and over"


def fitting_contexts(engine: Engine, contexts: Sequence[int], block_sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of ``contexts`` that leave room for the largest block in the target's positions."""
    room = engine.target.info.max_positions - max((*block_sizes, engine.drafter.config.block_size))
    return tuple(context for context in contexts if context <= room)


def measure_rounds(
    engine: Engine,
    ids: Sequence[int],
    contexts: Sequence[int],
    block_sizes: Sequence[int],
    *,
    repeats: int = 3,
    rounds: int = ROUNDS,
    report: Callable[[int, int, str], None] = lambda done, total, text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Rounds:
    """Measure ``rounds`` rounds of every cell in each repeat. The contexts are the beginnings of ``ids``. ``report`` is
    told how many contexts are done, of how many; ``stopped`` is asked after each round.

    Raises ``UsageError``, also for a context that does not fit, before anything is measured."""
    for name, values, least in (
        ("a context length", contexts, 1), ("a block size", block_sizes, 1), ("repeats", (repeats,), 1),
        ("rounds", (rounds,), 1),
    ):  # fmt: skip
        if not values or min(values) < least:
            raise UsageError(f"{name} is {min(values, default='missing')}; it must be at least {least}")
    if too_long := set(contexts) - set(fitting_contexts(engine, contexts, block_sizes)):
        raise UsageError(
            f"a context of {min(too_long)} tokens and a block do not fit into the target's "
            f"{engine.target.info.max_positions} positions"
        )
    own = engine.drafter.config.block_size
    result = Rounds(tuple(sorted(set(contexts))), tuple(sorted(set(block_sizes))), own, repeats, rounds)
    result.notes += [
        f"block size {size} is above the {own} this drafter was made for: its time counts, its guesses do not"
        for size in result.block_sizes
        if size > own
    ]
    total = repeats * len(result.contexts)
    for repeat in range(repeats):
        for context in _turned(result.contexts, repeat):
            report(len(result.samples), total, f"repeat {repeat + 1}, context {context:,}")
            sample = _sample(engine, ids, result, repeat, context, stopped)
            if sample is None:
                return result
            result.samples.append(sample)
    report(total, total, "done")
    return result


def _sample(
    engine: Engine, ids: Sequence[int], plan: Rounds, repeat: int, context: int, stopped: Callable[[], bool]
) -> Sample | None:
    backend, target = engine.backend, engine.target
    held = Engine(backend, cast(Target, _HeldTarget(target)), cast(Drafter, _HeldDrafter(engine.drafter)))
    clock = backend.clock(target, exact=True)
    requests = {size: _request(engine, size) for size in plan.block_sizes}
    sample = Sample(repeat, context, {size: [] for size in plan.block_sizes})
    each = WARM_ROUNDS + plan.rounds
    budget = min(1 + each * plan.own_block_size, target.info.max_positions - context)
    with engine.stream(list(ids[:context]), max_new_tokens=budget, ignore_eos=True) as generation:
        anchor = next(generation).committed[0]
        for number in range(each):
            for size in _turned(plan.block_sizes, number + repeat):
                if stopped():
                    return None
                target.tapping = size > PLAIN
                event = backend.run(partial(held._round, requests[size], clock, anchor, size - PLAIN))
                if number >= WARM_ROUNDS:
                    sample.held[size].append(event)
        target.tapping = True
        before = time.perf_counter()
        for number, event in enumerate(generation):
            after = time.perf_counter()
            if number >= WARM_ROUNDS:
                sample.real.append((after - before, event))
            if len(sample.real) == plan.rounds:
                break
            if stopped():
                return None
            before = time.perf_counter()
    return sample


def _request(engine: Engine, size: int) -> Request:
    sampling = SamplingParams()
    return Request(
        prompt=[],
        stopper=Stopper((), _NO_BUDGET),
        verifier=engine.backend.run(lambda: engine.backend.verifier("greedy", sampling, engine.target)),
        sampling=sampling,
        block_size=size,
        speculate=size > PLAIN,
        detail=False,
    )


def _turned(values: Sequence[int], by: int) -> list[int]:
    """``values`` in order, each time another one first."""
    shift = by % len(values)
    return [*values[shift:], *values[:shift]]
