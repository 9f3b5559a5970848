"""What can be held of the benchmark without a GPU: its cases, their bytes, its options."""

from __future__ import annotations

import json

import pytest
import torch
from triton_dflash import bench, forced

SMALL = bench.Sizes(
    heads=4, groups=2, head_dim=64, intermediate=96, draft_layers=3, target_layers=2, vocabulary=300, context=40,
    long=(80, 120), rows=6,
)  # fmt: skip


def attended(keys: int, e: int) -> int:
    """Keys and values; queries and output."""
    return 2 * 2 * keys * 64 * e + 2 * 4 * 6 * 64 * e


def test_the_cases_run_and_count_their_bytes() -> None:
    e, found = 2, {}
    for case in bench.cases(SMALL, "cpu", torch.bfloat16):
        with forced(False):
            result = case.call()
        if case.plain is not None:
            torch.testing.assert_close(case.plain().view_as(result), result, atol=2e-2, rtol=2e-2)
        found[case.name] = case.bytes
    width = 3 * 2 * 2 * 64  # L, keys and values, g, d
    assert found == {
        "context_kv": 2 * 6 * width * e + 2 * 6 * 32 * 4,
        "context_kv, prompt": 2 * 40 * width * e + 2 * 40 * 32 * 4,
        "block_kv": 2 * 6 * 8 * 64 * e + 2 * 6 * 32 * 4,
        "block_attention, both ways": attended(46, e),
        "block_attention, causal": attended(46, e),
        "block_attention, window": attended(9 + 6, e),
        "block_attention, 80 keys": attended(86, e),
        "block_attention, 120 keys": attended(126, e),
        "swiglu": 6 * 96 * e * 3,
        "verify_greedy": 6 * 300 * e,
        "verify_rejection": 6 * 300 * e + 300 * e + 300 * 4,
        "compact_path": 2 * (2 * 2 * 2) * 5 * 64 * e,
    }


def test_a_result_is_held_against_the_roofline() -> None:
    case = bench.Case("block_attention, 8192 keys", lambda: None, 40_000_000)
    result = bench.compared(case, fused=20e-6, plain=50e-6, roofline=4e12)
    assert result == {
        "name": case.name, "bytes": case.bytes, "seconds": 20e-6, "plain": 50e-6, "roofline": 1e-5, "of_copy": 0.5,
    }  # fmt: skip
    assert "2.50x" in bench.as_line(result) and "roofline     10.0 µs    50.0% of it" in bench.as_line(result)


def test_options() -> None:
    options = bench.options_of(["--kernel", "verify", "--kernel", "compact_path", "--rows", "8"])
    assert vars(options) == {
        "kernel": ["verify", "compact_path"], "context": 4096, "rows": 8, "dtype": "bfloat16",
    }  # fmt: skip
    assert json.dumps(vars(options))
    with pytest.raises(SystemExit):
        bench.options_of(["--dtype", "float64"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
