"""A generation as JSON lines: a head, every ``StepEvent``, a tail. What a demo replays and conformance compares."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.errors import StorageError
from dflash.records import open_text
from dflash.types import GenerationResult, StepEvent

FORMAT = 1


@dataclass(frozen=True)
class Trace:
    """``head``: what was run (models, rule, block size, sampling …). ``tail``: how it ended."""

    head: dict[str, Any]
    prompt_ids: list[int]
    steps: list[StepEvent]
    tail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, result: GenerationResult, head: dict[str, Any], pieces: Sequence[str] | None = None) -> Trace:
        tail = {
            "token_ids": result.token_ids,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "metrics": result.metrics.to_dict(),
            "notes": list(result.notes),
        }
        if pieces is not None:
            tail["pieces"] = list(pieces)
        return cls(head, list(result.prompt_ids), list(result.steps), tail)

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
            return cls(head, head.pop("prompt_ids"), [StepEvent.from_dict(step) for step in steps], tail)
        except OSError as error:
            raise StorageError(f"the trace {path} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error):
            raise StorageError(f"{path} is not a whole trace of format {FORMAT}") from None
