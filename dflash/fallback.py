"""Giving up on drafting where it costs more than it brings: the output stays the same, only its pace differs."""

from __future__ import annotations

import statistics

from dflash.types import StepEvent

WARM_ROUNDS, ROUNDS, PLAIN_STEPS = 2, 12, 3


class Fallback:
    """One request's comparison. After some rounds a few plain steps are timed; where a token costs less that way, the
    rest of the request goes on without a drafter, and ``notes`` says so. The output stays the same token for token."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._rounds: list[StepEvent] = []
        self._plain: list[float] = []

    def wants_plain(self) -> bool:
        """Whether the next step should be a plain one, to be timed."""
        return len(self._rounds) >= WARM_ROUNDS + ROUNDS and len(self._plain) < PLAIN_STEPS

    def has_lost(self, event: StepEvent) -> bool:
        """Take in a step; True at the one that settles that drafting is slower."""
        if event.kind == "round":
            self._rounds.append(event)
            return False
        self._plain.append(event.seconds)
        if len(self._plain) != PLAIN_STEPS:
            return False
        measured = self._rounds[WARM_ROUNDS:]
        round_seconds = statistics.median(step.seconds for step in measured)
        acceptance_length = sum(len(step.committed) for step in measured) / len(measured)
        break_even = round_seconds / statistics.median(self._plain)
        if acceptance_length >= break_even:
            return False
        self._notes.append(
            f"went on without the drafter: it brought {acceptance_length:.2f} tokens a round and a round costs as much "
            f"as {break_even:.2f} plain steps here"
        )
        return True
