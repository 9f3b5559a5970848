"""Targets from folders: facts, number formats, devices, quantised ones; and folders that are none, in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
from mlx.utils import tree_map
from mlx_dflash.backend import MlxBackend
from mlx_dflash.target import choose_device, load_target
from mlx_lm.utils import quantize_model
from mlx_models import IDS, assert_close, feed, gap, make_model, save_model, serve, settings_of, whole
from tiny_mlx import MlxPair
from tiny_models import make_config, make_drafter, make_target, save_pair

import dflash
from dflash.errors import BackendError, CheckpointError, DFlashError, PairError

BACKEND = MlxBackend()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama as mlx-lm writes it."""
    settings = settings_of("llama")
    return save_model(tmp_path, make_model(settings), settings)


def edit(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def edit_weight(folder: Path, name: str, change: Any) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)  # what is put off would be read from the file that is written over
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, name: change(weights[name])})


def refusal(folder: Path, error: type[DFlashError], **options: Any) -> str:
    """The one sentence that ``folder`` is refused with."""
    wanted: dict[str, Any] = {"device": "cpu", "dtype": "float32", "layer_ids": (0,), **options}
    with pytest.raises(error) as caught:
        load_target(folder, **wanted)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Facts and number formats ---------------------------------------------------------------------------------------


def test_a_saved_model_loads_with_its_facts(tmp_path: Path) -> None:
    make_target(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 1]}')
    info = serve(tmp_path, (0, 2)).info
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (4, 32, 300)
    assert (info.max_positions, info.stop_token_ids) == (512, (1, 7, 9))
    assert (info.dtype, info.device, info.model_type) == ("float32", "cpu", "llama")


def test_a_family_with_words_of_its_own_loads_with_its_facts(tmp_path: Path) -> None:
    """GPT-2's config has none of the usual names for sizes."""
    settings: dict[str, Any] = {
        "model_type": "gpt2", "n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64,
        "layer_norm_epsilon": 1e-5, "vocab_size": 97, "eos_token_id": 5,
    }  # fmt: skip
    info = serve(save_model(tmp_path, make_model(settings), settings), (0, 2)).info
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (3, 32, 97)
    assert (info.max_positions, info.stop_token_ids) == (64, (5,))


def test_a_target_in_shards_is_the_same_target(folder: Path) -> None:
    expected = feed(serve(folder, (0,)), IDS).logits
    mx.eval(expected)
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    (folder / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for shard in range(2):
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        part = dict(list(weights.items())[shard::2])
        mx.save_safetensors(str(folder / file), part)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert mx.array_equal(feed(serve(folder, (0,)), IDS).logits, expected)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refusal(folder, CheckpointError)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_number_formats_are_honoured(folder: Path, dtype: str) -> None:
    target = serve(folder, (0,), dtype)
    output = feed(target, IDS[:5])
    assert target.info.dtype == dtype
    assert {str(output.logits.dtype), str(output.features.dtype)} == {f"mlx.core.{dtype}"}


def test_auto_is_float32_on_a_cpu_whatever_is_stored(tmp_path: Path) -> None:
    settings, model = settings_of("llama"), make_model(settings_of("llama"))
    model.set_dtype(mx.bfloat16)
    target = serve(save_model(tmp_path, model, settings), (0,), "auto")
    assert target.info.dtype == "float32"
    assert feed(target, IDS[:5]).logits.dtype == mx.float32


def test_unknown_number_formats_are_refused(folder: Path) -> None:
    assert "dtype is 'int4'; it must be auto, float32, float16, bfloat16" in refusal(folder, BackendError, dtype="int4")


def test_weights_that_overflow_in_float16_are_refused_by_name(folder: Path) -> None:
    edit_weight(folder, "model.layers.1.mlp.up_proj.weight", lambda weight: weight * 1e6)
    assert "model.layers.1.mlp.up_proj.weight" in (said := refusal(folder, CheckpointError, dtype="float16"))
    assert "overflows in float16; use bfloat16 or float32" in said
    for wide in ("bfloat16", "float32"):
        assert mx.isfinite(feed(serve(folder, (0,), wide), IDS[:5]).logits).all()


# Devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "mps", "gpu:0", "CPU", ""])
def test_devices_that_mlx_does_not_have_are_refused(folder: Path, device: str) -> None:
    assert f"device is {device!r}; mlx has auto, cpu, gpu" in refusal(folder, BackendError, device=device)


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU")
def test_the_gpu_is_refused_where_there_is_none(folder: Path) -> None:
    before = mx.default_device()
    assert "device 'gpu' cannot be used here" in refusal(folder, BackendError, device="gpu")
    assert mx.default_device() == before
    assert choose_device("auto") == "cpu"


# Folders that are none ------------------------------------------------------------------------------------------


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "config.json is missing" in refusal(tmp_path, CheckpointError)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_config_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refusal(folder, CheckpointError)


@pytest.mark.parametrize("kind", ["no_such_model", None, "", "../llama", 7])
def test_a_model_that_mlx_lm_does_not_know_is_refused_by_name(folder: Path, kind: Any) -> None:
    edit(folder, model_type=kind)
    assert f"does not know the model_type {kind!r}" in refusal(folder, CheckpointError)


def test_missing_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "is missing" in refusal(folder, CheckpointError)


@pytest.mark.parametrize("keep", [0, 4, 100, -100])
def test_a_truncated_weight_file_is_refused(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "is not a whole safetensors file" in refusal(folder, CheckpointError)


def test_tensors_that_are_missing_left_over_or_misshapen_are_named(folder: Path) -> None:
    name, whole_file = "model.layers.2.self_attn.q_proj.weight", (folder / "model.safetensors").read_bytes()
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), {key: w for key, w in weights.items() if key != name})
    assert name in refusal(folder, CheckpointError)
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, "model.extra.weight": mx.zeros(3)})
    assert "model.extra.weight" in refusal(folder, CheckpointError)
    (folder / "model.safetensors").write_bytes(whole_file)
    edit_weight(folder, name, lambda weight: weight[:8])
    assert name in refusal(folder, CheckpointError)


