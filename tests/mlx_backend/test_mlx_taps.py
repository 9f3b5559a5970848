"""Taps on one model's instances: the right layers in the right order, nothing of any other model, all of it undone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
import mlx.nn as nn
from mlx_dflash.taps import parts_of
from mlx_dflash.target import MlxTarget
from mlx_models import (
    HIDDEN,
    IDS,
    LAYERS,
    VOCAB,
    assert_close,
    feed,
    gap,
    make_model,
    settings_of,
    weights_of,
    whole,
)

from dflash.errors import BackendError
from dflash.types import TargetInfo

INFO = TargetInfo(LAYERS, HIDDEN, VOCAB, 256, (), "float32", "cpu")


def target_of(model: Any, *layer_ids: int) -> MlxTarget:
    return MlxTarget(model, parts_of(model), layer_ids, INFO)


def modules_of(model: nn.Module) -> dict[str, int]:
    """Path → identity of every module that MLX's own walk finds."""
    return {path: id(module) for path, module in model.named_modules()}


# Features -------------------------------------------------------------------------------------------------------


def test_every_tap_is_its_layers_output_and_the_last_is_before_the_final_norm() -> None:
    model = make_model(settings_of("llama"))
    model.model.norm.weight = mx.linspace(0.5, 2, HIDDEN)  # a final norm that does nothing would hide a wrong last tap
    hidden, expected = model.model.embed_tokens(mx.array([IDS])), []
    for layer in model.layers:
        hidden = layer(hidden, "causal", None)
        expected.append(hidden[0])
    features = feed(target_of(model, *range(LAYERS)), IDS).features
    taps = mx.split(features, LAYERS, axis=-1)
    for ours, theirs in zip(taps, expected, strict=True):
        assert_close(ours, theirs, 1e-5)
    for index, tap in enumerate(taps):
        assert all(gap(tap, other) > 1e-2 for at, other in enumerate(expected) if at != index)
    assert gap(taps[-1], model.model.norm(expected[-1])) > 1e-2


@pytest.mark.parametrize("ids", [(0,), (3,), (2, 0), (0, 1, 2, 3), (3, 1)])
def test_features_are_the_taps_in_the_order_of_their_ids(ids: tuple[int, ...]) -> None:
    model = make_model(settings_of("qwen3"))
    target = target_of(model, *range(LAYERS))
    taps = mx.split(feed(target, IDS).features, LAYERS, axis=-1)
    target.close()
    features = feed(target_of(model, *ids), IDS).features
    assert mx.array_equal(features, mx.concatenate([taps[index] for index in ids], axis=-1))


def test_no_features_while_tapping_is_off() -> None:
    target = target_of(make_model(settings_of("llama")), 0, 2)
    target.tapping = False
    assert feed(target, IDS).features is None
    assert not target.taps.seen
    target.tapping = True
    assert feed(target, [3]).features.shape == (1, 2 * HIDDEN)


def test_features_are_handed_out_once_and_not_held() -> None:
    target = target_of(make_model(settings_of("llama")), 0, 2)
    feed(target, IDS)
    assert not target.taps.seen
    with pytest.raises(BackendError, match="passed by its layer 0"):
        target.taps.take()


@pytest.mark.parametrize("wrong", [-1, LAYERS, 99])
def test_layers_that_the_target_does_not_have_are_refused(wrong: int) -> None:
    model = make_model(settings_of("llama"))
    before = modules_of(model)
    with pytest.raises(BackendError, match=f"holds {wrong}.*0 to {LAYERS - 1}"):
        target_of(model, 0, wrong)
    assert modules_of(model) == before, "a refused model is left unwrapped"


# One model and no other ------------------------------------------------------------------------------------------


