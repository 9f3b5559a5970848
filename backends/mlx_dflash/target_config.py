"""A target's configuration in the words that mlx-lm's model classes read.

transformers 5 nests ``rope_theta``, the scaling and the partial factor in ``rope_parameters``; most of mlx-lm's classes
read the flat keys and quietly take a default of their own where those are missing. The text stays plausible then and is
wrong. So the nested spelling is flattened, and what a class has no word for is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import mlx.nn as nn

from dflash.checkpoint import read_rope
from dflash.errors import CheckpointError, ConfigError
from dflash.rope import RopeConfig

OWN_ROPE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Families whose attention has one RoPE for all layers, which ``mlx_dflash.rope`` can replace."""
_NESTED = ("rope_theta", "partial_rotary_factor")
_INCONSISTENT = {"plamo3": "a block sees one position more of its sliding window than a single token does"}
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_DEFAULT_THETA = 10_000.0  # transformers' own, where a config does not say


def flat_rope(config: Mapping[str, Any], arguments: type | None) -> dict[str, Any]:
    """The keys to add to ``config`` (the language model's part) so that ``arguments``, mlx-lm's dataclass of the
    family (None: unknown), holds its RoPE. Raises ``CheckpointError`` where it cannot."""
    nested = config.get("rope_parameters")
    if not isinstance(nested, Mapping):
        return {}
    known = {field.name for field in fields(arguments)} if arguments else set()
    if "rope_parameters" in known:
        return {}
    if any(isinstance(value, Mapping) for value in nested.values()):
        raise CheckpointError(
            f"the target's rope_parameters differ by layer type, which mlx-lm's {config.get('model_type')} does not "
            "read; a config.json in mlx-lm's own spelling would be right"
        )
    flat: dict[str, Any] = {key: nested[key] for key in _NESTED if nested.get(key) is not None and key not in config}
    kind = nested.get("rope_type", "default")
    if kind != "default" and config.get("rope_scaling") is None:
        flat["rope_scaling"] = {key: value for key, value in nested.items() if key not in _NESTED} | {"type": kind}
    for key, value in flat.items():
        if key not in known and not (key == "partial_rotary_factor" and value == 1):
            raise CheckpointError(
                f"the target's config has {key} {value}, which mlx-lm's {config.get('model_type')} does not read; "
                "this model cannot be served on mlx"
            )
    return flat


def own_rope(config: Mapping[str, Any]) -> RopeConfig | None:
    """The RoPE of a target whose family takes ours; None where mlx-lm's own must do."""
    if config.get("model_type") not in OWN_ROPE:
        return None
    places = (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {})
    stated = any(place.get("rope_theta") is not None for place in places)
    try:
        rope = read_rope(config if stated else {**config, "rope_theta": _DEFAULT_THETA})
    except ConfigError:  # a scaling that the core does not have; mlx-lm may
        return None
    return replace(rope, partial=1.0)  # transformers' models of these families rotate whole heads, whatever it says


def check_served(config: Mapping[str, Any], layers: Sequence[Any]) -> None:
    """Raise ``CheckpointError`` where mlx-lm's ``layers`` compute something else than ``config`` says."""
    family, activation = config.get("model_type"), config.get("hidden_act", "silu")
    if reason := _INCONSISTENT.get(str(family)):
        raise CheckpointError(f"mlx-lm's {family} cannot verify blocks: {reason}")
    if family in OWN_ROPE and activation != "silu":
        raise CheckpointError(f"the target's hidden_act is {activation!r}, and mlx-lm's {family} knows 'silu' only")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    ropes = [getattr(getattr(layer, "self_attn", None), "rope", None) for layer in layers]
    plain = [rope for rope in ropes if isinstance(rope, nn.RoPE) and (kind != "linear" or rope.scale == 1)]
    if kind not in ("default", "mrope") and plain:
        raise CheckpointError(f"the target's RoPE is scaled ({kind}), which mlx-lm's {family} passes over")


def longest_context(config: Mapping[str, Any], layers: int, served: Sequence[int | None]) -> int:
    """How many positions a target of so many ``layers`` serves as its ``config`` says. ``served`` are the windows of
    mlx-lm's caches, layer by layer; where its class has none, the text must end at the window that it does not know
    of. Raises ``CheckpointError`` where it has them in other layers than the config."""
    most: int = next((config[name] for name in _LENGTHS if config.get(name)), 1 << 20)
    stated = _windows(config, layers)
    if stated is None or stated == list(served) or len(served) != layers:  # layers that share caches know what they do
        return most
    if any(served):
        raise CheckpointError(
            f"the target's config has sliding windows in other layers than mlx-lm's {config.get('model_type')}; "
            "this model cannot be served on mlx"
        )
    return min(most, *(window for window in stated if window))


def _windows(config: Mapping[str, Any], count: int) -> list[int | None] | None:
    """The attention window of each layer by transformers' rules; None where the config leaves it to the family."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    optional = str(config.get("model_type")).startswith("qwen")
    if not window or not config.get("use_sliding_window", not optional):
        return [None] * count
    if kinds:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if optional:
        first = config.get("max_window_layers", count)
        return [window if layer >= first else None for layer in range(count)]
    return None if "sliding_window_pattern" in config else [window] * count
