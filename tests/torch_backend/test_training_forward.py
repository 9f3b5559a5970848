"""The training forward sees exactly what the drafter sees when served: two leak tests, and mutants they must catch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch_dflash.drafter import TorchDrafter
from torch_dflash.modeling import DraftModel
from torch_dflash.rotary import Rotary, rotate
from torch_dflash.training import forward as training
from torch_dflash.training.forward import block_mask, training_forward
from training_tiny import MASK, TAPS, VOCAB

from dflash.checkpoint import DraftConfig
from dflash.rope import RopeConfig

BLOCK, LENGTH = 4, 23
ANCHORS = torch.tensor([[0, 1, 6, 11, 21, 22], [3, 3, 9, 14, 17, 20]])
KINDS = {
    "full": {},
    "causal": {"causal": (True, True)},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5},
    "sliding, not causal": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "causal": (False, False)},
}


class Case:
    def __init__(self, kind: str = "full") -> None:
        generator = torch.Generator().manual_seed(1)
        self.config = DraftConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCAB,
            block_size=BLOCK,
            mask_token_id=MASK,
            target_layer_ids=TAPS,
            rope=RopeConfig(theta=1000.0),
            **KINDS[kind],
        )
        self.model = DraftModel(self.config)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)
        self.embedding = torch.randn(VOCAB, 32, generator=generator)
        self.head = torch.randn(VOCAB, 32, generator=generator)
        self.rotary = Rotary(self.config.rope, 8)
        self.features = torch.randn(2, LENGTH, 64, generator=generator)
        self.tokens = torch.randint(4, VOCAB, (2, LENGTH), generator=generator)

    @torch.no_grad()
    def blocks(self, features: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """[b, N, B, H]"""
        features = self.features if features is None else features
        tokens = self.tokens if tokens is None else tokens
        return training_forward(self.model, self.embedding, self.rotary, features, tokens, ANCHORS)


def nothing_leaks(case: Case) -> None:
    """Every feature at a position ≥ a and every token but x_a may change: block a stays bit-identical."""
    before = case.blocks()
    for row in range(len(ANCHORS)):
        for place, anchor in enumerate(ANCHORS[row].tolist()):
            features, tokens = case.features.clone(), case.tokens.clone()
            features[row, anchor:] = 100 * torch.randn(LENGTH - anchor, 64)
            kept = tokens[row, anchor].item()
            tokens[row] = torch.randint(4, VOCAB, (LENGTH,))
            tokens[row, anchor] = kept
            assert torch.equal(case.blocks(features, tokens)[row, place], before[row, place])


@torch.no_grad()
def served_block(case: Case, row: int, anchor: int) -> Tensor:
    """What the drafter computes for the block at ``anchor`` when it is served: context in pieces, then one block."""
    drafter = TorchDrafter(case.model, case.embedding, case.head)
    for start in range(0, anchor, 5):
        piece = case.features[row, start : min(start + 5, anchor)]
        drafter.observe(piece, len(piece))
    return drafter.model.norm(drafter.layer_states(int(case.tokens[row, anchor]), BLOCK - 1)[-1])


def training_equals_serving(case: Case) -> None:
    blocks = case.blocks()
    for row in range(len(ANCHORS)):
        for place, anchor in enumerate(ANCHORS[row].tolist()):
            torch.testing.assert_close(blocks[row, place], served_block(case, row, anchor), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def plain_block(case: Case, row: int, anchor: int) -> Tensor:
    """The paper's block, one query at a time, with nothing shared with the code under test but the weights."""
    model, config = case.model, case.config
    context = model.hidden_norm(model.fc(case.features[row, :anchor]))
    ids = torch.tensor([int(case.tokens[row, anchor])] + [MASK] * (BLOCK - 1))
    x = case.embedding[ids]
    cos, sin = case.rotary.range(0, LENGTH + BLOCK)

    def heads(y: Tensor, count: int) -> Tensor:
        return y.view(len(y), count, 8)

    for layer, causal, window in zip(model.layers, config.causal, config.windows(), strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat((context, normed))
        keys = attention.k_norm(heads(attention.k_proj(both), 2))
        values = heads(attention.v_proj(both), 2)
        queries = attention.q_norm(heads(attention.q_proj(normed), 4))
        rows = []
        for slot in range(BLOCK):
            at, seen = anchor + slot, []
            for key in range(len(both)):
                near = window is None or abs(at - key) < window
                if near and (key < anchor or not causal or key <= at):
                    seen.append(key)
            mixed = []
            for head in range(4):
                query = rotate(queries[slot, head], cos[at], sin[at])
                scores = torch.stack([query @ rotate(keys[key, head // 2], cos[key], sin[key]) for key in seen])
                shares = (scores / math.sqrt(8)).softmax(0)
                mixed.append(shares @ values[seen, head // 2])
            rows.append(torch.cat(mixed))
        x = x + attention.o_proj(torch.stack(rows))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.norm(x)


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_tokens_from_the_anchor_on_do_not_reach_its_block(kind):
    torch.manual_seed(0)
    nothing_leaks(Case(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_block_may_see_does_reach_it(kind):
    case = Case(kind)
    before = case.blocks()
    for place, anchor in enumerate(ANCHORS[0].tolist()):
        tokens = case.tokens.clone()
        tokens[0, anchor] = (tokens[0, anchor] + 1) % VOCAB
        assert not torch.equal(case.blocks(tokens=tokens)[0, place], before[0, place])
        if anchor:
            features = case.features.clone()
            features[0, anchor - 1] += 1.0
            assert not torch.equal(case.blocks(features)[0, place], before[0, place])


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_in_training_equals_the_same_block_when_served(kind):
    training_equals_serving(Case(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_equals_the_papers_formula(kind):
    case = Case(kind)
    blocks = case.blocks()
    for row, place in ((0, 0), (0, 2), (1, 3), (1, 5)):
        anchor = int(ANCHORS[row, place])
        torch.testing.assert_close(blocks[row, place], plain_block(case, row, anchor), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check", [nothing_leaks, training_equals_serving])
def test_a_mask_that_lets_the_anchors_own_state_in_would_be_noticed(monkeypatch, check):
    def leaky(anchors: Tensor, *sizes: int, **options: object) -> Tensor:
        return block_mask(anchors + 1, *sizes, **options)  # j < a + 1, that is j <= a

    monkeypatch.setattr(training, "block_mask", leaky)
    with pytest.raises(AssertionError):
        check(Case())


def test_blocks_that_see_each_other_would_be_noticed(monkeypatch):
    def open_blocks(anchors: Tensor, length: int, *sizes: int, **options: object) -> Tensor:
        mask = block_mask(anchors, length, *sizes, **options)
        mask[..., length:] = True
        return mask

    monkeypatch.setattr(training, "block_mask", open_blocks)
    for check in (nothing_leaks, training_equals_serving):
        with pytest.raises(AssertionError):
            check(Case())


def test_the_mask_as_a_picture():
    def picture(**options: object) -> list[str]:
        mask = block_mask(torch.tensor([[1, 3]]), 4, 3, **options)[0, 0]
        return ["".join(".#"[int(cell)] for cell in row) for row in mask]

    assert picture(causal=False, window=None) == ["#...###...", "#...###...", "#...###...",
                                                  "###....###", "###....###", "###....###"]  # fmt: skip
    assert picture(causal=True, window=None) == ["#...#.....", "#...##....", "#...###...",
                                                 "###....#..", "###....##.", "###....###"]  # fmt: skip
    assert picture(causal=False, window=3) == ["#...###...", "#...###...", "....###...",
                                               ".##....###", "..#....###", ".......###"]  # fmt: skip


def test_padding_blocks_keep_their_own_keys_so_that_no_row_is_empty():
    mask = block_mask(torch.zeros(1, 3, dtype=torch.long), 9, BLOCK, causal=True, window=4)
    assert mask.any(-1).all()


def test_the_block_order_and_its_neighbours_do_not_matter():
    case = Case()
    together = case.blocks()
    for place in range(ANCHORS.shape[1]):
        with torch.no_grad():
            single = training_forward(
                case.model, case.embedding, case.rotary, case.features, case.tokens, ANCHORS[:, place : place + 1]
            )
        torch.testing.assert_close(single[:, 0], together[:, place], rtol=1e-5, atol=1e-5)
