"""The native target: a dense decoder of the Llama, Qwen2 and Qwen3 families with a cache whose rewind is an integer.

It computes what transformers' own model computes, from the same weights (its fused products share their memory), with
less in between (``stack``), and it can verify a tree. ``reason_against`` says why a model cannot be served this way.

Shapes: n tokens in a pass, H hidden size, K taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.errors import BackendError, ConfigError
from dflash.rope import RopeConfig
from dflash.targets import leading
from dflash.types import TargetOutput
from torch_dflash.rotary import Rotary
from torch_dflash.stack import LayerWeights, Sight, StackSize, Tree, rms_norm
from torch_dflash.stacks import make_head, make_stack
from torch_dflash.target import target_info

FAMILIES = ("llama", "qwen2", "qwen3")


def reason_against(model: Any) -> str | None:
    """Why ``model`` needs transformers' own forward; None where the native one computes the same."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"model_type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some of its layers have sliding attention"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1:
        return "its config has a partial rotary factor"
    try:
        _rope(config)
    except ConfigError as error:
        return str(error)
    if any(type(module) is not nn.Linear for name, module in model.named_modules() if name.endswith("_proj")):
        return "its projections are quantised or wrapped"
    return None


class NativeTarget:
    """Implements ``dflash.interfaces.Target``. Raises ``BackendError`` where ``reason_against`` has one."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        if reason := reason_against(model):
            raise BackendError(f"this target cannot be served natively: {reason}")
        config: Any = self.model.config
        self.info = target_info(self.model, layer_ids)
        self.layer_ids, self.tapping = tuple(layer_ids), True
        heads: int = config.num_attention_heads
        size = StackSize(
            heads=heads,
            groups=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            eps=config.rms_norm_eps,
        )
        decoder = self.model.get_decoder()
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.head: Tensor = self.model.get_output_embeddings().weight
        self._to_logits = make_head(self.head, self.model.get_output_embeddings().bias)
        self.norm: Tensor = decoder.norm.weight
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        layers = [LayerWeights.of(layer) for layer in decoder.layers]
        self.stack = make_stack(
            layers, size, [Sight()] * len(layers), Rotary(_rope(config), size.head_dim, self.device)
        )
        self.length = self._last = 0
        self._tree: Tree | None = None

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor | Sequence[int], *, parents: Sequence[int] | None = None, last_only: bool = False
    ) -> TargetOutput:
        """As in ``dflash.interfaces.Target``. ``parents`` [n]: for each token the index of an earlier one, −1 for a
        token that continues the cache."""
        assert not self._last, "keep() must follow every forward()"
        ids = torch.as_tensor(tokens, device=self.device)
        self._tree = None if parents is None else Tree(parents, len(ids), self.device)
        end, layers = self.length + len(ids), self.info.num_layers
        self.stack.cache.room(end, self.length, max(self.info.max_positions, end))
        wanted = {layers - 1, *(self.layer_ids if self.tapping else ())}
        kind, after = ("forward", last_only), partial(self._outputs, last_only)
        logits, *features = self.stack.through(kind, ids, self.length, wanted, self._embed, after, self._tree)
        self._last = len(ids)
        return TargetOutput(logits, features[0] if self.tapping else None)

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def _outputs(self, last_only: bool, states: dict[int, Tensor]) -> tuple[Tensor, ...]:
        """Logits and, where the tapped layers' states are there for them, features."""
        last = states[self.info.num_layers - 1]
        logits = self._to_logits(rms_norm(last[-1:] if last_only else last, self.norm, self.stack.size.eps))
        tapped = [states[index] for index in self.layer_ids if index in states]
        return (logits, torch.cat(tapped, dim=-1)) if len(tapped) == len(self.layer_ids) else (logits,)

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        """As in ``dflash.interfaces.Target``; of a tree, a path from its root down. Raises ``BackendError``."""
        kept = leading(path, self._last) if self._tree is None else self._tree.check_path(path)
        if self._tree is not None and list(path) != list(range(kept)):
            self.stack.cache.move(self.length, torch.tensor(path, device=self.device))
        self.length += kept
        self._last, self._tree = 0, None

    def reset(self) -> None:
        self.length = self._last = 0
        self._tree = None

    def close(self) -> None:
        """Nothing was changed in the model but where its weights lie."""


def _rope(config: Any) -> RopeConfig:
    numbers = dict(config.rope_parameters or {})
    theta, kind = numbers.pop("rope_theta", 10_000.0), numbers.pop("rope_type", "default")
    numbers.pop("partial_rotary_factor", None)
    scaling = tuple(sorted((key, value) for key, value in numbers.items() if value is not None))
    return RopeConfig(float(theta), kind, 1.0, scaling, config.max_position_embeddings)
