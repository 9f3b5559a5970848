"""The drafter against a dense reference written straight from its formulas; its cache against one that never grows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_dflash.stack as stack_module
from tiny_models import HIDDEN, MASK, VOCAB, TinyPair, make_config, make_drafter, make_target, save_pair
from torch_dflash.backend import TorchBackend
from torch_dflash.drafter import TorchDrafter
from torch_dflash.modeling import DraftModel
from torch_dflash.rotary import Rotary, rotate
from torch_dflash.target import TorchTarget
from transformers import GlmConfig, Qwen3Config
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import dflash
from dflash.checkpoint import DraftConfig
from dflash.engine import Engine
from dflash.errors import PairError
from dflash.rope import RopeConfig
from dflash.types import SamplingParams

GREEDY = SamplingParams()


def heads(seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """An embedding and a head [V, H]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, VOCAB, HIDDEN, generator=generator) * 0.5)  # type: ignore[return-value]


def features_of(count: int, config: DraftConfig, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, config.feature_size, generator=torch.Generator().manual_seed(seed))


def made(config: DraftConfig) -> TorchDrafter:
    return TorchDrafter(make_drafter(config), *heads())


# The reference ----------------------------------------------------------------------------------------------------


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: torch.Tensor, position: int, config: DraftConfig) -> torch.Tensor:
    """One head's vector [d] rotated by its position: pair i is channels i and i + half."""
    frequencies, factor = config.rope.frequencies(config.head_dim)
    angles, half = position * torch.tensor(frequencies), len(frequencies)
    cos, sin = (angles.cos() * factor).float(), (angles.sin() * factor).float()
    first, second, rest = x[:half], x[half : 2 * half], x[2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest))


def visible(query: int, key: int, causal: bool, window: int | None) -> bool:
    return not (causal and key > query) and (window is None or abs(query - key) < window)


