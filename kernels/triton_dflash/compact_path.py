"""The accepted path of a token tree, moved to the front of the tree's rows in the cache: one launch, in place.

Shapes: m tokens on the path, d head size; the leading axes (layers, keys and values, heads) are one axis of slices.

    cache[..., start + i, :] = cache[..., start + path_i, :]        i = 0 … m−1, path strictly ascending

A path that ascends has path_i ≥ i. So a row is only ever overwritten by one from further right, and whatever is read
after the write of row i lies beyond i.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from torch import Tensor

from triton_dflash.choose import either
from triton_dflash.language import jit, padded, tl

MOST_ROWS_AT_ONCE = 16


def naive(cache: Tensor, start: int, path: Tensor) -> None:
    """Move rows start + path_i of ``cache`` [..., capacity, d] to start + i, for ``path`` [m] of indices on its device.

    That ``path`` ascends strictly from 0 or above is the caller's promise: to check it would wait for the device."""
    assert start + len(path) <= cache.shape[-2], "the path is longer than what the cache holds after its start"
    cache[..., start : start + len(path), :] = cache[..., start + path, :]  # indexing copies before anything is written


@jit(do_not_specialize=["start", "m"])
def compact_path_kernel(
    cache, path, start, m, slice_step, row_step,
    D: tl.constexpr, D_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program a slice. ROWS rows are read before any of them is written: another warp may hold the row that a
    write replaces. Later rows lie beyond everything written so far."""
    column = tl.arange(0, D_TILE)[None, :]
    base = cache + tl.program_id(0).to(tl.int64) * slice_step + start.to(tl.int64) * row_step
    for first in range(0, m, ROWS):
        rows = first + tl.arange(0, ROWS)
        sources = tl.load(path + rows, mask=rows < m, other=0).to(tl.int64)[:, None]
        rows = rows[:, None]
        moved = (rows < m) & (sources != rows) & (column < D)
        values = tl.load(base + sources * row_step + column, mask=moved)
        tl.debug_barrier()
        tl.store(base + rows.to(tl.int64) * row_step + column, values, mask=moved)


def fused(cache: Tensor, start: int, path: Tensor) -> None:
    """``naive`` in one launch, for a cache whose leading axes can be seen as one."""
    m, (capacity, d) = len(path), cache.shape[-2:]
    assert start + m <= capacity, "the path is longer than what the cache holds after its start"
    assert cache.stride(-1) == 1 and path.stride(0) == 1
    slices = cache.view(-1, capacity, d)
    if m == 0:
        return
    compact_path_kernel[(len(slices),)](
        slices, path, start, m, slices.stride(0), slices.stride(1), D=d, D_TILE=padded(d),
        ROWS=min(padded(m), MOST_ROWS_AT_ONCE), num_warps=4,
    )  # fmt: skip


compact_path = either("compact_path", naive, fused)
