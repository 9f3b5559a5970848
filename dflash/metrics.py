"""The one place that computes an acceptance or speed figure.

A **round** drafts ``num_draft_tokens`` tokens (the anchor is not one of them), accepts the first ``accepted`` of them,
and commits those and the correction or bonus, fewer where a stop or the budget cuts it. Steps of kind ``prefill`` and
``plain`` are no rounds. A ratio whose denominator is zero is None.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash.types import StepEvent


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


@dataclass(frozen=True)
class Metrics:
    """Figures of one generation, or of several summed by ``merge``. Times are seconds, memory is bytes.

    ``total_seconds`` runs from the request to its end, ``ttft`` to the first token (the drafter's context prefill
    included); ``ttft`` and ``peak_memory`` of a merge are the largest."""

    num_tokens: int
    num_prompt_tokens: int
    num_plain_steps: int
    per_step_drafted: tuple[int, ...]
    per_step_accepted: tuple[int, ...]
    per_step_committed: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float
    plain_seconds: float
    ttft: float | None
    total_seconds: float
    peak_memory: int = 0

    @classmethod
    def from_steps(
        cls,
        steps: Sequence[StepEvent],
        *,
        num_prompt_tokens: int = 0,
        ttft: float | None = None,
        total_seconds: float | None = None,
        peak_memory: int = 0,
    ) -> Metrics:
        """``total_seconds`` defaults to the sum of the steps, ``ttft`` to the first step."""
        rounds = [step for step in steps if step.kind == "round"]
        plain = [step for step in steps if step.kind == "plain"]
        return cls(
            num_tokens=sum(len(step.committed) for step in steps),
            num_prompt_tokens=num_prompt_tokens,
            num_plain_steps=len(plain),
            per_step_drafted=tuple(len(step.drafted) for step in rounds),
            per_step_accepted=tuple(step.accepted for step in rounds),
            per_step_committed=tuple(len(step.committed) for step in rounds),
            draft_seconds=sum(step.draft_seconds for step in rounds),
            verify_seconds=sum(step.verify_seconds for step in rounds),
            overhead_seconds=sum(step.overhead_seconds for step in rounds),
            plain_seconds=sum(step.seconds for step in plain),
            ttft=ttft if ttft is not None else (steps[0].seconds if steps else None),
            total_seconds=total_seconds if total_seconds is not None else sum(step.seconds for step in steps),
            peak_memory=peak_memory,
        )

    @classmethod
    def merge(cls, parts: Iterable[Metrics]) -> Metrics:
        """All rounds of several generations as one record: ratios of it are token-weighted means."""
        every = list(parts)
        return cls(
            num_tokens=sum(part.num_tokens for part in every),
            num_prompt_tokens=sum(part.num_prompt_tokens for part in every),
            num_plain_steps=sum(part.num_plain_steps for part in every),
            per_step_drafted=tuple(n for part in every for n in part.per_step_drafted),
            per_step_accepted=tuple(n for part in every for n in part.per_step_accepted),
            per_step_committed=tuple(n for part in every for n in part.per_step_committed),
            draft_seconds=sum(part.draft_seconds for part in every),
            verify_seconds=sum(part.verify_seconds for part in every),
            overhead_seconds=sum(part.overhead_seconds for part in every),
            plain_seconds=sum(part.plain_seconds for part in every),
            ttft=max((part.ttft for part in every if part.ttft is not None), default=None),
            total_seconds=sum(part.total_seconds for part in every),
            peak_memory=max((part.peak_memory for part in every), default=0),
        )

    @property
    def num_spec_steps(self) -> int:
        """Rounds."""
        return len(self.per_step_drafted)

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.per_step_drafted)

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(self.per_step_accepted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """τ: committed tokens ÷ rounds, the correction or bonus included."""
        return _ratio(sum(self.per_step_committed), self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted draft tokens ÷ drafted tokens."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """For slot 1, 2, …: rounds that accepted it ÷ rounds that drafted it."""
        deepest = max(self.per_step_drafted, default=0)
        drafted = [sum(n > k for n in self.per_step_drafted) for k in range(deepest)]
        accepted = [sum(n > k for n in self.per_step_accepted) for k in range(deepest)]
        return tuple(a / d for a, d in zip(accepted, drafted, strict=True))

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """How many rounds accepted exactly 0, 1, 2, … drafted tokens."""
        deepest = max(self.per_step_drafted, default=-1)
        return tuple(self.per_step_accepted.count(n) for n in range(deepest + 1))

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first: (end − first token) ÷ (tokens − 1), summed over the runs of a merge."""
        return _ratio(self.decode_seconds, self._num_decoded)

    @property
    def _num_decoded(self) -> int:
        """Tokens after the first of each run."""
        return sum(self.per_step_committed) + self.num_plain_steps

    @property
    def decode_seconds(self) -> float:
        """Rounds and plain steps, prefill excluded."""
        return self.draft_seconds + self.verify_seconds + self.overhead_seconds + self.plain_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens of rounds and plain steps ÷ their time."""
        return _ratio(self._num_decoded, self.decode_seconds)

    @property
    def end_to_end_tokens_per_second(self) -> float | None:
        """All tokens ÷ the whole time, prefill included."""
        return _ratio(self.num_tokens, self.total_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Every figure by its name, ready for JSON."""
        derived = (
            "num_spec_steps",
            "num_draft_tokens",
            "num_accepted_draft_tokens",
            "mean_acceptance_length",
            "draft_acceptance_rate",
            "acceptance_rate_per_position",
            "acceptance_histogram",
            "tpot",
            "decode_tokens_per_second",
            "end_to_end_tokens_per_second",
        )
        record = asdict(self) | {name: getattr(self, name) for name in derived}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}


def per_prompt(parts: Sequence[Metrics], name: str) -> dict[str, float] | None:
    """Mean, standard deviation, smallest and largest of one figure over prompts; None where no prompt has it."""
    values = [value for part in parts if (value := getattr(part, name)) is not None]
    if not values:
        return None
    return {
        "mean": statistics.fmean(values),
        "stdev": statistics.stdev(values) if len(values) > 1 else 0.0,
        "min": min(values),
        "max": max(values),
    }


def break_even(speculative: Metrics, plain: Metrics) -> float | None:
    """The τ at which a round costs as much as the plain steps it replaces: seconds a round ÷ seconds a plain token."""
    round_seconds = _ratio(speculative.decode_seconds - speculative.plain_seconds, speculative.num_spec_steps)
    token_seconds = _ratio(plain.plain_seconds, plain.num_plain_steps)
    return round_seconds / token_seconds if round_seconds is not None and token_seconds else None
