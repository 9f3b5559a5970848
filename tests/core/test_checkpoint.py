"""The native dialect: every spelling is read, what cannot work is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_folders import draft_dict, write_draft, write_tensors

from dflash.checkpoint import DraftConfig, check_weights, default_target_layer_ids, read_header, weight_files
from dflash.errors import CheckpointError, ConfigError, DialectError, PairError, WeightsError
from dflash.types import TargetInfo


def nested(**changes: Any) -> dict[str, Any]:
    """``dflash_config`` with changes; None drops the key."""
    raw = {"mask_token_id": 3, "target_layer_ids": [1, 3]} | changes
    return {key: value for key, value in raw.items() if value is not None}


def target(**changes: Any) -> TargetInfo:
    facts: dict[str, Any] = {
        "num_layers": 6,
        "hidden_size": 16,
        "vocab_size": 40,
        "max_positions": 256,
        "stop_token_ids": (2,),
        "dtype": "float32",
        "device": "cpu",
    }
    return TargetInfo(**facts | changes)


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (12, (1, 3, 5, 7, 9)),
        (16, (1, 4, 7, 10, 13)),
        (24, (1, 6, 11, 16, 21)),
        (28, (1, 7, 13, 19, 25)),
        (30, (1, 8, 14, 20, 27)),
        (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)),
    ],
)
def test_default_taps_match_the_golden_table(layers: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(layers, 5) == ids


def test_one_default_tap_is_the_middle_layer() -> None:
    assert default_target_layer_ids(30, 1) == (15,)


def test_default_taps_of_a_shallow_target_are_refused_not_repeated() -> None:
    with pytest.raises(ConfigError, match="only once"):
        default_target_layer_ids(5, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": None}, "dflash_config is missing"),
        ({"dflash_config": nested(mask_token_id=None)}, "mask_token_id is missing"),
        ({"dflash_config": nested(target_layer_ids=None)}, "target_layer_ids is missing"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"block_size": None}, "block_size is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"dflash_config": nested(target_layer_ids=[1, 6])}, "holds 6; the target's layers are 0 to 5"),
        ({"dflash_config": nested(target_layer_ids=[-1, 3])}, "holds -1; layers count from 0"),
        ({"dflash_config": nested(target_layer_ids=[3, 3])}, "only once"),
        ({"dflash_config": nested(target_layer_ids=[])}, "empty"),
        ({"dflash_config": nested(target_layer_ids=3)}, "must be a list"),
        ({"dflash_config": nested(target_layer_ids=[1.5])}, "whole number"),
        ({"dflash_config": nested(mask_token_id=40)}, "mask_token_id is 40; the embedding has rows 0 to 39"),
        ({"dflash_config": nested(mask_token_id=-1)}, "mask_token_id is -1"),
        ({"dflash_config": nested(mask_token_id=True)}, "mask_token_id is True"),
        ({"dflash_config": nested(extra_head=1)}, "unknown key extra_head"),
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": "4"}, "block_size is '4'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["full_attention", "mamba"]}, "mamba"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}, "smaller than the block"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; it must be a positive number"),
        ({"rope_parameters": {"rope_type": "magic", "rope_theta": 10000.0}}, "rope_type is 'magic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "curl": 1}}, "no key curl"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftConfig.from_dict(draft_dict(**changes))


@pytest.mark.parametrize("value", ["x", [1], [None], {"a": 1}, -1, 0, 1.5, True, float("nan")], ids=repr)
def test_a_value_of_the_wrong_kind_is_refused_or_harmless_but_never_a_crash(value: Any) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    configs = [draft_dict(**{key: value}) for key in (*draft_dict(), *DraftConfig.from_dict(draft_dict()).to_dict())]
    configs += [draft_dict(rope_scaling=value), draft_dict(is_causal=value), draft_dict(sliding_window=value)]
    configs += [draft_dict(dflash_config=nested(**{key: value})) for key in (*nested(), "block_size", "is_causal")]
    for key in (*rope, "partial_rotary_factor", "beta_fast", "attention_factor", "mscale", "truncate"):
        configs.append(draft_dict(rope_theta=None, rope_parameters=rope | {key: value}))
    for raw in configs:
        try:
            DraftConfig.from_dict(raw).rope.frequencies(8)
        except ConfigError as refusal:
            assert len(str(refusal).splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": nested(block_size=8)}, "block_size is 8 in dflash_config and 4 in config.json"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta is 10000.0 in config.json and 5.0 in rope_parameters"),
        ({"target_layer_ids": [0, 1]}, "target_layer_ids"),
        ({"mask_token_id": 4}, "mask_token_id is 3 in dflash_config and 4 in config.json"),
        ({"is_causal": True, "dflash_config": nested(is_causal=False)}, "is_causal"),
        (
            {
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "factor is 2.0 in rope_parameters and 4.0 in rope_scaling",
        ),
    ],
)
def test_spellings_that_disagree_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftConfig.from_dict(draft_dict(**changes))


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "spelling",
    [
        {"block_size": None, "dflash_config": nested(block_size=4)},
        {"dflash_config": nested(block_size=4)},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0}},
        {"rope_theta": None, "rope_scaling": {"rope_theta": 10000.0, "rope_type": "default"}},
        {"rope_scaling": None},
        {
            "dflash_config": nested(mask_token_id=None, target_layer_ids=None),
            "mask_token_id": 3,
            "target_layer_ids": [1, 3],
        },
        {"dtype": None, "torch_dtype": "float32"},
        {"dtype": "torch.float32"},
        {"layer_types": ["full_attention"] * 2},
        {"is_causal": False},
        {"dflash_config": nested(causal=False)},
    ],
)
def test_every_spelling_of_the_same_drafter_reads_alike(spelling: dict[str, Any]) -> None:
    assert DraftConfig.from_dict(draft_dict(**spelling)) == DraftConfig.from_dict(draft_dict())


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", **YARN}},
    ],
)
def test_every_spelling_of_a_scaled_rope_reads_alike(spelling: dict[str, Any]) -> None:
    rope = DraftConfig.from_dict(draft_dict(**spelling)).rope
    assert (rope.kind, dict(rope.scaling)) == ("yarn", YARN)


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, (False, False)),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, (True, False)),
        ({"is_causal": True}, (True, True)),
        ({"dflash_config": nested(is_causal=True)}, (True, True)),
        ({"dflash_config": nested(causal=True)}, (True, True)),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False}, (False, False)),
    ],
)
def test_causality_and_windows_follow_the_layers_unless_stated(
    changes: dict[str, Any], causal: tuple[bool, ...]
) -> None:
    config = DraftConfig.from_dict(draft_dict(**changes))
    assert config.causal == causal
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    assert config.windows() == tuple(8 if slides else None for slides in sliding)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True},
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False},
        {"num_target_layers": None, "attention_bias": True},
        {"dflash_lab": {"template_sha256": "ab"}},
    ],
)
def test_what_is_written_reads_back_the_same_in_both_spellings(changes: dict[str, Any]) -> None:
    config = DraftConfig.from_dict(draft_dict(**changes))
    raw = json.loads(json.dumps(config.to_dict()))
    assert DraftConfig.from_dict(raw) == config
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10000.0
    assert "auto_map" not in raw
    assert raw.get("dflash_lab") == changes.get("dflash_lab")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        ({"conv_kernel_size": 3}, "DFlash 2"),
        ({"dflash_config": nested(selector_rank=8)}, "DFlash 2"),
        ({"speculators_model_type": "dflash", "architectures": None}, "speculators"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"model_type": "llama"}, "'llama'"),
    ],
)
def test_other_dialects_are_recognised_and_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(DialectError, match=name):
        DraftConfig.from_dict(draft_dict(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 16 in the drafter and 32 in the target"),
        ({"vocab_size": 41}, "vocab_size is 40 in the drafter and 41 in the target"),
        ({"num_layers": 8}, "num_target_layers is 6 in the drafter; the target has 8"),
    ],
)
def test_a_drafter_for_another_target_is_refused(changes: dict[str, Any], message: str) -> None:
    config = DraftConfig.from_dict(draft_dict())
    config.check_target(target())
    with pytest.raises(PairError, match=message):
        config.check_target(target(**changes))


def test_taps_beyond_the_target_are_refused_where_the_drafter_does_not_say_its_depth() -> None:
    config = DraftConfig.from_dict(draft_dict(num_target_layers=None))
    with pytest.raises(PairError, match="holds 3; the target's layers are 0 to 2"):
        config.check_target(target(num_layers=3))


def test_a_folder_without_config_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        DraftConfig.load(tmp_path)
    for broken in ('{"hidden_size": ', "[]", "\xff"):
        (tmp_path / "config.json").write_bytes(broken.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"not valid JSON|no JSON object"):
            DraftConfig.load(tmp_path)


@pytest.mark.parametrize("bias", [False, True])
def test_whole_weights_pass(tmp_path: Path, bias: bool) -> None:
    folder = write_draft(tmp_path, draft_dict(attention_bias=bias), dtype="BF16")
    config = DraftConfig.load(folder)
    check_weights(folder, config)
    assert ("layers.1.self_attn.v_proj.bias" in read_header(folder / "model.safetensors")) is bias


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("fc.weight", None, "lack fc.weight"),
        ("layers.1.mlp.up_proj.weight", None, "lack layers.1.mlp.up_proj.weight"),
        ("lm_head.weight", (40, 16), "hold lm_head.weight"),
        ("hidden_norm.weight", (17,), r"hidden_norm.weight has shape \[17\]; the config makes it \[16\]"),
    ],
)
def test_weights_missing_left_over_or_misshapen_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    config = DraftConfig.load(write_draft(tmp_path))
    shapes = {key: value for key, value in (config.tensor_shapes() | {name: shape}).items() if value is not None}
    write_tensors(tmp_path / "model.safetensors", shapes)
    with pytest.raises(WeightsError, match=message):
        check_weights(tmp_path, config)


def test_sharded_weights_are_read_through_their_index(tmp_path: Path) -> None:
    config = DraftConfig.load(write_draft(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model.safetensors is missing"):
        check_weights(tmp_path, config)
    names = sorted(config.tensor_shapes())
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for shard, held in shards.items():
        write_tensors(tmp_path / shard, {name: config.tensor_shapes()[name] for name in held})
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_weights(tmp_path, config)
    assert [file.name for file in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"b.safetensors is missing"):
        check_weights(tmp_path, config)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10\x00",
        b"\xff" * 64,
        b"\x04\x00\x00\x00\x00\x00\x00\x00[1]]",
        b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
        b'\x0e\x00\x00\x00\x00\x00\x00\x00{"a": {"b":1}}',
        b"\x08\x00\x00\x00\x00\x00\x00\x00\xff\xfe\x00\x01\x02\x03\x04\x05",
    ],
)
def test_a_corrupt_weights_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        read_header(file)


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_weights_file_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    file = tmp_path_factory.mktemp("cut") / "model.safetensors"
    write_tensors(file, {"a": (3, 5), "b": (7,)})
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(WeightsError):
        read_header(file)


def test_a_weights_file_with_something_appended_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_tensors(file, {"a": (3,)})
    file.write_bytes(file.read_bytes() + b"\x00")
    with pytest.raises(WeightsError, match="promises"):
        read_header(file)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        {"rope_type": "yarn", **YARN, "truncate": False},
        {"rope_type": "yarn", **YARN, "attention_factor": 0.7},
        {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
        {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 512},
        {"rope_type": "llama3", **LLAMA3},
    ],
    ids=lambda scaling: "-".join(f"{key[:8]}={value}" for key, value in scaling.items()),
)
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_rotary_frequencies_equal_those_of_transformers(scaling: dict[str, Any], theta: float, head_dim: int) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    parameters = {"rope_theta": theta, **scaling}
    theirs = Qwen3Config(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters=dict(parameters),
    )
    if scaling["rope_type"] == "default":
        if "partial_rotary_factor" in scaling:
            compute = rope_utils.ROPE_INIT_FUNCTIONS["linear"]  # Qwen3's own default ignores the factor
            theirs.rope_parameters["factor"] = 1.0
        else:
            compute = Qwen3RotaryEmbedding.compute_default_rope_parameters
    else:
        compute = rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    wanted, factor = compute(theirs, device="cpu")

    raw = draft_dict(rope_theta=None, rope_parameters=parameters, max_position_embeddings=256)
    ours, ours_factor = DraftConfig.from_dict(raw).rope.frequencies(head_dim)
    assert ours == pytest.approx(wanted.double().numpy(), rel=2e-5)
    assert ours_factor == pytest.approx(factor, rel=1e-6)
