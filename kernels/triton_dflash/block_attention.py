"""Attention of a block's few queries over a long cache that ends with the block itself: for drafting (both ways),
verifying (causal, sliding window) and trees (ancestors), split over the keys.

Shapes: h heads, g key/value heads, r = h/g, n ≤ 64 queries, C the cache's capacity, d head size. ``start`` keys are the
context, the block's own n come after it; query i is at position start + depth_i.

    out_i = Σ_j softmax_j(scale · q_i · k_j) v_j      over j < start with start + depth_i − j < window
                                                      and j = start + m where bit m of bits_i is set

A few queries alone would keep a few processors busy. So each program takes one key/value head, up to 64 of its r·n
rows of queries and one stretch of the context (the first also the block's own keys), and leaves the stretch's result
with the base-2 logarithm of its weights' sum; a second kernel averages the stretches by these weights.

``start`` is read on the device: the number of programs follows from C, how the context is cut from ``start``. So a
captured launch serves every length. Programs for which no stretch is left end at once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_dflash.choose import either
from triton_dflash.language import jit, narrowed, operand, padded, pieces, tl

MOST_QUERIES = 64  # bits of a whole number
MOST_STRETCHES = 64
STRETCHES_AT_ONCE = 16
WITHOUT_DEVICE = 16  # programs worth starting where there is only the interpreter


def visible(C: int, start: Tensor, bits: Tensor, window: int | None, depth: Tensor | None) -> Tensor:
    """What each query sees of the whole cache, bool [n, C], without asking the host."""
    n = len(bits)
    own = torch.arange(C, device=bits.device) - start  # from 0 for the block's first
    inside = (own >= 0) & (own < n)
    sees = inside & ((bits[:, None] >> own.clamp(0, n - 1)) & 1).bool()
    before = (own < 0).expand(n, -1)
    if window is not None:
        steps = torch.arange(n, device=bits.device) if depth is None else depth
        before = before & (steps[:, None] - own < window)
    return sees | before


def naive(
    q: Tensor, keys: Tensor, values: Tensor, start: Tensor, bits: Tensor, window: int | None = None,
    depth: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """What ``q`` [h, n, d] attends to in the cache's ``keys`` and ``values`` [g, C, d]: [h, n, d], laid out as
    [n, h, d].

    ``start`` int32 [1], ``bits`` int64 [n] and ``depth`` int32 [n] lie on the device; ``depth`` is 0 … n−1 where it is
    None. ``window`` limits the context alone: the block's own keys are up to ``bits``, where every query sees at least
    itself. ``scale`` is 1/√d by default. That start + n ≤ C, and no depth below 0, are the caller's promise."""
    _check(q, keys, values, bits, window)
    (heads, n, d), (groups, capacity, _) = q.shape, keys.shape
    mask = visible(capacity, start, bits, window, depth).repeat(heads // groups, 1)
    unwritten = (torch.arange(capacity, device=q.device) >= start + n)[:, None]  # nothing, or not even numbers
    keys, values = keys.masked_fill(unwritten, 0), values.masked_fill(unwritten, 0)
    folded = q.reshape(groups, heads // groups * n, d)  # the heads of a group as rows of one product
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale).view(heads, n, d)
    return out.transpose(0, 1).contiguous().transpose(0, 1)


def _check(q: Tensor, keys: Tensor, values: Tensor, bits: Tensor, window: int | None) -> None:
    (heads, n, d), (groups, capacity, _) = q.shape, keys.shape
    if heads % groups or keys.shape != values.shape or keys.shape[2] != d or not 0 < n <= min(capacity, MOST_QUERIES):
        raise ValueError(
            f"queries {list(q.shape)} do not fit keys {list(keys.shape)} and values {list(values.shape)}; "
            f"[h, n, d] and [g, C, d] with g | h and n ≤ C, n ≤ {MOST_QUERIES} do"
        )
    if bits.shape != (n,) or bits.dtype != torch.int64:
        raise ValueError(f"bits is {list(bits.shape)} {bits.dtype}; it must be [{n}] int64, a query's sight each")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a query sees at least itself")


@jit
def cut(start, n, window, stretches, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Where the keys that any query sees begin, how many a stretch has (a multiple of KEYS, two at least), and how many
    of ``stretches`` that takes."""
    begin = start * 0
    if WINDOW:
        begin = tl.maximum(start - window + 1, 0)
    keys = start + n - begin
    each = tl.maximum(tl.cdiv(tl.cdiv(keys, stretches), KEYS), 2) * KEYS
    return begin, each, tl.cdiv(keys, each)


@jit(do_not_specialize=["n", "window", "stretches"])
def attend_stretch_kernel(
    q, keys, values, start, bits, depth, out, weights,
    n, window, stretches, scale,
    q_head, q_row, k_head, k_row, v_head, v_row, out_part, out_head, out_row,
    RATIO: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D_TILE: tl.constexpr,
):  # fmt: skip
    """Program (rows, head, stretch): ROWS rows of a key/value head over one stretch, KEYS keys at a time, with the
    running maximum and sum of the softmax. ``scale`` counts in powers of two."""
    group, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    context = tl.load(start)
    begin, each, used = cut(context, n, window, stretches, WINDOW, KEYS)
    if part >= used:
        return
    folded = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = folded < RATIO * n
    head, query = group * RATIO + folded // n, folded % n
    column = tl.arange(0, D_TILE)
    wanted = there[:, None] & (column[None, :] < D)
    rows = tl.load(q + (head * q_head + query * q_row)[:, None] + column[None, :], mask=wanted, other=0.0)
    sight = tl.load(bits + query)[:, None]
    low = begin + part * each
    high = tl.minimum(low + each, context + n)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D_TILE], tl.float32)
    for first in range(low, high, KEYS):
        key = first + tl.arange(0, KEYS)
        inside = key < high
        place = key.to(tl.int64)
        k = tl.load(
            keys + group * k_head + place[None, :] * k_row + column[:, None],
            mask=inside[None, :] & (column[:, None] < D), other=0.0,
        )  # fmt: skip
        score = tl.dot(operand(rows), operand(k), input_precision="ieee") * scale
        own = (key - context)[None, :]  # below 0 in the context
        if WINDOW:
            steps = query if depth is None else tl.load(depth + query)
            score = tl.where((own >= 0) | (steps[:, None] - own < window), score, float("-inf"))
        if first + KEYS > context:
            seen = (own < 0) | (((sight >> tl.maximum(own, 0).to(tl.int64)) & 1) != 0)
            score = tl.where(seen & inside[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing of this stretch
        share = tl.exp2(score - level[:, None])
        shrink = tl.exp2(top - level)
        v = tl.load(
            values + group * v_head + place[:, None] * v_row + column[None, :],
            mask=inside[:, None] & (column[None, :] < D), other=0.0,
        )  # fmt: skip
        total = total * shrink + tl.sum(share, 1)
        share = narrowed(share, v.dtype)
        mixed = tl.dot(operand(share), operand(v), mixed * shrink[:, None], input_precision="ieee")
        top = higher
    some = tl.where(total > 0, total, 1.0)
    target = out + part.to(tl.int64) * out_part + (head * out_head + query * out_row)[:, None] + column[None, :]
    tl.store(target, narrowed(mixed / some[:, None], out.dtype.element_ty), mask=wanted)
    tl.store(weights + (part * tl.num_programs(1) * RATIO + head) * n + query, top + tl.log2(some), mask=there)


@jit(do_not_specialize=["n", "window", "stretches"])
def average_stretches_kernel(
    parts, weights, out, start, n, window, stretches, out_head, out_row,
    D: tl.constexpr, D_TILE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    MOST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program a query and head: its stretches' results, weighted by 2 to the power of ``weights``."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    _, _, used = cut(tl.load(start), n, window, stretches, WINDOW, KEYS)
    column = tl.arange(0, D_TILE)
    every = tl.arange(0, MOST)
    top = tl.max(tl.load(weights + every * rows + row, mask=every < used, other=float("-inf")), 0)
    total = 0.0
    mixed = tl.zeros([D_TILE], tl.float32)
    for first in range(0, used, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        live = part < used
        share = tl.exp2(tl.load(weights + part * rows + row, mask=live, other=float("-inf")) - top)
        slots = (part * rows + row)[:, None] * D + column[None, :]
        results = tl.load(parts + slots, mask=live[:, None] & (column[None, :] < D), other=0.0)
        total += tl.sum(share, 0)
        mixed += tl.sum(share[:, None] * results, 0)
    target = out + row // n * out_head + row % n * out_row + column
    tl.store(target, narrowed(mixed / total, out.dtype.element_ty), mask=column < D)


@functools.cache
def programs_worth(device: torch.device) -> int:
    """How many programs keep ``device`` busy: two a processor."""
    if device.type != "cuda":
        return WITHOUT_DEVICE
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def most_stretches(keys: int, others: int, at_once: int, programs: int) -> int:
    """Into how many stretches ``keys`` are cut at most, so that with ``others`` they come near ``programs``. No stretch
    is shorter than two steps of ``at_once``, unless there is no more."""
    return min(max(programs // others, 1), MOST_STRETCHES, pieces(keys, 2 * at_once))


def tiles(rows: int, d_tile: int, element: int) -> tuple[int, int, int]:
    """Rows of queries and of keys in a tile, and warps, for elements of so many bytes: as large as goes without a
    spilled register (``compile_check``), and two stages of keys and values fit beside each other on any GPU."""
    fitting = max(padded(rows), 16)
    if element == 4:
        return 16, 32 if d_tile <= 128 else 16, 8
    if d_tile > 128:
        return min(fitting, 32), 32, 8
    row_tile = min(fitting, 64)
    return row_tile, 64, 8 if row_tile == 64 else 4


def fused(
    q: Tensor, keys: Tensor, values: Tensor, start: Tensor, bits: Tensor, window: int | None = None,
    depth: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """``naive`` in one or two launches; strides are free but for contiguous heads."""
    _check(q, keys, values, bits, window)
    assert q.stride(-1) == keys.stride(-1) == values.stride(-1) == bits.stride(0) == 1
    assert depth is None or depth.is_contiguous()
    (heads, n, d), (groups, capacity, _) = q.shape, keys.shape
    ratio, d_tile = heads // groups, max(padded(d), 16)
    row_tile, key_tile, warps = tiles(ratio * n, d_tile, q.element_size())
    context = capacity if window is None else min(capacity, window)
    others = groups * pieces(ratio * n, row_tile)
    stretches = most_stretches(context, others, key_tile, programs_worth(q.device))
    out = torch.empty(n, heads, d, dtype=q.dtype, device=q.device).transpose(0, 1)
    parts = torch.empty(stretches, heads, n, d, dtype=torch.float32, device=q.device) if stretches > 1 else out[None]
    weights = torch.empty(stretches, heads, n, dtype=torch.float32, device=q.device)
    shared = dict(D=d, D_TILE=d_tile, WINDOW=window is not None, KEYS=key_tile)
    attend_stretch_kernel[pieces(ratio * n, row_tile), groups, stretches](
        q, keys, values, start, bits, depth, parts, weights,
        n, window or 0, stretches, (d**-0.5 if scale is None else scale) * math.log2(math.e),
        *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2], *parts.stride()[:3],
        RATIO=ratio, ROWS=row_tile, num_warps=warps, num_stages=2, **shared,
    )  # fmt: skip
    if stretches > 1:
        average_stretches_kernel[(heads * n,)](
            parts, weights, out, start, n, window or 0, stretches, *out.stride()[:2],
            MOST=MOST_STRETCHES, AT_ONCE=STRETCHES_AT_ONCE, num_warps=4, **shared,
        )  # fmt: skip
    return out


block_attention = either("block_attention", naive, fused)
