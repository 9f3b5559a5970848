"""A transformers model as a target: taps on the right layers, a cache that forgets exactly what was rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LAYERS, VOCAB, TinyPair, make_config, make_target
from torch_dflash.cache import RewindableCache, cache_argument
from torch_dflash.target import TorchTarget, choose_device, load_model, stop_token_ids
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dflash.errors import BackendError, CheckpointError, DFlashError, RewindError

IDS = [(37 * index + 5) % VOCAB for index in range(48)]
SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.2, pad_token_id=0,
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip
WINDOW, BLOCK = 8, 4


@torch.inference_mode()
def fresh_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits [n, V] of a forward without any cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def prefilled(target: TorchTarget, ids: list[int], chunk: int = 512) -> torch.Tensor:
    target.reset()
    parts = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        parts.append(target.forward(part).logits)
        target.keep(range(len(part)))
    return torch.cat(parts)


def junk(token: int) -> int:
    return (token + 101) % VOCAB


# Taps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tap_i_is_hidden_state_i_plus_1_and_before_the_final_norm_for_the_last(family: str) -> None:
    model = make_target(family)
    with torch.no_grad():  # a final norm that does nothing would hide a wrong last tap
        model.model.norm.weight.copy_(torch.linspace(0.5, 2, SMALL["hidden_size"]))
    target = TorchTarget(model, range(LAYERS))
    features = target.forward(IDS).features
    taps = features.split(SMALL["hidden_size"], dim=-1)
    assert len(taps) == LAYERS
    hidden = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert len(hidden) == LAYERS + 1
    for layer in range(LAYERS - 1):
        torch.testing.assert_close(taps[layer], hidden[layer + 1][0])
    torch.testing.assert_close(model.model.norm(taps[-1]), hidden[-1][0])
    assert not torch.allclose(taps[-1], hidden[-1][0], atol=1e-2), "the last tap is the state before the norm"
    for layer in range(LAYERS):
        others = [other for other in range(LAYERS + 1) if other not in (layer + 1, LAYERS)]
        assert all(not torch.allclose(taps[layer], hidden[other][0], atol=1e-2) for other in others)


@pytest.mark.parametrize("ids", [(0,), (3,), (2, 0), (0, 1, 2, 3), (3, 1)])
def test_features_are_the_taps_in_the_order_of_their_ids(ids: tuple[int, ...]) -> None:
    model = make_target()
    whole = TorchTarget(model, range(LAYERS))
    parts = whole.forward(IDS).features.split(SMALL["hidden_size"], dim=-1)
    whole.close()
    features = TorchTarget(model, ids).forward(IDS).features
    torch.testing.assert_close(features, torch.cat([parts[layer] for layer in ids], dim=-1))


def test_only_tapped_layers_carry_hooks_and_closing_removes_them() -> None:
    model = make_target()
    target = TorchTarget(model, (1, 3))
    assert [len(layer._forward_hooks) for layer in model.model.layers] == [0, 1, 0, 1]
    target.close()
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_no_features_while_tapping_is_off(tiny: TinyPair) -> None:
    tiny.target.reset()
    tiny.target.tapping = False
    assert tiny.target.forward(IDS).features is None
    tiny.target.keep(range(len(IDS)))
    assert not tiny.target.taps._seen
    tiny.target.tapping = True
    assert tiny.target.forward([3]).features.shape == (1, 2 * SMALL["hidden_size"])
    tiny.target.keep(range(1))


@pytest.mark.parametrize("wrong", [-1, LAYERS, 99])
def test_layers_that_the_target_does_not_have_are_refused(wrong: int) -> None:
    with pytest.raises(BackendError, match=f"holds {wrong}.*0 to {LAYERS - 1}"):
        TorchTarget(make_target(), (0, wrong))


# Cache and rewind -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kept", range(1, BLOCK + 1))
def test_a_rejected_tail_leaves_the_cache_as_if_it_had_never_been_fed(family: str, kept: int) -> None:
    """Every layer's keys and values, and the logits of what follows; ``kept`` 1 is a block with nothing accepted."""
    model = make_target(family)
    target, straight = TorchTarget(model, (0,)), TorchTarget(model, (0,))
    prefilled(target, IDS[:10])
    target.forward(IDS[10 : 10 + kept] + [junk(token) for token in IDS[10 + kept : 10 + BLOCK]])
    target.keep(range(kept))
    prefilled(straight, IDS[: 10 + kept])
    assert target.length == straight.length == 10 + kept
    for ours, theirs in zip(target.cache.inner.layers, straight.cache.inner.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)
    after = target.forward(IDS[10 + kept : 20]).logits
    torch.testing.assert_close(after, fresh_logits(model, IDS[:20])[10 + kept :], atol=1e-5, rtol=1e-4)


