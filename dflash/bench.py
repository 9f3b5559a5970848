"""The benchmark protocol: plain and speculative decoding of the same prompts, interleaved, repeated, on this machine.

The two arms take turns prompt by prompt, and turns in going first, so that a machine that warms up, throttles or gets
busy does so to both. A figure of speed is the median over repeats, with its smallest and largest. Acceptance does not
vary between repeats (the seed is fixed) and is taken from the first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dflash.engine import Engine
from dflash.errors import PromptError, UsageError
from dflash.metrics import Metrics, break_even, per_prompt
from dflash.prompts import EvalPrompt, PromptSet
from dflash.tokenizer import Prompt
from dflash.types import DRAFT_POLICIES, GenerationResult, SamplingParams

ARMS = ("plain", "dflash")
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Twin:
    """One prompt, decoded by both arms in one repeat."""

    prompt: EvalPrompt
    repeat: int
    plain: GenerationResult
    dflash: GenerationResult

    @property
    def identical(self) -> bool:
        return self.plain.token_ids == self.dflash.token_ids


@dataclass
class Benchmark:
    """What was measured so far: whole where ``len(twins)`` is prompts × repeats."""

    prompts: PromptSet
    repeats: int
    twins: list[Twin] = field(default_factory=list)

    @property
    def partial(self) -> bool:
        return len(self.twins) < len(self.prompts.prompts) * self.repeats

    @property
    def notes(self) -> list[str]:
        """What the results had to say, once each."""
        return list(dict.fromkeys(note for twin in self.twins for note in (*twin.dflash.notes, *twin.plain.notes)))

    def to_dict(self) -> dict[str, Any]:
        """Figures over all prompts, and under ``domains`` of each domain."""
        domains = {name: self._figures(name) for name in self.prompts.domains}
        measured = {name: figures for name, figures in domains.items() if figures["prompts"]}
        return {**self._figures(None), "partial": self.partial, "domains": measured, "notes": self.notes}

    def _figures(self, domain: str | None) -> dict[str, Any]:
        twins = [twin for twin in self.twins if domain is None or twin.prompt.domain == domain]
        repeats = self._repeats(twins)
        first = [twin.dflash.metrics for twin in (repeats[0] if repeats else [])]
        merged = Metrics.merge(first)
        ids = {twin.prompt.id for twin in twins}
        return {
            "prompts": len(ids),
            "repeats": len(repeats),
            "num_tokens": merged.num_tokens,
            "num_spec_steps": merged.num_spec_steps,
            "num_draft_tokens": merged.num_draft_tokens,
            "num_accepted_draft_tokens": merged.num_accepted_draft_tokens,
            "mean_acceptance_length": merged.mean_acceptance_length,
            "draft_acceptance_rate": merged.draft_acceptance_rate,
            "acceptance_rate_per_position": list(merged.acceptance_rate_per_position),
            "acceptance_histogram": list(merged.acceptance_histogram),
            "per_prompt": {
                name: per_prompt(first, name) for name in ("mean_acceptance_length", "draft_acceptance_rate")
            },
            **{arm: _speeds([[getattr(twin, arm).metrics for twin in repeat] for repeat in repeats]) for arm in ARMS},
            "speedup": spread([_speedup(repeat) for repeat in repeats]),
            "break_even_acceptance_length": spread([_break_even(repeat) for repeat in repeats]),
            "identical_prompts": len(ids - {twin.prompt.id for twin in twins if not twin.identical}),
        }

    def _repeats(self, twins: Sequence[Twin]) -> list[list[Twin]]:
        """The twins of each repeat. One that was broken off is no repeat, unless there is nothing else."""
        by_repeat = [[twin for twin in twins if twin.repeat == repeat] for repeat in range(self.repeats)]
        return [repeat for repeat in by_repeat if repeat and len(repeat) == len(by_repeat[0])]


def _speeds(repeats: Sequence[Sequence[Metrics]]) -> dict[str, Any]:
    """One arm's speed; each repeat sums (``ttft``: takes the median) over its prompts first."""
    merged = [Metrics.merge(repeat) for repeat in repeats]
    first_tokens = [[part.ttft for part in repeat if part.ttft is not None] for repeat in repeats]
    return {
        "decode_tokens_per_second": spread([part.decode_tokens_per_second for part in merged]),
        "end_to_end_tokens_per_second": spread([part.end_to_end_tokens_per_second for part in merged]),
        "ttft": spread([statistics.median(times) if times else None for times in first_tokens]),
        "total_seconds": spread([part.total_seconds for part in merged]),
        "num_tokens": merged[0].num_tokens if merged else 0,
        "peak_memory": max((part.peak_memory for part in merged), default=0),
    }