def reference(model: DraftModel, features: torch.Tensor, anchor: int, count: int) -> torch.Tensor:
    """Draft logits [count, V]: no cache, no fused product, one head and one query at a time."""
    config, weights = model.config, {name: weight.detach() for name, weight in model.named_parameters()}
    embedding, head = heads()
    eps, d = config.rms_norm_eps, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    context = rms(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = embedding[[anchor] + [config.mask_token_id] * count]
    past, total = len(features), len(features) + 1 + count
    for index in range(config.num_hidden_layers):

        def weight(name: str, index: int = index) -> torch.Tensor:
            return weights[f"layers.{index}.{name}"]

        def product(x: torch.Tensor, name: str, index: int = index) -> torch.Tensor:
            bias = weights.get(f"layers.{index}.self_attn.{name}.bias", torch.zeros(1))
            return x @ weights[f"layers.{index}.self_attn.{name}.weight"].T + bias

        normed = rms(x, weight("input_layernorm.weight"), eps)
        everything = torch.cat((context, normed))
        q, k, v = product(normed, "q_proj"), product(everything, "k_proj"), product(everything, "v_proj")
        k_heads, v_heads = k.unflatten(-1, (-1, d)), v.unflatten(-1, (-1, d))
        keys = [
            [turned(rms(one, weight("self_attn.k_norm.weight"), eps), at, config) for one in k_heads[at]]
            for at in range(total)
        ]
        rows = []
        for row in range(past, total):
            sees = [at for at in range(total) if visible(row, at, config.causal[index], config.windows()[index])]
            parts = []
            for h, one in enumerate(q[row - past].unflatten(-1, (-1, d))):
                query = turned(rms(one, weight("self_attn.q_norm.weight"), eps), row, config)
                scores = torch.stack([query @ keys[at][h // group] for at in sees]) / math.sqrt(d)
                parts.append(scores.softmax(0) @ v_heads[sees, h // group])
            rows.append(torch.cat(parts))
        x = x + product(torch.stack(rows), "o_proj")
        normed = rms(x, weight("post_attention_layernorm.weight"), eps)
        gate = normed @ weight("mlp.gate_proj.weight").T
        up = normed @ weight("mlp.up_proj.weight").T
        x = x + (gate * gate.sigmoid() * up) @ weight("mlp.down_proj.weight").T
    return (rms(x, weights["norm.weight"], eps) @ head.T)[1:]


SLIDING, FULL = "sliding_attention", "full_attention"
YARN = RopeConfig(1e4, "yarn", 1.0, (("factor", 4.0), ("original_max_position_embeddings", 64)))

CONFIGS: dict[str, dict[str, Any]] = {
    "full": {},
    "one layer, no groups": {"num_hidden_layers": 1, "num_key_value_heads": 4},
    "three layers, one key head": {"num_hidden_layers": 3, "num_key_value_heads": 1},
    "heads wider than the hidden size": {"head_dim": 16},
    "bias": {"attention_bias": True},
    "causal": {"causal": (True, True)},
    "sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 6},
    "sliding, narrow": {"layer_types": (SLIDING, SLIDING), "sliding_window": 5},
    "sliding, bidirectional": {"layer_types": (SLIDING, SLIDING), "sliding_window": 6, "causal": (False, False)},
    "mixed": {"layer_types": (SLIDING, FULL), "sliding_window": 6},
    "mixed, the other way round": {"layer_types": (FULL, SLIDING), "sliding_window": 7, "causal": (True, False)},
    "three taps": {"target_layer_ids": (3, 0, 1)},
    "linear rope": {"rope": RopeConfig(1e4, "linear", 1.0, (("factor", 8.0),))},
    "yarn": {"rope": YARN},
    "partial rope": {"rope": RopeConfig(1e4, partial=0.5)},
    "large eps": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_draft_logits_equal_the_dense_reference(name: str) -> None:
    config = make_config(**CONFIGS[name])
    drafter = made(config)
    features = features_of(11, config)
    for length, count in ((1, 4), (11, 4), (11, 1)):
        drafter.reset()
        drafter.observe(features[:length], length)
        expected = reference(drafter.model, features[:length], anchor=42, count=count)
        torch.testing.assert_close(drafter.logits(42, count), expected, atol=2e-5, rtol=2e-4)


def test_every_configuration_drafts_something_else() -> None:
    """Otherwise the test above could not tell an ignored setting from an honoured one."""
    seen: list[torch.Tensor] = []
    for name in CONFIGS:
        config = make_config(**CONFIGS[name])
        if config.feature_size != make_config().feature_size:
            continue
        drafter = made(config)
        drafter.observe(features_of(11, config), 11)
        logits = drafter.logits(42, 4)
        assert all((logits - other).abs().max() > 1e-3 for other in seen), name
        seen.append(logits)


# The context's cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "mixed", "bias"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_a_context_taken_in_chunks_gives_the_same_proposal(name: str, chunk: int) -> None:
    config = make_config(**CONFIGS[name])
    features = features_of(23, config)
    whole, chunked = made(config), made(config)
    whole.observe(features, 23)
    for start in range(0, 23, chunk):
        part = features[start : start + chunk]
        chunked.observe(part, len(part))
    assert chunked.length == whole.length == 23
    torch.testing.assert_close(chunked.logits(5, 4), whole.logits(5, 4))
    assert chunked.propose(5, 4, GREEDY).tokens.tolist() == whole.propose(5, 4, GREEDY).tokens.tolist()


def test_features_behind_the_committed_ones_are_ignored() -> None:
    config = make_config()
    features = features_of(9, config)
    exact, more = made(config), made(config)
    exact.observe(features[:6], 6)
    more.observe(features, 6)
    assert more.length == 6
    torch.testing.assert_close(more.logits(5, 4), exact.logits(5, 4))


def test_a_block_leaves_nothing_in_the_context() -> None:
    config = make_config()
    features = features_of(12, config)
    drafter, fresh = made(config), made(config)
    for start in range(0, 12, 2):
        drafter.observe(features[start : start + 2], 2)
        drafter.propose(start, 6, GREEDY)
        drafter.propose(start + 1, 1, GREEDY)
    fresh.observe(features, 12)
    torch.testing.assert_close(drafter.logits(5, 4), fresh.logits(5, 4))


def test_reset_forgets_the_context() -> None:
    config = make_config()
    drafter, fresh = made(config), made(config)
    drafter.observe(features_of(30, config, seed=1), 30)
    drafter.propose(3, 4, GREEDY)
    drafter.reset()
    assert drafter.length == 0
    for one in (drafter, fresh):
        one.observe(features_of(5, config), 5)
    torch.testing.assert_close(drafter.logits(5, 4), fresh.logits(5, 4), atol=0, rtol=0)


@pytest.mark.parametrize("length", range(5, 13))
def test_the_cache_grows_under_the_context_or_the_block_without_losing_either(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    features = features_of(length, config)
    roomy = made(config)
    monkeypatch.setattr(stack_module, "FIRST_CAPACITY", 8)
    tight = made(config)
    assert tight.stack.cache.capacity == 8
    for row in range(length):
        tight.observe(features[row : row + 1], 1)
    roomy.observe(features, length)
    torch.testing.assert_close(tight.logits(5, 4), roomy.logits(5, 4))
    assert tight.stack.cache.capacity >= length + 5


def test_contexts_far_beyond_the_first_tables_and_capacity_are_served() -> None:
    config = make_config(num_hidden_layers=1)
    features = features_of(1500, config)
    whole, chunked = made(config), made(config)
    whole.observe(features, 1500)
    for start in range(0, 1500, 400):
        chunked.observe(features[start : start + 400], min(400, 1500 - start))
    torch.testing.assert_close(chunked.logits(5, 4), whole.logits(5, 4))


# Proposals --------------------------------------------------------------------------------------------------------


def test_a_proposal_is_the_argmax_of_each_slot_behind_its_anchor() -> None:
    config = make_config()
    drafter = made(config)
    drafter.observe(features_of(7, config), 7)
    logits = drafter.logits(42, 4)
    proposal = drafter.propose(42, 4, GREEDY, detail=True)
    assert proposal.count == 4
    assert proposal.tokens.tolist() == logits.argmax(-1).tolist()
    assert proposal.block.tolist() == [42, *proposal.tokens.tolist()]
    assert proposal.probs is not None
    torch.testing.assert_close(proposal.probs, logits.softmax(-1).max(-1).values)
    assert drafter.propose(42, 4, GREEDY).probs is None
    sampled = drafter.propose(42, 4, SamplingParams(temperature=1.0, seed=0))
    assert sampled.tokens.tolist() == proposal.tokens.tolist()


@pytest.mark.parametrize("count", [1, 2, 5, 9, 20])
def test_blocks_of_any_size_are_drafted(count: int) -> None:
    """The drafter was made for 4 slots."""
    config = make_config()
    drafter = made(config)
    features = features_of(6, config)
    drafter.observe(features, 6)
    torch.testing.assert_close(
        drafter.logits(5, count), reference(drafter.model, features, 5, count), atol=2e-5, rtol=2e-4
    )
    assert len(drafter.propose(5, count, GREEDY).tokens) == count
    assert len(drafter.propose(5, 4, GREEDY).tokens) == 4


def test_an_anchor_that_is_the_mask_id_is_drafted_from() -> None:
    drafter = made(make_config())
    features = features_of(3, drafter.config)
    drafter.observe(features, 3)
    expected = reference(drafter.model, features, MASK, 4)
    torch.testing.assert_close(drafter.logits(MASK, 4), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("window", [5, 6, 100])
def test_no_row_of_a_mask_is_empty_and_no_logit_is_not_a_number(window: int) -> None:
    kinds = {"layer_types": (SLIDING, SLIDING), "sliding_window": window}
    for causal in ((True, True), (False, False)):
        drafter = made(make_config(**kinds, causal=causal))
        for length in (1, 2, 9):
            drafter.reset()
            drafter.observe(features_of(length, drafter.config), length)
            assert drafter.logits(5, 4).isfinite().all()


# Attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("count", [1, 4, 12])
def test_looking_at_attention_changes_nothing(name: str, count: int) -> None:
    """And its rows have one entry for each token of the context and of the block."""
    config = make_config(**CONFIGS[name])
    drafter, features = made(config), features_of(11, config)
    drafter.observe(features[:9], 9)
    before = drafter.layer_states(42, count)
    weights = drafter.attention(42, count)
    assert [layer.shape for layer in weights] == [(1 + count, 9 + 1 + count)] * config.num_hidden_layers
    for layer in weights:
        torch.testing.assert_close(layer.sum(-1), torch.ones(1 + count), atol=1e-5, rtol=0)
    assert drafter.length == 9
    for ours, theirs in zip(drafter.layer_states(42, count), before, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    drafter.observe(features[9:], 2)
    fresh = made(config)
    fresh.observe(features, 11)
    torch.testing.assert_close(drafter.logits(5, 4), fresh.logits(5, 4))


def test_attention_before_any_context_is_over_the_block_alone() -> None:
    (layer, *_) = made(make_config()).attention(42, 3)
    assert layer.shape == (4, 4) and (layer > 0).all()


# RoPE against transformers ----------------------------------------------------------------------------------------

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
ROPES: dict[str, tuple[RopeConfig, dict[str, Any]]] = {
    "none": (RopeConfig(5e5), {"rope_type": "default"}),
    "linear": (RopeConfig(1e4, "linear", 1.0, (("factor", 4.0),)), {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        RopeConfig(1e6, "yarn", 1.0, (("factor", 4.0), ("original_max_position_embeddings", 512))),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "yarn with its own betas and attention factor": (
        RopeConfig(
            1e4, "yarn", 1.0,
            (("factor", 8.0), ("original_max_position_embeddings", 256), ("beta_fast", 16.0), ("beta_slow", 2.0),
             ("attention_factor", 0.7)),
        ),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "beta_fast": 16.0,
         "beta_slow": 2.0, "attention_factor": 0.7},
    ),
    "llama3": (RopeConfig(5e5, "llama3", 1.0, tuple(LLAMA3.items())), {"rope_type": "llama3", **LLAMA3}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rope_tables_equal_transformers(name: str) -> None:
    ours, theirs = ROPES[name]
    parameters = {**theirs, "rope_theta": ours.theta}
    config = Qwen3Config(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=2048, rope_parameters=parameters
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(2000)[None])
    ours_cos, ours_sin = Rotary(ours, 32).range(0, 2000)
    torch.testing.assert_close(ours_cos, cos[0, :, :16], atol=2e-4, rtol=0)
    torch.testing.assert_close(ours_sin, sin[0, :, :16], atol=2e-4, rtol=0)


@pytest.mark.parametrize("partial", [0.5, 0.25, 1.0])
def test_partial_rope_equals_transformers(partial: float) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": partial}
    config = GlmConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=2048, rope_parameters=parameters
    )
    cos, _ = GlmRotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    ours = Rotary(RopeConfig(1e4, partial=partial), 32).range(0, 300)[0]
    assert ours.shape[-1] == int(32 * partial) // 2
    torch.testing.assert_close(ours, cos[0, :, : ours.shape[-1]], atol=1e-4, rtol=0)
    x = torch.randn(300, 32)
    cos, sin = Rotary(RopeConfig(1e4, partial=partial), 32).range(0, 300)
    assert torch.equal(rotate(x, cos, sin)[:, int(32 * partial) :], x[:, int(32 * partial) :])


def test_tables_grow_without_changing() -> None:
    rotary = Rotary(RopeConfig(1e4), 8)
    before = rotary.range(1000, 1020)[0][:20].clone()
    rotary.range(0, 5000)
    assert torch.equal(rotary.range(1000, 1020)[0], before)
    cos, sin = rotary.at(torch.tensor([[3, 4000]]), 4001)
    assert cos.shape == sin.shape == (1, 2, 4)
    assert torch.equal(cos[0, 1], rotary.range(4000, 4001)[0][0])


def test_the_drafters_rope_is_its_own_and_not_the_targets() -> None:
    """One target, two drafters that differ in their RoPE alone, draft differently."""
    pair = TinyPair()
    prompt = [(7 * index) % VOCAB for index in range(40)]
    drafted = []
    for rope in (RopeConfig(1e4), RopeConfig(50.0)):
        result = pair.engine(pair.drafter(rope=rope)).generate(prompt, max_new_tokens=8)
        drafted.append([step.drafted for step in result.steps])
    assert drafted[0] != drafted[1]


# Number formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e3, 3e4, 1e6, 1e9])
def test_float16_drafts_the_same_from_features_beyond_its_range(scale: float) -> None:
    """The projection is followed by a norm, so that a feature's scale means nothing; float16 ends at 65,504."""
    config = make_config()
    wide = made(config)
    half = TorchDrafter(make_drafter(config).half(), *(weight.half() for weight in heads()))
    features = features_of(9, config) * scale
    for drafter in (wide, half):
        drafter.observe(features, 9)
    exact, rounded = wide.logits(5, 4), half.logits(5, 4).float()
    assert rounded.isfinite().all()
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()


def test_float16_features_at_the_end_of_their_range_do_not_overflow_the_projection() -> None:
    config = make_config()
    half = TorchDrafter(make_drafter(config).half(), *(weight.half() for weight in heads()))
    half.observe(torch.full((4, config.feature_size), 60_000.0, dtype=torch.float16), 4)
    assert half.logits(5, 4).isfinite().all()


def test_features_that_are_not_numbers_cost_acceptance_and_raise_a_warning_but_no_token() -> None:
    pair = TinyPair()
    drafter = pair.drafter()
    observe = drafter.observe
    drafter.observe = lambda features, count: observe(features * math.nan, count)  # type: ignore[method-assign]
    prompt = [5, 17, 200, 33]
    with pytest.warns(RuntimeWarning, match="number format"):
        result = pair.engine(drafter).generate(prompt, max_new_tokens=40)
    assert result.token_ids == pair.oracle(prompt, 40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_pair_generates(dtype: torch.dtype) -> None:
    model = make_target().to(dtype)
    target = TorchTarget(model, make_config().target_layer_ids)
    drafter = TorchDrafter(
        make_drafter(make_config()).to(dtype), model.get_input_embeddings().weight, model.get_output_embeddings().weight
    )
    result = Engine(TorchBackend(), target, drafter, check=True).generate([5, 17], max_new_tokens=12)
    assert len(result.token_ids) == 12
    assert target.info.dtype == str(dtype).removeprefix("torch.")


# Beside a target ---------------------------------------------------------------------------------------------------


def test_a_saved_pair_loads_by_its_folders_and_is_lossless(tmp_path: Path, tiny: TinyPair) -> None:
    config = make_config()
    target_folder, draft_folder = save_pair(tmp_path, make_target(), config, make_drafter(config))
    engine = dflash.load(target=target_folder, draft=draft_folder, device="cpu", check=True)
    expected = tiny.engine().generate([5, 17, 200], max_new_tokens=20)
    result = engine.generate([5, 17, 200], max_new_tokens=20)
    assert engine.tokenizer is None
    assert result.token_ids == expected.token_ids
    assert [step.drafted for step in result.steps] == [step.drafted for step in expected.steps]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 16, "head_dim": 8}, "hidden_size is 16 in the drafter and 32 in the target"),
        ({"vocab_size": 310}, "vocab_size is 310"),
        ({"num_target_layers": 9}, "num_target_layers is 9 in the drafter; the target has 4"),
        ({"num_target_layers": None, "target_layer_ids": (0, 4)}, "holds 4.*0 to 3"),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    tmp_path: Path, tiny: TinyPair, change: dict[str, Any], says: str
) -> None:
    config = make_config(**change)
    _, draft_folder = save_pair(tmp_path, tiny.model, config, make_drafter(config))
    with pytest.raises(PairError, match=says):
        TorchBackend().load_drafter(draft_folder, config, tiny.target)
