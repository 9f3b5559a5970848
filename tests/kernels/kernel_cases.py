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
    tenth of a rounding where that happens to have none."""
    assert found.dtype == plain.dtype and found.shape == exact.shape
    assert found.isfinite().all(), "something was read that nobody wrote, or not written at all"
    error, allowed = ((x.double() - exact).abs().max().item() for x in (found, plain))
    tenth = torch.finfo(found.dtype).eps / 10 * exact.abs().max().item()
    assert error <= max(2 * allowed, tenth), f"error {error:.3g}; the plain code's is {allowed:.3g}"
