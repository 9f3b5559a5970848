"""A layer's queries, keys and values of a block: norms, rotation and cache write in one launch.

Shapes: n tokens, h heads, g key/value heads, d head size, r ≤ d rotated channels, C the cache's capacity, P positions.

For every token i and head, with ``q``, ``k`` and ``v`` from the layer's one matrix product:

    q' = RoPE(q / rms(q) · q_norm)        rms(q)² = mean(q²) + eps; channel c < r/2 turns with channel c + r/2
    k' = RoPE(k / rms(k) · k_norm)        position start + depth_i, or start + i; norms may be absent (Llama, Qwen2)
    cache[0, head, start + i] = k'
    cache[1, head, start + i] = v

``start`` and ``depth`` are read on the device: a captured launch serves every position. The plain code rounds to the
cache's type after the norm, after the weight and after the rotation; the kernel once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from torch import Tensor

from triton_dflash.choose import either
from triton_dflash.language import jit, narrowed, padded, pieces, tl

TILE = 1024  # elements of a program's tile: 8 a thread, 16 bytes where an element has two


def naive(
    mixed: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, cache: Tensor,
    start: Tensor, eps: float, depth: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The rotated queries [h, n, d] of n tokens, whose keys and values are written into ``cache`` [2, g, C, d] at
    start … start+n−1.

    ``mixed`` [n, (h+2g)*d] is the product's output, queries first, then keys, then values; ``q_norm`` and ``k_norm``
    [d] are both there or both None; ``cos`` and ``sin`` [P, r/2] float32 hold every position. ``start`` is int32 [1]
    and ``depth`` int32 [n], both on the device; start + n ≤ C, and positions below P, are the caller's promise."""
    _, groups, _, d = cache.shape
    n, heads = len(mixed), mixed.shape[1] // d - 2 * groups
    _check(mixed, heads, q_norm, k_norm, cache)
    split = mixed.view(n, heads + 2 * groups, d).transpose(0, 1)  # [h + 2g, n, d]
    at = positions(n, start, depth)
    keys = turned(split[heads : heads + groups], k_norm, cos[at], sin[at], eps)
    places = positions(n, start, None)
    cache[0].index_copy_(1, places, keys)
    cache[1].index_copy_(1, places, split[heads + groups :])
    return turned(split[:heads], q_norm, cos[at], sin[at], eps)


def positions(n: int, start: Tensor, depth: Tensor | None) -> Tensor:
    """start + depth, or start … start+n−1: int64 [n], without asking the host."""
    return start.long() + (torch.arange(n, device=start.device) if depth is None else depth.long())


def turned(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """``x`` [..., n, d] normed (unless ``weight``, which broadcasts to it, is None) and rotated by tables [n, r/2]."""
    half = cos.shape[-1]
    if weight is not None:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        x = scaled.to(x.dtype) * weight.to(x.dtype)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)


def _check(mixed: Tensor, heads: int, q_norm: Tensor | None, k_norm: Tensor | None, cache: Tensor) -> None:
    _, groups, capacity, d = cache.shape
    if heads < 1 or mixed.shape[1] != (heads + 2 * groups) * d or len(mixed) > capacity:
        raise ValueError(f"a product {list(mixed.shape)} does not fit a cache {list(cache.shape)}: [2, g, C, d]")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("one of q_norm and k_norm is missing; queries and keys are both normed, or neither is")