def test_a_setting_that_is_missing_is_named(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("rms_norm_eps")
    (folder / "config.json").write_text(json.dumps(raw))
    assert "rms_norm_eps" in refusal(folder, CheckpointError)


@pytest.mark.parametrize("ids", [(0, 9), (-1,)])
def test_taps_that_the_target_does_not_have_are_refused(folder: Path, ids: tuple[int, ...]) -> None:
    assert "the target's layers are 0 to 3" in refusal(folder, BackendError, layer_ids=ids)


# Quantised targets ----------------------------------------------------------------------------------------------


def quantised(folder: Path, bits: int, seed: int = 0) -> Any:
    """A tiny Llama of ``tiny_models``' size, quantised as mlx-lm does it, and that model itself."""
    settings = settings_of("llama", vocab_size=300, hidden_size=64, intermediate_size=128, head_dim=16)
    model = make_model(settings, seed)
    model.update(tree_map(lambda weight: weight / 2 if weight.ndim > 1 else weight, model.parameters()))
    model, config = quantize_model(model, settings, group_size=64 if bits == 4 else 32, bits=bits)
    save_model(folder, model, config)
    return model


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_target_is_tapped_and_gives_its_own_logits(bits: int, tmp_path: Path) -> None:
    model = quantised(tmp_path, bits)
    target = serve(tmp_path, (1, 3))
    assert target.info.dtype == f"{bits}-bit float32"
    assert (target.info.vocab_size, target.info.hidden_size) == (300, 64)
    output = feed(target, IDS)
    assert_close(output.logits, whole(model), 1e-5)
    assert output.features.shape == (len(IDS), 2 * 64)
    target.reset()
    assert_close(feed(target, IDS, last_only=True).logits, whole(model)[-1:], 1e-5)


def test_quantising_changes_what_a_target_says(tmp_path: Path) -> None:
    logits = [whole(quantised(tmp_path / str(bits), bits)) for bits in (4, 8)]
    assert gap(*logits) > 1e-2


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_target_with_a_drafter_says_what_it_says_alone(bits: int, tmp_path: Path) -> None:
    """Rows in a block and single rows round differently, so the seeds are such that no two tokens are near a tie."""
    model = quantised(tmp_path / "target", bits, seed=3)
    config = make_config(hidden_size=64, head_dim=16, num_target_layers=4)
    _, draft = save_pair(tmp_path / "pair", make_target(), config, make_drafter(config))
    engine = dflash.load(target=tmp_path / "target", draft=draft, backend="mlx", device="cpu", check=True)
    assert engine.facts["dtype"] == f"{bits}-bit float32"
    for prompt in ([5, 17, 200], [9, 8, 7, 250]):
        plain = engine.generate(prompt, max_new_tokens=24, speculate=False)
        logits = whole(model, prompt + plain.token_ids)[len(prompt) - 1 : -1]
        best = mx.sort(logits, axis=-1)[:, -2:]
        assert float((best[:, 1] - best[:, 0]).min()) > 1e-3, "no near-tie"
        assert engine.generate(prompt, max_new_tokens=24).token_ids == plain.token_ids
        assert len(set(plain.token_ids)) > 3


# Through the front door -----------------------------------------------------------------------------------------


def test_a_saved_pair_loads_by_its_folders_and_is_lossless(tmp_path: Path) -> None:
    config, pair = make_config(), MlxPair()
    target_folder, draft_folder = save_pair(tmp_path, make_target(), config, make_drafter(config))
    engine = dflash.load(target=target_folder, draft=draft_folder, backend="mlx", device="cpu", check=True)
    expected = pair.engine().generate([5, 17, 200], max_new_tokens=20)
    result = engine.generate([5, 17, 200], max_new_tokens=20)
    assert engine.tokenizer is None
    assert (engine.facts["backend"], engine.facts["device"], engine.facts["dtype"]) == ("mlx", "cpu", "float32")
    assert result.token_ids == expected.token_ids == pair.oracle([5, 17, 200], 20)
    assert [step.drafted for step in result.steps] == [step.drafted for step in expected.steps]


def test_errors_of_loading_come_out_of_the_device_thread_as_they_are(tmp_path: Path) -> None:
    config = make_config()
    target_folder, draft_folder = save_pair(tmp_path, make_target(), config, make_drafter(config))
    edit(target_folder, model_type="no_such_model")
    with pytest.raises(CheckpointError, match="no_such_model"):
        dflash.load(target=target_folder, draft=draft_folder, backend="mlx")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 16, "head_dim": 8}, "hidden_size is 16 in the drafter and 32 in the target"),
        ({"vocab_size": 310}, "vocab_size is 310"),
        ({"num_target_layers": 9}, "num_target_layers is 9 in the drafter; the target has 4"),
        ({"num_target_layers": None, "target_layer_ids": (0, 4)}, "holds 4.*0 to 3"),
    ],
)
def test_a_drafter_for_another_target_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    config, pair = make_config(**change), MlxPair()
    _, draft_folder = save_pair(tmp_path, make_target(), config, make_drafter(config))
    with pytest.raises(PairError, match=says):
        BACKEND.run(lambda: BACKEND.load_drafter(draft_folder, config, pair.target))
