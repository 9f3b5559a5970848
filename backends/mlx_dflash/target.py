"""Any mlx-lm model as a target: hidden states through wrapped layers, mlx-lm's own caches rewound in one place.

Shapes: n tokens in a pass, V vocabulary, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from dflash.checkpoint import CONFIG_FILE, read_header, read_json, weight_files
from dflash.errors import BackendError, CheckpointError, DFlashError
from dflash.model_folder import read_target_config, stop_token_ids
from dflash.targets import check_dtype, check_layer_ids, leading, refuse_tree
from dflash.types import TargetInfo, TargetOutput
from mlx_dflash.cache import RewindableCache
from mlx_dflash.rope import Rope
from mlx_dflash.taps import Parts, Taps, parts_of
from mlx_dflash.target_config import check_served, flat_rope, longest_context, own_rope

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class MlxTarget:
    """Implements ``dflash.interfaces.Target``. Forwards are put off: they run when a verdict, or a drafter's context,
    is evaluated."""

    def __init__(self, model: Any, parts: Parts, layer_ids: Sequence[int], info: TargetInfo) -> None:
        self.model, self.info = model, info
        self.embed, self.head, self.float_type = parts.embed, parts.head, _float_type(model)
        check_layer_ids(layer_ids, info.num_layers)
        self.length = self._last = 0
        self.cache = RewindableCache(model)  # raises for a model that cannot be served, before it is wrapped
        self.taps = Taps(parts, layer_ids)

    @property
    def tapping(self) -> bool:
        return self.taps.enabled

    @tapping.setter
    def tapping(self, on: bool) -> None:
        self.taps.enabled = on

    def forward(
        self, tokens: mx.array | Sequence[int], *, parents: Sequence[int] | None = None, last_only: bool = False
    ) -> TargetOutput:
        refuse_tree(parents)
        assert not self._last, "keep() must follow every forward()"
        ids = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))
        self._last, self.taps.last_only = len(ids), last_only
        logits = self.model(ids[None], cache=self.cache.layers)[0]
        features = self.taps.take() if self.tapping else None
        if last_only:  # a chunk of a prompt: let its memory go before the next one is built
            mx.eval(self.cache.arrays(), [] if features is None else features)
            mx.clear_cache()
        return TargetOutput(logits, features)

    def keep(self, path: Sequence[int]) -> None:
        kept = leading(path, self._last)
        self.cache.rewind(self._last - kept)
        self.length += kept
        self._last = 0

    def reset(self) -> None:
        self.cache = RewindableCache(self.model)
        self.length = self._last = 0

    def close(self) -> None:
        """Unwrap the model's layers and head."""
        self.taps.close()


def load_target(folder: Path, *, device: str, dtype: str, layer_ids: Sequence[int]) -> MlxTarget:
    """An mlx-lm model from a local folder, as a target. ``dtype`` ``auto`` is float32 on a CPU, else what is stored.

    Raises ``BackendError`` for a device or dtype that is not there, ``CheckpointError`` where mlx-lm cannot read the
    folder, ``RewindError`` where its cache cannot forget."""
    where = choose_device(device)
    check_dtype(dtype, DTYPES)
    wanted = DTYPES.get(dtype) or (mx.float32 if where == "cpu" else None)
    config = read_target_config(folder)
    changes = _readable(folder, config)
    try:
        model: Any = load_model(folder, lazy=True, model_config=changes, get_model_classes=_classes)[0]
        parts = parts_of(model)
        _replace_rope(parts, config)
        check_served(config, parts.layers)
        if wanted is not None:
            model.set_dtype(wanted)
        mx.eval(model.parameters())
    except DFlashError:
        raise
    except Exception as error:  # mlx-lm raises many kinds; each is about this folder
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"the target in {folder} cannot be loaded: {reason[:300]}") from error
    if wanted == mx.float16:
        refuse_overflow(_weights(model), f"the target in {folder}")
    _wire_memory()
    return MlxTarget(model, parts, layer_ids, _info(model, parts, folder, config, where))


