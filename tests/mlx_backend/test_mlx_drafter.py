"""The drafter on MLX against the PyTorch one with the same weights; its context's cache; quantised and 16-bit ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
import mlx_dflash.drafter as drafter_module
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_dflash.backend import MlxBackend
from mlx_dflash.drafter import MlxDrafter
from mlx_models import gap
from tiny_mlx import MlxPair, mlx_weights
from tiny_models import HIDDEN, VOCAB, TinyPair, make_config, make_drafter, make_target, save_pair
from torch_dflash.drafter import TorchDrafter

import dflash
from dflash.checkpoint import DraftConfig
from dflash.errors import BackendError, UsageError, WeightsError
from dflash.rope import RopeConfig
from dflash.types import SamplingParams

GREEDY = SamplingParams()
TABLES = np.random.default_rng(9).normal(size=(2, VOCAB, HIDDEN)).astype(np.float32) * 0.5  # an embedding and a head


def made(config: DraftConfig, *, bits: int | None = None, dtype: mx.Dtype = mx.float32) -> MlxDrafter:
    embedding, head = (mx.array(table).astype(dtype) for table in TABLES)
    weights = {name: weight.astype(dtype) for name, weight in mlx_weights(make_drafter(config)).items()}
    return MlxDrafter(config, weights, lambda ids: embedding[ids], lambda x: x @ head.T, bits=bits)


def made_of_torch(config: DraftConfig) -> TorchDrafter:
    return TorchDrafter(make_drafter(config), *(torch.from_numpy(table) for table in TABLES))


def features_of(count: int, config: DraftConfig, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, config.feature_size)).astype(np.float32)


def observed(drafter: Any, features: np.ndarray, *pieces: int) -> Any:
    """``drafter`` with ``features`` in its context, taken in pieces of these lengths (default: at once)."""
    start = 0
    for count in pieces or (len(features),) * bool(len(features)):
        part = features[start : start + count]
        drafter.observe(mx.array(part) if isinstance(drafter, MlxDrafter) else torch.from_numpy(part), count)
        start += count
    assert start == len(features) == drafter.length
    return drafter


def logits(drafter: Any, anchor: int = 42, count: int = 4) -> np.ndarray:
    values = drafter.logits(anchor, count)
    return values.numpy() if isinstance(values, torch.Tensor) else np.array(values)


# The same numbers as on PyTorch ---------------------------------------------------------------------------------

KINDS = ("full_attention", "sliding_attention")
ROPES = st.one_of(
    st.builds(RopeConfig, theta=st.sampled_from([50.0, 1e4, 1e6]), partial=st.sampled_from([1.0, 0.5, 0.25])),
    st.builds(lambda factor: RopeConfig(1e4, "linear", 1.0, (("factor", factor),)), st.sampled_from([2.0, 8.0])),
    st.builds(
        lambda factor, attention: RopeConfig(
            1e4, "yarn", 1.0,
            (("factor", factor), ("original_max_position_embeddings", 16), ("attention_factor", attention)),
        ),
        st.sampled_from([2.0, 16.0]),
        st.sampled_from([0.8, 1.0, 1.3]),
    ),
)  # fmt: skip


@st.composite
def draft_configs(draw: Any) -> DraftConfig:
    layers = draw(st.integers(1, 3))
    kinds = draw(st.tuples(*[st.sampled_from(KINDS)] * layers))
    return make_config(
        num_hidden_layers=layers,
        layer_types=kinds,
        sliding_window=draw(st.integers(5, 12)) if "sliding_attention" in kinds else None,
        causal=draw(st.tuples(*[st.booleans()] * layers)),
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([8, 16])),
        attention_bias=draw(st.booleans()),
        target_layer_ids=draw(st.sampled_from([(3,), (0, 2), (3, 0, 1)])),
        rope=draw(ROPES),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
    )


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(config=draft_configs(), pieces=st.lists(st.integers(1, 9), min_size=1, max_size=4), count=st.integers(1, 9))
def test_any_configuration_drafts_what_the_torch_drafter_drafts(
    config: DraftConfig, pieces: list[int], count: int
) -> None:
    """Logits and every layer's hidden states, behind a context that came in pieces."""
    features = features_of(sum(pieces), config)
    ours, theirs = observed(made(config), features, *pieces), observed(made_of_torch(config), features)
    states = zip(ours.layer_states(42, count), theirs.layer_states(42, count), strict=True)
    for layer, (mine, reference) in enumerate(states):
        np.testing.assert_allclose(np.array(mine), reference.numpy(), atol=3e-5, rtol=3e-4, err_msg=f"layer {layer}")
    np.testing.assert_allclose(logits(ours, count=count), logits(theirs, count=count), atol=3e-5, rtol=3e-4)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(config=draft_configs(), length=st.integers(0, 20), count=st.integers(1, 9))
