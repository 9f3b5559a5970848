"""Greedy verification without another pass over the logits and without asking the host: two small launches.

Shapes: n rows of logits, V vocabulary, ``count`` < n drafted tokens.

    choice_i  = the lowest token whose logit is the row's largest
    accepted  = how many drafted tokens in a row, from the first, equal their row's choice
    next      = choice_accepted
    finite    = 1 where every row's largest logit is a number, as in ``MatchVerifier``; else 0, and the rest is void

The vocabulary is split over programs, each of which leaves its part's largest logit and where it stands; one program
then puts the parts together and judges.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from torch import Tensor

from triton_dflash.choose import either
from triton_dflash.language import jit, padded, pieces, tl

TILE = 4096  # logits a program reads
PARTS_AT_ONCE = 16
MOST_ROWS = 1024


def naive(logits: Tensor, drafted: Tensor) -> Tensor:
    """[accepted, next, finite, *drafted], int64 [3 + count], for ``logits`` [n, V] and ``drafted`` [count]."""
    choices = logits.argmax(-1)
    accepted = (drafted == choices[: len(drafted)]).long().cumprod(0).sum()
    finite = logits.amax(-1).isfinite().all()  # a number that is none shows in its row's largest
    return torch.cat((accepted[None], choices.gather(0, accepted[None]), finite[None].long(), drafted))


@jit
def largest_of_part_kernel(logits, largest, places, row_step, V, TILE: tl.constexpr):
    """Program (row, part): the largest of TILE logits and its lowest column; NaN counts as infinite."""
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * row_step + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, 0)
    slot = row * tl.num_programs(1) + part
    tl.store(largest + slot, best)
    tl.store(places + slot, tl.min(tl.where(x == best, columns, V), 0))


@jit(do_not_specialize=["n", "count"])
def greedy_verdict_kernel(
    largest, places, drafted, verdict, n, count, parts,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: all rows' choices from their parts, PARTS at a time, and the verdict."""
    rows = tl.arange(0, ROWS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    choice = tl.zeros([ROWS], tl.int32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)[None, :]
        live = (rows[:, None] < n) & (part < parts)
        slots = rows[:, None] * parts + part
        values = tl.load(largest + slots, mask=live, other=float("-inf"))
        columns = tl.load(places + slots, mask=live, other=0x7FFFFFFF)
        here = tl.max(values, 1)
        place = tl.min(tl.where(values == here[:, None], columns, 0x7FFFFFFF), 1)
        choice = tl.where(here > best, place, choice)  # an equal one further right does not count
        best = tl.maximum(best, here)
    tokens = tl.load(drafted + rows, mask=rows < count, other=0)
    accepted = tl.min(tl.where((rows < count) & (tokens != choice), rows, count), 0)
    infinite = (best == float("inf")) | (best == float("-inf"))
    tl.store(verdict, accepted)
    tl.store(verdict + 1, tl.sum(tl.where(rows == accepted, choice, 0), 0))
    tl.store(verdict + 2, 1 - tl.max(((rows < n) & infinite).to(tl.int32), 0))
    tl.store(verdict + 3 + rows, tokens, mask=rows < count)


def fused(logits: Tensor, drafted: Tensor) -> Tensor:
    """``naive`` in two launches, for up to 1,024 rows."""
    (n, vocabulary), count = logits.shape, len(drafted)
    assert count < n <= MOST_ROWS and logits.stride(-1) == drafted.stride(0) == 1
    parts = pieces(vocabulary, TILE)
    largest = torch.empty(n, parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(n, parts, dtype=torch.int32, device=logits.device)
    verdict = torch.empty(3 + count, dtype=torch.int64, device=logits.device)
    largest_of_part_kernel[n, parts](logits, largest, places, logits.stride(0), vocabulary, TILE=TILE, num_warps=8)
    rows = padded(n)
    greedy_verdict_kernel[(1,)](
        largest, places, drafted, verdict, n, count, parts, ROWS=rows, PARTS=PARTS_AT_ONCE,
        num_warps=4 if rows <= 64 else 16,
    )  # fmt: skip
    return verdict


verify_greedy = either("verify_greedy", naive, fused)
