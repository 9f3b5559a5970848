"""GGUF files into model folders: the same numbers, whatever is missing or strange named, and no tensor library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
load_file = pytest.importorskip("safetensors.numpy").load_file

import numpy as np  # noqa: E402
import tiny_gguf  # noqa: E402
from tiny_gguf import HEADS, HIDDEN, INNER, KEY_HEADS, KIND, LAYERS, TEMPLATE, write_gguf  # noqa: E402

from dflash.checkpoint import read_json, read_rope  # noqa: E402
from dflash.errors import BackendError, CheckpointError  # noqa: E402
from dflash.gguf import convert_gguf  # noqa: E402
from dflash.model_folder import stop_token_ids  # noqa: E402

FILES = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
NAMES = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
for layer in range(LAYERS):
    NAMES |= {
        f"model.layers.{layer}.{name}.weight": f"blk.{layer}.{held}"
        for name, held in {
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }.items()
    }


def convert(file: Path, folder: Path) -> list[float]:
    shares: list[float] = []
    folder.mkdir(exist_ok=True)
    convert_gguf(file, folder, shares.append)
    return shares


def as_llama_cpp_stores(name: str, rows: np.ndarray) -> np.ndarray:
    """Rows of a query or key projection as ``LlamaModel.permute`` of llama.cpp's converter orders them: of each head,
    the row of the first half and its partner of the second half, in turn."""
    heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(name.split(".")[-1])
    if heads is None:
        return rows
    half = len(rows) // heads // 2
    order = [head * 2 * half + side * half + row for head in range(heads) for row in range(half) for side in (0, 1)]
    return rows[order]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf")
    write_gguf(place / "tiny.gguf", tiny_gguf.tensors())
    convert(place / "tiny.gguf", place / "folder")
    return place / "folder"


@pytest.mark.parametrize("kind", [KIND.F32, KIND.F16, KIND.Q8_0, KIND.Q4_1], ids=lambda kind: kind.name)
def test_weights_are_exactly_the_dequantised_ones_in_float32(kind: Any, tmp_path: Path) -> None:
    exact = write_gguf(tmp_path / "tiny.gguf", tiny_gguf.tensors(), kind=kind)
    convert(tmp_path / "tiny.gguf", tmp_path / "folder")
    weights = load_file(tmp_path / "folder" / "model.safetensors")
    assert set(weights) == set(NAMES)  # no head: it is the embedding
    for name, held in NAMES.items():
        assert weights[name].dtype == np.float32
        assert np.array_equal(as_llama_cpp_stores(held, weights[name]), exact[f"{held}.weight"]), name


def test_a_head_of_its_own_is_kept(folder: Path, tmp_path: Path) -> None:
    values = tiny_gguf.tensors()
    values["output.weight"] = values["token_embd.weight"][::-1].copy()
    exact = write_gguf(tmp_path / "untied.gguf", values)
    convert(tmp_path / "untied.gguf", tmp_path / "folder")
    weights = load_file(tmp_path / "folder" / "model.safetensors")
    assert np.array_equal(weights["lm_head.weight"], exact["output.weight"])
    assert read_json(tmp_path / "folder" / "config.json")["tie_word_embeddings"] is False
    assert read_json(folder / "config.json")["tie_word_embeddings"] is True


def test_the_config_says_what_the_header_says(folder: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == FILES
    config = read_json(folder / "config.json")
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": 128,
        "vocab_size": len(tiny_gguf.tokens()),
        "rope_theta": 100000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    assert wanted.items() <= config.items()
    assert config["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)
    assert read_rope(config).theta == 100000.0  # every spelling agrees
    assert stop_token_ids(folder) == (2,)
    assert read_json(folder / "generation_config.json")["eos_token_id"] == 2


def test_the_tokenizer_splits_digits_off_first_as_its_file_asks(folder: Path) -> None:
    pytest.importorskip("transformers")
    from dflash.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    text = "<|im_start|>  12 a▁é<|im_end|>"
    ids = tokenizer.encode_text(text)
    tokens = tiny_gguf.tokens()
    assert [tokens[index] for index in ids][:5] == ["<|im_start|>", "ĠĠ", "1", "2", "Ġa"]
    assert tokenizer.decode(ids, special=True) == text
    assert tokenizer.decode(ids) == "  12 a▁é"
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.stop_token_ids == (2,)
    chat = tokenizer.encode_chat([{"role": "user", "content": "1"}])
    assert tokenizer.decode(chat, special=True) == "<|im_start|>user\n1<|im_end|>\n"


def test_progress_moves_and_ends(folder: Path, tmp_path: Path) -> None:
    shares = convert(folder.parent / "tiny.gguf", tmp_path / "again")
    assert shares == sorted(shares)
    assert len(shares) > 3
    assert shares[-1] == 1.0
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()  # the file alone decides


def test_converting_needs_no_tensor_library_and_is_silent(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dflash.gguf import convert_gguf; "
        f"convert_gguf(Path({str(folder.parent / 'tiny.gguf')!r}), Path({str(tmp_path)!r}), lambda share: None); "
        "assert not {'torch', 'mlx', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "its architecture is qwen2; this converter reads llama"),
        ({"pre": "llama-bpe"}, "its tokenizer is gpt2 with pre-tokenizer llama-bpe; this converter reads smollm's"),
        ({"more": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)}, r"RoPE is scaled \(yarn\)"),
    ],
)
def test_other_kinds_of_model_are_refused_by_name(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", tiny_gguf.tensors(), **options)
    with pytest.raises(CheckpointError, match=f"other.gguf cannot be converted: .*{message}"):
        convert(tmp_path / "other.gguf", tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.1.attn_q.weight": None}, r"the tensor blk.1.attn_q.weight is missing"),
        ({"rope_freqs.weight": (8,)}, r"holds the tensor rope_freqs.weight, which a dense Llama does not have"),
        ({"blk.0.attn_k.bias": (32,)}, r"holds the tensor blk.0.attn_k.bias"),
        ({"blk.0.ffn_up.weight": (32, HIDDEN)}, r"blk.0.ffn_up.weight has shape \(32, 64\); its header makes it \(96"),
    ],
)
def test_tensors_that_are_no_dense_llamas_are_named(
    changes: dict[str, tuple[int, ...] | None], message: str, tmp_path: Path
) -> None:
    values = tiny_gguf.tensors()
    for name, shape in changes.items():
        values.pop(name, None)
        if shape is not None:
            values[name] = np.zeros(shape, dtype=np.float32)
    write_gguf(tmp_path / "odd.gguf", values)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "odd.gguf", tmp_path / "folder")
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_header_without_a_number_is_named(folder: Path, tmp_path: Path) -> None:
    content = (folder.parent / "tiny.gguf").read_bytes()
    (tmp_path / "poor.gguf").write_bytes(content.replace(b"llama.rope.freq_base", b"llama.rope.freq_bass"))
    with pytest.raises(CheckpointError, match=r"poor.gguf cannot be converted: its header has no llama.rope.freq_base"):
        convert(tmp_path / "poor.gguf", tmp_path / "folder")


def test_a_file_that_is_no_gguf_or_is_cut_short_is_refused(folder: Path, tmp_path: Path) -> None:
    content = (folder.parent / "tiny.gguf").read_bytes()
    broken = [b"", b"PK\x03\x04" + bytes(64), b"GGUF" + bytes(64), content[:40], content[:3000], content[:-64]]
    for data in broken:
        (tmp_path / "broken.gguf").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"broken.gguf is not a whole GGUF file: .") as refusal:
            convert(tmp_path / "broken.gguf", tmp_path / "folder")
        assert len(str(refusal.value).splitlines()) == 1
    with pytest.raises(CheckpointError, match=r"gone.gguf is not a whole GGUF file: .*No such file"):
        convert(tmp_path / "gone.gguf", tmp_path / "folder")


def test_a_format_that_gguf_cannot_dequantise_is_named(folder: Path, tmp_path: Path) -> None:
    reader = gguf.GGUFReader(folder.parent / "tiny.gguf")
    (tensor,) = (tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight")
    content = bytearray((folder.parent / "tiny.gguf").read_bytes())
    place = tensor.field.offset + sum(int(part.nbytes) for part in tensor.field.parts[:4])
    assert content[place] == KIND.Q4_1
    content[place] = KIND.Q8_1
    (tmp_path / "format.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_down.weight is Q8_1, which gguf does not dequantise"):
        convert(tmp_path / "format.gguf", tmp_path / "folder")


def test_missing_packages_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(BackendError, match="needs gguf; pip install 'dflash-lab"):
        convert_gguf(folder.parent / "tiny.gguf", tmp_path, lambda share: None)


def test_a_folder_that_cannot_be_written_is_an_os_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        convert_gguf(folder.parent / "tiny.gguf", tmp_path / "gone", lambda share: None)
