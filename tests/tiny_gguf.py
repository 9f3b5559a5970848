"""A tiny Llama in a GGUF file, as llama.cpp's converter writes one, with a tokenizer of SmolLM's kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from model_folders import draft_dict
from safetensors.numpy import save_file

from dflash.checkpoint import DraftConfig
from dflash.gguf import convert_gguf

HIDDEN, HEADS, KEY_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
KIND = gguf.GGMLQuantizationType


def tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "ĠĠ", "Ġa"]


def shapes() -> dict[str, tuple[int, ...]]:
    """GGUF name → shape, of a tied model."""
    keys = HIDDEN // HEADS * KEY_HEADS
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens()), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        found |= {block + f"{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        found |= {block + f"attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "output")}
        found |= {block + f"attn_{name}.weight": (keys, HIDDEN) for name in ("k", "v")}
        found |= {block + f"ffn_{name}.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found[block + "ffn_down.weight"] = (HIDDEN, INNER)
    return found


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes().items()}


def write_gguf(
    file: Path,
    values: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    kind: Any = KIND.Q4_1,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> dict[str, np.ndarray]:
    """Write ``values``, matrices in ``kind``; returns them as they dequantise. ``more`` adds to the header."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    more(writer)
    exact = {}
    for name, value in values.items():
        stored = kind if value.ndim == 2 else KIND.F32
        packed = gguf.quantize(value, stored)
        writer.add_tensor(name, packed, raw_dtype=stored)
        exact[name] = gguf.dequantize(packed, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Folders of a converted target and of a random drafter for it, both made without a tensor library."""
    target, draft = folder / "target", folder / "draft"
    for new in (target, draft):
        new.mkdir()
    write_gguf(folder / "tiny.gguf", tensors(), kind=KIND.F32)
    convert_gguf(folder / "tiny.gguf", target, lambda share: None)
    raw = draft_dict(
        hidden_size=HIDDEN,
        vocab_size=len(tokens()),
        num_target_layers=LAYERS,
        dflash_config={"mask_token_id": 0, "target_layer_ids": [0, 1]},
    )
    (draft / "config.json").write_text(json.dumps(raw))
    generator = np.random.default_rng(0)
    wanted = DraftConfig.from_dict(raw).tensor_shapes()
    weights = {name: generator.normal(size=shape).astype(np.float32) for name, shape in wanted.items()}
    save_file(weights, draft / "model.safetensors")
    return target, draft
