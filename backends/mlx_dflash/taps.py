"""Reading one model's hidden states by wrapping some of its parts, instance by instance, and unwrapping them again.

mlx-lm's models keep their decoder layers in a plain list and have no hooks. A wrapper takes a layer's place in that
list, calls it, and keeps what it returned: tap i is the output of decoder layer i before any final norm. No class is
touched, so other models in the process are not either.

Shapes: n tokens, K taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash.errors import BackendError

_LAYERS = ("layers", "h", "blocks")
_EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embed_in", "embeddings")
_HEADS = ("lm_head", "embed_out", "output")


class _Wrapper:
    """Stands in for ``inner``: whatever is not defined here is the inner module's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _TappedLayer(_Wrapper):
    def __init__(self, inner: Any, taps: Taps, index: int) -> None:
        super().__init__(inner)
        self._taps, self._index = taps, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if self._taps.enabled:
            self._taps.seen[self._index] = output[0] if isinstance(output, tuple) else output
        return output


class _Head(_Wrapper):
    """The head, or the embedding that serves as one: only the last row where only that is asked for, because a
    vocabulary's worth of logits for every token of a prompt costs more memory than the prompt."""

    def __init__(self, inner: Any, taps: Taps, tied: bool) -> None:
        super().__init__(inner)
        self._taps, self._tied = taps, tied

    def __call__(self, x: mx.array) -> Any:
        return self.inner(x) if self._tied else self.inner(self._rows(x))

    def as_linear(self, x: mx.array) -> Any:
        return self.inner.as_linear(self._rows(x))

    def _rows(self, x: mx.array) -> mx.array:
        return x[:, -1:] if self._taps.last_only else x


@dataclass(frozen=True)
class Parts:
    """Where a model keeps what is wrapped, and what a drafter borrows: ``embed`` (ids → [..., H]) and ``head``
    ([..., H] → [..., V]), the model's own. ``place`` is parent, name and module of the head."""

    layers: list[Any]
    embed: Any
    head: Any
    place: tuple[Any, str, Any]
    tied: bool

    @property
    def hidden_size(self) -> int:
        """H, also of a quantised embedding, whose 32-bit words hold several numbers."""
        width = int(self.embed.weight.shape[1])
        return width * 32 // self.embed.bits if hasattr(self.embed, "bits") else width

    @property
    def vocab_size(self) -> int:
        """Rows of the head, also of a quantised one."""
        return int(self.place[2].weight.shape[0])


class Taps:
    """Wrappers around the layers ``ids`` and the head of one model; ``take()`` hands out what a forward left."""

    def __init__(self, parts: Parts, ids: Sequence[int]) -> None:
        self.enabled, self.last_only = True, False
        self.seen: dict[int, mx.array] = {}
        self._ids, self._parts = tuple(ids), parts
        for index in ids:
            parts.layers[index] = _TappedLayer(parts.layers[index], self, index)
        parent, name, module = parts.place
        setattr(parent, name, _Head(module, self, parts.tied))

    def take(self) -> mx.array:
        """Features [n, K*H] of the last forward in the order of the ids, then forgotten. Raises ``BackendError``."""
        if missing := [index for index in self._ids if index not in self.seen]:
            raise BackendError(f"the target's forward passed by its layer {missing[0]}; its layers cannot be tapped")
        if odd := [index for index in self._ids if self.seen[index].ndim != 3]:
            raise BackendError(
                f"the target's layer {odd[0]} hands on {list(self.seen[odd[0]].shape)}, not one sequence of states; "
                "its layers cannot be tapped"
            )
        features = mx.concatenate([self.seen[index] for index in self._ids], axis=-1)[0]
        self.seen.clear()
        return features

    def close(self) -> None:
        """Take the wrappers out; the model is as it was. Harmless when it is already."""
        parent, name, module = self._parts.place
        for index in self._ids:
            self._parts.layers[index] = getattr(self._parts.layers[index], "inner", self._parts.layers[index])
        vars(parent).pop(name, None)
        setattr(parent, name, module)
        self.seen.clear()


def parts_of(model: Any) -> Parts:
    """Raises ``BackendError`` where the model has no layers, embedding or head that can be recognised."""
    embedding = _find(model, _EMBEDDINGS, (nn.Embedding, nn.QuantizedEmbedding))
    if embedding is None:
        raise BackendError(f"{type(model).__module__} has no token embedding that can be recognised")
    head = _find(model, _HEADS, (nn.Linear, nn.QuantizedLinear))
    return Parts(
        layers=_decoder_layers(model),
        embed=embedding[2],
        head=head[2] if head else embedding[2].as_linear,
        place=head or embedding,
        tied=head is None,
    )


def _decoder_layers(model: Any) -> list[Any]:
    """The very list that holds the model's decoder layers. Raises ``BackendError`` where there is none."""
    first = model.layers[0] if getattr(model, "layers", None) else None
    for _, module in model.named_modules():
        for name in _LAYERS:
            found = module.get(name)
            if isinstance(found, list) and found and (first is None or found[0] is first):
                return found
    raise BackendError(f"{type(model).__module__} has no list of decoder layers that could be tapped")


def _find(model: Any, names: Sequence[str], kinds: tuple[type, ...]) -> tuple[Any, str, Any] | None:
    """Parent, name and module of the first of ``names``, nearest to the model's root and outside its layers."""
    found = []
    for path, module in model.named_modules():
        *above, name = path.split(".")
        if name in names and isinstance(module, kinds) and not any(part.isdigit() for part in above):
            found.append((len(above), names.index(name), above, name, module))
    if not found:
        return None
    _, _, above, name, module = min(found, key=lambda entry: entry[:2])
    parent = model
    for part in above:
        parent = getattr(parent, part)
    return parent, name, module
