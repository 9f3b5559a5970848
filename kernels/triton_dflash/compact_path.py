"""The accepted path of a token tree, moved to the front of the tree's rows in the cache: one launch, in place.

Shapes: m tokens on the path, C the cache's capacity, d head size; the leading axes (layers, keys and values, heads) are
one axis of slices.

    cache[..., start + i, :] = cache[..., start + path_i, :]        i = 0 … count−1, path strictly ascending

A path that ascends has path_i ≥ i. So a row is only ever overwritten by one from further right, and whatever is read
after the write of row i lies beyond i. ``start``, the path and how much of it counts are read on the device.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from torch import Tensor

from triton_dflash.choose import either
from triton_dflash.language import jit, padded, tl

MOST_ROWS_AT_ONCE = 16


def naive(cache: Tensor, start: Tensor, path: Tensor, count: Tensor | None = None) -> None:
    """Move rows start + path_i of ``cache`` [..., C, d] to start + i, for the first ``count`` of ``path`` [m].

    ``start`` is int32 [1], ``count`` an integer [1] ≤ m, or None for all, and ``path`` integers, all on the device.
    That the path ascends strictly from 0 or above and ends within the cache is the caller's promise: to check it would
    wait for the device."""
    _check(cache, path)
    here = torch.arange(len(path), device=path.device)
    sources = path.long() if count is None else torch.where(here < count, path.long(), here)
    taken = cache.index_select(-2, start.long() + sources)  # copied before anything is written
    cache.index_copy_(cache.dim() - 2, start.long() + here, taken)


def _check(cache: Tensor, path: Tensor) -> None:
    if len(path) > cache.shape[-2]:
        raise ValueError(f"a path of {len(path)} rows is longer than the cache, which holds {cache.shape[-2]}")


@jit(do_not_specialize=["m"])
def compact_path_kernel(
    cache, path, start, count, m, slice_step, row_step,
    D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program a slice. ROWS rows are read before any of them is written: another warp may hold the row that a
    write replaces. Later rows lie beyond everything written so far."""
    column = tl.arange(0, D_TILE)[None, :]
    base = cache + tl.program_id(0).to(tl.int64) * slice_step + tl.load(start).to(tl.int64) * row_step
    end = m if count is None else tl.load(count).to(tl.int32)
    for first in range(0, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        sources = tl.load(path + rows, mask=rows < end, other=0).to(tl.int64)[:, None]
        rows = rows[:, None]
        moved = (rows < end) & (sources != rows) & (column < D)
        values = tl.load(base + sources * row_step + column, mask=moved)
        tl.debug_barrier()
        tl.store(base + rows.to(tl.int64) * row_step + column, values, mask=moved)


def fused(cache: Tensor, start: Tensor, path: Tensor, count: Tensor | None = None) -> None:
    """``naive`` in one launch, for a cache whose leading axes can be seen as one."""
    _check(cache, path)
    m, (capacity, d) = len(path), cache.shape[-2:]
    assert cache.stride(-1) == 1 and path.is_contiguous()
    slices = cache.view(-1, capacity, d)
    if m == 0:
        return
    compact_path_kernel[(len(slices),)](
        slices, path, start, count, m, slices.stride(0), slices.stride(1), D=d, D_TILE=padded(d),
        ROWS=min(padded(m), MOST_ROWS_AT_ONCE), num_warps=4,
    )  # fmt: skip


compact_path = either("compact_path", naive, fused)
