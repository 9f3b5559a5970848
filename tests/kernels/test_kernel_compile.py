"""Every kernel compiles for CUDA without a device, spills nothing and stays within the registers it was measured at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Registers a thread, measured with Triton 3.9 for compute capability 8.0 and 9.0; the most of all calls.
MEASURED = {
    "turn_heads_kernel": (32, 32),
    "attend_stretch_kernel": (196, 180),
    "average_stretches_kernel": (72, 48),
    "largest_of_part_kernel": (46, 44),
    "greedy_verdict_kernel": (64, 64),
    "part_normaliser_kernel": (32, 32),
    "residual_mass_kernel": (90, 66),
    "draw_kernel": (108, 130),
    "compact_path_kernel": (28, 28),
    "swiglu_kernel": (32, 32),
}
SLACK = 1.5  # for other releases of Triton
SHARED = 99 * 1024  # bytes of shared memory that a program may have on the smallest of the supported GPUs
CALLS = (
    "block_kv", "attention, d 128, 8 rows", "attention, d 128, window", "greedy", "rejection",
    "compact, part of a path", "swiglu",
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """``python -m triton_dflash.compile_check`` for these calls: in a process of its own, since kernels that were made
    for the interpreter cannot be compiled."""
    from triton_dflash import language

    if language.missing:
        pytest.skip(language.missing)
    cache = tmp_path_factory.mktemp("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONWARNINGS": "ignore"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "triton_dflash.compile_check", *CALLS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kernel", MEASURED)
def test_registers(kernel: str, capability: int, compiled: list[dict[str, Any]]) -> None:
    found = [one for one in compiled if one["kernel"] == kernel and one["capability"] == capability]
    assert found
    for one in found:
        assert one["stack"] == 0, f"spills: {one}"
        assert one["registers"] <= SLACK * MEASURED[kernel][capability == 90], one
        assert one["shared"] <= SHARED, one


def test_no_kernel_is_left_out(compiled: list[dict[str, Any]]) -> None:
    import triton_dflash

    written = {
        line.split("def ")[1].split("(")[0]
        for file in Path(triton_dflash.__file__).parent.glob("*.py")
        for line in file.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert written == set(MEASURED) == {one["kernel"] for one in compiled}


def test_rows_are_read_before_they_are_overwritten(compiled: list[dict[str, Any]]) -> None:
    """The interpreter cannot show it: between warps only the barrier keeps ``compact_path`` safe in place."""
    found = [one["order"] for one in compiled if one["kernel"] == "compact_path_kernel"]
    assert len(found) == 2
    for order in found:
        first_store = order.index("store")
        assert "barrier" in order[:first_store], order
        assert "load" in order[: order.index("barrier")] and "load" not in order[order.index("barrier") : first_store]
