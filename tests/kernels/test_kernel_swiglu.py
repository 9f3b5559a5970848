"""``swiglu``: gate and up from one product."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, F16, F32, assert_as_good, name_of
from triton_dflash import swiglu
from triton_dflash.swiglu import fused, naive


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # the interpreter is numpy
@pytest.mark.parametrize(
    ("n", "size", "dtype"), [(1, 97, F32), (5, 1025, BF16), (16, 257, F16), (3, 2048, BF16), (0, 64, F32)], ids=name_of
)
def test_the_gate(n: int, size: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(size)
    wider = (3 * torch.randn(n, 2 * size + 8)).to(dtype)
    wider[:1, :2] = torch.tensor([-200.0, 200.0])  # where e^−x overflows, and where it is gone
    mixed = wider[:, :-8]
    gate, up = mixed.double().chunk(2, dim=-1)
    found = fused(wider.to(device)[:, :-8]).cpu()
    if n:
        assert_as_good(found, naive(mixed), gate / (1 + (-gate).exp()) * up)
    assert found.shape == (n, size)
    assert torch.equal(swiglu(wider.to(device)[:, :-8]).cpu(), found), "the public function takes the kernel"