def test_length_counts_committed_tokens_only(tiny: TinyPair) -> None:
    target = tiny.target
    target.reset()
    assert target.length == 0
    target.forward(IDS[:7])
    assert target.length == 0, "nothing is committed before keep"
    target.keep(range(7))
    target.forward(IDS[7:11])
    assert target.length == 7
    target.keep(range(2))
    assert target.length == 9
    target.reset()
    assert target.length == 0


def test_keep_takes_leading_tokens_of_the_last_forward_only(tiny: TinyPair) -> None:
    tiny.target.reset()
    tiny.target.forward(IDS[:4])
    for path in (range(5), [1, 2], [0, 2]):
        with pytest.raises(BackendError, match="leading tokens of the last 4"):
            tiny.target.keep(path)
    tiny.target.keep(range(0))
    assert tiny.target.length == 0


def test_a_forward_must_be_followed_by_keep(tiny: TinyPair) -> None:
    tiny.target.reset()
    tiny.target.forward(IDS[:4])
    with pytest.raises(AssertionError, match="keep"):
        tiny.target.forward(IDS[4:8])
    tiny.target.reset()
    tiny.target.forward(IDS[:4])
    tiny.target.keep(range(4))


def test_trees_are_refused(tiny: TinyPair) -> None:
    tiny.target.reset()
    with pytest.raises(BackendError, match="tree"):
        tiny.target.forward(IDS[:3], parents=[-1, 0, 0])


@pytest.mark.parametrize("removed", [0, 1, 3, 10])
def test_rewind_forgets_that_many_tokens_in_whatever_sense_crop_takes(removed: int) -> None:
    model = make_target()
    cache = RewindableCache(model)
    model(torch.tensor([IDS[:10]]), use_cache=True, **{cache_argument(model): cache.inner})
    assert cache.length == 10
    cache.rewind(removed)
    assert cache.length == 10 - removed
    for layer in cache.inner.layers:
        assert layer.keys.shape[-2] == layer.values.shape[-2] == 10 - removed


