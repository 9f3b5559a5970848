"""Compiled passes or plain PyTorch on a CPU: decided here, and nowhere else.

The compiled code runs for few rows of float32 on Linux and x86-64 with AVX2 where there is a C++ compiler. Everywhere
else PyTorch's own operations do, and the log says why, once. ``DFLASH_CPU_KERNELS=0`` turns it off.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from cpu_dflash.build import Unavailable, library, processor_flags

SWITCH = "DFLASH_CPU_KERNELS"
MOST_ROWS = 64
"""Of a pass. Beyond it the products are no longer bound by memory, and PyTorch's own are as good."""

log = logging.getLogger(__name__)
_forced: ContextVar[bool | None] = ContextVar("forced", default=None)


@contextmanager
def forced(compiled: bool) -> Iterator[None]:
    """Within it the compiled code is used (True; ``Unavailable`` at once where there is none) or not (False). Models
    ask when they are made; products ask each time."""
    if compiled:
        library()
    token = _forced.set(compiled)
    try:
        yield
    finally:
        _forced.reset(token)


def use_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether passes of few rows on ``device`` in ``dtype`` go through the compiled code."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    if (choice := _forced.get()) is not None:
        return choice
    return reason_against(os.environ.get(SWITCH, "1")) is None


@functools.cache
def reason_against(switch: str = "1") -> str | None:
    """Why there is no compiled code here; None where there is. Compiles it where nobody has yet."""
    reason = None
    if switch == "0":
        reason = f"{SWITCH} is 0"
    else:
        try:
            library()
        except Unavailable as unavailable:
            reason = str(unavailable)
    if reason is not None:
        log.info("plain PyTorch instead of compiled passes: %s", reason)
    return reason


def description() -> str:
    """For a record: what computes passes of few rows in this process. Nothing is compiled for it."""
    switch = os.environ.get(SWITCH, "1")
    if reason_against.cache_info().currsize == 0:
        return "not asked for"
    if reason := reason_against(switch):
        return f"plain: {reason}"
    return f"compiled, {'AVX-512' if 'avx512f' in processor_flags() else 'AVX2'}"
