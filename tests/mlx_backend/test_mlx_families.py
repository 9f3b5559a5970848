"""Any mlx-lm model with attention caches is a target: tapped at every layer, rewound across windows, and unwrapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
from mlx_dflash.taps import parts_of
from mlx_models import (
    FAMILIES,
    HIDDEN,
    IDS,
    LAYERS,
    VOCAB,
    assert_close,
    feed,
    gap,
    make_model,
    save_model,
    serve,
    served,
    settings_of,
    weights_of,
    whole,
)

from dflash.errors import BackendError, CheckpointError, DFlashError, RewindError

BLOCK = 4


def watched(model: Any) -> list[mx.array]:
    """Outputs [n, H] of a model's layers for ``IDS``, by making each layer's own class note them down."""
    seen: list[mx.array] = []
    for layer in parts_of(model).layers:
        kind = type(layer)

        def call(self: Any, *args: Any, kind: type = kind, **options: Any) -> Any:
            output = kind.__call__(self, *args, **options)
            seen.append((output[0] if isinstance(output, tuple) else output)[0])
            return output

        layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    whole(model)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_tapped_rewound_and_unwrapped(family: str, tmp_path: Path) -> None:
    settings = settings_of(family)
    plain = make_model(settings)
    expected = whole(plain)
    target = serve(save_model(tmp_path, plain, settings))
    assert (target.info.num_layers, target.info.hidden_size, target.info.vocab_size) == (LAYERS, HIDDEN, VOCAB)

    output = feed(target, IDS)
    assert output.features.shape == (len(IDS), LAYERS * HIDDEN)
    assert_close(output.logits, expected)
    layers = watched(plain)
    assert len(layers) == LAYERS
    for ours, theirs in zip(mx.split(output.features, LAYERS, axis=-1), layers, strict=True):
        assert_close(ours, theirs)

    target.reset()
    assert_close(feed(target, IDS[:6], last_only=True).logits, expected[5:6])
    position, kept = 6, 1
    while position + BLOCK < len(IDS):  # blocks of which 1 … 4 tokens stay, plain steps between them
        junk = [(token + 31) % VOCAB for token in IDS[position + kept : position + BLOCK]]
        logits = feed(target, IDS[position : position + kept] + junk, kept).logits
        assert_close(logits[:kept], expected[position : position + kept])
        position, kept = position + kept, kept % BLOCK + 1
        assert_close(feed(target, IDS[position : position + 1]).logits, expected[position : position + 1])
        position += 1
        assert target.length == position

    target.close()
    model, fresh = target.model, make_model(settings)
    assert [type(layer) for layer in parts_of(model).layers] == [type(layer) for layer in parts_of(fresh).layers]
    assert set(weights_of(model)) == set(weights_of(fresh))
    assert_close(whole(model), expected)


def test_every_family_says_something_else(tmp_path: Path) -> None:
    """Otherwise the test above could not tell that a family's own parts are at work."""
    logits = [whole(make_model(settings_of(family)), IDS[:24]) for family in FAMILIES]
    for index, ours in enumerate(logits):
        assert all(gap(ours, other) > 1e-3 for other in logits[:index]), list(FAMILIES)[index]


# Families that cannot be served ----------------------------------------------------------------------------------

MAMBA: dict[str, Any] = {
    "state_size": 8, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4, "num_heads": 4, "head_dim": 16,
    "n_groups": 1, "time_step_limit": (0.0, 1.0),
}  # fmt: skip
RECURRENT: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": (MAMBA, "ArraysCache in layers 0-3"),
    "mamba2": (MAMBA, "ArraysCache in layers 0-3"),
    "lfm2": (
        {
            "layer_types": ["conv", "full_attention"] * 2, "conv_bias": False, "conv_L_cache": 3, "block_dim": HIDDEN,
            "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 48,
        },
        "ArraysCache in layers 0, 2",
    ),
    "qwen3_next": (
        {
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "num_experts": 2,
            "num_experts_per_tok": 1, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [], "moe_intermediate_size": 16,
        },
        "ArraysCache in layers 0-2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_layers_are_refused_at_load_by_name_and_number(family: str, tmp_path: Path) -> None:
    changes, says = RECURRENT[family]
    with pytest.raises(RewindError, match=f"cannot forget rejected tokens: {says}; a target needs attention layers"):
        served(tmp_path, family, **changes)


def test_a_text_model_inside_another_is_refused_for_its_own_reason(tmp_path: Path) -> None:
    """Qwen3.5 keeps its language model's settings, recurrent layers among them, in ``text_config``."""
    changes, _ = RECURRENT["qwen3_next"]
    text = {**settings_of("qwen3_5_text", **changes), "num_experts": 0}
    with pytest.raises(RewindError, match="ArraysCache in layers 0-2"):
        served(tmp_path, "qwen3_5", text_config=text)


def test_a_forward_that_passes_its_layers_by_is_refused(tmp_path: Path) -> None:
    """This family runs the parts of its layers, twice over, and never calls a layer."""
    target = served(tmp_path, "iquestloopcoder", (0, 2), num_key_value_heads=4)
    with pytest.raises(BackendError, match="passed by its layer 0"):
        feed(target, IDS)


def test_layers_that_hand_on_several_streams_are_refused(tmp_path: Path) -> None:
    """Gemma 3n's layers hand on a stack of hidden states, of which none is the model's one."""
    text = {
        **settings_of("gemma3n"), "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB, "sliding_window": 8,
        "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * LAYERS,
        "hidden_size_per_layer_input": 8, "altup_num_inputs": 2,
        "altup_coef_clip": None, "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8,
    }  # fmt: skip
    with pytest.raises(BackendError, match=r"layer 0 hands on \[2, 1, 40, 32\]"):
        feed(served(tmp_path, "gemma3n", (0, 2), text_config=text), IDS)


def test_an_embedding_that_cannot_be_recognised_is_refused_by_name(tmp_path: Path) -> None:
    layers: dict[str, Any] = {
        "num_transformer_layers": LAYERS, "model_dim": HIDDEN, "ffn_dim_divisor": 8, "num_query_heads": [4] * LAYERS,
        "num_kv_heads": [2] * LAYERS, "ffn_multipliers": [2.0] * LAYERS,
    }  # fmt: skip
    with pytest.raises(BackendError, match=r"mlx_lm\.models\.openelm has no token embedding"):
        served(tmp_path, "openelm", **layers)


def test_a_class_that_needs_a_package_of_its_own_is_refused(tmp_path: Path) -> None:
    """mlx-lm's ``olmo`` ends the process where that package is missing."""
    (tmp_path / "config.json").write_text('{"model_type": "olmo"}')
    with pytest.raises(CheckpointError, match="olmo"):
        serve(tmp_path)


def test_a_class_whose_mask_is_wider_than_its_cache_is_right_or_refused(tmp_path: Path) -> None:
    """mlx-lm's PLaMo 3 lets a block attend to one position more than a plain step, which would show as other tokens."""
    settings = settings_of("plamo3", sliding_window=8, sliding_window_pattern=2)
    model = make_model(settings)
    try:
        target = serve(save_model(tmp_path, model, settings), (0,))
    except DFlashError as error:
        assert "plamo3" in str(error)
        return
    room = min(len(IDS), target.info.max_positions)
    in_one = feed(target, IDS[:room]).logits
    target.reset()
    step_by_step = [feed(target, [token]).logits for token in IDS[:room]]
    assert_close(mx.concatenate(step_by_step), in_one)
