"""The native target computes what transformers' own model computes, from the same weights."""

import logging

import pytest
import torch
from tiny_models import TinyPair, make_config, make_target
from torch_dflash.backend import serve_target
from torch_dflash.native import NativeTarget
from torch_dflash.products import Product, product
from torch_dflash.target import TorchTarget
from transformers import MistralConfig, MistralForCausalLM

from dflash.errors import BackendError

LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
CASES = {
    "llama": ("llama", {}),
    "qwen2-biased": ("qwen2", {}),
    "qwen3-normed": ("qwen3", {}),
    "multi-head-biases": ("llama", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=4)),
    "tied": ("qwen3", dict(tie_word_embeddings=True)),
    "llama3-rope": ("llama", dict(rope_parameters=LLAMA3)),
    "yarn-rope": ("qwen3", dict(rope_parameters=YARN)),
    "linear-rope": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
}


def varied(family, changes, seed=0):
    """A model whose norms and biases matter."""
    model = make_target(family, seed, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name):
    """Prefill, a block after a rewind, one row, and a prefill in chunks, to 1e-4 relative; taps included."""
    ids = torch.randint(0, 300, (80,), generator=torch.Generator().manual_seed(2)).tolist()
    theirs, ours = (kind(varied(*CASES[name]), (0, 3)) for kind in (TorchTarget, NativeTarget))
    for begin, end, kept in ((0, 60, 50), (50, 58, 8), (58, 59, 1), (59, 80, 0)):
        outputs = []
        for target in (theirs, ours):
            assert target.length == begin
            outputs.append(target.forward(ids[begin:end]))
            target.keep(range(kept))
        for part in ("logits", "features"):
            a, b = (getattr(output, part) for output in outputs)
            assert (a - b).abs().max() < 1e-4 * a.abs().max()
        assert (outputs[0].logits.argmax(-1) == outputs[1].logits.argmax(-1)).all()
    assert ours.length == theirs.length == 59
    assert ours.info == theirs.info


def test_the_wrapped_model_still_computes_the_same():
    """Its products are views into the fused weights; nothing is copied, nothing is lost."""
    model, ids = varied("qwen2", {}), torch.arange(1, 20)[None]
    before = model(ids).logits
    bytes_before = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    NativeTarget(model, (0,))
    assert torch.equal(model(ids).logits, before)
    assert len({weight.untyped_storage().data_ptr() for weight in model.parameters()}) < len(bytes_before)


def test_last_only_gives_the_last_row():
    target = NativeTarget(make_target(), (1,))
    whole = target.forward([3, 4, 5, 6]).logits
    target.keep(())
    assert torch.allclose(target.forward([3, 4, 5, 6], last_only=True).logits, whole[-1:], atol=1e-5)


def test_the_cache_grows_and_keeps_what_it_holds():
    long, short = (
        NativeTarget(make_target(max_position_embeddings=2048), (1,)),
        TorchTarget(make_target(max_position_embeddings=2048), (1,)),
    )
    ids = torch.randint(0, 300, (900,), generator=torch.Generator().manual_seed(4)).tolist()
    for target in (long, short):
        for start in range(0, 900, 300):
            output = target.forward(ids[start : start + 300], last_only=True)
            target.keep(range(300))
        target.last = output.logits
    assert (long.last - short.last).abs().max() < 1e-4 * short.last.abs().max()


def test_generation_is_the_same_through_either(caplog):
    pair = TinyPair("qwen3")
    drafter, prompt = pair.drafter(), [9, 8, 7]
    oracle = pair.oracle(prompt, 40)
    with caplog.at_level(logging.INFO, "torch_dflash"):
        for native in (True, False):
            pair.target = serve_target(pair.model, make_config().target_layer_ids, native=native)
            assert isinstance(pair.target, NativeTarget if native else TorchTarget)
            assert pair.engine(drafter).generate(prompt, max_new_tokens=40, ignore_eos=True).token_ids == oracle
    assert "through transformers" in caplog.text


def test_a_model_it_cannot_serve_is_named():
    config = MistralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = MistralForCausalLM(config)
    with pytest.raises(BackendError, match="mistral"):
        NativeTarget(model, (0,))
    assert isinstance(serve_target(model, (0,)), TorchTarget)
    stretched = make_target("llama", rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0))
    with pytest.raises(BackendError, match="rope_type is 'dynamic'"):
        NativeTarget(stretched, (0,))
    assert isinstance(serve_target(stretched, (0,)), TorchTarget)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(0,), (1,), (2,), (5,), (64,), (65,), (1, 3), (2, 0), (2, 1, 7)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_the_linear_one_for_any_number_of_rows(lead, biased, dtype):
    generator = torch.Generator().manual_seed(len(lead))
    x = torch.randn(*lead, 24, generator=generator).to(dtype)
    weight = torch.randn(97, 24, generator=generator).to(dtype)
    bias = torch.randn(97, generator=generator).to(dtype) if biased else None
    with torch.inference_mode():
        result = product(x, weight, bias)
    assert result.shape == (*lead, 97) and result.is_contiguous()
    torch.testing.assert_close(result, torch.nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


def test_a_product_that_learns_has_gradients_of_its_own():
    layer = Product(24, 97)
    layer(torch.randn(3, 24)).square().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.abs().sum() > 0
    assert list(layer.state_dict()) == ["weight", "bias"]