def test_tapping_one_model_leaves_another_of_its_class_alone() -> None:
    tapped, other = make_model(settings_of("llama"), seed=1), make_model(settings_of("llama"), seed=2)
    before, expected = modules_of(other), whole(other)
    calls = {type(layer): type(layer).__call__ for layer in (*tapped.layers, tapped.lm_head)}
    target = target_of(tapped, 0, 3)
    assert all(kind.__call__ is call for kind, call in calls.items()), "no class is touched"
    assert mx.array_equal(whole(other), expected)
    feed(target, IDS)
    assert not target.taps.seen
    assert modules_of(other) == before


def test_two_tapped_models_of_one_class_keep_their_features_apart() -> None:
    models = [make_model(settings_of("llama"), seed=seed) for seed in (1, 2)]
    alone = [feed(target_of(make_model(settings_of("llama"), seed=seed), 0, 2), IDS).features for seed in (1, 2)]
    first, second = (target_of(model, 0, 2) for model in models)
    a, b = first.forward(IDS), second.forward(IDS[:9])  # put off: neither has run yet
    assert mx.array_equal(a.features, alone[0])
    assert_close(b.features, alone[1][:9], 1e-5)


# Undone ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llama, tied", "gemma3_text", "mistral3", "gpt_neox"])
def test_closing_gives_the_model_back(family: str) -> None:
    model = make_model(settings_of(family))
    modules, weights, expected = modules_of(model), weights_of(model), whole(model)
    target = target_of(model, 0, 3)
    assert_close(feed(target, IDS).logits, expected)
    target.close()
    assert modules_of(model) == modules
    after = weights_of(model)
    assert set(after) == set(weights) and all(after[name] is weights[name] for name in weights)
    assert mx.array_equal(whole(model), expected)
    target.close()
    assert modules_of(model) == modules


@pytest.mark.parametrize("family", ["llama", "llama, tied"])
def test_a_second_target_on_the_same_model_is_as_good_as_the_first(family: str) -> None:
    model = make_model(settings_of(family))
    first = target_of(model, 1)
    expected = feed(first, IDS, last_only=True)
    first.close()
    again = feed(target_of(model, 1), IDS, last_only=True)
    assert again.logits.shape == (1, VOCAB)
    assert mx.array_equal(again.logits, expected.logits)
    assert mx.array_equal(again.features, expected.features)


def test_a_served_model_still_tells_its_weights() -> None:
    """mlx-lm's own tools walk a model's parameters; wrappers must not hide the tapped layers' from them."""
    model = make_model(settings_of("llama"))
    names = set(weights_of(model))
    target = target_of(model, 0, 2)
    assert {name for name in names if name.startswith("model.layers.1.")} <= set(weights_of(model))
    target.close()
    assert set(weights_of(model)) == names


# The head -------------------------------------------------------------------------------------------------------

SCALED = ["cohere", "cohere2", "gemma2", "gemma4_text", "granite"]


@pytest.mark.parametrize("family", ["llama", "llama, tied", "qwen2", "mistral3", "gpt2", *SCALED])
def test_the_last_row_alone_is_exactly_the_last_row(family: str) -> None:
    """Also where the model scales or caps its logits behind the head."""
    model = make_model(settings_of(family))
    rows = whole(model, IDS[:9])
    target = target_of(model, 0)
    last = feed(target, IDS[:9], last_only=True).logits
    assert last.shape == (1, VOCAB)
    assert_close(last, rows[-1:], 1e-5)
    assert feed(target, IDS[9:12]).logits.shape == (3, VOCAB), "only where it was asked for"


@pytest.mark.parametrize("family", SCALED)
def test_those_families_do_change_what_their_heads_say(family: str) -> None:
    """Otherwise the test above would hold for a model whose own scaling was lost."""
    model, said = make_model(settings_of(family)), []
    parts = parts_of(model)
    head, name = parts.place[2], "as_linear" if parts.tied else "__call__"
    kind = type(head)

    def noted(self: Any, x: mx.array) -> mx.array:
        said.append(getattr(kind, name)(self, x))
        return said[-1]

    head.__class__ = type("Noted", (kind,), {name: noted})
    logits = whole(model)
    assert gap(logits, said[0][0]) > 1e-3
