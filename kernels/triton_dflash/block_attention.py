"""Attention of a block's few queries over a long cache that ends with the block itself: for drafting (both ways),
verifying (causal, sliding window) and trees (ancestors), split over the keys.

Shapes: h heads, g key/value heads, r = h/g, n queries, S keys, of which the last n are the block's own, d head size.

    out_i = Σ_j softmax_j(scale · q_i · k_j) v_j      over the keys j that query i, at position S − n + i, sees

A few queries alone would keep a few processors busy. So each program takes one key/value head, up to 64 of its r·n
rows of queries and one stretch of keys, and leaves the stretch's result with the base-2 logarithm of its weights' sum;
a second kernel averages the stretches by these weights. Where one stretch is enough there is no second launch.
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

MOST_STRETCHES = 64
STRETCHES_AT_ONCE = 16
WITHOUT_DEVICE = 16  # programs worth starting where there is only the interpreter


def visible(
    n: int, S: int, causal: bool, window: int | None, ancestors: Tensor | None, device: torch.device
) -> Tensor | None:
    """What each query sees, bool [n, S]; None for everything."""
    if ancestors is not None:
        before = torch.ones(n, S - n, dtype=torch.bool, device=device)
        return torch.cat((before, ancestors), dim=1)
    if not causal and window is None:
        return None
    queries, keys = torch.arange(S - n, S, device=device)[:, None], torch.arange(S, device=device)
    sees = keys <= queries if causal else torch.ones(n, S, dtype=torch.bool, device=device)
    return sees if window is None else sees & ((queries - keys).abs() < window)


def naive(
    q: Tensor, keys: Tensor, values: Tensor, causal: bool = False, window: int | None = None,
    ancestors: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """What ``q`` [h, n, d] attends to in ``keys`` and ``values`` [g, S, d]: [h, n, d]. ``scale`` is 1/√d by default.

    ``causal`` hides later keys and ``window`` those that are ``window`` or more positions away; ``ancestors``, bool
    [n, n] with a true diagonal, says instead which of the block's own keys each query sees, next to all before."""
    _check(q, keys, values, causal, window, ancestors)
    (heads, n, d), groups = q.shape, len(keys)
    mask = visible(n, keys.shape[1], causal, window, ancestors, q.device)
    if mask is not None:
        mask = mask.repeat(heads // groups, 1)
    folded = q.reshape(groups, heads // groups * n, d)  # the heads of a group as rows of one product
    return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale).view(heads, n, d)


def _check(q: Tensor, keys: Tensor, values: Tensor, causal: bool, window: int | None, ancestors: Tensor | None) -> None:
    (heads, n, d), (groups, S, _) = q.shape, keys.shape
    if heads % groups or keys.shape != values.shape or keys.shape[2] != d or not 0 < n <= S:
        raise ValueError(
            f"queries {list(q.shape)} do not fit keys {list(keys.shape)} and values {list(values.shape)}; "
            "[h, n, d] and [g, S, d] with g | h and n ≤ S do"
        )
    if ancestors is not None and (causal or window is not None or ancestors.shape != (n, n)):
        raise ValueError(f"ancestors must be [{n}, {n}] and exclude causal and window, which count positions as slots")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a query sees at least itself")


@jit(do_not_specialize=["n", "S", "begin", "stretch", "window"])
def attend_stretch_kernel(
    q, keys, values, ancestors, out, weights,
    n, S, begin, stretch, window, scale,
    q_head, q_row, k_head, k_row, v_head, v_row,
    RATIO: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D_TILE: tl.constexpr,
):  # fmt: skip
    """Program (rows, head, stretch): ROWS rows of a key/value head over one stretch, KEYS keys at a time, with the
    running maximum and sum of the softmax. ``scale`` counts in powers of two."""
    group, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    folded = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = folded < RATIO * n
    head, query = group * RATIO + folded // n, folded % n
    column = tl.arange(0, D_TILE)
    wanted = there[:, None] & (column[None, :] < D)
    rows = tl.load(q + (head * q_head + query * q_row)[:, None] + column[None, :], mask=wanted, other=0.0)
    block = S - n
    low = begin + part * stretch
    high = tl.minimum(low + stretch, S)
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
        seen = inside[None, :] & there[:, None]
        if CAUSAL:
            seen = seen & (key[None, :] <= block + query[:, None])
        if WINDOW:
            seen = seen & (tl.abs(block + query[:, None] - key[None, :]) < window)
        if TREE:
            own = key[None, :] - block
            kin = tl.load(ancestors + query[:, None] * n + own, mask=seen & (own >= 0), other=0)
            seen = seen & ((own < 0) | (kin != 0))
        score = tl.where(seen, score, float("-inf"))
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
    slot = (part * tl.num_programs(1) * RATIO + head) * n + query
    tl.store(
        out + slot[:, None] * D + column[None, :], narrowed(mixed / some[:, None], out.dtype.element_ty), mask=wanted
    )
    tl.store(weights + slot, top + tl.log2(some), mask=there)


@jit(do_not_specialize=["stretches"])
def average_stretches_kernel(
    parts, weights, out, stretches, D: tl.constexpr, D_TILE: tl.constexpr,
    MOST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program a query and head: its stretches' results, weighted by 2 to the power of ``weights``."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.arange(0, D_TILE)
    every = tl.arange(0, MOST)
    top = tl.max(tl.load(weights + every * rows + row, mask=every < stretches, other=float("-inf")), 0)
    total = 0.0
    mixed = tl.zeros([D_TILE], tl.float32)
    for first in range(0, stretches, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        live = part < stretches
        share = tl.exp2(tl.load(weights + part * rows + row, mask=live, other=float("-inf")) - top)
        slots = (part * rows + row)[:, None] * D + column[None, :]
        results = tl.load(parts + slots, mask=live[:, None] & (column[None, :] < D), other=0.0)
        total += tl.sum(share, 0)
        mixed += tl.sum(share[:, None] * results, 0)
    tl.store(out + row * D + column, narrowed(mixed / total, out.dtype.element_ty), mask=column < D)


@functools.cache
def programs_worth(device: torch.device) -> int:
    """How many programs keep ``device`` busy: two a processor."""
    if device.type != "cuda":
        return WITHOUT_DEVICE
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def stretch_of(keys: int, others: int, at_once: int, programs: int) -> int:
    """Keys in a stretch, a multiple of ``at_once``, so that stretches × ``others`` come near ``programs``. No stretch
    is shorter than two steps, unless there is no more."""
    wanted = min(max(programs // others, 1), MOST_STRETCHES, pieces(keys, 2 * at_once))
    return pieces(pieces(keys, wanted), at_once) * at_once


def tiles(rows: int, d_tile: int, element: int, tree: bool) -> tuple[int, int, int]:
    """Rows of queries and of keys in a tile, and warps, for elements of so many bytes: as large as goes without a
    spilled register (``compile_check``), and two stages of keys and values fit beside each other on any GPU."""
    fitting = max(padded(rows), 16)  # a product needs 16 rows
    if element == 4:
        return 16, 32 if d_tile <= 128 else 16, 8
    if d_tile > 128:
        return min(fitting, 32), 32, 8
    row_tile = min(fitting, 64)
    return row_tile, 32 if tree else 64, 8 if row_tile == 64 else 4


def fused(
    q: Tensor, keys: Tensor, values: Tensor, causal: bool = False, window: int | None = None,
    ancestors: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """``naive`` in one or two launches; strides are free but for contiguous heads."""
    _check(q, keys, values, causal, window, ancestors)
    assert q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    (heads, n, d), (groups, S, _) = q.shape, keys.shape
    ratio, d_tile = heads // groups, max(padded(d), 16)
    row_tile, key_tile, warps = tiles(ratio * n, d_tile, q.element_size(), ancestors is not None)
    begin = 0 if window is None else max(0, S - n - window + 1)  # no query sees further back
    others = groups * pieces(ratio * n, row_tile)
    stretch = stretch_of(S - begin, others, key_tile, programs_worth(q.device))
    stretches = pieces(S - begin, stretch)
    out = torch.empty(heads, n, d, dtype=q.dtype, device=q.device)
    parts = out if stretches == 1 else torch.empty(stretches, heads, n, d, dtype=torch.float32, device=q.device)
    weights = torch.empty(stretches, heads, n, dtype=torch.float32, device=q.device)
    attend_stretch_kernel[pieces(ratio * n, row_tile), groups, stretches](
        q, keys, values, None if ancestors is None else ancestors.contiguous(), parts, weights,
        n, S, begin, stretch, window or 0, (d**-0.5 if scale is None else scale) * math.log2(math.e),
        *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        RATIO=ratio, D=d, CAUSAL=causal, WINDOW=window is not None, TREE=ancestors is not None,
        ROWS=row_tile, KEYS=key_tile, D_TILE=d_tile, num_warps=warps, num_stages=2,
    )  # fmt: skip
    if stretches > 1:
        average_stretches_kernel[(heads * n,)](
            parts, weights, out, stretches, D=d, D_TILE=d_tile, MOST=MOST_STRETCHES, AT_ONCE=STRETCHES_AT_ONCE,
            num_warps=4,
        )  # fmt: skip
    return out


block_attention = either("block_attention", naive, fused)
