"""Response records: what the target itself answered, as exact token ids, one JSON object a line (``.gz`` or not).

Ids are kept through the end token and never re-tokenised, because a drafter learns the target's own voice.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from dflash.errors import TrainingError


@dataclass(frozen=True)
class ResponseRecord:
    """One prompt (ids with its chat template) and the target's response to it (ids, end token included).

    ``temperature`` is what the response was sampled at; ``finished`` says that it ended by itself."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    domain: str = ""
    temperature: float = 0.0
    finished: bool = True
    key: str = ""

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.prompt + self.response, dtype=np.int64)

    @property
    def loss_mask(self) -> np.ndarray:
        mask = np.zeros(len(self), dtype=bool)
        mask[len(self.prompt) :] = True
        return mask

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)

    def to_json(self) -> str:
        record: dict[str, Any] = {
            "domain": self.domain,
            "temp": self.temperature,
            "prompt": list(self.prompt),
            "response": list(self.response),
            "finished": self.finished,
        }
        return json.dumps(record | ({"key": self.key} if self.key else {}), separators=(",", ":"))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ResponseRecord:
        return cls(
            prompt=_ids(raw, "prompt"),
            response=_ids(raw, "response"),
            domain=str(raw.get("domain", "")),
            temperature=float(raw.get("temp", 0.0)),
            finished=bool(raw.get("finished", True)),
            key=str(raw.get("key", "")),
        )


def _ids(raw: dict[str, Any], key: str) -> tuple[int, ...]:
    ids = raw.get(key)
    if not isinstance(ids, list) or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError(f"{key} must be a list of token ids")
    return tuple(ids)


def open_text(path: Path, mode: str) -> IO[str]:
    """``path`` as UTF-8 text, through gzip where its name ends in ``.gz``."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    stream: IO[str] = opened(path, mode + "t", encoding="utf-8")
    return stream


def iter_records(path: str | Path) -> Iterator[ResponseRecord]:
    """Records of one file in order. Raises ``TrainingError`` naming the line that is not one."""
    path = Path(path)
    try:
        with open_text(path, "r") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield ResponseRecord.from_dict(json.loads(line))
                except (ValueError, TypeError, AttributeError) as error:
                    raise TrainingError(f"{path}, line {number}, is not a response record: {error}") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TrainingError(f"{path} cannot be read as response records: {error}") from None


def read_records(paths: Sequence[str | Path]) -> list[ResponseRecord]:
    """All records of ``paths``, in order; ``TrainingError`` where there is none."""
    records = [record for path in paths for record in iter_records(path)]
    if not records:
        raise TrainingError(f"{', '.join(map(str, paths))} holds no response records")
    return records
