"""``context_kv``: norm, rotation and cache write of all layers."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, F16, F32, assert_as_good, at, name_of, turned_exactly
from tiny_models import make_config
from torch import Tensor
from torch_dflash.modeling import DraftModel
from torch_dflash.rotary import Rotary
from triton_dflash import context_kv
from triton_dflash.context_kv import fused, naive

EPS = 1e-6
CASES = [  # n tokens, L layers, g heads, d, r rotated channels, type, where the tokens start, in a tree
    (97, 2, 1, 128, 128, F32, 0, False),
    (5, 3, 1, 80, 40, BF16, 4, True),
    (257, 1, 1, 96, 96, F16, 31, False),
    (1025, 1, 1, 64, 64, BF16, 1, False),
    (16, 1, 8, 256, 64, F32, 16, True),
    (1, 5, 2, 128, 128, F16, 97, False),
    (33, 2, 1, 80, 80, F32, 7, False),
]


@pytest.mark.parametrize(("n", "layers", "groups", "d", "rotated", "dtype", "start", "tree"), CASES, ids=name_of)
def test_keys_and_values(
    n: int, layers: int, groups: int, d: int, rotated: int, dtype: torch.dtype, start: int, tree: bool, device: str
) -> None:
    torch.manual_seed(n)
    wider = torch.randn(n, layers * 2 * groups * d + 8).to(dtype)
    mixed = wider[:, :-8]  # its rows lie further apart than they are long
    weights = (1 + torch.randn(layers, d) / 4).to(dtype)
    angles = torch.rand(start + n, rotated // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    depth = torch.randint(0, n, (n,), dtype=torch.int32) if tree else None
    poisoned = torch.full((layers, 2, groups, start + n + 3, d), torch.nan, dtype=dtype)
    found, plain = poisoned.to(device), poisoned.clone()
    on_device = [None if x is None else x.to(device) for x in (weights, cos, sin, depth)]
    fused(wider.to(device)[:, :-8], *on_device[:3], found, at(start, device), EPS, on_device[3])
    naive(mixed, weights, cos, sin, plain, at(start), EPS, depth)
    found = found.cpu()
    for cache in (found, plain):
        assert cache[..., :start, :].isnan().all() and cache[..., start + n :, :].isnan().all(), "written elsewhere"
    places = start + (torch.arange(n) if depth is None else depth)
    both = mixed.view(n, layers, 2, groups, d).permute(1, 2, 3, 0, 4)
    exact = turned_exactly(both[:, 0], weights[:, None, None], cos[places], sin[places], EPS)
    written = slice(start, start + n)
    assert_as_good(found[:, 0, :, written], plain[:, 0, :, written], exact)
    assert torch.equal(found[:, 1, :, written], both[:, 1]), "values are copied as they are"
    assert torch.equal(plain[:, 1, :, written], both[:, 1])


def test_a_launch_serves_every_start(device: str) -> None:
    cache, start = torch.full((1, 2, 1, 30, 64), torch.nan, device=device), at(0, device)
    mixed, weights, table = (torch.randn(*shape, device=device) for shape in ((4, 128), (1, 64), (30, 32)))
    for place in (3, 20, 7):
        start.fill_(place)
        fused(mixed, weights, table, table, cache, start, EPS)
    filled = cache.cpu()[0, 1, 0].isfinite().all(-1).nonzero()[:, 0].tolist()
    assert filled == [*range(3, 11), *range(20, 24)]
    for place in (3, 20):
        assert torch.equal(cache[0, 1, 0, place : place + 4], mixed[:, 64:])
    assert not torch.equal(cache[0, 0, 0, 20:24], cache[0, 0, 0, 7:11]), "each turned by its own position"


def test_no_tokens_write_nothing(device: str) -> None:
    cache = torch.full((1, 2, 1, 4, 64), torch.nan, device=device)
    table = torch.ones(4, 32, device=device)
    fused(torch.empty(0, 128, device=device), torch.ones(1, 64, device=device), table, table, cache, at(2, device), EPS)
    assert cache.isnan().all()


@pytest.mark.parametrize("write", [fused, naive])
@pytest.mark.parametrize(("n", "width"), [(3, 64), (5, 128)])
def test_what_does_not_fit_is_refused(write, n: int, width: int) -> None:
    table = torch.ones(8, 32)
    with pytest.raises(ValueError, match="does not fit a cache"):
        write(torch.zeros(n, width), torch.ones(1, 64), table, table, torch.zeros(1, 2, 1, 4, 64), at(0), EPS)


def test_the_drafter_computes_the_same(device: str) -> None:
    """The plain code is the model's own ``context_kv``, to the bit; the public function takes the kernel."""
    config = make_config()
    model = DraftModel(config).requires_grad_(False)
    for layer in model.layers:
        layer.self_attn.k_norm.weight.uniform_(0.5, 1.5)
    torch.manual_seed(3)
    context = torch.randn(1, 9, config.hidden_size)
    weight, _ = model.stacked_kv()
    rotary = Rotary(config.rope, config.head_dim)
    both = model.context_kv(context, rotary.range(5, 14))
    expected = torch.stack([torch.stack(pair)[:, 0] for pair in both])
    weights = torch.stack([layer.self_attn.k_norm.weight for layer in model.layers])
    arguments: list[Tensor] = [context[0] @ weight.T, weights, *rotary.range(0, 14)]
    cache = torch.full((*expected.shape[:3], 20, expected.shape[-1]), torch.nan)
    naive(*arguments, cache, at(5), config.rms_norm_eps)
    assert torch.equal(cache[..., 5:14, :], expected)
    on_device = torch.full_like(cache, torch.nan, device=device)
    context_kv(*(x.to(device) for x in arguments), on_device, at(5, device), config.rms_norm_eps)
    torch.testing.assert_close(on_device.cpu()[..., 5:14, :], expected)
