"""Events and traces made by hand, for tests of what a page shows of them; no model and no tensor library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from byte_tokenizer import ByteTokenizer

from dflash.metrics import Metrics
from dflash.token_texts import TokenTexts
from dflash.trace import Trace
from dflash.types import FinishReason, GenerationResult, StepEvent

END, CONTROL = 256, 257


class Bytes(ByteTokenizer):
    """A token a byte; ids from 256 on are control tokens with a name of their own."""

    stop_token_ids = (END,)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        parts = [bytes([token]) if token < 256 else f"<|{token}|>".encode() for token in ids if token < 256 or special]
        return b"".join(parts).decode(errors="replace")

    def spell(self, token: int) -> str | None:
        return f"‹{token:02X}›"


def ids_of(text: str | Sequence[int]) -> tuple[int, ...]:
    return tuple(text.encode()) if isinstance(text, str) else tuple(text)


class Story:
    """Steps that follow each other: each takes its place, its anchor and its number from those before it."""

    def __init__(self, prompt: str = "Hi?") -> None:
        self.prompt, self.steps = list(ids_of(prompt)), list[StepEvent]()

    @property
    def committed(self) -> list[int]:
        return [token for step in self.steps for token in step.committed]

    def first(self, text: str | Sequence[int] = "A", seconds: float = 0.25) -> StepEvent:
        return self._add("prefill", (), 0, ids_of(text), None, (0.0, seconds, 0.0))

    def plain(self, text: str | Sequence[int], seconds: float = 0.02) -> StepEvent:
        return self._add("plain", (), 0, ids_of(text), None, (0.0, seconds, 0.0))

    def round(
        self,
        drafted: str | Sequence[int],
        accepted: int,
        own: str | Sequence[int] | None,
        times: tuple[float, float, float] = (0.002, 0.02, 0.001),
        **more: Any,
    ) -> StepEvent:
        """``own`` is the one token of the target's; None where the output ended before it."""
        tokens = ids_of(drafted)
        kind = None if own is None else "bonus" if accepted == len(tokens) else "correction"
        committed = (*tokens[:accepted], *(() if own is None else ids_of(own)))
        return self._add("round", tokens, accepted, committed, kind, times, **more)

    def result(self, finish: FinishReason = "length", notes: Sequence[str] = ()) -> GenerationResult:
        metrics = Metrics.from_steps(self.steps, num_prompt_tokens=len(self.prompt))
        text = Bytes().decode(self.committed)
        return GenerationResult(self.committed, text, finish, self.steps, metrics, self.prompt, tuple(notes))

    def trace(self, finish: FinishReason = "length", head: dict[str, Any] | None = None, **more: Any) -> Trace:
        texts = TokenTexts.of_steps(self.steps, Bytes())
        texts.learn(self.prompt)
        return Trace.of(self.result(finish, **more), {"target": "T"} if head is None else head, texts)

    def _add(
        self, kind: Any, drafted: Any, accepted: int, committed: Any, own: Any, times: Any, **more: Any
    ) -> StepEvent:
        ids = [*self.prompt, *self.committed]
        event = StepEvent(
            kind, len(self.steps), len(ids) - 1, ids[-1], drafted, accepted, committed, own, *times, **more
        )
        self.steps.append(event)
        return event


def records(lines: str, kind: str | None = None) -> list[dict[str, Any]]:
    """The JSON lines of a log, or those of a type."""
    assert not lines or lines.endswith("\n")
    read = [json.loads(line) for line in lines.splitlines()]
    return [record for record in read if kind in (None, record["type"])]


def running_text(lines: str) -> str:
    """The text that a page shows: what is no control token."""
    return "".join(text for step in records(lines, "step") for text, _, special in step["tokens"] if not special)


def checked(lines: str) -> list[dict[str, Any]]:
    """The records of a finished log that keeps to its format."""
    assert "<" not in lines and lines.isascii()
    for line in lines.splitlines():
        json.loads(line, parse_constant=lambda name: (_ for _ in ()).throw(AssertionError(name)))
    read = records(lines)
    for step in records(lines, "step"):
        _check_step(step)
    return read


def _check_step(step: dict[str, Any]) -> None:
    fates = [fate for _, fate, _, _ in step["slots"]]
    accepted = fates.count("accepted")
    rejected = fates.count("rejected")
    assert fates == ["accepted"] * accepted + ["rejected"] * rejected + ["discarded"] * (
        len(fates) - accepted - rejected
    )
    own = step["next"][1] if step["next"] else None
    assert rejected == (own == "correction")
    if own == "bonus":
        assert accepted == len(fates)
    committed = [fate for _, fate, _ in step["tokens"]]
    if step["kind"] == "round":
        assert committed == ["accepted"] * accepted + [own] * bool(own)
    else:
        assert committed in ([], ["plain"]) and not fates and step["next"] is None
    for slot, (text, fate, ours, theirs) in enumerate(step["slots"]):
        assert isinstance(text, str) and text
        assert ours is None or 0 <= ours <= 1
        assert (
            theirs is None or (0 <= theirs <= 1 and fate != "discarded") or (fate == "discarded" and slot == accepted)
        )
    assert step["story"].endswith(".")
