"""The compiled product: as exact as PyTorch's, and a row's bits depend on nothing but the row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cpu_cases import needs_compiled, threads
from cpu_dflash.product import compiled, naive
from torch import Tensor

pytestmark = needs_compiled

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64)
SHAPES = ((1, 1), (3, 7), (97, 257), (257, 97), (1025, 576), (64, 1536))  # N, K


def case(
    shape: tuple[int, int], biased: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor | None]:
    """64 rows, a weight and perhaps a bias."""
    generator = torch.Generator().manual_seed(sum(shape))
    outputs, inputs = shape
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (64, outputs))
    return x, weight.to(dtype), torch.randn(outputs, generator=generator) if biased else None


def error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows_is_as_exact_as_pytorchs_own(
    shape: tuple[int, int], biased: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = case(shape, biased, dtype)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for n in ROWS:
        found, plain = compiled(x[:n], weight, bias), naive(x[:n], weight, bias)
        assert found.shape == plain.shape and found.dtype == plain.dtype and found.isfinite().all()
        allowed = max(2 * error(plain, exact[:n]), 1e-6 * exact[:n].abs().max().item())
        assert error(found, exact[:n]) <= allowed, f"{n} rows"


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_in_bfloat16_give_what_the_widened_ones_give(shape: tuple[int, int], biased: bool) -> None:
    x, weight, bias = case(shape, biased, torch.bfloat16)
    for n in ROWS:
        assert torch.equal(compiled(x[:n], weight, bias), compiled(x[:n], weight.float(), bias)), f"{n} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_the_same_bits_whatever_comes_with_it(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = case(shape, True, dtype)
    alone = torch.cat([compiled(row[None], weight, bias) for row in x])
    for n in ROWS:
        assert torch.equal(compiled(x[:n], weight, bias), alone[:n]), f"the first {n} rows"
        assert torch.equal(compiled(x[-n:], weight, bias), alone[-n:]), f"the last {n} rows"
    others = torch.full_like(x, torch.inf)
    others[5] = x[5]
    assert torch.equal(compiled(others, weight, bias)[5], alone[5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_change_no_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = case(shape, True, dtype)
    for n in (1, 7, 64):
        found = []
        for count in (1, 2, 3):
            with threads(count):
                found.append(compiled(x[:n], weight, bias))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), f"{n} rows"


def test_rows_that_do_not_lie_side_by_side() -> None:
    x, weight, bias = case((97, 257), True)
    expected = compiled(x[:9], weight, bias)
    wide = torch.full((18, 514), torch.nan)
    wide[::2, ::2] = x[:9]
    assert torch.equal(compiled(wide[::2, ::2], weight, bias), expected)
    assert torch.equal(compiled(x[:9].T.contiguous().T, weight, bias), expected)
    shifted = torch.empty(9 * 257 + 1)[1:].view(9, 257).copy_(x[:9])  # starts at no multiple of a vector
    assert torch.equal(compiled(shifted, weight, bias), expected)


def test_nothing_is_read_beyond_inputs_weights_and_bias() -> None:
    """Each lies in the middle of a larger piece of memory that is NaN around it."""

    def surrounded(tensor: Tensor) -> Tensor:
        pad = torch.full((64,), torch.nan, dtype=tensor.dtype)
        return torch.cat((pad, tensor.flatten(), pad))[64:-64].view(tensor.shape)

    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x, weight, bias = case(shape, True, dtype)
            for n in (1, 3, 7):
                parts = (surrounded(x[:n]), surrounded(weight), surrounded(bias))
                assert torch.equal(compiled(*parts), compiled(x[:n], weight, bias))
