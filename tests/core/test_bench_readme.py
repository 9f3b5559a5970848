"""The README's tables of the suites, from synthetic records: the newest whole one of each kind, and nothing typed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash.prompts import EvalPrompt, PromptSet
from dflash.suites.end_to_end import Answer, EndToEnd, Turn
from dflash.suites.kernels import Kernels, ProductShape
from dflash.suites.rounds import Rounds, Sample
from dflash.types import StepEvent

ROOT = Path(__file__).resolve().parents[2]
FACTS = {
    "models": {"target": {"name": "smollm2-135m"}, "draft": {"name": "smollm2-135m"}},
    "dtype": "float32",
    "device": "cpu",
    "threads": 2,
    "hardware": {"cpu": "A processor", "cores": 4, "gpus": []},
}


@pytest.fixture
def readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_figures", ROOT / "experiments" / "readme.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def store(folder: Path, *records: dict[str, Any]) -> None:
    (folder / "bench.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def rounds(scale: float, **facts: Any) -> dict[str, Any]:
    def event(draft: float, verify: float) -> StepEvent:
        return StepEvent("round", 0, 0, 1, (2,), 0, (3,), "correction", draft * scale, verify * scale, 0.001 * scale)

    held = {1: [event(0, 0.010)], 8: [event(0.004, 0.016)]}
    measured = Rounds((256,), (1, 8), 8, 1, 1, [Sample(0, 256, held, [(0.025 * scale, held[8][0])])])
    return {"kind": "bench-rounds", **measured.to_dict(), "context_tokens": "ids", **FACTS, **facts}


def end_to_end() -> dict[str, Any]:
    about = {
        "plain": {"versions": {}},
        "transformers": {"versions": {"transformers": "5.1"}},
        "llama.cpp": {"versions": {"llama-cpp-python": "0.3"}, "weights": "Q4_1"},
    }
    measured = EndToEnd(
        PromptSet("mini", (EvalPrompt([1], id="a"),)),
        1,
        about,
        {"official": "nobody has it (/root/x.py)", "z": "nobody has it"},
    )
    seconds = {"plain": 1.0, "transformers": 2.5, "llama.cpp": 0.5}
    answers = {name: Answer([7] * 10, seconds[name]) for name in about}
    measured.turns = [Turn("a", 0, answers | {"llama.cpp": Answer([8] * 10, 0.5)})]
    request = {"max_new_tokens": 10, "block_size": 8, "prompt_set": {"name": "mini"}}
    return {"kind": "bench-end-to-end", **measured.to_dict(), **request, **FACTS}


def products() -> dict[str, Any]:
    measured = Kernels([ProductShape("down", 1000, 1000, 3, 0)], (8,), 1, 4, "cpu_dflash", {"sum": [40e9]})
    measured.seconds = {(measured.shapes[0], 8): {"linear": [0.0004], "backend": [0.0002]}}
    return {"kind": "bench-kernels", **measured.to_dict(), **FACTS}


def test_rounds_take_the_newest_whole_record_of_each_pair(readme: ModuleType, tmp_path: Path) -> None:
    other = {"models": {"target": {"name": "random weights in qwen3-8b's shape, 36 of 36 layers"}}}
    store(tmp_path, rounds(1), rounds(3, **other), rounds(2), rounds(9, partial=True))
    bundled, shape = readme._rounds().split("\n\n**")
    assert "| 256 | plain | – | 20.0 | – | 22.0 [22.0–22.0] | – | – | – |" in bundled
    assert "| 256 | 8 | 8.0 | 32.0 | 4.8% | 42.0 [42.0–42.0] | 1.60 | 0.25 | 1.00 |" in bundled
    assert "the bundled pair (float32, A processor, 4 cores, 2 threads" in bundled
    assert "neither drafting nor verifying is 20.0% [20.0% – 20.0%] at 256 tokens." in bundled
    assert "`random weights in qwen3-8b's shape, 36 of 36 layers`" in shape and "| 256 | 8 | 12.0 | 48.0 |" in shape


def test_end_to_end_names_every_program_and_why_one_is_missing(readme: ModuleType, tmp_path: Path) -> None:
    store(tmp_path, end_to_end())
    table = readme._end_to_end()
    assert "| plain | 10.0 [10.0–10.0] | 2.50 [2.50–2.50] | 1/1 |" in table
    assert "| transformers (transformers 5.1) | 4.0 [4.0–4.0] | 1 | 1/1 |" in table
    assert "| llama.cpp (llama-cpp-python 0.3) | 20.0 [20.0–20.0] | 5.00 [5.00–5.00] | 0/1 |" in table
    assert "llama.cpp computes on Q4_1 weights" in table and "Not measured: official, z (nobody has it)." in table


def test_kernels_are_products_on_a_cpu_and_triton_s_on_a_gpu(readme: ModuleType, tmp_path: Path) -> None:
    gpu = {"device": "cuda:0", "hardware": {"cpu": "A processor", "cores": 4, "gpus": ["A GPU"]}}
    kernel = {"name": "verify_greedy", "seconds": 20e-6, "plain": 50e-6, "of_copy": 0.8}
    triton = {"kind": "bench-kernels", "partial": False, "kernels": [kernel], "copy_bytes_per_second": 4e12}
    store(tmp_path, products(), triton | FACTS | gpu)
    cpu, cuda = readme._kernels().split("\n\n**")
    assert "| target | 8 | 1.2 [1.2–1.2] | 0.6 [0.6–0.6] | 2.00 [2.00–2.00] | 20.0 | 50% |" in cpu
    assert "| verify_greedy | 20.0 | 50.0 | 2.50 | 80% |" in cuda
    assert "A GPU" in cuda and "4000 GB/s" in cuda


def test_every_table_has_as_many_cells_in_each_row(readme: ModuleType, tmp_path: Path) -> None:
    store(tmp_path, rounds(1), end_to_end(), products())
    for text in (readme._rounds(), readme._end_to_end(), readme._kernels()):
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert len(rows) > 2 and len({row.count("|") for row in rows}) == 1


def test_without_a_record_there_is_no_table(readme: ModuleType) -> None:
    assert readme._rounds() == readme._end_to_end() == readme._kernels() == ""
