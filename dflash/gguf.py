"""The bundled target's GGUF file into a model folder, with numpy: one converter for every backend.

It reads dense Llamas with SmolLM's tokenizer, as llama.cpp's ``convert_hf_to_gguf.py`` writes them, and refuses every
other kind by name. What it writes depends on the file alone, so that the folder is the same on every machine.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash.backends import install_command
from dflash.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from dflash.errors import BackendError, CheckpointError

PACKAGES = ("gguf", "safetensors", "tokenizers")  # which every backend brings
_SPECIAL = 3  # GGUF's token type of control tokens
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def require_packages() -> None:
    """Raise ``BackendError`` where a package that ``convert_gguf`` needs is missing."""
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        raise BackendError(f"reading a GGUF file needs {', '.join(missing)}; {install_command()} brings all of it")


def convert_gguf(source: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Write the model in ``source`` into ``folder``: its weights in float32, exactly as they dequantise, configs,
    tokenizer and chat template. ``progress`` gets the share done after each step.

    Raises ``BackendError`` where a package is missing, ``CheckpointError`` where the file is no whole GGUF file or
    holds another kind of model, and ``OSError`` where ``folder`` cannot be written."""
    require_packages()
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(source)
        facts = _Facts((name, field.contents()) for name, field in reader.fields.items())
    except (ValueError, LookupError, ArithmeticError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{source} is not a whole GGUF file: {reason}") from error
    progress(0.4)
    try:
        config = _config(facts, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
        tokenizer, tokenizer_config = _tokenizer(facts), _tokenizer_config(facts)
        template = facts["tokenizer.chat_template"]
        weights = _weights(reader.tensors, config, lambda share: progress(0.4 + 0.3 * share))
    except CheckpointError as error:
        raise CheckpointError(f"{source} cannot be converted: {error}") from None
    try:
        save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:  # the Rust side's own kind of OSError
        raise OSError(str(error)) from error
    progress(0.9)
    _write_json(folder / CONFIG_FILE, config)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ends)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    progress(1.0)


class _Facts(dict[str, Any]):
    """What a GGUF header says, by key."""

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"its header has no {key}")


def _config(facts: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The ``config.json`` of transformers' Llama, with RoPE's base in the old spelling and the new."""
    if (architecture := facts["general.architecture"]) != "llama":
        raise CheckpointError(f"its architecture is {architecture}; this converter reads llama")
    if scaling := facts.get("llama.rope.scaling.type"):
        raise CheckpointError(f"its RoPE is scaled ({scaling}); this converter reads plain RoPE")
    theta, heads = facts["llama.rope.freq_base"], facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": facts["llama.embedding_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts.get("llama.rope.dimension_count", facts["llama.embedding_length"] // heads),
        "intermediate_size": facts["llama.feed_forward_length"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": facts["llama.context_length"],
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _weights(tensors: Any, config: Mapping[str, Any], progress: Callable[[float], None]) -> dict[str, np.ndarray]:
    """Transformers' names → float32 arrays. Raises ``CheckpointError`` unless the file holds exactly a Llama's."""
    from gguf import dequantize

    held, weights = {tensor.name: tensor for tensor in tensors}, {}
    wanted = _wanted(config)
    if missing := sorted(name for name, _ in wanted.values() if name not in held):
        raise CheckpointError(f"the tensor {missing[0]} is missing")
    if unknown := sorted(set(held) - {name for name, _ in wanted.values()}):
        raise CheckpointError(f"it holds the tensor {unknown[0]}, which a dense Llama does not have")
    for count, (name, (held_name, shape)) in enumerate(wanted.items(), start=1):
        tensor = held[held_name]
        try:
            values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError:
            raise CheckpointError(
                f"the tensor {held_name} is {tensor.tensor_type.name}, which gguf does not dequantise"
            ) from None
        if values.shape != shape:
            raise CheckpointError(f"the tensor {held_name} has shape {values.shape}; its header makes it {shape}")
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _rotated_by_halves(values, shape[0] // config["head_dim"])
        weights[name] = values
        progress(count / len(wanted))
    return weights


def _wanted(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Transformers' name of every tensor → its GGUF name and shape."""
    hidden, inner, vocabulary = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("token_embd.weight", (vocabulary, hidden)),
        "model.norm.weight": ("output_norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        wanted["lm_head.weight"] = ("output.weight", (vocabulary, hidden))
    for layer in range(config["num_hidden_layers"]):
        for held, name in _LAYER_TENSORS.items():
            shape = shapes.get(held, (hidden,))
            wanted[f"model.layers.{layer}.{name}.weight"] = (f"blk.{layer}.{held}.weight", shape)
    return wanted


def _rotated_by_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * d, H] of a query or key projection in transformers' order. RoPE turns row i together with row
    i + d/2 there; llama.cpp turns neighbours, and its converter (``LlamaModel.permute``) puts them side by side."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _tokenizer(facts: Mapping[str, Any]) -> Any:
    """Built from the file's own tables. Its pre-tokenizer (``smollm``) splits digits off first; transformers' reader
    of GGUF tokenizers does not, which moves token boundaries after indentation. The target's own output encodes back
    to itself more often this way (97 % against 89 % of 3,072 responses)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = tuple(facts.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"its tokenizer is {kind[0]} with pre-tokenizer {kind[1]}; this converter reads smollm's")
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[facts[f"tokenizer.ggml.{held}_token_id"]] for name, held in named.items()},
    }


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
