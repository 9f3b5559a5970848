"""``compact_path``: accepted rows move to the front, in place; nothing else moves."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, F16, F32, at, name_of
from triton_dflash import compact_path
from triton_dflash.compact_path import fused, naive

CASES = [  # leading axes, capacity, d, type, start, path, how many of it count
    ((2, 2, 3), 97, 64, F32, 40, [0, 2, 3, 9], None),
    ((1, 2, 1), 257, 80, BF16, 193, list(range(0, 64, 2)), None),
    ((3,), 97, 96, F16, 0, [0, 1, 2, 3], None),
    ((2,), 1025, 128, F32, 1000, list(range(1, 18)), 17),
    ((2, 2), 97, 256, BF16, 80, [16], None),
    ((2, 1), 97, 64, F16, 5, [0, *range(30, 70)], 20),
    ((4,), 20, 64, F32, 3, [], None),
    ((2,), 97, 64, F32, 90, [1, 3, 4, 0, 0, 0, 0], 3),
    ((2,), 97, 64, BF16, 90, [2, 5], 0),
]


@pytest.mark.parametrize(("leading", "capacity", "d", "dtype", "start", "path", "count"), CASES, ids=name_of)
def test_rows_move(
    leading: tuple[int, ...], capacity: int, d: int, dtype: torch.dtype, start: int, path: list[int],
    count: int | None, device: str,
) -> None:  # fmt: skip
    torch.manual_seed(capacity)
    before = torch.randn(*leading, capacity, d).to(dtype)
    before[..., start + max(path, default=0) + 1 :, :] = torch.nan  # nobody wrote there, and nobody reads it
    expected = before.clone()
    for place, source in enumerate(path[:count]):
        expected[..., start + place, :] = before[..., start + source, :]
    for move, where in ((fused, device), (naive, "cpu")):
        cache = before.to(where, copy=True)
        way = torch.tensor(path, dtype=torch.int64 if count is None else torch.int32, device=where)
        move(cache, at(start, where), way, None if count is None else torch.tensor([count], device=where))
        torch.testing.assert_close(cache.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_one_layer_of_a_larger_cache(device: str) -> None:
    cache = torch.randn(3, 2, 2, 40, 64, device=device)
    before = cache.clone()
    compact_path(cache[1], at(10, device), torch.tensor([1, 4], device=device))
    assert torch.equal(cache[1, :, :, 10:12], before[1, :, :, [11, 14]])
    cache[1, :, :, 10:12] = before[1, :, :, 10:12]
    assert torch.equal(cache, before)


@pytest.mark.parametrize("move", [fused, naive])
def test_a_path_beyond_the_cache_is_refused(move, device: str) -> None:
    with pytest.raises(ValueError, match="9 rows is longer than the cache, which holds 8"):
        move(torch.zeros(1, 8, 64, device=device), at(6, device), torch.arange(9, device=device))
