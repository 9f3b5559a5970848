"""The drafter on MLX: the paper's forward (arXiv 2602.06036) over the native weights, its context's keys and values
cached, its products optionally quantised.

Shapes: n tokens, K taps, H hidden size, L draft layers, h heads, g key/value heads, d head size, I intermediate size,
``count`` drafted tokens, B block size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu

from dflash.checkpoint import DraftConfig
from dflash.errors import BackendError
from dflash.types import Proposal, SamplingParams
from mlx_dflash.rope import Rope
from mlx_dflash.sampling import draft_samples

FIRST_CAPACITY = 512
HALF_LARGEST = 256  # of a feature that enters a float16 product
GROUP_SIZES = (64, 32)  # of weights that share a scale, the likeliest first
Mask = mx.array | str | None  # bool [n, S], or what stands for one in MLX's attention


@dataclass(frozen=True)
class Product:
    """``x`` [..., in] times ``weight`` [out, in] transposed, with ``bias`` [out] or none. ``packed`` holds scales and
    biases of a quantised weight, of ``bits`` and ``group_size``."""

    weight: mx.array
    bias: mx.array | None = None
    packed: tuple[mx.array, mx.array] | None = None
    group_size: int = 64
    bits: int = 16

    def __call__(self, x: mx.array) -> mx.array:
        if self.packed is not None:
            out = mx.quantized_matmul(
                x, self.weight, *self.packed, transpose=True, group_size=self.group_size, bits=self.bits
            )
            return out if self.bias is None else out + self.bias
        return x @ self.weight.T if self.bias is None else mx.addmm(self.bias, x, self.weight.T)

    def rows(self, start: int, end: int) -> Product:
        """The same product, for these outputs only; the weights are shared."""
        return Product(
            self.weight[start:end],
            None if self.bias is None else self.bias[start:end],
            None if self.packed is None else (self.packed[0][start:end], self.packed[1][start:end]),
            self.group_size,
            self.bits,
        )

    def quantised(self, bits: int) -> Product:
        """The product with weights of ``bits`` bits. Raises ``BackendError`` where no group size divides its width."""
        width = self.weight.shape[1]
        fitting = [size for size in GROUP_SIZES if width % size == 0]
        if not fitting:
            raise BackendError(
                f"the drafter cannot be quantised: a product is {width} wide and no multiple of {GROUP_SIZES[-1]}; "
                "leave draft_bits out"
            )
        weight, *packed = mx.quantize(self.weight, group_size=fitting[0], bits=bits)
        return Product(weight, self.bias, (packed[0], packed[1]), fitting[0], bits)

    def arrays(self) -> list[Any]:
        return [part for part in (self.weight, self.bias, self.packed) if part is not None]


@dataclass(frozen=True)
class Layer:
    """One draft layer. ``kv`` are rows of the product that serves all layers' contexts; gate and up are one."""

    input_norm: mx.array
    q: Product
    kv: Product
    q_norm: mx.array
    k_norm: mx.array
    output: Product
    post_norm: mx.array
    gate_up: Product
    down: Product


