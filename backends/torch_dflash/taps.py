"""Reading a target's hidden states through hooks, only of the tapped layers, without touching its classes.

Tap i is the output of decoder layer i before any final norm. Shapes: b sequences, n tokens, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import BackendError


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers of a transformers causal LM; ``BackendError`` where none can be recognised."""
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", None)  # type: ignore[operator, union-attr]
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted and name.split(".")[-1] in ("layers", "h"):
            return module
    raise BackendError(f"{type(model).__name__} has no list of {wanted} decoder layers that could be tapped")


class Taps:
    """Hooks on the layers ``ids`` of one model instance; ``take()`` hands out what the last forward left."""

    def __init__(self, model: nn.Module, ids: Sequence[int]) -> None:
        layers = decoder_layers(model)
        self.enabled = True
        self._seen: dict[int, Tensor] = {}
        self._ids = tuple(ids)
        self._hooks = [layers[index].register_forward_hook(self._hook(index)) for index in ids]

    def _hook(self, index: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if self.enabled:
                self._seen[index] = output[0] if isinstance(output, tuple) else output

        return keep

    def take(self) -> Tensor | None:
        """Features [b, n, K*H] in the order of the ids, then forgotten; None while disabled."""
        if not self.enabled or not self._seen:
            self._seen.clear()  # an interrupted forward may have left something
            return None
        features = torch.cat([self._seen[index] for index in self._ids], dim=-1)
        self._seen.clear()
        return features

    def close(self) -> None:
        """Remove the hooks; the model is as it was."""
        for hook in self._hooks:
            hook.remove()
        self._seen.clear()
