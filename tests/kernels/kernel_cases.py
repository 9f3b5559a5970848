"""What the kernels' tests share: types, and the bound on errors."""

from __future__ import annotations

import torch
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def name_of(value: object) -> str | None:
    """A type's short name in a test's."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def assert_as_good(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """``found``'s largest error against ``exact`` is at most twice that of ``plain`` code in the same type, or a
    tenth of a rounding where that happens to have none; and the plain code's is at most eight roundings."""
    assert found.dtype == plain.dtype and found.shape == exact.shape
    assert found.isfinite().all(), "something was read that nobody wrote, or not written at all"
    error, allowed = ((x.double() - exact).abs().max().item() for x in (found, plain))
    rounding = torch.finfo(found.dtype).eps * exact.abs().max().item()
    assert allowed <= 8 * rounding, f"the plain code is wrong by {allowed:.3g}, {allowed / rounding:.3g} roundings"
    tenth = rounding / 10
    assert error <= max(2 * allowed, tenth), f"error {error:.3g}; the plain code's is {allowed:.3g}"


def at(start: int, device: str = "cpu") -> Tensor:
    """Where a block starts, as the kernels take it."""
    return torch.tensor([start], dtype=torch.int32, device=device)


def bits_of(sees: Tensor) -> Tensor:
    """Each query's sight of the block, int64 [n], from bool [n, n]; the 64th key's bit is the sign's."""
    powers = [2**m if m < 63 else -(2**63) for m in range(len(sees))]
    return (sees.long() * torch.tensor(powers)).sum(-1)


def turned_exactly(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """``x`` [..., n, d] normed, unless ``weight`` is None, and rotated by tables [n, r/2]: in float64, channel by
    channel as the formula says."""
    x, half = x.double(), cos.shape[1]
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    out = x.clone()
    for i in range(half):
        c, s = cos[:, i].double(), sin[:, i].double()
        out[..., i] = x[..., i] * c - x[..., half + i] * s
        out[..., half + i] = x[..., half + i] * c + x[..., i] * s
    return out