@jit(do_not_specialize=["n"])
def turn_heads_kernel(
    mixed, q_weights, k_weights, cos, sin, queries, cache, start, depth, n, eps,
    mixed_row, weight_row, table_row, q_head, q_row, layer_step, kind_step, head_step, cache_row,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    HALF_TILE: tl.constexpr, TAIL_TILE: tl.constexpr,
):  # fmt: skip
    """One program: ROWS tokens of one head of one layer; a layer's heads are HEADS of queries, G of keys, G of values.
    A row lies in registers as its two halves that turn with each other, and the tail that does not turn (TAIL_TILE 0:
    there is none)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    which = tl.program_id(1)
    layer, slot = which // (HEADS + 2 * G), which % (HEADS + 2 * G)
    there = rows < n
    first_row = tl.load(start).to(tl.int64)
    source = mixed + rows.to(tl.int64) * mixed_row + which.to(tl.int64) * D
    column = tl.arange(0, HALF_TILE)[None, :]
    beyond = 2 * HALF + tl.arange(0, TAIL_TILE if TAIL_TILE > 0 else 1)[None, :]
    live, late = there & (column < HALF), there & (beyond < D)
    first = tl.load(source + column, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + column, mask=live, other=0.0).to(tl.float32)
    tail = tl.load(source + beyond, mask=late, other=0.0).to(tl.float32)
    if slot < HEADS + G:
        if k_weights is not None:
            squares = tl.sum(first * first + second * second, 1) + tl.sum(tail * tail, 1)
            scale = tl.rsqrt(squares / D + eps)[:, None]
            weight = k_weights + layer * weight_row
            if slot < HEADS:
                weight = q_weights + layer * weight_row
            first *= scale * tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
            second *= scale * tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
            tail *= scale * tl.load(weight + beyond, mask=beyond < D, other=0.0).to(tl.float32)
        position = first_row + (rows if depth is None else tl.load(depth + rows, mask=there, other=0))
        c = tl.load(cos + position * table_row + column, mask=live, other=0.0)
        s = tl.load(sin + position * table_row + column, mask=live, other=0.0)
        aside = first * c - second * s
        second = second * c + first * s
        first = aside
    dtype: tl.constexpr = cache.dtype.element_ty
    first, second, tail = narrowed(first, dtype), narrowed(second, dtype), narrowed(tail, dtype)
    if slot < HEADS:
        target = queries + slot.to(tl.int64) * q_head + rows.to(tl.int64) * q_row
        tl.store(target + column, first, mask=live)
        tl.store(target + HALF + column, second, mask=live)
        if TAIL_TILE > 0:
            tl.store(target + beyond, tail, mask=late)
    else:
        head, kind = (slot - HEADS) % G, (slot - HEADS) // G
        base = cache + layer.to(tl.int64) * layer_step + kind.to(tl.int64) * kind_step + head.to(tl.int64) * head_step
        target = base + (first_row + rows) * cache_row
        tl.store(target + column, first, mask=live)
        tl.store(target + HALF + column, second, mask=live)
        if TAIL_TILE > 0:
            tl.store(target + beyond, tail, mask=late)


def launch(
    mixed: Tensor, q_weights: Tensor | None, k_weights: Tensor | None, cos: Tensor, sin: Tensor,
    queries: Tensor | None, cache: Tensor, start: Tensor, depth: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """``turn_heads_kernel`` for ``cache`` [L, 2, g, C, d]; without queries what stands for them is never touched."""
    layers, _, groups, _, d = cache.shape
    n, half, heads = len(mixed), cos.shape[-1], 0 if queries is None else len(queries)
    given = [x for x in (mixed, q_weights, k_weights, cos, sin, queries, cache) if x is not None]
    assert {x.stride(-1) for x in given} == {1} and cos.stride() == sin.stride(), "innermost axes are contiguous"
    assert depth is None or depth.is_contiguous()
    if n == 0:
        return
    tail, rows = d - 2 * half, max(TILE // padded(d), 1)
    steps = 0 if k_weights is None else k_weights.stride(0), cos.stride(0)
    turn_heads_kernel[pieces(n, rows), layers * (heads + 2 * groups)](
        mixed, k_weights if q_weights is None else q_weights, k_weights, cos, sin,
        cache if queries is None else queries, cache, start, depth, n, eps, mixed.stride(0), *steps,
        *((0, 0) if queries is None else queries.stride()[:2]), *cache.stride()[:4],
        HEADS=heads, G=groups, D=d, HALF=half, ROWS=rows, HALF_TILE=padded(half),
        TAIL_TILE=padded(tail) if tail else 0, num_warps=4,
    )  # fmt: skip


def fused(
    mixed: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, cache: Tensor,
    start: Tensor, eps: float, depth: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``naive`` in one launch. Innermost axes are contiguous, and both tables have the same strides."""
    _, groups, _, d = cache.shape
    n, heads = len(mixed), mixed.shape[1] // d - 2 * groups
    _check(mixed, heads, q_norm, k_norm, cache)
    queries = torch.empty(heads, n, d, dtype=mixed.dtype, device=mixed.device)
    launch(mixed, q_norm, k_norm, cos, sin, queries, cache[None], start, depth, eps)
    return queries


block_kv = either("block_kv", naive, fused)
