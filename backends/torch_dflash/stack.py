"""A stack of decoder layers over a preallocated cache: what a target and a drafter of the Llama, Qwen2 and Qwen3 kind
have in common. Here in plain PyTorch; ``cpu_stack`` and ``cuda_stack`` compute the same faster.

Shapes: n new rows in a pass, S rows in the cache before them, L layers, H hidden size, h heads, g key/value heads, d
head size, I intermediate size, C the cache's capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.errors import BackendError
from torch_dflash.products import product
from torch_dflash.rotary import Rotary, rotate

FIRST_CAPACITY = 512


@dataclass(frozen=True)
class LayerWeights:
    """One layer's: queries, keys and values in one product [(h+2g)*d, H], gate and up in another [2*I, H]. Biases and
    the norms of queries and keys are None where a layer has none."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, layer: Any) -> LayerWeights:
        """Those of a transformers decoder layer, or of a draft layer. Its modules keep views of what is fused, so that
        nothing is in memory twice."""
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up, gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
        return cls(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=qkv,
            qkv_bias=qkv_bias,
            q_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
            k_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
            output=attention.o_proj.weight.detach(),
            output_bias=_detached(attention.o_proj.bias),
            post_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=mlp.down_proj.weight.detach(),
            down_bias=_detached(mlp.down_proj.bias),
        )


