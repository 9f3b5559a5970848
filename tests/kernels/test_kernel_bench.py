"""What can be held of the benchmark without a GPU: its cases, their bytes, its options."""

from __future__ import annotations

import json

import pytest
import torch
from triton_dflash import bench, forced

SMALL = bench.Sizes(heads=4, groups=2, head_dim=64, draft_layers=3, target_layers=2, vocabulary=300, context=40, rows=6)


def test_the_cases_run_and_count_their_bytes() -> None:
    e, found = 2, {}
    for case in bench.cases(SMALL, "cpu", torch.bfloat16):
        with forced(False):
            case.call()
        found[case.name] = case.bytes
    width = 3 * 2 * 2 * 64  # L, keys and values, g, d
    attended = 2 * 2 * 40 * 64 * e + 2 * 4 * 6 * 64 * e  # cache; queries and output
    assert found == {
        "context_kv": 2 * 6 * width * e + 2 * 6 * 32 * 4,
        "context_kv, prompt": 2 * 40 * width * e + 2 * 40 * 32 * 4,
        "block_attention, both ways": attended,
        "block_attention, causal": attended,
        "block_attention, tree": attended,
        "verify_greedy": 6 * 300 * e,
        "verify_rejection": 6 * 300 * e + 300 * e + 300 * 4,
        "compact_path": 2 * (2 * 2 * 2) * 5 * 64 * e,
    }


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
