"""The backend's stack for CUDA with the kernels themselves, not their plain twins: whole passes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tiny_models import make_config, make_drafter, make_target
from torch import Tensor
from torch_dflash.cuda_stack import ContextWriter, CudaStack
from torch_dflash.rotary import Rotary
from torch_dflash.stack import LayerWeights, PlainStack, Sight, StackSize, Tree
from triton_dflash import forced

from dflash.rope import RopeConfig

SIZE = StackSize(heads=4, groups=2, head_dim=8, eps=1e-6)


def both_of(model: Any, sights: list[Sight], device: str) -> list[PlainStack]:
    layers = [LayerWeights.of(layer) for layer in model.to(device).layers]
    kinds: tuple[type[PlainStack], ...] = PlainStack, CudaStack
    return [kind(layers, SIZE, sights, Rotary(RopeConfig(1e4), 8, device)) for kind in kinds]


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all() and (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(("family", "programs"), [("llama", 1), ("qwen3", 4)])
@torch.inference_mode()
def test_a_targets_passes(family: str, programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block, one row, a block after a rewind, a tree, and one row after the tree's path; the cache attended to as a
    whole and in stretches."""
    torch.manual_seed(3)
    monkeypatch.setattr(sys.modules["triton_dflash.block_attention"], "programs_worth", lambda _: programs)
    stacks = both_of(make_target(family, num_hidden_layers=2).model, [Sight()] * 2, device)
    parents = [-1, 0, 0, 1, 2, 4]
    tree, at = Tree(parents, len(parents), torch.device(device)), 0
    with forced(True):
        for rows, kept in ((8, 8), (1, 1), (5, 2), (6, 4), (1, 1)):
            x = torch.randn(rows, 32, device=device)
            states = [stack.run(x, at, (0, 1), tree if rows == 6 else None) for stack in stacks]
            for index in (0, 1):
                assert_same(states[1][index], states[0][index])
            if rows == 6:
                for stack in stacks:
                    stack.cache.move(at, torch.tensor([0, 2, 4, 5], device=device))
            at += kept
            held = [stack.cache.tensor[..., :at, :] for stack in stacks]
            assert_same(held[1], held[0])


@torch.inference_mode()
def test_a_drafters_round(device: str) -> None:
    """Features into the context, then a block that sees both ways, in a window in one of its layers."""
    torch.manual_seed(4)
    config = make_config(layer_types=("full_attention", "sliding_attention"), sliding_window=9, causal=(False, False))
    model = make_drafter(config).requires_grad_(False)
    plain, ours = both_of(model, [Sight(False), Sight(False, 9)], device)
    assert isinstance(ours, CudaStack)
    k_norms = torch.stack([layer.self_attn.k_norm.weight for layer in model.layers])
    writer = ContextWriter(model.fc.weight, model.hidden_norm.weight, *model.stacked_kv(), k_norms, ours)
    features, x = torch.randn(30, config.feature_size, device=device), torch.randn(5, 32, device=device)
    context = model.context_kv(model.project(features)[None], plain.rotary.range(0, 30))
    plain.cache.tensor[..., :30, :] = torch.stack([torch.stack(pair)[:, 0] for pair in context])
    with forced(True):
        ours.cover()
        writer.write_at(features, torch.zeros(1, dtype=torch.int32, device=device))
        assert_same(ours.cache.tensor[..., :30, :], plain.cache.tensor[..., :30, :])
        theirs, found = (stack.run(x, 30, (0, 1)) for stack in (plain, ours))
    for index in (0, 1):
        assert_same(found[index], theirs[index])
