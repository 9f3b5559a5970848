"""Triton's names, or stand-ins that let the package be imported where there is no Triton; and what every kernel needs.

Triton's interpreter runs kernels on any device, but cuts bfloat16 off where a GPU rounds it, and multiplies its bits as
whole numbers. ``operand`` and ``narrowed`` put that right for it and compile to nothing else.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import os
from typing import Any

missing: str | None = None
"""Why Triton cannot be imported; None where it can."""

tl: Any = None
jit: Any
try:
    import triton
    from triton import language

    tl, jit = language, triton.jit
except ImportError as error:
    missing = f"triton cannot be imported ({error})"

    def as_it_is(function: Any = None, **options: Any) -> Any:
        """The function itself: plain code is used then, so nobody launches it."""
        return function if function is not None else as_it_is

    jit = as_it_is

interpreted = missing is None and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels were made for Triton's interpreter; decided at import."""

INTERPRETED: Any = None if tl is None else tl.constexpr(interpreted)


def padded(size: int) -> int:
    """The power of two that is at least ``size``: what a tile's axis must be."""
    return 1 << max(size - 1, 0).bit_length()


def pieces(size: int, piece: int) -> int:
    """How many pieces cover ``size``."""
    return -(-size // piece)


@jit
def operand(x):
    """``x`` as a factor of ``tl.dot``."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x


@jit
def narrowed(x, dtype: tl.constexpr):
    """``x`` in float32 as ``dtype``, rounded to the nearest, to even where two are."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)