class MlxDrafter:
    """Implements ``dflash.interfaces.Drafter``. ``weights`` have the native names; ``embed`` (ids → [..., H]) and
    ``head`` ([..., H] → [..., V]) are the target's. ``bits`` 4 or 8 quantises the products."""

    def __init__(
        self, config: DraftConfig, weights: dict[str, mx.array], embed: Any, head: Any, *, bits: int | None = None
    ) -> None:
        self.config, self._embed, self._head = config, embed, head
        self.dtype = weights["norm.weight"].dtype
        self.rope = Rope(config.rope, config.head_dim)
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._windows = config.windows()

        def product(*names: str) -> Product:
            return _product(weights, names, bits)

        layers = [f"layers.{index}." for index in range(config.num_hidden_layers)]
        self._fc = product("fc")
        self._kv = product(*(f"{name}self_attn.{letter}_proj" for name in layers for letter in "kv"))
        size = 2 * self._groups * config.head_dim
        self.layers = [
            Layer(
                input_norm=weights[name + "input_layernorm.weight"],
                q=product(name + "self_attn.q_proj"),
                kv=self._kv.rows(index * size, (index + 1) * size),
                q_norm=weights[name + "self_attn.q_norm.weight"],
                k_norm=weights[name + "self_attn.k_norm.weight"],
                output=product(name + "self_attn.o_proj"),
                post_norm=weights[name + "post_attention_layernorm.weight"],
                gate_up=product(name + "mlp.gate_proj", name + "mlp.up_proj"),
                down=product(name + "mlp.down_proj"),
            )
            for index, name in enumerate(layers)
        ]
        self._context_norm, self._norm = weights["hidden_norm.weight"], weights["norm.weight"]
        mx.eval([self._fc.arrays(), self._kv.arrays(), *(_arrays(layer) for layer in self.layers)])
        self.length = 0
        self._cache: list[tuple[mx.array, mx.array]] = []

    def projection(self, features: mx.array) -> mx.array:
        """The conditioning projection: features [n, K*H] → context [n, H]."""
        if self.dtype == mx.float16:
            features = scaled_for_half(features)
        return self._rms(self._fc(features.astype(self.dtype)), self._context_norm)

    def observe(self, features: mx.array, token_count: int) -> None:
        """Project the first ``token_count`` rows of ``features`` [n, K*H] and cache their keys and values, for every
        layer from one product. It runs while the host goes on."""
        end = self.length + token_count
        self._make_room(end)
        both = self._kv(self.projection(features[:token_count]))
        both = both.reshape(token_count, len(self.layers), 2, self._groups, -1).transpose(1, 2, 3, 0, 4)
        for index, layer in enumerate(self.layers):
            self._write(index, self._keys(layer, both[index, 0]), both[index, 1], end)
        self.length = end
        mx.async_eval(self._cache)

    def layer_states(self, anchor: int, count: int) -> list[mx.array]:
        """Hidden states [1 + count, H] of a block after ``anchor``, behind each draft layer."""
        return self._pass(anchor, count, self._attend)

    def attention(self, anchor: int, count: int) -> list[mx.array]:
        """Attention weights [1 + count, length + 1 + count] of a block after ``anchor``, float32, of each draft layer:
        over the context and then the block itself, averaged over the heads."""
        seen: list[mx.array] = []

        def attend(q: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
            weights = attention_weights(q, keys, mask)
            unseen = self.length + 1 + count - keys.shape[2]  # positions before the first that any slot sees
            seen.append(mx.pad(weights, [(0, 0), (unseen, 0)]))
            return self._attend(q, keys, values, mask)

        self._pass(anchor, count, attend)
        return seen

    def _attend(self, q: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.config.head_dim**-0.5, mask=mask)

    def _pass(
        self, anchor: int, count: int, attend: Callable[[mx.array, mx.array, mx.array, Mask], mx.array]
    ) -> list[mx.array]:
        """A block after ``anchor`` through all layers: the hidden states [1 + count, H] behind each."""
        rows, end = 1 + count, self.length + 1 + count
        self._make_room(end)
        x = self._embed(mx.array([anchor] + [self.config.mask_token_id] * count)).astype(self.dtype)
        masks: dict[tuple[bool, int | None], tuple[int, Mask]] = {}
        states = []
        for index, layer in enumerate(self.layers):
            kind = self.config.causal[index], self._windows[index]
            if kind not in masks:
                masks[kind] = attention_mask(*kind, self.length, end)
            first, mask = masks[kind]
            normed = self._rms(x, layer.input_norm)
            q = layer.q(normed).reshape(rows, self._heads, -1).transpose(1, 0, 2)
            kv = layer.kv(normed).reshape(rows, 2, self._groups, -1).transpose(1, 2, 0, 3)
            self._write(index, self._keys(layer, kv[0]), kv[1], end)
            keys, values = self._cache[index]
            q = self.rope(self._rms(q, layer.q_norm)[None], offset=self.length)
            attended = attend(q, keys[..., first:end, :], values[..., first:end, :], mask)
            x = x + layer.output(attended[0].transpose(1, 0, 2).reshape(rows, -1))
            gate, up = mx.split(layer.gate_up(self._rms(x, layer.post_norm)), 2, axis=-1)
            x = x + layer.down(swiglu(gate, up))
            states.append(x)
        return states

    def logits(self, anchor: int, count: int) -> mx.array:
        """Draft logits [count, V] of the slots after ``anchor``; slot 0 predicts nothing."""
        return self._head(self._rms(self.layer_states(anchor, count)[-1][1:], self._norm))

    def propose(
        self,
        anchor: int,
        count: int,
        sampling: SamplingParams,
        *,
        detail: bool = False,
        uniforms: np.ndarray | None = None,
    ) -> Proposal:
        """The likeliest token of each slot, or its sample by ``uniforms``. It runs while the host builds the target's
        pass over them."""
        logits, q, probs = self.logits(anchor, count), None, None
        if uniforms is None:
            tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        else:
            tokens, q = draft_samples(logits, sampling, mx.array(uniforms, dtype=mx.float32))
        block = mx.concatenate([mx.array([anchor], dtype=mx.int32), tokens])
        if detail:
            chances = mx.softmax(logits.astype(mx.float32), axis=-1) if q is None else q
            probs = mx.take_along_axis(chances, tokens[:, None], axis=-1)[:, 0]
        mx.async_eval([one for one in (block, q, probs) if one is not None])
        return Proposal(tokens, block, count, probs, q)

    def reset(self) -> None:
        self.length, self._cache = 0, []

    def _keys(self, layer: Layer, keys: mx.array) -> mx.array:
        """Keys [g, n, d] normed and rotated at the positions from the context's end on."""
        return self.rope(self._rms(keys, layer.k_norm)[None], offset=self.length)[0]

    def _write(self, index: int, keys: mx.array, values: mx.array, end: int) -> None:
        for cache, new in zip(self._cache[index], (keys, values), strict=True):
            cache[:, :, self.length : end] = new

    def _make_room(self, end: int) -> None:
        """Grow each layer's keys and values [1, g, capacity, d]; what is in them stays."""
        held = self._cache[0][0].shape[2] if self._cache else 0
        if end <= held:
            return
        more = mx.zeros((1, self._groups, max(end, FIRST_CAPACITY), self.config.head_dim), self.dtype)
        if not self._cache:
            self._cache = [(mx.array(more), mx.array(more)) for _ in self.layers]
            return
        self._cache = [
            (mx.concatenate([keys, more], axis=2), mx.concatenate([values, more], axis=2))
            for keys, values in self._cache
        ]

    def _rms(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self.config.rms_norm_eps)


def attention_mask(causal: bool, window: int | None, start: int, end: int) -> tuple[int, Mask]:
    """What a block at positions start … end−1 may see of the positions up to ``end``: the first position that any slot
    sees, and from there on a mask, bool [end − start, end − first], or what stands for one in MLX's attention."""
    if window is None:
        return 0, "causal" if causal else None
    first = max(0, start - window + 1)
    distance = mx.arange(start, end)[:, None] - mx.arange(first, end)
    sees = mx.abs(distance) < window
    return first, sees & (distance >= 0) if causal else sees


def attention_weights(q: mx.array, keys: mx.array, mask: Mask) -> mx.array:
    """The weights [n, S] by which MLX's attention of ``q`` [1, h, n, d] over ``keys`` [1, g, S, d] mixes values,
    averaged over the heads; float32, also where products are in 16 bits."""
    (_, heads, rows, size), (_, groups, total, _) = q.shape, keys.shape
    grouped = q.astype(mx.float32).reshape(groups, heads // groups, rows, size)
    scores = grouped @ keys.astype(mx.float32)[0][:, None].swapaxes(-1, -2) * size**-0.5  # [g, h/g, n, S]
    if isinstance(mask, str):  # "causal": the last rows of a square mask
        mask = mx.arange(total - rows, total)[:, None] >= mx.arange(total)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    return mx.softmax(scores, axis=-1).mean((0, 1))


def scaled_for_half(features: mx.array) -> mx.array:
    """Rows of ``features`` [n, K*H] scaled down to where no float16 product overflows at 65,504: some targets' residual
    streams come near it. The projection's norm takes the scale out again."""
    wide = features.astype(mx.float32)
    return wide / mx.maximum(mx.abs(wide).max(-1, keepdims=True) / HALF_LARGEST, 1)


def _product(weights: dict[str, mx.array], names: Sequence[str], bits: int | None) -> Product:
    """One product of several, their outputs one after the other."""
    weight = mx.concatenate([weights[f"{name}.weight"] for name in names])
    biased = f"{names[0]}.bias" in weights
    made = Product(weight, mx.concatenate([weights[f"{name}.bias"] for name in names]) if biased else None)
    return made if bits is None else made.quantised(bits)


def _arrays(layer: Layer) -> list[Any]:
    return [part.arrays() if isinstance(part, Product) else part for part in vars(layer).values()]