def test_any_configuration_looks_where_the_torch_drafter_looks(config: DraftConfig, length: int, count: int) -> None:
    """And looking changes nothing: the same states before and after, and the same context."""
    features = features_of(length, config)
    pieces = (length,) if length else ()
    ours, theirs = observed(made(config), features, *pieces), observed(made_of_torch(config), features, *pieces)
    before = [np.array(state) for state in ours.layer_states(42, count)]
    for mine, reference in zip(ours.attention(42, count), theirs.attention(42, count), strict=True):
        assert mine.dtype == mx.float32
        np.testing.assert_allclose(np.array(mine), reference.numpy(), atol=1e-5)
        assert ((np.array(mine) == 0) == (reference.numpy() == 0)).all()
    assert ours.length == length
    for mine, earlier in zip(ours.layer_states(42, count), before, strict=True):
        np.testing.assert_array_equal(np.array(mine), earlier)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_attention_of_sixteen_bit_drafters_sums_to_one_in_float32(dtype: mx.Dtype) -> None:
    config = make_config(causal=(True, False))
    for layer in observed(made(config, dtype=dtype), features_of(300, config)).attention(42, 4):
        assert layer.dtype == mx.float32
        np.testing.assert_allclose(np.array(layer).sum(-1), 1, atol=1e-5)


