"""The gate of a feed-forward layer, from the one product of gate and up: one launch, nothing copied.

Shapes: n tokens, I intermediate size.

    out = silu(gate) · up        silu(x) = x / (1 + e^−x)

The plain code rounds silu's result to its type before the product; the kernel rounds once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_dflash.choose import either
from triton_dflash.language import jit, narrowed, pieces, tl

TILE = 1024  # elements of a program: 8 a thread, 16 bytes where an element has two


def naive(mixed: Tensor) -> Tensor:
    """[n, I] from ``mixed`` [n, 2*I], gate first, then up."""
    gate, up = mixed.chunk(2, dim=-1)
    return F.silu(gate) * up


@jit
def swiglu_kernel(mixed, out, row_step, size, TILE: tl.constexpr):
    """Program (part, row)."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = column < size
    gate = tl.load(mixed + row * row_step + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(mixed + row * row_step + size + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, narrowed(gate * tl.sigmoid(gate) * up, out.dtype.element_ty), mask=live)


def fused(mixed: Tensor) -> Tensor:
    """``naive`` in one launch; rows are contiguous."""
    assert mixed.stride(-1) == 1
    n, size = len(mixed), mixed.shape[1] // 2
    out = torch.empty(n, size, dtype=mixed.dtype, device=mixed.device)
    if n:
        swiglu_kernel[pieces(size, TILE), n](mixed, out, mixed.stride(0), size, TILE=TILE, num_warps=4)
    return out


swiglu = either("swiglu", naive, fused)
