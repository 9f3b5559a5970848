"""A case's models on disk, in the layout and names that published checkpoints have, written with numpy alone.

Weights come from seed and name through the raw stream of PCG64, which numpy keeps from release to release. They are
whole numbers below 128 times a power of two: float32, float16 and bfloat16 hold them exactly, so one reference serves
every number format. Shapes: H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dflash.checkpoint import CONFIG_FILE, WEIGHTS_FILE, DraftConfig
from dflash.conformance.cases import DRAFT_EPS, MASK_ID, MAX_POSITIONS, STOP_ID, TARGET_EPS, Case
from dflash.rope import RopeConfig

Weights = dict[str, np.ndarray]
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FORMATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_pair(case: Case, folder: Path) -> tuple[Path, Path]:
    """``folder/target`` and ``folder/draft``, each a config and its weights."""
    stored = case.stored or case.dtype
    target, draft = folder / "target", folder / "draft"
    for place, config, weights in (
        (target, target_config(case), target_weights(case)),
        (draft, draft_config(case), draft_weights(case)),
    ):
        place.mkdir(parents=True)
        (place / CONFIG_FILE).write_text(json.dumps({**config, "dtype": stored}, indent=2) + "\n", encoding="utf-8")
        write_safetensors(place / WEIGHTS_FILE, weights, stored)
    return target, draft


def target_config(case: Case) -> dict[str, Any]:
    """The target's ``config.json``, its RoPE in the case's spelling."""
    raw: dict[str, Any] = {
        "architectures": [_CLASSES[case.family]],
        "model_type": case.family,
        "vocab_size": case.vocab,
        "hidden_size": case.hidden,
        "intermediate_size": 2 * case.hidden,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads.queries,
        "num_key_value_heads": case.heads.keys,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": TARGET_EPS,
        "tie_word_embeddings": case.tied,
        "bos_token_id": None,
        "eos_token_id": STOP_ID,
    }
    if case.family != "qwen2":
        raw |= {"head_dim": case.heads.size, "attention_bias": case.bias}
    if case.family == "llama":
        raw |= {"mlp_bias": case.mlp_bias}
    scaling = {"rope_type": case.rope.kind, **dict(case.rope.scaling)}
    if case.nested:
        return raw | {"rope_parameters": {"rope_theta": case.rope.theta, **scaling}}
    return raw | {"rope_theta": case.rope.theta} | ({} if case.rope.kind == "default" else {"rope_scaling": scaling})


def draft_config(case: Case) -> dict[str, Any]:
    """The drafter's ``config.json`` in the native dialect."""
    rope, heads = case.draft_rope, case.draft_heads
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": case.vocab,
        "hidden_size": case.hidden,
        "intermediate_size": 3 * case.hidden,
        "num_hidden_layers": case.draft_layers,
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "head_dim": heads.size,
        "attention_bias": case.draft_bias,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": DRAFT_EPS,
        "rope_parameters": _rope_parameters(rope),
        "num_target_layers": case.layers,
        "block_size": case.block,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(case.taps)},
    }
    if case.window is not None:
        names = {True: "sliding_attention", False: "full_attention"}
        raw |= {"layer_types": [names[slides] for slides in case.sliding], "sliding_window": case.window}
    return raw if case.causal is None else raw | {"is_causal": case.causal}


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    raw = {"rope_theta": rope.theta, "rope_type": rope.kind, **dict(rope.scaling)}
    return raw if rope.partial == 1 else raw | {"partial_rotary_factor": rope.partial}


def target_weights(case: Case) -> Weights:
    """Name → values, float64, in the names of transformers."""
    hidden, inner, heads = case.hidden, 2 * case.hidden, case.heads
    queries, keys = heads.queries * heads.size, heads.keys * heads.size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (case.vocab, hidden)}
    for layer in range(case.layers):
        name = f"model.layers.{layer}."
        shapes[name + "input_layernorm.weight"] = shapes[name + "post_attention_layernorm.weight"] = (hidden,)
        for letter, shape in {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}.items():
            shapes[f"{name}self_attn.{letter}_proj.weight"] = shape
            if case.bias or case.family == "qwen2":
                shapes[f"{name}self_attn.{letter}_proj.bias"] = shape[:1]
        shapes[name + "self_attn.o_proj.weight"] = (hidden, queries)
        if case.bias and case.family != "qwen2":
            shapes[name + "self_attn.o_proj.bias"] = (hidden,)
        if case.family == "qwen3":
            shapes[name + "self_attn.q_norm.weight"] = shapes[name + "self_attn.k_norm.weight"] = (heads.size,)
        for part, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            shapes[f"{name}mlp.{part}_proj.weight"] = shape
            if case.mlp_bias:
                shapes[f"{name}mlp.{part}_proj.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not case.tied:
        shapes["lm_head.weight"] = (case.vocab, hidden)
    return {name: _values(case, name, shape) for name, shape in shapes.items()}


def draft_weights(case: Case) -> Weights:
    """Name → values, float64, in the names of the native dialect."""
    shapes = DraftConfig.from_dict(draft_config(case)).tensor_shapes()
    return {name: _values(case, "draft." + name, shape) for name, shape in shapes.items()}


def _values(case: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Matrices around 0 with a deviation of about 1/√fan-in; norms between 3/4 and 5/4; biases below 1/4.

    In float32 queries and keys are twice as large, so that attention tells positions apart; in 16 bits an attention as
    sharp as that would magnify rounding itself."""
    raw = np.random.PCG64([case.seed, zlib.crc32(name.encode())]).random_raw(math.prod(shape)).reshape(shape)
    numbers = (raw >> 32).astype(np.int64)
    gain = 2 if case.dtype == "float32" and (".q_" in name or ".k_" in name) else 1
    if len(shape) == 2:
        return gain * (numbers % 255 - 127) * 2.0 ** -round(math.log2(73.6 * shape[1] ** 0.5))  # 73.6: their deviation
    around_zero = (numbers % 33 - 16) / 64
    return gain * (around_zero if name.endswith("bias") else 1 + around_zero)


def random_ids(case: Case, count: int) -> list[int]:
    """``count`` token ids of the case's own."""
    raw = np.random.PCG64([case.seed, 2**31]).random_raw(count)
    return [int(value) for value in (raw >> 32) % case.vocab]


def write_safetensors(file: Path, weights: Weights, dtype: str) -> None:
    """A safetensors file (https://github.com/huggingface/safetensors#format) with every tensor in ``dtype``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, values in weights.items():
        start = len(data)
        data += _bytes(values, dtype)
        header[name] = {"dtype": _FORMATS[dtype], "shape": list(values.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _bytes(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    single = values.astype("<f4")
    if dtype == "float32":
        return single.tobytes()
    return (single.view("<u4") >> 16).astype("<u2").tobytes()  # the upper half; the lower one is zero here
