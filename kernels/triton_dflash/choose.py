"""Kernel or plain code: decided here for every call, and nowhere else.

A kernel runs where Triton can be imported and the tensors lie on a CUDA device that it compiles for, or where
``TRITON_INTERPRET=1`` was set before the package was imported. Everywhere else the plain twin runs, and the log says
why, once a reason.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

from triton_dflash import language

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OLDEST = (8, 0)  # the compute capability from which bfloat16 products exist

log = logging.getLogger(__name__)
_forced: ContextVar[bool | None] = ContextVar("forced", default=None)


@contextmanager
def forced(kernels: bool) -> Iterator[None]:
    """Within it every call takes the kernel (True) or the plain code (False), wherever its tensors are.

    Raises ``RuntimeError`` at once where kernels are asked for and Triton cannot be imported."""
    if kernels and language.missing:
        raise RuntimeError(f"no kernel can run: {language.missing}")
    token = _forced.set(kernels)
    try:
        yield
    finally:
        _forced.reset(token)


def use_kernels(device: torch.device | str, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a call on tensors of ``device`` and ``dtype`` goes through a kernel."""
    choice = _forced.get()
    if choice is not None:
        return choice
    reason = _reason_against(torch.device(device), dtype, os.environ.get("TRITON_INTERPRET") == "1")
    if reason is not None:
        _say_once(reason)
    return reason is None


def either(name: str, naive: Callable[P, R], fused: Callable[P, R]) -> Callable[P, R]:
    """The public function ``name``: ``fused`` or its plain twin, by the first argument's device and dtype."""

    @functools.wraps(naive)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, torch.Tensor), "the first argument is given by position"
        if not use_kernels(first.device, first.dtype):
            return naive(*args, **kwargs)
        with torch.cuda.device_of(first):  # Triton launches on the current device
            return fused(*args, **kwargs)

    chosen.__name__ = chosen.__qualname__ = name
    return chosen


@functools.cache
def _reason_against(device: torch.device, dtype: torch.dtype, interpret: bool) -> str | None:
    """Why plain code has to do it; None where a kernel can."""
    if language.missing:
        return language.missing
    if dtype not in DTYPES:
        return f"the kernels do not compute in {str(dtype).removeprefix('torch.')}"
    if language.interpreted:
        return None if interpret else "TRITON_INTERPRET is no longer set"
    if device.type != "cuda":
        return f"the kernels need a CUDA device, not {device.type}"
    if torch.version.hip:
        return "the kernels were never run on ROCm"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"the kernels need compute capability {OLDEST[0]}.{OLDEST[1]}"
    return None


@functools.cache
def _say_once(reason: str) -> None:
    log.info("plain PyTorch in place of Triton kernels: %s", reason)