def _readable(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What to change in the folder's config so that mlx-lm reads all of it. Raises ``CheckpointError``."""
    raw = read_json(folder / CONFIG_FILE)
    kind, text = raw.get("model_type"), raw.get("text_config")
    try:
        _, arguments = _classes(raw | {"model_type": kind})
    except (ValueError, SystemExit):  # a class whose own package is missing ends the process
        raise CheckpointError(
            f"mlx-lm {version('mlx-lm')} does not know the model_type {kind!r} of {folder}; "
            "a newer mlx-lm or the torch backend may"
        ) from None
    if isinstance(text, dict):
        try:
            _, arguments = _classes(text | {"model_type": text.get("model_type")})
        except ValueError:  # a language model that is only known inside of its whole
            arguments = None
    changes = flat_rope(config, arguments)
    names = {name for file in weight_files(folder) for name in read_header(file)}
    if "tie_word_embeddings" not in config and any(name.endswith("lm_head.weight") for name in names):
        changes["tie_word_embeddings"] = False  # mlx-lm's classes would drop the head
    return {"text_config": text | changes} if changes and isinstance(text, dict) else changes


def _classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """mlx-lm's model and argument classes; the model's of Qwen3, which has no place for attention biases, with those
    where the config asks for them."""
    model_class, arguments = _get_classes(config=config)
    if config.get("model_type") not in ("qwen3", "qwen3_moe") or not config.get("attention_bias"):
        return model_class, arguments

    def build(values: Any) -> Any:
        model = model_class(values)
        for layer in model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                outputs, inputs = layer.self_attn[name].weight.shape
                layer.self_attn[name] = nn.Linear(inputs, outputs, bias=True)
        return model

    return build, arguments


def choose_device(device: str) -> str:
    """Make ``device`` MLX's own and return its name; ``auto``: the GPU where there is one. Raises ``BackendError``."""
    known = {"cpu": mx.cpu, "gpu": mx.gpu}
    if device not in (*known, "auto"):
        raise BackendError(f"device is {device!r}; mlx has auto, {', '.join(known)}")
    if device != "auto":
        try:
            mx.set_default_device(known[device])
        except ValueError as error:
            raise BackendError(f"device {device!r} cannot be used here: {error}") from None
    return "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"


def _replace_rope(parts: Parts, config: dict[str, Any]) -> None:
    if (rope := own_rope(config)) is None:
        return
    own = Rope(rope, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    for layer in parts.layers:
        layer.self_attn.rope = own


def refuse_overflow(weights: Iterable[tuple[str, mx.array]], whose: str) -> None:
    """Raise ``CheckpointError`` where a weight was too large for the float type that it was cast to."""
    for name, weight in weights:
        if mx.issubdtype(weight.dtype, mx.floating) and not mx.isfinite(weight).all().item():
            raise CheckpointError(f"{name} of {whose} overflows in float16; use bfloat16 or float32")


def _wire_memory() -> None:
    """Let Metal keep as much memory resident as it recommends, as mlx-lm does while it generates; otherwise weights are
    paged out between rounds. Elsewhere there is no such limit."""
    if most := mx.device_info().get("max_recommended_working_set_size"):
        mx.set_wired_limit(int(most))


def _info(model: Any, parts: Parts, folder: Path, config: dict[str, Any], device: str) -> TargetInfo:
    bits = (config.get("quantization") or config.get("quantization_config") or {}).get("bits")
    float_type = str(_float_type(model)).removeprefix("mlx.core.")
    return TargetInfo(
        num_layers=len(parts.layers),
        hidden_size=parts.hidden_size,
        vocab_size=parts.vocab_size,
        max_positions=longest_context(config, len(parts.layers), RewindableCache(model).windows()),
        stop_token_ids=stop_token_ids(folder),
        dtype=f"{bits}-bit {float_type}" if bits else float_type,
        device=device,
        model_type=config.get("model_type", ""),
    )


def _float_type(model: Any) -> mx.Dtype:
    """The type that the model computes in: that of its norms and biases, which no quantisation touches, or where there
    are none of its first weight in floating point."""
    floats = [weight for _, weight in _weights(model) if weight.ndim and mx.issubdtype(weight.dtype, mx.floating)]
    return min(floats, key=lambda weight: weight.ndim).dtype


def _weights(model: Any) -> list[tuple[str, mx.array]]:
    named: Any = tree_flatten(model.parameters())
    return list(named)
