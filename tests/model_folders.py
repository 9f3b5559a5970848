"""Tiny model folders on disk, written without any tensor library."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from dflash.checkpoint import DraftConfig

_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def draft_dict(**changes: Any) -> dict[str, Any]:
    """A small native drafter's ``config.json``; a change to None drops the key."""
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 40,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "num_target_layers": 6,
        "block_size": 4,
        "dtype": "float32",
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3]},
    } | changes
    return {key: value for key, value in raw.items() if value is not None}


def target_dict(**changes: Any) -> dict[str, Any]:
    """The ``config.json`` of a target that ``draft_dict`` fits."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 6,
        "vocab_size": 40,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "dtype": "float32",
    } | changes
    return {key: value for key, value in raw.items() if value is not None}


def write_tensors(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32", seed: int = 0) -> None:
    """A safetensors file with those tensors; their bytes differ from tensor to tensor."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = _BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    data = bytes((seed + index * 7) % 251 for index in range(offset))
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_draft(folder: Path, raw: dict[str, Any] | None = None, dtype: str = "F32") -> Path:
    """A drafter folder whose weights fit its config."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = raw or draft_dict()
    (folder / "config.json").write_text(json.dumps(raw))
    write_tensors(folder / "model.safetensors", DraftConfig.from_dict(raw).tensor_shapes(), dtype)
    return folder


def write_target(folder: Path, raw: dict[str, Any] | None = None, template: str | None = "{{ messages }}") -> Path:
    """A target folder with one tensor, a tokenizer (3 is special, as are 1 and 2) and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = raw or target_dict()
    (folder / "config.json").write_text(json.dumps(raw))
    rows, width = raw.get("vocab_size", 40), raw.get("hidden_size", 16)
    write_tensors(folder / "model.safetensors", {"model.embed_tokens.weight": (rows, width)})
    added = [{"id": index, "content": f"<{index}>", "special": True} for index in (1, 2, 3)]
    vocab = {f"t{index}": index for index in range(rows)}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocab}}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
