"""A target's configuration as transformers writes it: the same logits from MLX, or a refusal."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
import torch
from mlx_models import IDS, VOCAB, assert_close, feed, gap, serve
from transformers import AutoConfig, AutoModelForCausalLM

from dflash.errors import CheckpointError, DFlashError

SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.2, pad_token_id=0,
    bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
)  # fmt: skip
THETA, WINDOW = 77_777.0, 8  # no class of either library has this base as its default
PLAIN = {"rope_type": "default", "rope_theta": THETA}
ROPES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "linear": {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn of its own numbers": {
        "rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 32,
        "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}


def write(folder: Path, family: str, **changes: Any) -> mx.array:
    """A folder that transformers writes, and the logits [n, V] of ``IDS`` that transformers gives."""
    settings = copy.deepcopy({"rope_parameters": PLAIN, **SMALL, **changes})  # transformers writes into its arguments
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval().float()
    model.save_pretrained(folder)
    return logits_of(model)


@torch.inference_mode()
def logits_of(model: Any) -> mx.array:
    return mx.array(model(torch.tensor([IDS]), use_cache=False).logits[0].numpy())


def change(folder: Path, *dropped: str, **changes: Any) -> None:
    """Edit the folder's ``config.json``."""
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in {**raw, **changes}.items() if key not in dropped}
    (folder / "config.json").write_text(json.dumps(raw))


def right_or_refused(folder: Path, expected: mx.array) -> str | None:
    """The refusal, one sentence; None where the target gives ``expected`` as far as its context goes."""
    try:
        target = serve(folder, (0,))
    except DFlashError as error:
        assert "\n" not in str(error)
        return str(error)
    room = min(len(IDS), target.info.max_positions)
    assert_close(feed(target, IDS[:room]).logits, expected[:room])
    return None


# One RoPE for all layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers_for_every_rope(family: str, rope: str, tmp_path: Path) -> None:
    changes = {"sliding_window": None} if family == "mistral" else {}
    expected = write(tmp_path, family, rope_parameters=ROPES[rope], **changes)
    assert_close(feed(serve(tmp_path, (0,)), IDS).logits, expected)


def test_each_rope_gives_other_logits(tmp_path: Path) -> None:
    """Otherwise the test above could not tell an ignored setting from an honoured one."""
    seen = [write(tmp_path / name, "llama", rope_parameters=rope) for name, rope in ROPES.items()]
    seen.append(write(tmp_path / "default", "llama", rope_parameters={**PLAIN, "rope_theta": 10_000.0}))
    for index, logits in enumerate(seen):
        assert all(gap(logits, other) > 1e-2 for other in seen[:index])


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_flat_spelling_of_older_folders_means_the_same(family: str, rope: str, tmp_path: Path) -> None:
    expected = write(tmp_path, family, rope_parameters=ROPES[rope])
    scaling = {key: value for key, value in ROPES[rope].items() if key not in ("rope_theta", "rope_type")}
    old = {"rope_scaling": {"type": ROPES[rope]["rope_type"], **scaling} if scaling else None}
    change(tmp_path, "rope_parameters", rope_theta=THETA, **old)
    assert_close(feed(serve(tmp_path, (0,)), IDS).logits, expected)


OTHERS: dict[str, dict[str, Any]] = {
    "cohere": TIED,
    "cohere2": {**TIED, "sliding_window": WINDOW},
    "ernie4_5": {},
    "glm4": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
    "granite": {
        "logits_scaling": 2.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.5, "residual_multiplier": 0.7,
    },
    "helium": {},
    "hunyuan_v1_dense": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "nemotron": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
    "olmo2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
    "phi3": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}, "sliding_window": None},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_a_nested_base_reaches_the_classes_that_read_only_a_flat_one(family: str, tmp_path: Path) -> None:
    expected = write(tmp_path, family, **OTHERS[family])
    target = serve(tmp_path, (0,))
    assert_close(feed(target, IDS).logits, expected)
    assert target.info.max_positions == SMALL["max_position_embeddings"], "a window that is honoured ends nothing"


