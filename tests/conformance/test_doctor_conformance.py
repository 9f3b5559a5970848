"""``dflash doctor --conformance``: the table, the JSON line, and what goes wrong, as a user sees it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Any

import pytest
from torch_dflash.backend import TorchBackend

from dflash import backends
from dflash.cli.main import main
from dflash.conformance import cases, run
from dflash.conformance.cases import CASES, TOLERANCES

NAMES = ("llama", "match", "float16-qwen2")


class BrokenBackend(TorchBackend):
    """Taps every layer but the first one too early."""

    def load_target(self, folder, **where):
        return super().load_target(folder, **(where | {"layer_ids": [max(i - 1, 0) for i in where["layer_ids"]]}))


@pytest.fixture(autouse=True)
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", tuple(case for case in CASES if case.name in NAMES))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_backend", lambda name: BrokenBackend())


def doctor(*words: str) -> int:
    return main(["doctor", "--conformance", *words])


def test_the_table_says_where_it_ran_and_what_came_of_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--backend", "torch", "--device", "cpu") == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("dflash-lab ") and "· torch " in lines[0] and "· transformers " in lines[0]
    assert lines[1].endswith("· device cpu")
    for name in NAMES:
        (row,) = [line for line in lines if line.split()[:1] == [name]]
        assert row.split()[-1] == "ok"
    assert all(len(line) <= 132 for line in lines[2:-1])
    assert lines[-1].startswith("torch: 3 cases, 0 failed · worst drift float32 ")
    assert f"(at most {TOLERANCES['float16']:g})" in lines[-1] and "bfloat16" not in lines[-1]
    assert "conformance of torch: 3 of 3 · float16-qwen2" in shown.err


def test_a_failure_shows_every_layer_and_ends_in_1(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor() == 1
    shown = capsys.readouterr().out
    assert shown.count("FAIL") == len(NAMES)
    assert "llama: target layer 1 is off by " in shown
    assert "  target layer 0 " in shown and "  draft layer 1 " in shown and "← beyond" in shown
    assert "torch: 3 cases, 3 failed" in shown.splitlines()[-1]


def test_json_is_one_line_with_every_drift(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--backend", "torch", "--json") == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1
    record: dict[str, Any] = json.loads(shown)
    assert record["ok"] is True and record["backend"] == "torch" and record["device"]
    assert {"dflash-lab", "python", "torch", "transformers"} <= set(record["versions"])
    assert record["tolerances"] == TOLERANCES
    assert [case["name"] for case in record["cases"]] == list(NAMES)
    first = record["cases"][0]
    stages = [f"target layer {i}" for i in range(4)] + [
        "first logits",
        "tap of target layer 1",
        "tap of target layer 2",
    ]
    assert list(first["drift"]) == [
        *stages,
        "context",
        "draft layer 0",
        "draft layer 1",
        "draft logits",
        "target logits",
    ]
    assert 0 < first["worst"] == max(first["drift"].values()) < TOLERANCES["float32"]
    assert first["proposals"] == {"agreed": 28, "compared": 28, "unclear": 0}
    assert record["cases"][2]["dtype"] == "float16"


def test_json_of_a_failure_is_json_too(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert doctor("--json") == 1
    record = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert record["ok"] is False
    assert record["cases"][0]["fault"].startswith("target layer 1 is off by ")


def test_a_drift_that_is_no_number_is_null() -> None:
    from dflash.conformance.report import record_of

    result = run.Result(CASES[0], drift={"target layer 0": float("nan")}, fault="off by nan")
    (row,) = record_of(TorchBackend(), [result])["cases"]
    assert row["drift"] == {"target layer 0": None} and row["worst"] is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["smollm2-135m"], "a pair"),
        (["--target", "here"], "--target"),
        (["--draft", "here"], "--draft"),
        (["--dtype", "float32"], "--dtype"),
        (["--draft-bits", "4"], "--draft-bits"),
    ],
)
def test_what_it_does_not_take_is_refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(*words) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert f"dflash: error: --conformance brings its own models and number formats; leave {named} out" in shown.err


def test_a_backend_or_device_that_is_not_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor("--backend", "abacus") == 1
    assert "dflash: error: there is no backend 'abacus'" in capsys.readouterr().err
    assert doctor("--backend", "torch", "--device", "nowhere") == 1
    assert capsys.readouterr().err.startswith("dflash: error: device 'nowhere' cannot be used here: ")
    missing = [importlib.metadata.EntryPoint(name, f"not_there_{name}:Backend", "dflash.backends") for name in ("mlx",)]
    monkeypatch.setattr(backends, "entry_points", lambda group: missing)
    assert doctor() == 1
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1 and "pip install 'dflash-lab[" in shown.err


def test_an_interruption_ends_it_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_case = run.run_case

    def interrupted(backend, case, **options):
        if case.name == NAMES[1]:
            raise KeyboardInterrupt
        return run_case(backend, case, **options)

    monkeypatch.setattr(run, "run_case", interrupted)
    assert doctor("--backend", "torch") == 130
    shown = capsys.readouterr()
    assert not shown.out and shown.err.endswith("dflash: interrupted\n")


def test_the_suite_itself_needs_no_tensor_library() -> None:
    code = (
        "import sys, dflash.conformance.run, dflash.conformance.goldens, dflash.conformance.report; "
        "print(sorted({name.split('.')[0] for name in sys.modules}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "dflash" in shown
    assert not [name for name in ("'torch'", "'mlx'", "'transformers'", "'safetensors'") if name in shown]
