"""Tiny random mlx-lm models of many families, as modules and as folders that ``load_target`` takes.

Shapes: n tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_dflash.target import MlxTarget, load_target

VOCAB, HIDDEN, LAYERS, WINDOW = 97, 32, 4, 8
IDS = [(37 * index + 5) % VOCAB for index in range(40)]

SETTINGS: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5, norm_eps=1e-5, layer_norm_eps=1e-5, layer_norm_epsilon=1e-5,
    norm_epsilon=1e-5, max_position_embeddings=256, rope_theta=10_000.0, tie_word_embeddings=False,
    attention_bias=False, mlp_bias=False, use_bias=False, partial_rotary_factor=0.5, hidden_act="silu",
)  # fmt: skip
"""What most families' ``ModelArgs`` share; each picks what it knows."""

MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
PATTERN: dict[str, Any] = {"sliding_window": WINDOW, "sliding_window_pattern": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "norm_topk_prob": True,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
TINY_GPT: dict[str, Any] = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, "n_ctx": 256}
GRANITE: dict[str, Any] = {
    "logits_scaling": 2.0, "attention_multiplier": 0.3, "embedding_multiplier": 1.5, "residual_multiplier": 0.7,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, sliding": MIXED,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8.0},
    "gemma3_text": {**PATTERN, "query_pre_attn_scalar": 8.0},
    "gemma4_text": {
        **MIXED, "global_head_dim": 8, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
    },
    "phi": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": MIXED,
    "cohere": {},
    "cohere2": PATTERN,
    "gpt2": TINY_GPT,
    "gpt_neox": {"rotary_emb_base": 10_000, "rotary_pct": 0.25},
    "gpt_oss": {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral3": {
        **MIXED,
        "rope_parameters": {
            "rope_theta": 1e4, "rope_type": "default", "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral3": {"text_config": {**SETTINGS, "model_type": "llama", "rope_theta": 50_000.0}},
    "mixtral": {"num_local_experts": 4},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {},
    "granite": GRANITE,
    "glm4": {},
    "exaone": {"num_layers": LAYERS},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None},
    "nanochat": {},
    "nemotron": {},
    "stablelm": {"use_qkv_bias": True},
    "deepseek_v3": ROUTED,
    "deepseek_v32": {**ROUTED, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
}  # fmt: skip
"""Families that can be served, by a name that begins with the model type."""


def settings_of(family: str, **changes: Any) -> dict[str, Any]:
    """The ``config.json`` of a tiny model of ``family``."""
    return {**SETTINGS, "model_type": family.split(",")[0], **FAMILIES.get(family, {}), **changes}


def make_model(settings: dict[str, Any], seed: int = 0) -> Any:
    """An mlx-lm model with random float32 weights whose logits are spread enough for its output to vary."""
    mx.random.seed(seed)
    module = import_module(f"mlx_lm.models.{settings['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(settings))

    def spread(weight: mx.array) -> mx.array:
        matrix = weight.ndim > 1 and mx.issubdtype(weight.dtype, mx.floating)
        return mx.random.normal(weight.shape) * 0.2 if matrix else weight

    model.update(tree_map(spread, model.parameters()))
    mx.eval(model.parameters())
    return model


def save_model(folder: Path, model: nn.Module, settings: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights_of(model))
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def weights_of(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def serve(folder: Path, layer_ids: Sequence[int] = range(LAYERS), dtype: str = "float32") -> MlxTarget:
    return load_target(folder, device="cpu", dtype=dtype, layer_ids=layer_ids)


def served(folder: Path, family: str, layer_ids: Sequence[int] = range(LAYERS), **changes: Any) -> MlxTarget:
    """A tiny model of ``family`` as a target, by way of its folder."""
    settings = settings_of(family, **changes)
    return serve(save_model(folder, make_model(settings), settings), layer_ids)


def whole(model: Any, ids: Sequence[int] = IDS) -> mx.array:
    """Logits [n, V] of one forward over everything, without any cache."""
    logits = model(mx.array([list(ids)]))[0]
    mx.eval(logits)
    return logits


def feed(target: MlxTarget, ids: Sequence[int], kept: int | None = None, **options: Any) -> Any:
    """A forward of which the first ``kept`` tokens stay (all of them by default)."""
    output = target.forward(list(ids), **options)
    target.keep(range(len(ids) if kept is None else kept))
    return output


def gap(ours: mx.array, theirs: mx.array) -> float:
    """The largest difference, as a share of the largest value."""
    assert ours.shape == theirs.shape
    return float(mx.abs(ours - theirs).max() / mx.abs(theirs).max())


def assert_close(ours: mx.array, theirs: mx.array, within: float = 1e-4) -> None:
    difference = gap(ours, theirs)
    assert difference < within, f"off by {difference:.1e} of the largest value"  # the arrays would fill the screen
