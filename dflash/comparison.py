"""One request decoded twice, with a drafter and without: which was faster, and whether the tokens are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash.metrics import break_even
from dflash.types import GenerationResult


@dataclass(frozen=True)
class Comparison:
    """A speculative generation beside the plain one of the same request; ``dtype``, the target's, decides what may be
    promised of their tokens."""

    speculative: GenerationResult
    plain: GenerationResult
    dtype: str

    @property
    def speedup(self) -> float | None:
        """Plain end-to-end time ÷ speculative."""
        ours, plain = self.speculative.metrics, self.plain.metrics
        return plain.total_seconds / ours.total_seconds if ours.num_tokens and ours.total_seconds else None

    @property
    def break_even(self) -> float | None:
        return break_even(self.speculative.metrics, self.plain.metrics)

    @property
    def first_difference(self) -> int | None:
        """Number of the first token, counted from 1, in which the two differ; None where they are the same."""
        ours, theirs = self.speculative.token_ids, self.plain.token_ids
        if ours == theirs:
            return None
        same = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        return 1 + (min(len(ours), len(theirs)) if same is None else same)

    @property
    def verdict(self) -> str:
        """``yes`` or ``no``, with what that is worth."""
        # Blocks and single rows round differently in 16 bits: there, equal tokens are a finding, not a promise.
        exact, at = self.dtype in ("float32", "float64"), self.first_difference
        if at is None:
            return "yes" if exact else f"yes (this output; {self.dtype} arithmetic promises it up to near-ties only)"
        why = "" if exact else "; 16-bit arithmetic breaks near-ties, see README"
        return f"no (first difference at token {at}{why})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "plain": self.plain.metrics.to_dict(),
            "speedup": self.speedup,
            "break_even_acceptance_length": self.break_even,
            "identical": self.first_difference is None,
            "first_difference": self.first_difference,
        }