def _fuse(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The parts' weights, one above the other, and their biases."""
    weight = torch.cat([part.weight.detach() for part in parts])
    start = 0
    for part in parts:
        part.weight.data = weight[start : start + part.out_features]
        start += part.out_features
    if parts[0].bias is None:
        return weight, None
    return weight, torch.cat([part.bias.detach() for part in parts])


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


@dataclass(frozen=True)
class StackSize:
    """What every layer of a stack has in common."""

    heads: int
    groups: int
    head_dim: int
    eps: float


@dataclass(frozen=True)
class Sight:
    """What the rows of a pass see in one layer, next to everything before them: of each other all (both ways) or only
    earlier ones (``causal``), and nothing that is ``window`` or more positions away."""

    causal: bool = True
    window: int | None = None

    def mask(self, rows: int, end: int, device: torch.device) -> Tensor | None:
        """Bool [rows, end] for the last ``rows`` of ``end`` positions; None for everything."""
        if self.window is None and (rows == 1 or not self.causal):
            return None
        queries = torch.arange(end - rows, end, device=device)[:, None]
        keys = torch.arange(end, device=device)
        sees = keys <= queries if self.causal else torch.ones(rows, end, dtype=torch.bool, device=device)
        return sees if self.window is None else sees & ((queries - keys).abs() < self.window)


class Tree:
    """Rows of a pass that are a tree of candidates: each sees what is before the pass, its ancestors and itself.

    ``parents`` [n] holds for each row the index of an earlier one, −1 for a row that continues the cache. ``depth``
    [n]: a row is at position start + depth; ``ancestors`` bool [n, n]. Raises ``BackendError`` for other parents."""

    def __init__(self, parents: Sequence[int], rows: int, device: torch.device) -> None:
        if len(parents) != rows:
            raise BackendError(f"the tree has {rows} rows and {len(parents)} parents; each row has one")
        depths: list[int] = []
        kin = torch.eye(rows, dtype=torch.bool)
        for row, parent in enumerate(parents):
            if not -1 <= parent < row:
                raise BackendError(f"row {row} of the tree has parent {parent}; it must be -1 or an earlier row")
            depths.append(0 if parent < 0 else depths[parent] + 1)
            if parent >= 0:
                kin[row] |= kin[parent]
        self.parents = tuple(parents)
        self.depth = torch.tensor(depths, device=device)
        self.ancestors = kin.to(device)

    def check_path(self, path: Sequence[int]) -> int:
        """How many rows ``path`` has; ``BackendError`` where they do not lead from a root down, each the parent of the
        next."""
        for row, parent in zip(path, (-1, *path), strict=False):
            if not 0 <= row < len(self.parents) or self.parents[row] != parent:
                raise BackendError(f"{list(path)} is no path of the tree: row {row} does not follow {parent}")
        return len(path)

    def mask(self, window: int | None, start: int) -> Tensor:
        """Bool [n, start + n]."""
        depth, device = self.depth, self.depth.device
        before = torch.ones(len(depth), start, dtype=torch.bool, device=device)
        within = self.ancestors
        if window is not None:
            before &= start + depth[:, None] - torch.arange(start, device=device) < window
            within = within & (depth[:, None] - depth < window)
        return torch.cat((before, within), dim=1)


class PackedSights:
    """What the rows of a pass see of each other in each kind of layer, as kernels take it: bit m of an int64 says that
    row m is seen. ``kinds``: the W different sights of a stack."""

    def __init__(self, sights: Sequence[Sight], device: torch.device) -> None:
        self.kinds, self._device = list(dict.fromkeys(sights)), device
        self._chains: dict[int, Tensor] = {}

    def chain(self, rows: int) -> Tensor:
        """Bits [W, n] of rows in a row."""
        if rows not in self._chains:
            masks = [kind.mask(rows, rows, self._device) for kind in self.kinds]
            every = torch.ones(rows, rows, dtype=torch.bool, device=self._device)
            self._chains[rows] = torch.stack([packed(every if mask is None else mask) for mask in masks])
        return self._chains[rows]

    def tree(self, tree: Tree) -> Tensor:
        """Bits [W, n] of a tree's rows."""
        return torch.stack([packed(tree.mask(kind.window, 0)) for kind in self.kinds])


def packed(sees: Tensor) -> Tensor:
    """Bool [n, m ≤ 64] as bits, int64 [n]: the first column in the lowest."""
    return (sees.long() << torch.arange(sees.shape[1], device=sees.device)).sum(-1)


class KeyValues:
    """Keys and values of all layers, [L, 2, g, C, d]: what is beyond a length is free to be written over."""

    def __init__(self, layers: int, size: StackSize, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._options = (layers, 2, size.groups), {"device": device, "dtype": dtype}
        self._head_dim = size.head_dim
        self.tensor = self._empty(FIRST_CAPACITY)

    def _empty(self, capacity: int) -> Tensor:
        return torch.empty(*self._shape, capacity, self._head_dim, **self._options)  # type: ignore[call-overload]

    @property
    def capacity(self) -> int:
        return self.tensor.shape[-2]

    def room(self, end: int, held: int, most: int | None = None) -> None:
        """Make room for ``end`` positions, of which the first ``held`` stay what they are; it grows by doubling, up to
        ``most``."""
        if end <= self.capacity:
            return
        grown = self._empty(max(end, 2 * end if most is None else min(2 * end, most)))
        grown[..., :held, :] = self.tensor[..., :held, :]
        self.tensor = grown

    def move(self, start: int, path: Tensor) -> None:
        """Rows start + path [m] to start … start + m − 1, for a path that ascends."""
        self.tensor[..., start : start + len(path), :] = self.tensor[..., start + path, :]


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Queries [h, n, d], keys and values [g, S+n, d], and the mask [n, S+n] or None: to what is attended, [h, n, d]."""


class Stack(Protocol):
    """Layers and their cache."""

    cache: KeyValues

    def run(self, x: Tensor, start: int, wanted: Collection[int], tree: Tree | None = None) -> dict[int, Tensor]:
        """``x`` [n, H] at positions start … start + n − 1 (in a tree, at its depths) through all layers: the states
        [n, H] behind the ``wanted`` ones. The rows' keys and values are left in the cache at start; the caller has
        made room."""
        ...


class PlainStack:
    """Implements ``Stack`` in PyTorch's own operations, for any device and float type."""

    def __init__(
        self, layers: Sequence[LayerWeights], size: StackSize, sights: Sequence[Sight], rotary: Rotary
    ) -> None:
        self.layers, self.size, self.sights, self.rotary = list(layers), size, list(sights), rotary
        weight = self.layers[0].qkv
        self.cache = KeyValues(len(self.layers), size, weight.device, weight.dtype)

    def run(
        self, x: Tensor, start: int, wanted: Collection[int], tree: Tree | None = None, attend: Attend | None = None
    ) -> dict[int, Tensor]:
        """As in ``Stack``; ``attend`` takes the place of attention."""
        rows, end = len(x), start + len(x)
        tables = self.tables(start, rows, tree)
        masks: dict[Sight, Tensor | None] = {}
        states: dict[int, Tensor] = {}
        for index, (layer, sight) in enumerate(zip(self.layers, self.sights, strict=True)):
            if sight not in masks:
                masks[sight] = tree.mask(sight.window, start) if tree else sight.mask(rows, end, x.device)
            x = self._layer(layer, self.cache.tensor[index], x, start, tables, masks[sight], attend or attention)
            if index in wanted:
                states[index] = x
        return states

    def through(
        self, kind: Hashable, ids: Tensor, start: int, wanted: Collection[int], before: Callable[[Tensor], Tensor],
        after: Callable[[dict[int, Tensor]], tuple[Tensor, ...]], tree: Tree | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """``after`` the states that ``run`` finds for what is ``before`` them: ids [n] to results. ``kind`` stands for
        ``before`` and ``after``: a stack may keep what it does for one under it."""
        return after(self.run(before(ids), start, wanted, tree))

    def tables(self, start: int, rows: int, tree: Tree | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, r/2] of the rows' positions."""
        if tree is None:
            return self.rotary.range(start, start + rows)
        return self.rotary.at(start + tree.depth, start + rows)

    def _layer(
        self, layer: LayerWeights, cache: Tensor, x: Tensor, start: int, tables: tuple[Tensor, Tensor],
        mask: Tensor | None, attend: Attend,
    ) -> Tensor:  # fmt: skip
        rows, end = len(x), start + len(x)
        heads, groups, d, eps = self.size.heads, self.size.groups, self.size.head_dim, self.size.eps
        mixed = product(rms_norm(x, layer.input_norm, eps), layer.qkv, layer.qkv_bias).view(rows, heads + 2 * groups, d)
        queries_keys, values = mixed[:, : heads + groups], mixed[:, heads + groups :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(queries_keys[:, :heads], layer.q_norm, eps)
            queries_keys = torch.cat((q, rms_norm(queries_keys[:, heads:], layer.k_norm, eps)), dim=1)
        turned = rotate(queries_keys.transpose(0, 1), *tables)  # [h + g, n, d]
        cache[0, :, start:end] = turned[heads:]
        cache[1, :, start:end] = values.transpose(0, 1)
        attended = attend(turned[:heads], cache[0, :, :end], cache[1, :, :end], mask)
        attended = attended.transpose(0, 1).reshape(rows, heads * d)
        x = x + product(attended, layer.output, layer.output_bias)
        normed = rms_norm(x, layer.post_norm, eps)
        gate, up = product(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return x + product(F.silu(gate) * up, layer.down, layer.down_bias)


def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """``Attend`` without copying keys for each query head: the heads of a group become rows of one product."""
    (heads, rows, d), groups = q.shape, len(keys)
    if mask is not None:
        mask = mask.repeat(heads // groups, 1)
    folded = q.reshape(1, groups, heads // groups * rows, d)
    return F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask).view(heads, rows, d)


def attention_weights(q: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
    """The weights [n, S+n] by which ``attention`` of the same arguments mixes values, averaged over the heads;
    float32, also where products are in 16 bits."""
    (heads, rows, d), groups = q.shape, len(keys)
    folded = q.float().reshape(groups, heads // groups * rows, d)
    scores = (folded @ keys.float().mT).view(heads, rows, -1) * d**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).mean(0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last axis; the mean square in float32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
