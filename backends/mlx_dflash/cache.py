"""The target's cache: mlx-lm's own, one entry a layer, and the one place that knows how each kind forgets.

Shapes: g key/value heads, S cached tokens, d head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from mlx import nn
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from dflash.errors import RewindError
from dflash.model_folder import spans


class RewindableCache:
    """A model's prompt cache that can forget its newest tokens.

    Raises ``RewindError`` at once for a model with layers that cannot (recurrent states), and names them."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Any] = make_prompt_cache(model)
        stuck: dict[str, list[int]] = defaultdict(list)
        for index, layer in enumerate(self.layers):
            for entry in _entries(layer):
                if not entry.is_trimmable():
                    stuck[type(entry).__name__].append(index)
        if stuck:
            found = "; ".join(f"{kind} in layers {spans(layers)}" for kind, layers in stuck.items())
            raise RewindError(
                f"this target's cache cannot forget rejected tokens: {found}; "
                "a target needs attention layers throughout"
            )

    def rewind(self, count: int) -> None:
        """Forget the newest ``count`` tokens, all of them from the last forward. Raises ``RewindError``."""
        if not count:
            return
        for index, layer in enumerate(self.layers):
            for entry in _entries(layer):
                forgotten = _trim_rotating(entry, count) if isinstance(entry, RotatingKVCache) else entry.trim(count)
                if forgotten != count:
                    raise RewindError(
                        f"the target's layer {index} forgot {forgotten} tokens of {count} ({type(entry).__name__})"
                    )

    def windows(self) -> list[int | None]:
        """The attention window of each layer; None is unlimited."""
        return [layer.max_size if isinstance(layer, RotatingKVCache) else None for layer in self.layers]

    def arrays(self) -> list[Any]:
        """What must be evaluated for the cache to hold its tokens."""
        return [layer.state for layer in self.layers]


def _entries(layer: Any) -> Iterator[Any]:
    if isinstance(layer, CacheList):
        for inner in layer.caches:
            yield from _entries(inner)
    else:
        yield layer


def _trim_rotating(cache: Any, count: int) -> int:
    """Forget the last ``count`` tokens of a rotating cache, also after it has wrapped.

    A forward of several tokens leaves its keys [1, g, S, d] in the order of time, with a whole window before the first
    of them; cutting the newest off leaves every window whole. A single token overwrites its predecessor of a window
    ago, which nothing brings back."""
    rows = 0 if cache.keys is None else cache.keys.shape[2]
    in_order = cache._idx == rows
    if not in_order or count > rows or (cache.offset > rows and rows - count < cache.max_size):
        return 0
    cache.keys, cache.values = cache.keys[..., : rows - count, :], cache.values[..., : rows - count, :]
    cache.offset -= count
    cache._idx -= count
    return count