# The context's cache --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(5, 13))
def test_the_cache_grows_under_the_context_or_the_block_without_losing_either(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    features = features_of(length, config)
    roomy = observed(made(config), features)
    expected = logits(roomy)
    monkeypatch.setattr(drafter_module, "FIRST_CAPACITY", 8)
    tight = observed(made(config), features, *[1] * length)
    np.testing.assert_allclose(logits(tight), expected, atol=1e-5)
    assert 8 <= tight._cache[0][0].shape[2] < roomy._cache[0][0].shape[2]


def test_a_context_far_beyond_the_first_capacity_is_served() -> None:
    config = make_config(num_hidden_layers=1)
    features = features_of(1500, config)
    assert len(features) > 2 * drafter_module.FIRST_CAPACITY
    pieces = observed(made(config), features, 400, 400, 400, 300)
    np.testing.assert_allclose(logits(pieces), logits(observed(made(config), features)), atol=1e-5)
    np.testing.assert_allclose(logits(pieces), logits(observed(made_of_torch(config), features)), atol=1e-4)


def test_features_behind_the_committed_ones_are_ignored() -> None:
    config = make_config()
    features = features_of(9, config)
    more = made(config)
    more.observe(mx.array(features), 6)
    assert more.length == 6
    np.testing.assert_array_equal(logits(more), logits(observed(made(config), features[:6])))


def test_a_block_leaves_nothing_in_the_context() -> None:
    config = make_config()
    features = features_of(12, config)
    drafter = made(config)
    for start in range(0, 12, 2):
        drafter.observe(mx.array(features[start : start + 2]), 2)
        drafter.propose(start, 6, GREEDY)
        drafter.propose(start + 1, 1, GREEDY)
    np.testing.assert_allclose(logits(drafter), logits(observed(made(config), features)), atol=1e-5)


def test_a_proposal_that_is_still_put_off_is_not_changed_by_what_follows() -> None:
    """The engine observes the next features before anything of the last block need have run."""
    config = make_config()
    features = features_of(9, config)
    drafter = observed(made(config), features[:6])
    expected = logits(drafter, 5)
    waiting = drafter.logits(5, 4)
    drafter.observe(mx.array(features[6:]), 3)
    later = drafter.logits(7, 4)
    np.testing.assert_array_equal(np.array(waiting), expected)
    np.testing.assert_allclose(np.array(later), logits(observed(made(config), features), 7), atol=1e-5)


def test_reset_forgets_the_context() -> None:
    config = make_config()
    drafter = observed(made(config), features_of(30, config, seed=1))
    drafter.propose(3, 4, GREEDY)
    drafter.reset()
    assert drafter.length == 0
    features = features_of(5, config)
    np.testing.assert_array_equal(logits(observed(drafter, features)), logits(observed(made(config), features)))


@pytest.mark.parametrize("count", [1, 4, 20])
def test_a_proposal_is_the_argmax_of_each_slot_behind_its_anchor(count: int) -> None:
    """Blocks of any size: the drafter was made for 4 slots."""
    config = make_config()
    drafter = observed(made(config), features_of(7, config))
    slots = logits(drafter, 42, count)
    proposal = drafter.propose(42, count, GREEDY, detail=True)
    assert proposal.count == count
    assert proposal.tokens.tolist() == slots.argmax(-1).tolist()
    assert proposal.block.tolist() == [42, *proposal.tokens.tolist()]
    assert proposal.probs is not None
    np.testing.assert_allclose(np.array(proposal.probs), torch.tensor(slots).softmax(-1).max(-1).values, atol=1e-6)
    assert drafter.propose(42, count, GREEDY).probs is None
    sampled = drafter.propose(42, count, SamplingParams(temperature=1.0, seed=0))
    assert sampled.tokens.tolist() == proposal.tokens.tolist()


# Number formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e3, 3e4, 1e6, 1e9])
def test_float16_drafts_the_same_from_features_beyond_its_range(scale: float) -> None:
    """The projection is followed by a norm, so that a feature's scale means nothing; float16 ends at 65,504."""
    config = make_config()
    features = features_of(9, config) * np.float32(scale)
    exact = logits(observed(made(config), features))
    rounded = logits(observed(made(config, dtype=mx.float16), features)).astype(np.float32)
    assert np.isfinite(rounded).all()
    assert np.abs(rounded - exact).max() < 0.05 * np.abs(exact).max()


def test_float16_features_at_the_end_of_their_range_do_not_overflow_the_projection() -> None:
    config = make_config()
    half = made(config, dtype=mx.float16)
    half.observe(mx.full((4, config.feature_size), 60_000.0, dtype=mx.float16), 4)
    assert np.isfinite(logits(half)).all()


def test_features_that_are_not_numbers_cost_acceptance_and_raise_a_warning_but_no_token() -> None:
    pair, prompt = MlxPair(), [5, 17, 200, 33]
    drafter = pair.drafter()
    observe = drafter.observe
    drafter.observe = lambda features, count: observe(features * math.nan, count)  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="number format"):
        result = pair.engine(drafter).generate(prompt, max_new_tokens=40)
    assert result.token_ids == pair.oracle(prompt, 40)


# Quantised drafters ---------------------------------------------------------------------------------------------

FITTING: dict[str, Any] = {"intermediate_size": 64}  # with a hidden size of 32, every product's width fits a group


