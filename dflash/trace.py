"""A generation as JSON lines: a head, every ``StepEvent``, a tail. What a demo replays and conformance compares."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from dflash.errors import StorageError
from dflash.records import open_text
from dflash.token_texts import TokenTexts
from dflash.types import GenerationResult, StepEvent, StepKind

if TYPE_CHECKING:
    from dflash.engine import Engine

FORMAT = 1
_MOST = 1e12  # of seconds and probabilities: far beyond any, and sums of it stay finite


@dataclass(frozen=True)
class Trace:
    """``head``: what was run (models, rule, block size, sampling …). ``tail``: how it ended."""

    head: dict[str, Any]
    prompt_ids: list[int]
    steps: list[StepEvent]
    tail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, result: GenerationResult, head: dict[str, Any], texts: TokenTexts | None = None) -> Trace:
        """``texts`` let a reader without this tokenizer see what was drafted."""
        tail = {
            "token_ids": result.token_ids,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "metrics": result.metrics.to_dict(),
            "notes": list(result.notes),
        }
        if texts is not None:
            tail["texts"] = texts.to_dict()
        return cls(head, list(result.prompt_ids), list(result.steps), tail)

    @classmethod
    def of_request(cls, engine: Engine, options: dict[str, Any], result: GenerationResult) -> Trace:
        """The trace of a request with the ``options`` of ``Engine.stream``."""
        texts = TokenTexts.of_steps(result.steps, engine.tokenizer)
        texts.read_prompt(result.prompt_ids)
        return cls.of(result, request_head(engine, options), texts)

    @property
    def texts(self) -> TokenTexts:
        """What its tokens read as; their numbers where the trace does not say."""
        if "texts" in self.tail:
            return TokenTexts.from_dict(self.tail["texts"])
        return TokenTexts.of_steps(self.steps, None)

    def save(self, path: str | Path) -> None:
        """Write to ``path`` (through gzip where it ends in ``.gz``), whole or not at all. Raises ``StorageError``."""
        path = Path(path)
        part = path.with_name(f".{os.getpid()}.partial.{path.name}")
        lines = [{"trace": FORMAT, "prompt_ids": self.prompt_ids, **self.head}]
        lines += [step.to_dict() for step in self.steps]
        lines.append({"end": True, **self.tail})
        try:
            with open_text(part, "w") as stream:
                stream.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StorageError(f"the trace {path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what ``save`` wrote. Raises ``StorageError`` where it is unreadable, cut short or no trace."""
        try:
            with open_text(Path(path), "r") as stream:
                head, *steps, tail = [json.loads(line) for line in stream]
            if head.pop("trace") != FORMAT or not tail.pop("end"):
                raise ValueError
            trace = cls(head, head.pop("prompt_ids"), [_step(record) for record in steps], tail)
            if not (
                _are_ids(trace.prompt_ids)
                and len(trace.texts.running) == sum(len(s.committed) for s in trace.steps)
                and isinstance(tail.get("finish_reason", ""), str)
                and isinstance(tail.get("notes", []), list)
            ):
                raise ValueError
            return trace
        except OSError as error:
            raise StorageError(f"the trace {path} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError, zlib.error):
            raise StorageError(f"{path} is not a whole trace of format {FORMAT}") from None


def request_head(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """What was run. It names models, not this machine's folders, so that a trace can be handed on."""
    from dflash.bench import request_facts

    facts = {name: value for name, value in engine.facts.items() if not name.endswith("_folder")}
    for role in ("target", "draft"):
        if facts.get(role) and Path(facts[role]).is_dir():
            facts[role] = Path(facts[role]).name
    return facts | request_facts(engine, options)


def _step(record: dict[str, Any]) -> StepEvent:
    """A step whose parts fit each other. Raises ``ValueError`` or ``TypeError``."""
    step = StepEvent.from_dict(record)
    times = (step.draft_seconds, step.verify_seconds, step.overhead_seconds)
    chances = [chance for part in (step.draft_probs, step.target_probs) if part is not None for chance in part]
    if not (
        step.kind in get_args(StepKind)
        and _are_ids([step.index, step.position, step.anchor, step.accepted, *step.drafted, *step.committed])
        and step.accepted <= min(len(step.drafted), len(step.committed))
        and step.next_kind in (None, "bonus" if step.accepted == len(step.drafted) else "correction")
        and (step.next_kind is None or len(step.committed) == step.accepted + 1)
        and all(part is None or len(part) == len(step.drafted) for part in (step.draft_probs, step.target_probs))
        and all(abs(number) < _MOST for number in (*times, *chances))  # not true of what is no number
        and isinstance(step.text, str)
        and isinstance(step.plan, dict | None)
    ):
        raise ValueError("the parts of a step contradict each other")
    return step


def _are_ids(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(type(value) is int and value >= 0 for value in values)