def _merged(twins: Sequence[Twin], arm: str) -> Metrics:
    return Metrics.merge(getattr(twin, arm).metrics for twin in twins)


def _speedup(twins: Sequence[Twin]) -> float | None:
    ours = _merged(twins, "dflash").total_seconds
    return _merged(twins, "plain").total_seconds / ours if ours else None


def _break_even(twins: Sequence[Twin]) -> float | None:
    return break_even(_merged(twins, "dflash"), _merged(twins, "plain"))


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, smallest and largest over repeats; None where no repeat has a value."""
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None


def warm_up(engine: Engine, prompt: Prompt, options: dict[str, Any]) -> None:
    """A few tokens in both arms: the first pass of a process pays for what no later one does."""
    short = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"]), "stop": None}
    for speculate in (False, True):
        with engine.stream(prompt, **short, speculate=speculate) as generation:
            for _ in generation:
                pass


def run_benchmark(
    engine: Engine,
    prompts: PromptSet,
    options: dict[str, Any],
    *,
    repeats: int = 3,
    report: Callable[[Benchmark], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Benchmark:
    """Measure. ``options`` are those of ``Engine.stream``; a missing seed becomes 0. ``report`` is called after each
    prompt; ``stopped`` is asked after each round, and ends the measurement with what there is.

    Raises ``UsageError``, or ``PromptError`` for a prompt that does not fit, before anything is measured."""
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; it must be at least 1")
    options = options | {"sampling": seeded(options.get("sampling"))}
    for prompt in prompts.prompts:
        try:
            engine.stream(prompt.prompt, **options).close()  # refuses what it would refuse later; decodes nothing
        except PromptError as error:
            raise PromptError(f"prompt {prompt.id} of {prompts.name}: {error}") from None
    benchmark = Benchmark(prompts, repeats)
    warm_up(engine, prompts.prompts[0].prompt, options)
    for repeat in range(repeats):
        for at, prompt in enumerate(prompts.prompts):
            results: dict[str, GenerationResult] = {}
            for arm in ARMS if (at + repeat) % 2 == 0 else reversed(ARMS):
                result = _decode(engine, prompt.prompt, options | {"speculate": arm == "dflash"}, stopped)
                if result is None:
                    return benchmark
                results[arm] = result
            benchmark.twins.append(Twin(prompt, repeat, **results))
            report(benchmark)
    return benchmark


def _decode(
    engine: Engine, prompt: Prompt, options: dict[str, Any], stopped: Callable[[], bool]
) -> GenerationResult | None:
    with engine.stream(prompt, **options) as generation:
        for _ in generation:
            if stopped():
                return None
    return generation.result()


def seeded(sampling: SamplingParams | None) -> SamplingParams:
    """The same with a fixed seed: repeats must draw the same numbers."""
    sampling = sampling or SamplingParams()
    return sampling if sampling.greedy or sampling.seed is not None else replace(sampling, seed=0)


def request_facts(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """What a record says of a request: block size, rule, sampling, budget."""
    sampling = options.get("sampling") or SamplingParams()
    return {
        "block_size": options.get("block_size") or engine.drafter.config.block_size,
        "verify": options.get("verify") or ("greedy" if sampling.greedy else "match"),
        "draft_policy": options.get("draft_policy", DRAFT_POLICIES[0]),
        "sampling": asdict(sampling),
        "max_new_tokens": options["max_new_tokens"],
    }
