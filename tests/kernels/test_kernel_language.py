"""What every kernel shares: rounding and products as on a GPU, also in the interpreter."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, F16, F32, name_of
from triton_dflash.language import jit, narrowed, operand, padded, pieces, tl


def narrow(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, narrowed(tl.load(x + i), y.dtype.element_ty))


def square(x, y, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tile = tl.load(x + i[:, None] * SIZE + i[None, :])
    tl.store(y + i[:, None] * SIZE + i[None, :], tl.dot(operand(tile), operand(tile), input_precision="ieee"))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=name_of)
def test_numbers_are_rounded_to_the_nearest(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.cat((torch.randn(1000) * 100, torch.randn(16) / 1000, torch.zeros(1), torch.full((1,), torch.inf)))
    x = torch.cat((x, torch.tensor([1.00390625, 1.01171875, -1.00390625, 1.0039063, 255.5, 3.0])))  # ties in bfloat16
    y = torch.empty(len(x), dtype=dtype, device=device)
    jit(narrow)[(1,)](x.to(device), y, SIZE=1024)
    assert len(x) == 1024 and torch.equal(y.cpu(), x.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=name_of)
def test_products_have_the_numbers_for_factors(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 16).to(dtype)
    y = torch.empty(16, 16, device=device)
    jit(square)[(1,)](x.to(device), y, SIZE=16)
    torch.testing.assert_close(y.cpu(), x.float() @ x.float())


def test_tiles() -> None:
    assert [padded(size) for size in (1, 2, 3, 64, 65, 97)] == [1, 2, 4, 64, 128, 128]
    assert [pieces(size, 16) for size in (0, 1, 16, 17)] == [0, 1, 1, 2]
