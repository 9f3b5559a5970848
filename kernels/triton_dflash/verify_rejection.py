"""Rejection sampling: acceptance and the correction or bonus, in three small launches that ask the host for nothing.

Shapes: n = count + 1 rows of logits, V vocabulary, ``count`` drafted tokens d_k with the drafter's distributions q_k.

    p_k       = softmax(logits_k / temperature)
    accepted  = how many drafted tokens in a row, from the first, have u_k · q_k(d_k) < p_k(d_k)
    next      ~ max(p_a − q_a, 0) of the first rejected row a, or p of the last row where none was rejected
    finite    = 1 where every row's largest logit is a number; else 0, and the rest is void

Written as a product, u < p/q divides by nothing, and a token of probability zero is not accepted even by u = 0. A
residual that is empty, which only rounding can bring about, gives way to p. ``None`` stands for a q that was sure of
its draft, and is exact for any draft; another q is exact for drafts drawn from it.

The logits are read once, for every row's normaliser; then only the row that the next token comes from, its residual
mass first and after that the one part in which the draw falls. Top-k and top-p are the caller's: a logit of −∞ is a
token that is not there, and what remains is normalised here.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from torch import Tensor

from triton_dflash.choose import either
from triton_dflash.language import jit, padded, pieces, tl

TILE = 4096  # logits a program reads
MOST_ROWS = 256


def naive(logits: Tensor, drafted: Tensor, q: Tensor | None, uniforms: Tensor, temperature: float) -> Tensor:
    """[accepted, next, finite, *drafted], int64 [3 + count], for ``logits`` [n, V], ``drafted`` [count] and ``q``
    [count, V], sums 1, or None for one-hot ones.

    ``uniforms`` [2, n] in [0, 1), float32 or float64: the first row decides, the second draws. ``temperature`` is above
    0; the draw inverts the cumulative distribution in float64."""
    count = len(drafted)
    scores = logits.float()
    probs = ((scores - scores.amax(-1, keepdim=True)) / bounded(temperature)).softmax(-1)
    finite = logits.amax(-1).isfinite().all()
    own = probs[:count].gather(-1, drafted[:, None])[:, 0].double()
    given = torch.ones_like(own) if q is None else q.gather(-1, drafted[:, None])[:, 0].double()
    accepted = (uniforms[0, :count].double() * given < own).long().cumprod(0).sum()
    chances = probs.index_select(0, accepted[None])[0].double()
    mass = chances
    if count:
        row = accepted.clamp(max=count - 1)[None]
        if q is None:
            taken = torch.zeros_like(chances).index_fill_(0, drafted.gather(0, row), 1)
        else:
            taken = q.index_select(0, row)[0].double()
        residual = (chances - taken * (accepted < count)).clamp(min=0)
        mass = torch.where(residual.sum() > 0, residual, chances)
    cumulative = mass.cumsum(0)
    aim = uniforms[1].gather(0, accepted[None]).double() * cumulative[-1]
    last = ((mass > 0) * torch.arange(len(mass), device=mass.device)).amax()  # rounding may put the aim beyond it
    token = torch.searchsorted(cumulative, aim, right=True).minimum(last)
    return torch.cat((accepted[None], token, finite[None].long(), drafted))


def bounded(temperature: float) -> float:
    """``temperature`` where a GPU's float32 can divide by it: its fast division makes −∞ / 2^127 no number."""
    return min(max(temperature, 2.0**-126), 2.0**126)


@jit
def part_normaliser_kernel(logits, tops, sums, row_step, V, temperature, TILE: tl.constexpr):
    """Program (row, part): the part's largest logit (NaN counts as infinite) and its sum of exponentials under it."""
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row.to(tl.int64) * row_step + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    top = tl.max(tl.where(x == x, x, float("inf")), 0)
    level = tl.where((top == float("inf")) | (top == float("-inf")), 0.0, top)
    slot = row * tl.num_programs(1) + part
    tl.store(tops + slot, top)
    tl.store(sums + slot, tl.sum(tl.exp((x - level) / temperature), 0))


