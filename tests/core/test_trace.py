"""Traces: what was saved is what is read, and nothing else is taken for a trace."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dflash.errors import StorageError
from dflash.metrics import Metrics
from dflash.token_texts import TokenTexts
from dflash.trace import Trace
from dflash.types import GenerationResult, StepEvent

if TYPE_CHECKING:
    from tiny_models import TinyPair

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


# Texts, and whoever shows a trace -------------------------------------------------------------------------------------


def test_texts_are_read_as_they_were_saved(tmp_path: Path) -> None:
    texts = TokenTexts.of_steps(STEPS, None)
    Trace.of(RESULT, {}, texts).save(tmp_path / "trace.jsonl")
    assert Trace.load(tmp_path / "trace.jsonl").texts.to_dict() == texts.to_dict()


def test_an_older_trace_without_texts_shows_numbers(tmp_path: Path) -> None:
    Trace.of(RESULT, {}).save(tmp_path / "trace.jsonl")
    texts = Trace.load(tmp_path / "trace.jsonl").texts
    assert texts.running == ["<3>", "<4>", "<6>", "<7>"] and texts.of(5) == "<5>"


def test_a_trace_names_models_and_not_the_folders_of_this_machine(tiny: TinyPair) -> None:
    engine = tiny.engine(facts={"target": "T", "target_folder": "/home/someone/T", "draft_folder": "/home/someone/D"})
    options = {"max_new_tokens": 4, "block_size": 3}
    trace = Trace.of_request(engine, options, engine.generate([5, 6], **options))
    assert trace.head["target"] == "T" and "someone" not in str(trace)
    assert (trace.head["block_size"], trace.head["verify"], trace.head["max_new_tokens"]) == (3, "greedy", 4)
    assert len(trace.texts.running) == len(trace.tail["token_ids"]) and trace.texts.of(5) == "<5>"


ROUND: dict[str, Any] = STEPS[1].to_dict()
BROKEN_STEPS: list[dict[str, Any]] = [
    {"kind": "tree"},
    {"kind": None},
    {"index": -1},
    {"index": 1.0},
    {"index": True},
    {"position": "2"},
    {"anchor": None},
    {"anchor": -5},
    {"accepted": 3},
    {"accepted": -1},
    {"accepted": 0.5},
    {"drafted": [4, "<"]},
    {"drafted": [4]},  # then probabilities are too many
    {"drafted": 4},
    {"drafted": None},
    {"drafted": [[4], 5]},
    {"committed": []},
    {"committed": [4, -6]},
    {"committed": [4, 6, 7]},
    {"committed": "46"},
    {"next_kind": "bonus"},  # where one of two was accepted
    {"accepted": 2, "committed": [4, 5, 6]},  # a correction where all were
    {"next_kind": "guess"},
    {"next_kind": ["correction"]},
    {"draft_seconds": float("nan")},
    {"verify_seconds": float("inf")},
    {"verify_seconds": 1e308},
    {"overhead_seconds": -float("inf")},
    {"overhead_seconds": "0.1"},
    {"draft_seconds": None},
    {"draft_seconds": 10**400},
    {"draft_probs": [0.5]},
    {"draft_probs": [0.5, 0.2, 0.1]},
    {"draft_probs": [0.5, float("nan")]},
    {"draft_probs": [0.5, "0.1"]},
    {"draft_probs": 0.5},
    {"target_probs": [float("inf"), 0.0]},
    {"target_probs": [None, 0.0]},
    {"text": 5},
    {"text": None},
    {"colour": "red"},
]
BROKEN_ENDS: list[dict[str, Any]] = [
    {"texts": None},
    {"texts": []},
    {"texts": {}},
    {"texts": {"vocabulary": {}, "special": [], "running": []}},  # four tokens were committed
    {"texts": {"vocabulary": {}, "special": [], "running": ["a", "b", "c", "d", "e"]}},
    {"texts": {"vocabulary": {"3": 5}, "special": [], "running": ["a", "b", "c", "d"]}},
    {"texts": {"vocabulary": {}, "special": [], "running": "abcd", "more": [None]} | {"vocabulary": []}},
    {"finish_reason": ["stop"]},
    {"finish_reason": None},
    {"notes": 5},
    {"notes": "a note"},
    {"end": False},
]


def refused(folder: Path, lines: list[Any]) -> None:
    """One sentence for a file of these lines."""
    file = folder / "broken.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(StorageError) as raised:
        Trace.load(file)
    assert str(raised.value) == f"{file} is not a whole trace of format 1"


def saved(folder: Path) -> list[dict[str, Any]]:
    Trace.of(RESULT, {"target": "T"}, TokenTexts.of_steps(STEPS, None)).save(folder / "good.jsonl")
    return [json.loads(line) for line in (folder / "good.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("changes", BROKEN_STEPS, ids=str)
def test_a_step_whose_parts_contradict_each_other_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    head, first, _, last, end = saved(tmp_path)
    refused(tmp_path, [head, first, ROUND | changes, last, end])


@pytest.mark.parametrize("name", ROUND)
def test_a_step_without_one_of_its_parts_is_refused_or_has_its_default(tmp_path: Path, name: str) -> None:
    head, first, _, last, end = saved(tmp_path)
    lines = [head, first, {key: value for key, value in ROUND.items() if key != name}, last, end]
    if name not in ("draft_probs", "target_probs", "text"):
        refused(tmp_path, lines)
        return
    (tmp_path / "fine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert getattr(Trace.load(tmp_path / "fine.jsonl").steps[1], name) in (None, "")


@pytest.mark.parametrize("changes", BROKEN_ENDS, ids=str)
def test_an_end_that_nobody_could_show_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    *lines, end = saved(tmp_path)
    refused(tmp_path, [*lines, end | changes])


@pytest.mark.parametrize("ids", [None, 5, "12", [1, "2"], [-1], [1.5], [True], {"1": 2}], ids=str)
def test_a_prompt_that_is_no_list_of_ids_is_refused(tmp_path: Path, ids: Any) -> None:
    head, *lines = saved(tmp_path)
    refused(tmp_path, [head | {"prompt_ids": ids}, *lines])


@pytest.mark.parametrize(
    "line", [5, None, [], "text", "[" * 100_000, '{"kind": "round"'], ids=lambda line: str(line)[:9]
)
def test_a_line_that_is_no_step_is_refused(tmp_path: Path, line: Any) -> None:
    head, *lines = saved(tmp_path)
    refused(tmp_path, [head, line, *lines])


@pytest.mark.parametrize("name", ["picture.jsonl", "picture.jsonl.gz"])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    with pytest.raises(StorageError) as raised:
        Trace.load(file)
    assert name in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_a_model_that_is_a_folder_is_named_by_its_last_part_alone(tiny: TinyPair, tmp_path: Path) -> None:
    engine = tiny.engine(facts={"target": str(tmp_path), "draft": "owner/draft"})
    trace = Trace.of_request(engine, {"max_new_tokens": 2}, engine.generate([5, 6], max_new_tokens=2))
    assert (trace.head["target"], trace.head["draft"]) == (tmp_path.name, "owner/draft")
