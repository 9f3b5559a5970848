"""``context_kv``: norm, rotation and cache write of all layers."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, F16, F32, assert_as_good, name_of
from tiny_models import make_config
from torch import Tensor
from torch_dflash.modeling import DraftModel
from torch_dflash.rotary import Rotary
from triton_dflash import context_kv
from triton_dflash.context_kv import fused, naive

EPS = 1e-6
CASES = [  # n tokens, L layers, g heads, d, r rotated channels, type, where the tokens start
    (97, 2, 2, 64, 64, F32, 0),
    (5, 3, 1, 80, 40, BF16, 4),
    (257, 1, 1, 96, 96, F16, 31),
    (1025, 1, 1, 128, 128, BF16, 1),
    (16, 1, 8, 256, 64, F32, 16),
    (1, 5, 2, 128, 128, F16, 97),
    (33, 2, 1, 80, 80, F32, 7),
]


def exactly(mixed: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, shape: torch.Size) -> Tensor:
    """[L, 2, g, n, d] in float64, head by head as the formula says."""
    layers, _, groups, _, d = shape
    half = cos.shape[1]
    both = mixed.double().view(len(mixed), layers, 2, groups, d)
    out = torch.empty(layers, 2, groups, len(mixed), d, dtype=torch.float64)
    for layer in range(layers):
        for head in range(groups):
            k = both[:, layer, 0, head]
            k = k / (k.square().mean(-1, keepdim=True) + EPS).sqrt() * weights[layer].double()
            for i in range(half):
                c, s = cos[:, i].double(), sin[:, i].double()
                out[layer, 0, head, :, i] = k[:, i] * c - k[:, half + i] * s
                out[layer, 0, head, :, half + i] = k[:, half + i] * c + k[:, i] * s
            out[layer, 0, head, :, 2 * half :] = k[:, 2 * half :]
            out[layer, 1, head] = both[:, layer, 1, head]
    return out


@pytest.mark.parametrize(("n", "layers", "groups", "d", "rotated", "dtype", "start"), CASES, ids=name_of)
def test_keys_and_values(
    n: int, layers: int, groups: int, d: int, rotated: int, dtype: torch.dtype, start: int, device: str
) -> None:
    torch.manual_seed(n)
    wider = torch.randn(n, layers * 2 * groups * d + 8).to(dtype)
    mixed = wider[:, :-8]  # its rows lie further apart than they are long
    weights = (1 + torch.randn(layers, d) / 4).to(dtype)
    angles = torch.rand(n, rotated // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    poisoned = torch.full((layers, 2, groups, start + n + 3, d), torch.nan, dtype=dtype)
    found, plain = poisoned.to(device), poisoned.clone()
    on_device = wider.to(device)[:, :-8], *(x.to(device) for x in (weights, cos, sin))
    fused(*on_device, found, start, EPS)
    naive(mixed, weights, cos, sin, plain, start, EPS)
    found = found.cpu()
    for cache in (found, plain):
        assert cache[..., :start, :].isnan().all() and cache[..., start + n :, :].isnan().all(), "written elsewhere"
    exact = exactly(mixed, weights, cos, sin, poisoned.shape)
    written = slice(start, start + n)
    assert_as_good(found[:, 0, :, written], plain[:, 0, :, written], exact[:, 0])
    assert torch.equal(found[:, 1, :, written], plain[:, 1, :, written]), "values are copied as they are"


def test_no_tokens_write_nothing(device: str) -> None:
    cache = torch.full((1, 2, 1, 4, 64), torch.nan, device=device)
    nothing = torch.empty(0, 32, device=device)
    fused(torch.empty(0, 128, device=device), torch.ones(1, 64, device=device), nothing, nothing, cache, 2, EPS)
    assert cache.isnan().all()


def test_the_drafter_computes_the_same(device: str) -> None:
    """The plain code is the model's own ``context_kv``, to the bit; the public function takes the kernel."""
    config = make_config()
    model = DraftModel(config).requires_grad_(False)
    for layer in model.layers:
        layer.self_attn.k_norm.weight.uniform_(0.5, 1.5)
    torch.manual_seed(3)
    context = torch.randn(1, 9, config.hidden_size)
    weight, _ = model.stacked_kv()
    tables = Rotary(config.rope, config.head_dim).range(5, 14)
    expected = torch.stack([torch.stack(both)[:, 0] for both in model.context_kv(context, tables)])
    arguments = [context[0] @ weight.T, torch.stack([layer.self_attn.k_norm.weight for layer in model.layers]), *tables]
    cache = torch.full((*expected.shape[:3], 20, expected.shape[-1]), torch.nan)
    naive(*arguments, cache, 5, config.rms_norm_eps)
    assert torch.equal(cache[..., 5:14, :], expected)
    on_device = torch.full_like(cache, torch.nan, device=device)
    context_kv(*(x.to(device) for x in arguments), on_device, 5, config.rms_norm_eps)
    torch.testing.assert_close(on_device.cpu()[..., 5:14, :], expected)
