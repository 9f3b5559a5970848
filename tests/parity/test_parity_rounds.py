"""What the comparison of speed rests on: the bare loop makes the very rounds of the engine, and the figures are what
they are called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
PARITY = Path(__file__).resolve().parents[2] / "experiments" / "parity"
if not PARITY.is_dir():
    pytest.skip("the parity scripts come with a checkout only", allow_module_level=True)
sys.path.insert(0, str(PARITY))

import cases  # noqa: E402
import goldens  # noqa: E402
import ours  # noqa: E402
import speed  # noqa: E402
from protocol import stepwise  # noqa: E402


@pytest.mark.parametrize("name", ["fitted-llama-block-8", "fitted-qwen3-served-smaller"])
def test_bare_loop_makes_the_rounds_of_the_engine(name: str, tmp_path: Path) -> None:
    golden = goldens.read(name)
    cases.write_pair(next(case for case in cases.CASES if case.name == name), tmp_path, golden["weights"])
    engine = ours.open_pair(tmp_path / "target", tmp_path / "draft", "mlx")
    answers = stepwise(real=ours.real_rounds, bare=ours.bare_rounds)
    for request, trace in zip(golden["requests"], golden["traces"], strict=True):
        firsts = [answers["begin"](engine, request | {"kind": kind}) for kind in ("real", "bare")]
        assert firsts[0]["tokens"] == firsts[1]["tokens"] == trace["output"][:1]
        for expected in trace["rounds"]:
            real, bare = (answers["round"](engine, {"kind": kind}) for kind in ("real", "bare"))
            assert real["tokens"] == bare["tokens"] == expected["committed"]
            assert 0 < bare["kernels"] < bare["bare"] < bare["seconds"]
        assert answers["round"](engine, {"kind": "real"})["tokens"] == []


def test_shares_are_of_the_same_round_and_a_slow_one_does_not_move_them() -> None:
    def record(repeat: int, ours: float, official: float = 2.0) -> dict[str, float]:
        return {"repeat": repeat, "official": official, "ours": ours, "bare": 0.9 * ours, "kernels": 0.75 * ours}

    records = [record(0, 1.0), record(0, 1.0), record(0, 50.0), record(1, 1.5), record(1, 1.5), record(1, 3.0, 4.0)]
    found = speed.summarise_rounds(records)
    assert found["rounds"] == 3
    assert found["ours_over_official"] == {"median": 0.625, "min": 0.5, "max": 0.75}
    assert found["not_the_model"] == pytest.approx({"median": 0.25, "min": 0.25, "max": 0.25})
    assert found["beyond_a_bare_loop"] == pytest.approx({"median": 0.1, "min": 0.1, "max": 0.1})
    assert found["seconds"]["ours"] == {"median": 1.25, "min": 1.0, "max": 1.5}