def test_experts_as_qwen3_moe_names_them_itself(tmp_path: Path) -> None:
    """transformers 5 writes ``num_local_experts``; every published folder says ``num_experts``, as mlx-lm does."""
    expected = write(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    change(tmp_path, "num_local_experts", num_experts=4, mlp_only_layers=[], decoder_sparse_step=1)
    assert_close(feed(serve(tmp_path, (0,)), IDS).logits, expected)


# What a class does not read --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gpt_neox", {}, "rope_theta 77777"),
        ("glm", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor 0\.5"),
        ("cohere", {**TIED, "rope_parameters": ROPES["linear"]}, "rope_scaling"),
        ("helium", {"rope_parameters": ROPES["llama3"]}, "rope_scaling"),
        ("nemotron", {"rope_parameters": ROPES["llama3"]}, "rope_scaling"),
    ],
)
def test_a_rope_that_the_class_has_no_word_for_is_refused(
    family: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write(tmp_path, family, **changes)
    with pytest.raises(CheckpointError, match=says) as caught:
        serve(tmp_path, (0,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rope", ["linear", "llama3"])
def test_a_scaling_that_the_class_names_and_then_ignores_is_not_ignored(rope: str, tmp_path: Path) -> None:
    """mlx-lm's Mixtral has ``rope_scaling`` among its arguments and never looks at it."""
    changes = {"num_local_experts": 4, "sliding_window": None, "rope_parameters": ROPES[rope]}
    right_or_refused(tmp_path, write(tmp_path, "mixtral", **changes))


TYPED: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **TIED, **MIXED, "query_pre_attn_scalar": 16,
        "rope_parameters": {"sliding_attention": {**PLAIN, "rope_theta": 5e3}, "full_attention": PLAIN},
    },
    "olmo3": MIXED,
}  # fmt: skip


@pytest.mark.parametrize("family", TYPED)
def test_a_rope_that_differs_by_layer_type_is_right_or_refused(family: str, tmp_path: Path) -> None:
    refusal = right_or_refused(tmp_path, write(tmp_path, family, **TYPED[family]))
    assert refusal is None or "rope_parameters differ by layer type" in refusal


WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2_moe": {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "num_experts": 4,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2,
    },
    "gemma2": {**TIED, **MIXED, "query_pre_attn_scalar": 16},
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW, "hidden_act": "gelu"},
    "cohere2": {**TIED, **MIXED},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral3": {
        "sliding_window": WINDOW,
        "rope_parameters": {
            **ROPES["yarn"], "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("family", WINDOWS)
def test_a_window_is_honoured_or_refused_or_ends_the_context(family: str, tmp_path: Path) -> None:
    """Most of mlx-lm's classes attend to everything, whatever the config says of a window."""
    expected = write(tmp_path, family, **WINDOWS[family])
    right_or_refused(tmp_path, expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_another_activation_is_honoured_or_refused(family: str, tmp_path: Path) -> None:
    refusal = right_or_refused(tmp_path, write(tmp_path, family, hidden_act="gelu"))
    assert refusal is None or "hidden_act" in refusal


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_means_what_transformers_takes_it_to_mean(family: str, tmp_path: Path) -> None:
    """Defaults differ: where ``tie_word_embeddings`` is missing, transformers reads the head and mlx-lm drops it."""
    expected = write(tmp_path, family, **({"sliding_window": None} if family == "mistral" else {}))
    whole = (tmp_path / "config.json").read_text()
    for key in ("tie_word_embeddings", "attention_bias", "hidden_act", "max_position_embeddings"):
        (tmp_path / "config.json").write_text(whole)
        change(tmp_path, key)
        assert_close(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)), expected)
        refusal = right_or_refused(tmp_path, expected)
        assert refusal is None or key in refusal


def test_a_language_model_inside_another_is_read_with_its_own_rope(tmp_path: Path) -> None:
    """Mistral 3 keeps its language model's settings in ``text_config``."""
    expected = write(tmp_path, "mistral", sliding_window=None)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), {f"language_model.{name}": weight for name, weight in weights.items()}
    )
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    target = serve(tmp_path, (0,))
    assert target.info.hidden_size == SMALL["hidden_size"]
    assert_close(feed(target, IDS).logits, expected)