@pytest.mark.parametrize("crop", [lambda count: None, lambda count: "all"], ids=["does nothing", "takes all"])
def test_a_crop_that_means_something_else_is_noticed(crop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``crop`` once changed its meaning between two releases."""
    model = make_target()
    cache = RewindableCache(model)
    model(torch.tensor([IDS[:10]]), use_cache=True, **{cache_argument(model): cache.inner})
    inner_crop = cache.inner.crop
    monkeypatch.setattr(cache.inner, "crop", lambda count: inner_crop(-10) if crop(count) else None)
    with pytest.raises(RewindError, match="after forgetting 3 of 10"):
        cache.rewind(3)


def test_rewinding_an_empty_cache_by_nothing_is_fine() -> None:
    RewindableCache(make_target()).rewind(0)


# Sliding windows -------------------------------------------------------------------------------------------------


def mistral() -> Any:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=WINDOW))


def mixed_qwen2() -> Any:
    return make_target("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, sliding_window=WINDOW, layer_types=kinds))


@pytest.mark.parametrize("make", [mistral, mixed_qwen2, gemma3])
@pytest.mark.parametrize("prompt_length", [3, WINDOW - BLOCK, WINDOW - 1, WINDOW, 20])
def test_rejections_across_a_sliding_windows_wrap_leave_no_trace(make: Any, prompt_length: int) -> None:
    torch.manual_seed(0)
    model = make().eval()
    expected = fresh_logits(model, IDS)
    window_matters = fresh_logits(model, [junk(IDS[0]), *IDS[1:]])
    assert torch.allclose(window_matters[-1], expected[-1], atol=1e-5) == (make is mistral)
    target = TorchTarget(model, (0, LAYERS - 1))
    prefill = prefilled(target, IDS[:prompt_length], chunk=5)
    torch.testing.assert_close(prefill, expected[:prompt_length], atol=1e-4, rtol=1e-4)
    position, kept = prompt_length, 1
    while position + BLOCK <= len(IDS):
        block = IDS[position : position + kept] + [junk(token) for token in IDS[position + kept : position + BLOCK]]
        logits = target.forward(block).logits
        torch.testing.assert_close(logits[:kept], expected[position : position + kept], atol=1e-4, rtol=1e-4)
        target.keep(range(kept))
        position += kept
        assert target.length == position
        sliding = [layer for layer in target.cache.inner.layers if layer.is_sliding]
        assert sliding and all(layer.keys.shape[-2] <= WINDOW - 1 for layer in sliding), "the margin must go again"
        kept = kept % BLOCK + 1


@pytest.mark.parametrize("wrong_at", [(), (1,), (3,)])
def test_an_engine_on_a_sliding_target_matches_the_oracle(wrong_at: tuple[int, ...]) -> None:
    pair = TinyPair("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    prompt = IDS[:6]
    engine = pair.engine(pair.scripted(prompt, 24, wrong_at, block_size=BLOCK), prefill_chunk=4)
    result = engine.generate(prompt, max_new_tokens=24, ignore_eos=True)
    assert result.token_ids == pair.oracle(prompt, 24)


# Targets that cannot be served -----------------------------------------------------------------------------------


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2))


def mamba2() -> Any:
    return Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=64, hidden_size=16, num_heads=4, head_dim=8, state_size=8, n_groups=1, num_hidden_layers=2
        )
    )


def qwen3_next() -> Any:
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SMALL, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
            num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        )
    )  # fmt: skip


def lfm2_with_convolutions() -> Any:
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    return Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=kinds))


@pytest.mark.parametrize("make", [mamba, mamba2, qwen3_next, lfm2_with_convolutions])
def test_recurrent_and_linear_attention_targets_are_refused_by_name_at_load(make: Any) -> None:
    model = make()
    with pytest.raises(RewindError, match=f"{type(model).__name__}.*cannot forget"):
        TorchTarget(model, (0,))


def test_a_refused_target_keeps_no_hooks() -> None:
    model = qwen3_next()
    with pytest.raises(RewindError):
        TorchTarget(model, (0, 1))
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_a_model_without_a_list_of_layers_is_refused_by_name() -> None:
    model = make_target()
    model.model.blocks = model.model.layers
    del model.model.layers
    with pytest.raises(BackendError, match="LlamaForCausalLM has no list of 4 decoder layers"):
        TorchTarget(model, (0,))


# Loading ---------------------------------------------------------------------------------------------------------


def test_a_saved_model_loads_with_its_facts(tmp_path: Path) -> None:
    make_target(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    target = TorchTarget(load_model(tmp_path, device="cpu", dtype="auto"), make_config().target_layer_ids)
    info = target.info
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (LAYERS, SMALL["hidden_size"], VOCAB)
    assert (info.max_positions, info.stop_token_ids) == (512, (1, 7))
    assert (info.dtype, info.device, info.model_type) == ("float32", "cpu", "llama")
    assert not any(weight.requires_grad for weight in target.model.parameters())


def test_dtypes_are_honoured_and_unknown_ones_refused(tmp_path: Path) -> None:
    make_target().save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu", dtype="bfloat16").lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(BackendError, match=r"dtype is 'int4'.*float32"):
        load_model(tmp_path, device="cpu", dtype="int4")


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "nonsense:0", ""])
def test_devices_that_are_not_there_are_refused(device: str) -> None:
    with pytest.raises(BackendError, match="cannot be used here"):
        choose_device(device)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_model(tmp_path, device="cpu", dtype="auto")


def test_a_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    make_target().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DFlashError, match="cannot be loaded"):
        load_model(tmp_path, device="cpu", dtype="auto")


def test_stop_ids_are_the_union_of_both_configs() -> None:
    model = make_target(eos_token_id=5)
    model.generation_config.eos_token_id = [9, 5, 3]
    assert stop_token_ids(model) == (3, 5, 9)
    model.generation_config.eos_token_id = None
    assert stop_token_ids(model) == (5,)
