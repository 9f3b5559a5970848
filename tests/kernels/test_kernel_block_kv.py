"""``block_kv``: a layer's queries, keys and values from its product, with and without norms."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, F16, F32, assert_as_good, at, name_of, turned_exactly
from torch import Tensor
from triton_dflash import block_kv
from triton_dflash.block_kv import fused, naive

EPS = 1e-5
CASES = [  # n tokens, h heads, g groups, d, r rotated channels, type, start, normed, in a tree
    (16, 4, 1, 128, 128, BF16, 97, True, False),
    (1, 9, 3, 64, 64, F32, 0, False, False),
    (97, 2, 1, 80, 40, F16, 5, True, True),
    (7, 2, 2, 96, 96, BF16, 33, False, True),
    (17, 3, 1, 256, 64, F32, 2, True, False),
    (5, 4, 2, 8, 8, F32, 1, True, True),
]


@pytest.mark.parametrize(
    ("n", "heads", "groups", "d", "rotated", "dtype", "start", "normed", "tree"), CASES, ids=name_of
)
def test_queries_keys_and_values(
    n: int, heads: int, groups: int, d: int, rotated: int, dtype: torch.dtype, start: int, normed: bool, tree: bool,
    device: str,
) -> None:  # fmt: skip
    torch.manual_seed(n)
    wider = torch.randn(n, (heads + 2 * groups) * d + 8).to(dtype)
    norms = [(1 + torch.randn(d) / 4).to(dtype) if normed else None for _ in range(2)]
    angles = torch.rand(start + n, rotated // 2) * 6
    tables = [angles.cos(), angles.sin()]
    depth = torch.randint(0, n, (n,), dtype=torch.int32) if tree else None
    poisoned = torch.full((2, 3, groups, start + n + 3, d), torch.nan, dtype=dtype)

    def run(call, device: str) -> tuple[Tensor, Tensor]:
        cache = poisoned.to(device, copy=True).transpose(
            0, 1
        )  # keys and values of one of three layers, not next to each other
        given = [None if x is None else x.to(device) for x in (*norms, *tables, depth)]
        queries = call(wider.to(device)[:, :-8], *given[:4], cache[1], at(start, device), EPS, given[4])
        assert cache[0].isnan().all() and cache[2].isnan().all(), "another layer's"
        return queries.cpu(), cache[1].cpu()

    (q, found), (plain_q, plain) = run(fused, device), run(naive, "cpu")
    for cache in (found, plain):
        assert cache[..., :start, :].isnan().all() and cache[..., start + n :, :].isnan().all(), "written elsewhere"
    split = wider[:, :-8].view(n, heads + 2 * groups, d).transpose(0, 1)
    places, written = start + (torch.arange(n) if depth is None else depth), slice(start, start + n)
    at_places = [table[places] for table in tables]
    assert_as_good(q, plain_q, turned_exactly(split[:heads], norms[0], *at_places, EPS))
    keys = turned_exactly(split[heads : heads + groups], norms[1], *at_places, EPS)
    assert_as_good(found[0, :, written], plain[0, :, written], keys)
    for cache in (found, plain):
        assert torch.equal(cache[1, :, written], split[heads + groups :]), "values are copied as they are"


def test_the_public_function_takes_the_kernel(device: str) -> None:
    """And both do what transformers' attention does to its queries and keys."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    torch.manual_seed(4)
    mixed, norm = torch.randn(6, 8 * 64), Qwen3RMSNorm(64, EPS)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    angles = torch.rand(11, 32) * 6
    split = mixed.view(1, 6, 8, 64).transpose(1, 2)
    whole = torch.cat((angles, angles), dim=-1)[None, 5:]
    with torch.no_grad():
        expected = apply_rotary_pos_emb(norm(split[:, :4]), norm(split[:, 4:6]), whole.cos(), whole.sin())
        weight = norm.weight.to(device)
        cache = torch.zeros(2, 2, 20, 64, device=device)
        tables = angles.cos().to(device), angles.sin().to(device)
        queries = block_kv(mixed.to(device), weight, weight, *tables, cache, at(5, device), EPS)
    torch.testing.assert_close(queries.cpu(), expected[0][0])
    torch.testing.assert_close(cache[0, :, 5:11].cpu(), expected[1][0])


@pytest.mark.parametrize("write", [fused, naive])
@pytest.mark.parametrize(
    ("n", "width", "norms", "message"),
    [
        (3, 100, 2, "does not fit a cache"),
        (3, 128, 2, "does not fit a cache"),
        (5, 192, 2, "does not fit a cache"),
        (3, 192, 1, "one of q_norm and k_norm is missing"),
    ],
)
def test_what_does_not_fit_is_refused(write, n: int, width: int, norms: int, message: str) -> None:
    """Not a whole number of heads, no query's, more tokens than the cache holds; a norm alone."""
    table = torch.ones(8, 32)
    given = torch.ones(64), torch.ones(64) if norms == 2 else None
    with pytest.raises(ValueError, match=message):
        write(torch.zeros(n, width), *given, table, table, torch.zeros(2, 1, 4, 64), at(0), EPS)
