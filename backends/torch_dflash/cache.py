"""The target's cache: one place that knows how transformers' caches grow and how they forget."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import transformers
from torch import nn
from transformers import DynamicCache

from dflash.errors import RewindError


def cache_argument(model: nn.Module) -> str:
    """What ``model.forward`` calls its cache: ``cache`` in newer transformers, ``past_key_values`` before."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


class RewindableCache:
    """A ``DynamicCache`` that can forget its newest tokens, asserted each time.

    Raises ``RewindError`` at once for a model whose layers cannot forget (recurrent states)."""

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.inner = DynamicCache(config=config)
        kinds = {type(layer).__name__ for layer in self.inner.layers}
        if fixed := sorted(kind for kind in kinds if "Linear" in kind or "Quantized" in kind):
            raise RewindError(
                f"{type(model).__name__} keeps {', '.join(fixed)} states, which cannot forget rejected tokens; "
                "targets need attention layers throughout"
            )
        if hasattr(self.inner, "activate_past_recording"):  # sliding layers then keep a margin until they are cropped
            self.inner.activate_past_recording()
        elif any(getattr(layer, "is_sliding", False) for layer in self.inner.layers):
            raise RewindError(
                f"{type(model).__name__} has sliding-window layers, whose caches transformers "
                f"{transformers.__version__} cannot rewind; newer ones (5.15 is enough) can"
            )

    @property
    def length(self) -> int:
        return int(self.inner.get_seq_length())

    def rewind(self, count: int) -> None:
        """Forget the newest ``count`` tokens. Also called with 0: sliding layers drop their margin then.

        ``Cache.crop`` has meant "to this length" and "this many fewer"; a negative count is the latter in every
        release, 0 is not, and the length is checked all the same."""
        before = self.length
        if before == 0 or (count == 0 and not zero_removes_nothing()):
            return
        try:
            self.inner.crop(-count)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise RewindError(f"the target's cache cannot forget {count} tokens: {error}") from error
        if self.length != before - count:
            raise RewindError(f"the target's cache holds {self.length} tokens after forgetting {count} of {before}")


@functools.cache
def zero_removes_nothing() -> bool:
    """Whether ``crop(0)`` keeps everything in the installed transformers; before 5.15 or so it kept nothing."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), 0)
    cache.crop(0)
    return int(cache.get_seq_length()) == 2