def test_more_bits_stay_closer_to_the_drafter_itself() -> None:
    config = make_config(**FITTING)
    features = features_of(9, config)
    exact, eight, four = (mx.array(logits(observed(made(config, bits=bits), features))) for bits in (None, 8, 4))
    assert 0 < gap(eight, exact) < 0.03
    assert gap(eight, exact) < gap(four, exact) < 0.6


@pytest.mark.parametrize("width", [32, 64, 96, 160])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_quantised_product_are_that_product(width: int, bits: int) -> None:
    """All layers' keys and values are one product of the context, and each layer's own rows of it of a block."""
    weight, bias = mx.random.normal((24, width), key=mx.random.key(1)), mx.arange(24, dtype=mx.float32)
    product = drafter_module.Product(weight, bias).quantised(bits)
    assert product.group_size == (64 if width % 64 == 0 else 32)
    x = mx.random.normal((3, width), key=mx.random.key(2))
    np.testing.assert_allclose(np.array(product.rows(8, 20)(x)), np.array(product(x))[:, 8:20], atol=1e-4)
    assert 0 < gap(product(x), x @ weight.T + bias) < (0.2 if bits == 4 else 0.02)


@pytest.mark.parametrize("change", [{}, {"head_dim": 12, "intermediate_size": 64}], ids=["40 wide", "48 wide"])
def test_a_width_that_no_group_divides_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match=r"(40|48) wide and no multiple of 32; leave draft_bits out"):
        made(make_config(**change), bits=8)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_output_of_a_pair_with_a_quantised_drafter_is_the_targets(bits: int, tmp_path: Path) -> None:
    config = make_config(**FITTING)
    target, draft = save_pair(tmp_path, make_target(), config, make_drafter(config))
    engine = dflash.load(target=target, draft=draft, backend="mlx", device="cpu", draft_bits=bits, check=True)
    assert engine.drafter.layers[0].down.bits == bits  # type: ignore[attr-defined]
    prompt = [5, 17, 200, 33]
    assert engine.generate(prompt, max_new_tokens=30).token_ids == TinyPair().oracle(prompt, 30)


def test_other_numbers_of_bits_and_other_backends_are_refused(tmp_path: Path) -> None:
    config = make_config(**FITTING)
    target, draft = save_pair(tmp_path, make_target(), config, make_drafter(config))
    with pytest.raises(UsageError, match="draft_bits is 3; the mlx backend has 4, 8"):
        dflash.load(target=target, draft=draft, backend="mlx", draft_bits=3)
    with pytest.raises(UsageError, match="draft_bits is 4; the torch backend has none"):
        dflash.load(target=target, draft=draft, backend="torch", draft_bits=4)


def test_a_drafter_that_is_quantised_already_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """mlx-lm's layout: packed weights beside scales and biases."""
    config = make_config(**FITTING)
    target, draft = save_pair(tmp_path, make_target(), config, make_drafter(config))
    packed: dict[str, mx.array] = {}
    for name, weight in mlx_weights(make_drafter(config)).items():
        if weight.ndim == 2:
            parts = mx.quantize(weight, group_size=32, bits=4)
            packed |= {
                name.removesuffix("weight") + part: one
                for part, one in zip(("weight", "scales", "biases"), parts, strict=True)
            }
        else:
            packed[name] = weight
    mx.save_safetensors(str(draft / "model.safetensors"), packed)
    raw = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(raw | {"quantization": {"group_size": 32, "bits": 4}}))
    with pytest.raises(
        WeightsError, match=r"weights are quantised \(fc\.scales.*give the unquantised drafter"
    ) as caught:
        dflash.load(target=target, draft=draft, backend="mlx")
    assert "\n" not in str(caught.value)


def test_a_weight_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    config, pair, backend = make_config(), MlxPair(), MlxBackend()
    _, draft = save_pair(tmp_path, make_target(), config, make_drafter(config))
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read") as caught:
        backend.run(lambda: backend.load_drafter(draft, config, pair.target))
    assert "\n" not in str(caught.value)
