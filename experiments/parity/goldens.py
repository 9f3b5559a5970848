"""Stored official traces: one gzipped JSON file a case, which the ordinary test suite holds our engine against.

A golden holds the case it was made from, a fitted drafter's weights, requests and traces. Requests whose trace comes
near a tie are passed over: another CPU could round those the other way.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from cases import Case

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "golden"
CLEAR = 1e-4
"""The nearest tie, relative to the largest logit, that a stored trace may come to."""


def path_of(name: str) -> Path:
    return FOLDER / f"parity-{name}.json.gz"


def read(name: str) -> dict[str, Any]:
    with gzip.open(path_of(name), "rt", encoding="utf-8") as stream:
        golden: dict[str, Any] = json.load(stream)
    return golden


def write(name: str, golden: dict[str, Any]) -> None:
    """The same golden gives the same bytes."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(json.dumps(golden, separators=(",", ":")).encode(), 9, mtime=0)
    partial = path_of(name).with_suffix(".partial")
    partial.write_bytes(packed)
    partial.replace(path_of(name))


def stored_weights(case: Case) -> str | None:
    """The fitted weights of a case as stored; None where it is random, new, or has changed since."""
    if not path_of(case.name).exists():
        return None
    golden = read(case.name)
    weights: str | None = golden["weights"] if golden["case"] == case.to_dict() else None
    return weights
