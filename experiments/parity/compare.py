"""Two traces of the same request, held against each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from protocol import unpack

TOLERANCE = 1e-4
"""The largest difference of draft logits that passes, relative to the round's largest logit, in float32."""


@dataclass
class Agreement:
    """What has been compared so far. ``accepted[n]`` rounds accepted n drafted tokens; ``worst`` is the largest
    relative difference of draft logits; ``differences`` is empty where both agree."""

    requests: int = 0
    rounds: int = 0
    drafted: int = 0
    logit_rounds: int = 0
    tokens: int = 0
    worst: float = 0.0
    margin: float = float("inf")
    accepted: Counter[int] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def add(self, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        """Compare one request's traces, round by round; only the first difference of a request is kept."""
        self.requests += 1
        self.tokens += len(theirs["output"])
        self.margin = min(self.margin, theirs["margin"])
        self.accepted.update(step["accepted"] for step in theirs["rounds"])
        self.rounds += len(theirs["rounds"])
        self.drafted += sum(len(step["drafted"]) for step in theirs["rounds"])
        if difference := self._first_difference(theirs, ours):
            self.differences.append(f"{difference} (nearest tie: {theirs['margin']:.1e})")

    def merge(self, other: Agreement) -> None:
        for name in ("requests", "rounds", "drafted", "logit_rounds", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst, self.margin = max(self.worst, other.worst), min(self.margin, other.margin)
        self.accepted.update(other.accepted)
        self.differences += other.differences

    def _first_difference(self, theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
        for index, (one, other) in enumerate(zip(theirs["rounds"], ours["rounds"], strict=False)):
            if index < min(len(theirs["logits"]), len(ours["logits"])):
                a, b = unpack(theirs["logits"][index]), unpack(ours["logits"][index])
                if a.shape != b.shape:
                    return f"round {index}: draft logits {list(a.shape)} officially, ours {list(b.shape)}"
                error = float(np.abs(a - b).max() / np.abs(a).max())
                self.worst, self.logit_rounds = max(self.worst, error), self.logit_rounds + 1
                if not error <= TOLERANCE:
                    return f"round {index}: draft logits differ by {error:.1e}"
            for what in ("position", "drafted", "accepted", "committed"):
                if one[what] != other[what]:
                    return f"round {index}: {what} {one[what]} officially, ours {other[what]}"
        for what in ("rounds", "logits"):
            if len(theirs[what]) != len(ours[what]):
                return f"{len(theirs[what])} {what} officially, ours {len(ours[what])}"
        if theirs["output"] != ours["output"]:
            return f"output {theirs['output']} officially, ours {ours['output']}"
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "agrees": not self.differences,
            "requests": self.requests,
            "rounds": self.rounds,
            "draft_tokens": self.drafted,
            "output_tokens": self.tokens,
            "logit_rounds": self.logit_rounds,
            "worst_logit_difference": self.worst,
            "nearest_tie": self.margin,
            "acceptance_histogram": {str(count): self.accepted[count] for count in sorted(self.accepted)},
            "differences": self.differences,
        }
