"""Traces: what was saved is what is read, and nothing else is taken for a trace."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from dflash.errors import StorageError
from dflash.metrics import Metrics
from dflash.token_texts import TokenTexts
from dflash.trace import Trace
from dflash.types import GenerationResult, StepEvent

STEPS = [
    StepEvent("prefill", 0, 1, 12, (), 0, (3,), None, 0.0, 0.01, 0.0, text="é"),
    StepEvent("round", 1, 2, 3, (4, 5), 1, (4, 6), "correction", 0.001, 0.002, 0.003, (0.5, 0.25), (0.75, 0.0), "\n"),
    StepEvent("plain", 2, 4, 6, (), 0, (7,), None, 0.0, 0.002, 0.001),
]
RESULT = GenerationResult([3, 4, 6, 7], "é\n", "length", STEPS, Metrics.from_steps(STEPS), [11, 12], ("a note",))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_is_read_as_it_was_saved(tmp_path: Path, name: str) -> None:
    trace = Trace.of(RESULT, {"target": "T", "block_size": 3}, TokenTexts.of_steps(STEPS, None))
    trace.save(tmp_path / name)
    read = Trace.load(tmp_path / name)
    assert read == trace
    assert read.steps == STEPS
    assert read.tail["finish_reason"] == "length"
    assert read.tail["token_ids"] == [token for step in read.steps for token in step.committed]
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_trace_with_unlike_line_ends_in_its_text_stays_one_line_a_step(tmp_path: Path) -> None:
    trace = Trace.of(RESULT, {})
    trace.save(tmp_path / "trace.jsonl")
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 2 + len(STEPS)


def test_a_trace_cut_short_at_any_line_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    Trace.of(RESULT, {}).save(file)
    lines = file.read_text().splitlines(keepends=True)
    for kept in range(len(lines)):
        file.write_text("".join(lines[:kept]))
        with pytest.raises(StorageError, match="not a whole trace"):
            Trace.load(file)
    file.write_text("".join(lines)[:-20])
    with pytest.raises(StorageError, match="not a whole trace"):
        Trace.load(file)


def test_a_damaged_compressed_trace_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    whole, damaged = tmp_path / "whole.jsonl.gz", tmp_path / "damaged.jsonl.gz"
    Trace.of(RESULT, {}).save(whole)
    data = whole.read_bytes()
    start = 10 + len("whole.jsonl") + 64  # behind gzip's own header, whose name and time are not protected
    for at in range(start, len(data), 3):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        with pytest.raises(StorageError) as raised:
            Trace.load(damaged)
        assert "None" not in str(raised.value)
        damaged.write_bytes(data[:at])
        with pytest.raises(StorageError):
            Trace.load(damaged)


@pytest.mark.parametrize("text", ["", "\n", "{}\n{}\n", "[1]\n[2]\n", '{"trace": 2}\n{"end": true}\n', "\x00\xff"])
def test_other_files_are_no_traces(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text(text)
    with pytest.raises(StorageError, match="not a whole trace"):
        Trace.load(file)


def test_files_that_are_not_there_or_no_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing\.jsonl"):
        Trace.load(tmp_path / "missing.jsonl")
    with pytest.raises(StorageError, match="cannot be read"):
        Trace.load(tmp_path)
    with pytest.raises(StorageError, match="cannot be written"):
        Trace.of(RESULT, {}).save(tmp_path / "no" / "folder" / "trace.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_failed_save_leaves_the_old_trace_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.jsonl"
    Trace.of(RESULT, {"run": 1}).save(file)
    monkeypatch.setattr("dflash.trace.open_text", lambda path, mode: open("/dev/full", "w"))  # noqa: SIM115
    with pytest.raises(StorageError, match="cannot be written"):
        Trace.of(RESULT, {"run": 2}).save(file)
    monkeypatch.undo()
    assert Trace.load(file).head == {"run": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_compressed_trace_is_gzip(tmp_path: Path) -> None:
    Trace.of(RESULT, {}).save(tmp_path / "trace.jsonl.gz")
    with gzip.open(tmp_path / "trace.jsonl.gz", "rt", encoding="utf-8") as stream:
        assert next(stream).startswith('{"trace":1')
