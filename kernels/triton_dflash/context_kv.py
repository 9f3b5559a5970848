"""The context's keys and values of all draft layers: norm, rotation and cache write in one launch.

Shapes: n tokens, L draft layers, g key/value heads, d head size, r ≤ d rotated channels.

For every token, layer and head, with ``k`` and ``v`` from the one matrix product of all layers:

    k' = RoPE(k / rms(k) · weight)        rms(k)² = mean(k²) + eps; channel i < r/2 turns with channel i + r/2
    cache[layer, 0, head, start + token] = k'
    cache[layer, 1, head, start + token] = v

The plain code rounds to the cache's type after the norm, after the weight and after the rotation; the kernel once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from torch import Tensor

from triton_dflash.choose import either
from triton_dflash.language import jit, narrowed, padded, pieces, tl

TILE = 1024  # elements of a program's tile: 8 a thread, 16 bytes where an element has two


def naive(mixed: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, start: int, eps: float) -> None:
    """Write keys and values of n tokens into ``cache`` [L, 2, g, capacity, d] at start … start+n−1.

    ``mixed`` [n, L*2*g*d] is the stacked product's output, ``weights`` [L, d] are the key norms', ``cos`` and ``sin``
    [n, r/2] float32 the rotation of these tokens' positions."""
    layers, _, groups, capacity, d = cache.shape
    end, half = start + len(mixed), cos.shape[-1]
    assert mixed.shape[1] == layers * 2 * groups * d and end <= capacity, "the product's width, the cache's room"
    both = mixed.view(-1, layers, 2, groups, d).permute(1, 2, 3, 0, 4)  # [L, 2, g, n, d]
    wide = both[:, 0].float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    keys = scaled.to(mixed.dtype) * weights.to(mixed.dtype)[:, None, None, :]
    first, second = keys[..., :half].float(), keys[..., half : 2 * half].float()
    cache[:, 0, :, start:end, :half] = (first * cos - second * sin).to(cache.dtype)
    cache[:, 0, :, start:end, half : 2 * half] = (second * cos + first * sin).to(cache.dtype)
    cache[:, 0, :, start:end, 2 * half :] = keys[..., 2 * half :]
    cache[:, 1, :, start:end] = both[:, 1]


@jit(do_not_specialize=["n", "start"])
def context_kv_kernel(
    mixed, weights, cos, sin, cache, n, start, eps,
    mixed_row, weight_row, table_row, layer_step, kind_step, head_step, cache_row,
    G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, HALF_TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
):  # fmt: skip
    """One program: ROWS tokens of one head of one layer, keys or values. A row lies in registers as its two halves
    that turn with each other, and the tail that does not turn (TAIL_TILE 0: there is none)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    which = tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = cache.dtype.element_ty
    layer, kind, head = which // (2 * G), which // G % 2, which % G
    source = mixed + rows * mixed_row + which * D
    target = cache + layer * layer_step + kind * kind_step + head * head_step + (start + rows) * cache_row
    column = tl.arange(0, HALF_TILE)[None, :]
    live = (rows < n) & (column < HALF)
    first = tl.load(source + column, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + column, mask=live, other=0.0).to(tl.float32)
    if kind == 0:
        squares = tl.sum(first * first + second * second, 1)
        if TAIL_TILE > 0:
            beyond = 2 * HALF + tl.arange(0, TAIL_TILE)[None, :]
            tail = tl.load(source + beyond, mask=(rows < n) & (beyond < D), other=0.0).to(tl.float32)
            squares += tl.sum(tail * tail, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        weight = weights + layer * weight_row
        first *= scale * tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
        c = tl.load(cos + rows * table_row + column, mask=live, other=0.0)
        s = tl.load(sin + rows * table_row + column, mask=live, other=0.0)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
        if TAIL_TILE > 0:
            tail *= scale * tl.load(weight + beyond, mask=beyond < D, other=0.0).to(tl.float32)
            tl.store(target + beyond, narrowed(tail, dtype), mask=(rows < n) & (beyond < D))
    elif TAIL_TILE > 0:
        beyond = 2 * HALF + tl.arange(0, TAIL_TILE)[None, :]
        tail = tl.load(source + beyond, mask=(rows < n) & (beyond < D), other=0.0)
        tl.store(target + beyond, tail, mask=(rows < n) & (beyond < D))
    tl.store(target + column, narrowed(first, dtype), mask=live)
    tl.store(target + HALF + column, narrowed(second, dtype), mask=live)


def fused(mixed: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, start: int, eps: float) -> None:
    """``naive`` in one launch. Innermost axes are contiguous, and both tables have the same strides."""
    layers, _, groups, capacity, d = cache.shape
    n, half = len(mixed), cos.shape[-1]
    assert mixed.shape[1] == layers * 2 * groups * d and start + n <= capacity, "the product's width, the cache's room"
    assert {t.stride(-1) for t in (mixed, weights, cos, sin, cache)} == {1} and cos.stride() == sin.stride()
    if n == 0:
        return
    tail = d - 2 * half
    rows = max(TILE // padded(d), 1)
    context_kv_kernel[pieces(n, rows), layers * 2 * groups](
        mixed, weights, cos, sin, cache, n, start, eps, mixed.stride(0), weights.stride(0), cos.stride(0),
        *cache.stride()[:4], G=groups, D=d, HALF=half, ROWS=rows, HALF_TILE=padded(half),
        TAIL_TILE=padded(tail) if tail else 0, num_warps=4,
    )  # fmt: skip


context_kv = either("context_kv", naive, fused)
