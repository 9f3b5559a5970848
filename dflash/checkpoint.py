"""The drafter's checkpoint: every spelling of the native dialect read into one validated ``DraftConfig``.

The native dialect is what z-lab, SGLang and vLLM exchange: a Qwen3-style ``config.json`` and weights without prefix,
embedding or head. Other dialects are recognised by their marks and refused by name. Nothing here needs a tensor
library: weights are checked by the header of their safetensors files. The file is long because what is read, what is
checked and what is written are one contract, which a reader should find in one place.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash.errors import CheckpointError, ConfigError, DialectError, PairError, WeightsError
from dflash.rope import RopeConfig
from dflash.types import TargetInfo

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
LAYER_TYPES = ("full_attention", "sliding_attention")
_DFLASH_KEYS = {"mask_token_id", "target_layer_ids", "block_size", "is_causal", "causal"}
_DFLASH2_KEYS = {
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
}
_ABSENT = object()


def default_target_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The taps of the paper: ``round(1 + i*(L-4)/(n-1))`` with Python's banker's rounding; one tap: ``L // 2``.

    Raises ``ConfigError`` where a shallow target makes the formula repeat an id."""
    if count == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))
    _check_taps(ids, num_target_layers)
    return ids


@dataclass(frozen=True)
class DraftConfig:
    """A drafter's shape and its place on the target.

    ``target_layer_ids`` are the tapped layers (id i: the output of decoder layer i, before any final norm);
    ``num_target_layers`` is None where an old file does not say. ``causal`` says per draft layer whether the block
    sees only itself and earlier slots. ``sliding_window`` counts positions, and is only used by layers whose type is
    ``sliding_attention``. Raises ``ConfigError``.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope: RopeConfig
    num_target_layers: int | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    causal: tuple[bool, ...] = ()
    max_position_embeddings: int = 32768
    dtype: str = "bfloat16"
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if not self.causal:
            object.__setattr__(self, "causal", tuple(kind == "sliding_attention" for kind in self.layer_types))
        _check_sizes(self)
        _check_taps(self.target_layer_ids, self.num_target_layers)

    @property
    def feature_size(self) -> int:
        """K*H: the width of one token's features."""
        return len(self.target_layer_ids) * self.hidden_size

    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer; None is unlimited."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the native dialect with its shape."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, self.feature_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for layer in range(self.num_hidden_layers):
            name = f"layers.{layer}."
            shapes[name + "input_layernorm.weight"] = (hidden,)
            shapes[name + "post_attention_layernorm.weight"] = (hidden,)
            attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
            for letter, shape in attention.items():
                shapes[f"{name}self_attn.{letter}_proj.weight"] = shape
                if self.attention_bias:
                    shapes[f"{name}self_attn.{letter}_proj.bias"] = shape[:1]
            shapes[name + "self_attn.q_norm.weight"] = (self.head_dim,)
            shapes[name + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[name + "mlp.gate_proj.weight"] = (inner, hidden)
            shapes[name + "mlp.up_proj.weight"] = (inner, hidden)
            shapes[name + "mlp.down_proj.weight"] = (hidden, inner)
        return shapes

    def check_target(self, target: TargetInfo) -> None:
        """Raise ``PairError`` where this drafter cannot draft for ``target``."""
        for name, ours, theirs in (
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise PairError(f"{name} is {ours} in the drafter and {theirs} in the target; they must be equal")
        if self.num_target_layers not in (None, target.num_layers):
            raise PairError(
                f"num_target_layers is {self.num_target_layers} in the drafter; the target has {target.num_layers}"
            )
        if (deepest := max(self.target_layer_ids)) >= target.num_layers:
            raise PairError(f"target_layer_ids holds {deepest}; the target's layers are 0 to {target.num_layers - 1}")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DraftConfig:
        """Read a parsed ``config.json``. Raises ``DialectError`` or ``ConfigError``."""
        _refuse_other_dialects(raw)
        nested = raw.get("dflash_config")
        if not isinstance(nested, Mapping):
            raise ConfigError("dflash_config is missing; a native DFlash drafter has one with mask_token_id in it")
        if unknown := set(nested) - _DFLASH_KEYS:
            raise ConfigError(
                f"dflash_config has the unknown key {', '.join(sorted(unknown))}; "
                f"known are {', '.join(sorted(_DFLASH_KEYS))}"
            )
        layers = _number(raw, "num_hidden_layers")
        heads, hidden = _number(raw, "num_attention_heads"), _number(raw, "hidden_size")
        if (activation := raw.get("hidden_act", "silu")) != "silu":
            raise ConfigError(f"hidden_act is {activation!r}; DFlash drafters use 'silu'")
        taps = _agree("target_layer_ids", {"dflash_config": nested, "config.json": raw})
        if not isinstance(taps, Sequence) or isinstance(taps, str):
            raise ConfigError(f"target_layer_ids is {taps!r}; it must be a list of layer numbers")
        layer_types = tuple(_list(raw, "layer_types", str) or ("full_attention",) * layers)
        return cls(
            hidden_size=hidden,
            intermediate_size=_number(raw, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_whole("num_key_value_heads", raw.get("num_key_value_heads", heads)),
            head_dim=_whole("head_dim", raw.get("head_dim") or hidden // heads),
            vocab_size=_number(raw, "vocab_size"),
            block_size=_whole("block_size", _agree("block_size", {"dflash_config": nested, "config.json": raw})),
            mask_token_id=_whole(
                "mask_token_id", _agree("mask_token_id", {"dflash_config": nested, "config.json": raw}), least=0
            ),
            target_layer_ids=tuple(_whole("target_layer_ids", tap, least=None) for tap in taps),
            rope=read_rope(raw),
            num_target_layers=_whole("num_target_layers", raw["num_target_layers"])
            if raw.get("num_target_layers") is not None
            else None,
            rms_norm_eps=_positive("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
            attention_bias=_flag("attention_bias", raw.get("attention_bias", False)),
            layer_types=layer_types,
            sliding_window=_read_window(raw, layer_types),
            causal=_read_causality(raw, nested, layer_types),
            max_position_embeddings=_whole("max_position_embeddings", raw.get("max_position_embeddings", 32768)),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            extra={"dflash_lab": raw["dflash_lab"]} if isinstance(raw.get("dflash_lab"), Mapping) else {},
        )

    def to_dict(self) -> dict[str, Any]:
        """The native ``config.json``, in both spellings of whatever has two."""
        rope = {"rope_type": self.rope.kind, "rope_theta": self.rope.theta, **dict(self.rope.scaling)}
        if self.rope.partial != 1:
            rope["partial_rotary_factor"] = self.rope.partial
        nested: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "block_size": self.block_size,
        }
        raw: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "rope_theta": self.rope.theta,
            "rope_parameters": rope,
            "layer_types": list(self.layer_types),
            "use_sliding_window": "sliding_attention" in self.layer_types,
            "sliding_window": self.sliding_window,
            "block_size": self.block_size,
            "dtype": self.dtype,
            "dflash_config": nested,
        }
        if self.rope.kind != "default":
            raw["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        if self.num_target_layers is not None:
            raw["num_target_layers"] = self.num_target_layers
        if self.causal != tuple(kind == "sliding_attention" for kind in self.layer_types):
            if len(set(self.causal)) > 1:
                raise ConfigError("the native dialect has one is_causal for all layers; this drafter mixes both")
            raw["is_causal"] = nested["is_causal"] = self.causal[0]
        return raw | dict(self.extra)

    @classmethod
    def load(cls, folder: str | Path) -> DraftConfig:
        """Read ``folder/config.json``. Raises ``CheckpointError`` where it is missing or not JSON."""
        return cls.from_dict(read_json(Path(folder) / CONFIG_FILE))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``; ``CheckpointError`` where there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a model folder holds it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return raw


def weight_names(folder: str | Path) -> list[str]:
    """Names of the safetensors files that make a checkpoint: one, or the shards its index names. Raises
    ``CheckpointError`` for an index that is none."""
    index = Path(folder) / INDEX_FILE
    if not index.exists():
        return [WEIGHTS_FILE]
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise WeightsError(f"{index} names no weight files in its weight_map")
    return sorted(set(named.values()))


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint, one or sharded. Raises ``WeightsError`` where one is missing."""
    files = [Path(folder) / name for name in weight_names(folder)]
    for file in files:
        if not file.exists():
            raise WeightsError(f"{file} is missing; a checkpoint holds {WEIGHTS_FILE} or the shards its index names")
    return files


def read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name → (shape, dtype) of every tensor in a safetensors file; ``WeightsError`` where it is corrupt or cut off."""
    broken = f"{file} is not a whole safetensors file"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > size - 8:
                raise WeightsError(f"{broken}: it ends inside its header; download or write it again")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            tensors = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeightsError(f"{broken}: its header is corrupt; download or write it again") from None
    if size != 8 + length + end:
        raise WeightsError(f"{broken}: it holds {size} bytes and its header promises {8 + length + end}")
    return tensors


def check_weights(folder: str | Path, config: DraftConfig) -> None:
    """Raise ``WeightsError`` where the tensors in ``folder`` are not exactly those of ``config``."""
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        found |= {name: shape for name, (shape, _) in read_header(file).items()}
    expected = config.tensor_shapes()
    if packed := sorted(name for name in found if name.endswith(".scales")):
        raise WeightsError(
            f"the drafter's weights are quantised ({_some(packed)}), which the native dialect has no layout for; "
            "give the unquantised drafter, and draft_bits to quantise it as it is loaded"
        )
    if missing := sorted(set(expected) - set(found)):
        raise WeightsError(f"the drafter's weights lack {_some(missing)}")
    if left_over := sorted(set(found) - set(expected)):
        raise WeightsError(f"the drafter's weights hold {_some(left_over)}, which its config has no place for")
    for name, shape in expected.items():
        if found[name] != shape:
            raise WeightsError(f"{name} has shape {list(found[name])}; the config makes it {list(shape)}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _refuse_other_dialects(raw: Mapping[str, Any]) -> None:
    inner = raw.get("dflash_config")
    nested: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    names = set(_list(raw, "architectures", str))
    found = None
    if "DFlash2DraftModel" in names or _DFLASH2_KEYS & (set(raw) | set(nested)):
        found = "DFlash 2 (convolutions and a path selector)"
    elif "speculators_model_type" in raw:
        found = f"speculators ({raw['speculators_model_type']})"
    elif any("DSpark" in name for name in names) or "markov_rank" in raw:
        found = "DSpark (a Markov head)"
    if found:
        raise DialectError(f"this drafter is in the {found} dialect, which is not supported yet; native DFlash is")
    if names and "DFlashDraftModel" not in names:
        raise DialectError(f"architectures is {sorted(names)}; a native DFlash drafter says ['DFlashDraftModel']")
    if (kind := raw.get("model_type", "qwen3")) != "qwen3":
        raise DialectError(f"model_type is {kind!r}; a native DFlash drafter says 'qwen3'")


def _agree(key: str, places: Mapping[str, Mapping[str, Any]], default: Any = _ABSENT) -> Any:
    """The value of ``key``, refused where two places that hold it disagree, or where none does."""
    found = {place: values[key] for place, values in places.items() if values.get(key) is not None}
    if not found:
        if default is not _ABSENT:
            return default
        raise ConfigError(f"{key} is missing; it belongs into {' or '.join(places)}")
    first, *others = found.items()
    for place, value in others:
        if value != first[1]:
            raise ConfigError(f"{key} is {first[1]} in {first[0]} and {value} in {place}; they must agree")
    return first[1]


def _number(raw: Mapping[str, Any], key: str) -> int:
    if raw.get(key) is None:
        raise ConfigError(f"{key} is missing from config.json")
    return _whole(key, raw[key])


def _whole(key: str, value: Any, least: int | None = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        wanted = "a whole number" if least is None else f"a whole number, at least {least}"
        raise ConfigError(f"{key} is {value!r}; it must be {wanted}")
    return value


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value!r}; it must be a positive number")
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}; it must be true or false")
    return value


def _list(raw: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    value = raw.get(key) if raw.get(key) is not None else []
    if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
        raise ConfigError(f"{key} is {value!r}; it must be a list of {kind.__name__}")
    return value


def _object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key) if raw.get(key) is not None else {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}; it must be an object")
    return value


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """The RoPE of a parsed ``config.json`` in any of its spellings. Raises ``ConfigError``."""
    nested, scaling = _object(raw, "rope_parameters"), _object(raw, "rope_scaling")
    theta = _agree("rope_theta", {"config.json": raw, "rope_parameters": nested, "rope_scaling": scaling}, default=None)
    if theta is None:
        raise ConfigError("rope_theta is missing; the RoPE base belongs into config.json or rope_parameters")
    old = {**scaling, "rope_type": scaling.get("rope_type") or scaling.get("type")}
    kind = _agree("rope_type", {"rope_parameters": nested, "rope_scaling": old}, default="default")
    places = {"config.json": raw, "rope_parameters": nested, "rope_scaling": scaling}
    partial = _agree("partial_rotary_factor", places, default=1.0)
    numbers: dict[str, Any] = {}
    for key in sorted((set(nested) | set(scaling)) - {"rope_theta", "rope_type", "type", "partial_rotary_factor"}):
        value = _agree(key, {"rope_parameters": nested, "rope_scaling": scaling}, default=None)
        if value is not None:
            numbers[key] = value
    return RopeConfig(
        theta=_positive("rope_theta", theta),
        kind=kind,
        partial=_positive("partial_rotary_factor", partial),
        scaling=tuple(sorted(numbers.items())),
        max_positions=_whole("max_position_embeddings", raw.get("max_position_embeddings", 32768)),
    )


def _read_window(raw: Mapping[str, Any], layer_types: Sequence[str]) -> int | None:
    if "sliding_attention" not in layer_types:
        return None
    if raw.get("sliding_window") is None:
        raise ConfigError("sliding_window is missing; layer_types marks layers as sliding_attention")
    return _whole("sliding_window", raw["sliding_window"])


def _read_causality(raw: Mapping[str, Any], nested: Mapping[str, Any], layer_types: Sequence[str]) -> tuple[bool, ...]:
    spellings = {
        "config.json": {"is_causal": raw.get("is_causal")},
        "dflash_config": {"is_causal": nested.get("is_causal")},
        "dflash_config.causal": {"is_causal": nested.get("causal")},
    }
    causal = _agree("is_causal", spellings, default=None)
    if causal is None:
        return tuple(kind == "sliding_attention" for kind in layer_types)
    return (_flag("is_causal", causal),) * len(layer_types)


def _check_sizes(config: DraftConfig) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads is {config.num_attention_heads}, "
            f"which num_key_value_heads ({config.num_key_value_heads}) does not divide"
        )
    if config.block_size < 2:
        raise ConfigError(
            f"block_size is {config.block_size}; a block is an anchor and at least one slot, so 2 or more"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ConfigError(
            f"mask_token_id is {config.mask_token_id}; the embedding has rows 0 to {config.vocab_size - 1}"
        )
    if len(config.layer_types) != config.num_hidden_layers:
        raise ConfigError(
            f"layer_types has {len(config.layer_types)} entries; num_hidden_layers is {config.num_hidden_layers}"
        )
    if unknown := set(config.layer_types) - set(LAYER_TYPES):
        raise ConfigError(f"layer_types holds {_some(sorted(unknown))}; known are {', '.join(LAYER_TYPES)}")
    if config.sliding_window is not None and config.sliding_window < config.block_size:
        raise ConfigError(f"sliding_window is {config.sliding_window}, smaller than the block of {config.block_size}")


def _check_taps(ids: Sequence[int], num_target_layers: int | None) -> None:
    if not ids:
        raise ConfigError("target_layer_ids is empty; at least one target layer must be tapped")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"target_layer_ids is {list(ids)}; a layer can be tapped only once")
    if min(ids) < 0:
        raise ConfigError(f"target_layer_ids holds {min(ids)}; layers count from 0")
    if num_target_layers is not None and max(ids) >= num_target_layers:
        raise ConfigError(f"target_layer_ids holds {max(ids)}; the target's layers are 0 to {num_target_layers - 1}")
