"""``compact_path``: accepted rows move to the front, in place; nothing else moves."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, F16, F32, name_of
from triton_dflash import compact_path
from triton_dflash.compact_path import fused, naive

CASES = [  # leading axes, capacity, d, type, start, path
    ((2, 2, 3), 97, 64, F32, 40, [0, 2, 3, 9]),
    ((1, 2, 1), 257, 80, BF16, 193, list(range(0, 64, 2))),
    ((3,), 97, 96, F16, 0, [0, 1, 2, 3]),
    ((2,), 1025, 128, F32, 1000, list(range(1, 18))),
    ((2, 2), 97, 256, BF16, 80, [16]),
    ((2, 1), 97, 64, F16, 5, [0, *range(30, 70)]),
    ((4,), 20, 64, F32, 3, []),
]


@pytest.mark.parametrize(("leading", "capacity", "d", "dtype", "start", "path"), CASES, ids=name_of)
def test_rows_move(
    leading: tuple[int, ...], capacity: int, d: int, dtype: torch.dtype, start: int, path: list[int], device: str
) -> None:
    torch.manual_seed(capacity)
    before = torch.randn(*leading, capacity, d).to(dtype)
    before[..., start + max(path, default=0) + 1 :, :] = torch.nan  # nobody wrote there, and nobody reads it
    expected = before.clone()
    for place, source in enumerate(path):
        expected[..., start + place, :] = before[..., start + source, :]
    for move, where in ((fused, device), (naive, "cpu")):
        cache = before.to(where, copy=True)
        move(cache, start, torch.tensor(path, dtype=torch.int64, device=where))
        torch.testing.assert_close(cache.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_one_layer_of_a_larger_cache(device: str) -> None:
    cache = torch.randn(3, 2, 2, 40, 64, device=device)
    before = cache.clone()
    compact_path(cache[1], 10, torch.tensor([1, 4], device=device))
    assert torch.equal(cache[1, :, :, 10:12], before[1, :, :, [11, 14]])
    cache[1, :, :, 10:12] = before[1, :, :, 10:12]
    assert torch.equal(cache, before)


@pytest.mark.parametrize("move", [fused, naive])
def test_a_path_beyond_the_cache_is_refused(move, device: str) -> None:
    with pytest.raises(AssertionError, match="longer than what the cache holds"):
        move(torch.zeros(1, 8, 64, device=device), 6, torch.arange(3, device=device))