@jit(do_not_specialize=["n", "count"])
def residual_mass_kernel(
    logits, drafted, q, uniforms, tops, sums, masses, scales, verdict,
    row_step, q_step, n, count, V, parts, temperature,
    ONE_HOT: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program ``part``: judges all rows (each program the same, from a few numbers), then sums the residual and p of
    the row that the next token comes from over its part. The first program writes down what was judged;
    ``verdict`` ends with a −1, the token that is refused where none is."""
    rows, every = tl.arange(0, ROWS), tl.arange(0, PARTS)[None, :]
    live = (rows[:, None] < n) & (every < parts)
    part_tops = tl.load(tops + rows[:, None] * parts + every, mask=live, other=float("-inf"))
    part_sums = tl.load(sums + rows[:, None] * parts + every, mask=live, other=0.0)
    top = tl.max(part_tops, 1)
    infinite = (top == float("inf")) | (top == float("-inf"))
    level = tl.where(infinite, 0.0, top)
    total = tl.sum(part_sums * tl.exp((part_tops - level[:, None]) / temperature), 1)
    total = tl.where(total > 0, total, 1.0)  # rows that only fill the tile
    asked = rows < count
    tokens = tl.load(drafted + rows, mask=asked, other=0)
    own = tl.load(logits + rows.to(tl.int64) * row_step + tokens, mask=asked, other=float("-inf")).to(tl.float32)
    own = (tl.exp((own - level) / temperature) / total).to(tl.float64)
    limit = tl.load(uniforms + rows, mask=asked, other=0.0).to(tl.float64)
    if not ONE_HOT:
        limit *= tl.load(q + rows.to(tl.int64) * q_step + tokens, mask=asked, other=0.0).to(tl.float32).to(tl.float64)
    accepted = tl.min(tl.where(asked & (limit >= own), rows, count), 0)
    top = tl.sum(tl.where(rows == accepted, level, 0.0), 0)
    total = tl.sum(tl.where(rows == accepted, total, 0.0), 0)

    part = tl.program_id(0)
    columns = part * TILE + tl.arange(0, TILE)
    x = tl.load(logits + accepted.to(tl.int64) * row_step + columns, mask=columns < V, other=float("-inf"))
    chances = (tl.exp((x.to(tl.float32) - top) / temperature) / total).to(tl.float64)
    if ONE_HOT:
        refused = tl.sum(tl.where((rows == accepted) & asked, tokens + 1, 0), 0) - 1  # −1 where none was
        residual = tl.where(columns == refused, 0.0, chances)
    else:
        drafts = tl.where(accepted < count, V, 0)  # the bonus has no q
        given = tl.load(q + accepted.to(tl.int64) * q_step + columns, mask=columns < drafts, other=0.0)
        residual = tl.maximum(chances - given.to(tl.float32).to(tl.float64), 0.0)
    tl.store(masses + part, tl.sum(residual, 0))
    tl.store(masses + parts + part, tl.sum(chances, 0))
    if part == 0:
        tl.store(scales, top)
        tl.store(scales + 1, total)
        tl.store(verdict, accepted)
        tl.store(verdict + 2, 1 - tl.max(((rows < n) & infinite).to(tl.int32), 0))
        tl.store(verdict + 3 + rows, tl.where(asked, tokens, -1), mask=rows <= count)


@jit(do_not_specialize=["n", "count"])
def draw_kernel(
    logits, q, uniforms, masses, scales, verdict,
    row_step, q_step, n, count, V, parts, temperature,
    ONE_HOT: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program: the part in which the draw falls, then the token. In parts and in tokens alike the draw goes to the
    first whose cumulative mass is beyond it; where rounding leaves none, to the last that has any mass."""
    accepted = tl.load(verdict).to(tl.int32)
    top, total = tl.load(scales), tl.load(scales + 1)
    every = tl.arange(0, PARTS)
    residuals = tl.load(masses + every, mask=every < parts, other=0.0)
    all_masses = tl.load(masses + parts + every, mask=every < parts, other=0.0)
    empty = tl.sum(residuals, 0) <= 0
    part_mass = tl.where(empty, all_masses, residuals)
    aim = tl.load(uniforms + n + accepted).to(tl.float64) * tl.sum(part_mass, 0)
    beyond = (tl.cumsum(part_mass, 0) > aim) & (part_mass > 0)
    part = tl.min(tl.where(beyond, every, PARTS), 0)
    part = tl.minimum(part, tl.max(tl.where(part_mass > 0, every, 0), 0))
    aim -= tl.sum(tl.where(every < part, part_mass, 0.0), 0)

    columns = part * TILE + tl.arange(0, TILE)
    x = tl.load(logits + accepted.to(tl.int64) * row_step + columns, mask=columns < V, other=float("-inf"))
    chances = (tl.exp((x.to(tl.float32) - top) / temperature) / total).to(tl.float64)
    if ONE_HOT:
        residual = tl.where(columns == tl.load(verdict + 3 + accepted), 0.0, chances)
    else:
        drafts = tl.where(accepted < count, V, 0)  # the bonus has no q
        given = tl.load(q + accepted.to(tl.int64) * q_step + columns, mask=columns < drafts, other=0.0)
        residual = tl.maximum(chances - given.to(tl.float32).to(tl.float64), 0.0)
    empty = empty | (tl.sum(residual, 0) <= 0)  # a trace of mass, which this kernel rounds to none
    mass = tl.where(empty, chances, residual)
    beyond = (tl.cumsum(mass, 0) > aim) & (mass > 0)
    token = tl.min(tl.where(beyond, columns, 0x7FFFFFFF), 0)
    tl.store(verdict + 1, tl.minimum(token, tl.max(tl.where(mass > 0, columns, 0), 0)))


def fused(logits: Tensor, drafted: Tensor, q: Tensor | None, uniforms: Tensor, temperature: float) -> Tensor:
    """``naive`` in three launches, for up to 256 rows."""
    (n, vocabulary), count = logits.shape, len(drafted)
    assert count + 1 == n <= MOST_ROWS and uniforms.shape == (2, n) and uniforms.is_contiguous()
    assert logits.stride(-1) == drafted.stride(0) == 1 and (q is None or q.stride(-1) == 1)
    device, parts = logits.device, pieces(vocabulary, TILE)
    tops, sums = torch.empty(2, n, parts, dtype=torch.float32, device=device)
    masses = torch.empty(2, parts, dtype=torch.float64, device=device)
    scales = torch.empty(2, dtype=torch.float32, device=device)
    verdict = torch.empty(3 + count + 1, dtype=torch.int64, device=device)
    heat, row_step, q_step = bounded(temperature), logits.stride(0), 0 if q is None else q.stride(0)
    part_normaliser_kernel[n, parts](logits, tops, sums, row_step, vocabulary, heat, TILE=TILE, num_warps=8)
    residual_mass_kernel[(parts,)](
        logits, drafted, q, uniforms, tops, sums, masses, scales, verdict, row_step, q_step, n, count, vocabulary,
        parts, heat, ONE_HOT=q is None, ROWS=padded(n), PARTS=padded(parts), TILE=TILE, num_warps=8,
    )  # fmt: skip
    draw_kernel[(1,)](
        logits, q, uniforms, masses, scales, verdict, row_step, q_step, n, count, vocabulary, parts, heat,
        ONE_HOT=q is None, PARTS=padded(parts), TILE=TILE, num_warps=8,
    )  # fmt: skip
    return verdict[: 3 + count]


verify_rejection = either("verify_rejection", naive, fused)
