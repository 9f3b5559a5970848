"""Compiles every kernel for CUDA without a device, and reads what the code would take of one.

``python -m triton_dflash.compile_check [CALL …]`` prints one JSON line a compiled kernel: registers and bytes of stack
a thread (a spilled register lives on the stack), bytes of shared memory a program, and the order of its loads from
global memory, stores to it and barriers. The launches are the package's own, made on CPU tensors while Triton is told
to compile only; so options and tile sizes are those of a real call. Not for ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from triton_dflash import (
    block_attention,
    block_kv,
    compact_path,
    context_kv,
    forced,
    swiglu,
    verify_greedy,
    verify_rejection,
)

CAPABILITIES = (80, 90)


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one capability in one call."""

    call: str
    kernel: str
    capability: int
    registers: int
    stack: int
    shared: int
    order: tuple[str, ...]


class NoDevice:
    """A driver of Triton's that only knows which GPU code is made for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # Triton caches by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def compiling_only(capability: int) -> Iterator[list[Any]]:
    """Within it launches compile for ``capability`` and run nothing; the list collects what was compiled."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []

    def launch(self: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: compiled.append(self.run(*args, grid=grid, warmup=True, **options))

    driver.set_active(NoDevice(capability))  # for good: where there is no GPU there is none to go back to
    with mock.patch.object(JITFunction, "__getitem__", launch), forced(True):
        yield compiled


def resources(cubin: bytes) -> dict[str, int]:
    """What ``cuobjdump``, which comes with Triton, tells of a compiled kernel: REG, STACK, SHARED and more."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        told = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", told)}


def check(call: str, capability: int) -> list[Compiled]:
    """What the kernels of ``call``, one of ``CALLS``, take of a GPU of ``capability``."""
    with compiling_only(capability) as compiled:
        CALLS[call]()
    return [described(call, capability, kernel) for kernel in compiled]


def described(call: str, capability: int, kernel: Any) -> Compiled:
    used = resources(kernel.asm["cubin"])
    names = {"ld.global": "load", "st.global": "store", "bar.sync": "barrier"}
    found = re.findall("|".join(map(re.escape, names)), kernel.asm["ptx"])
    order = tuple(name for name, _ in itertools.groupby(names[one] for one in found))
    return Compiled(call, kernel.metadata.name, capability, used["REG"], used["STACK"], kernel.metadata.shared, order)


START = torch.ones(1, dtype=torch.int32)


def attention(heads: int, groups: int, n: int, C: int, d: int, dtype: torch.dtype, window: int | None = None) -> None:
    keys, values = torch.zeros(2, groups, C, d, dtype=dtype)
    bits = torch.ones(n, dtype=torch.int64)
    block_attention(torch.zeros(heads, n, d, dtype=dtype), keys, values, START, bits, window)


def turning(heads: int, groups: int, d: int, rotated: int, dtype: torch.dtype, normed: bool, tree: bool) -> None:
    table, weight = torch.zeros(64, rotated // 2), torch.zeros(d, dtype=dtype) if normed else None
    mixed, cache = torch.zeros(16, (heads + 2 * groups) * d, dtype=dtype), torch.zeros(2, groups, 64, d, dtype=dtype)
    depth = torch.zeros(16, dtype=torch.int32) if tree else None
    block_kv(mixed, weight, weight, table, table, cache, START, 1e-6, depth)


def context() -> None:
    table, weights = torch.zeros(64, 64), torch.zeros(2, 128, dtype=torch.bfloat16)
    mixed, cache = torch.zeros(16, 1024, dtype=torch.bfloat16), torch.zeros(2, 2, 2, 64, 128, dtype=torch.bfloat16)
    context_kv(mixed, weights, table, table, cache, START, 1e-6)


CALLS: dict[str, Callable[[], Any]] = {
    "context_kv": context,
    "block_kv": lambda: turning(4, 2, 128, 128, torch.bfloat16, normed=True, tree=True),
    "block_kv, no norm": lambda: turning(9, 3, 64, 64, torch.bfloat16, normed=False, tree=False),
    "block_kv, d 80, half of it rotated": lambda: turning(2, 1, 80, 40, torch.float32, normed=True, tree=False),
    "attention, d 128": lambda: attention(8, 2, 16, 4096, 128, torch.bfloat16),
    "attention, d 128, one row": lambda: attention(8, 2, 1, 4096, 128, torch.bfloat16),
    "attention, d 128, 64 rows": lambda: attention(8, 2, 64, 4096, 128, torch.float16),
    "attention, d 128, 8 rows": lambda: attention(8, 2, 8, 4096, 128, torch.float16),
    "attention, d 64, window": lambda: attention(3, 1, 16, 4096, 64, torch.bfloat16, window=2048),
    "attention, d 128, window": lambda: attention(8, 2, 16, 4096, 128, torch.bfloat16, window=2048),
    "attention, d 256": lambda: attention(8, 1, 16, 4096, 256, torch.bfloat16),
    "attention, d 128, float32": lambda: attention(8, 2, 16, 4096, 128, torch.float32),
    "attention, d 256, float32": lambda: attention(8, 1, 16, 4096, 256, torch.float32),
    "swiglu": lambda: swiglu(torch.zeros(16, 2 * 1536, dtype=torch.bfloat16)),
    "greedy": lambda: verify_greedy(torch.zeros(16, 9000, dtype=torch.bfloat16), torch.zeros(15).long()),
    "greedy, 256 rows": lambda: verify_greedy(torch.zeros(256, 9000), torch.zeros(255).long()),
    "rejection": lambda: verify_rejection(
        torch.zeros(16, 150_000, dtype=torch.bfloat16), torch.zeros(15).long(), torch.zeros(15, 150_000),
        torch.zeros(2, 16, dtype=torch.float64), 1.0,
    ),
    "rejection, one-hot": lambda: verify_rejection(
        torch.zeros(16, 150_000), torch.zeros(15).long(), None, torch.zeros(2, 16, dtype=torch.float64), 1.0
    ),
    "compact": lambda: compact_path(torch.zeros(4, 2, 2, 64, 128, dtype=torch.bfloat16), START, torch.arange(9)),
    "compact, part of a path": lambda: compact_path(
        torch.zeros(4, 2, 2, 64, 128, dtype=torch.bfloat16), START, torch.arange(9, dtype=torch.int32), START
    ),
}  # fmt: skip
"""Calls that between them compile every kernel, by name."""


def main(calls: Sequence[str]) -> int:
    for capability in CAPABILITIES:
        for name in calls or CALLS:
            for compiled in check(name, capability):
                print(json.dumps(asdict(compiled)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
