"""The stack of decoder layers on CUDA: passes of few rows through Triton kernels (``triton_dflash``), with everything
that varies from pass to pass on the device, so that one CUDA graph serves them all (``graphs``).

A layer is nine launches, ten where the cache is long enough to be attended to in stretches: norm, product,
``block_kv``, ``block_attention``, product onto the residual stream, norm, product, ``swiglu``, product onto the stream.

Shapes: those of ``stack``; W kinds of sight in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from torch_dflash.graphs import GraphedPasses
from torch_dflash.rotary import Rotary
from torch_dflash.stack import Attend, KeyValues, LayerWeights, PackedSights, PlainStack, Sight, StackSize, Tree

MOST_ROWS = 64
"""Of a pass through the kernels: a row's sight of the others is the bits of a whole number."""


class CudaKeyValues(KeyValues):
    """Keys and values whose rows move in place, in one launch."""

    def move(self, start: int, path: Tensor) -> None:
        from triton_dflash import compact_path

        compact_path(self.tensor, torch.full((1,), start, dtype=torch.int32, device=path.device), path)


class CudaStack(PlainStack):
    """Implements ``Stack``. Passes of more than ``MOST_ROWS`` rows, which are prompts, take PyTorch's own attention."""

    def __init__(
        self, layers: Sequence[LayerWeights], size: StackSize, sights: Sequence[Sight], rotary: Rotary
    ) -> None:
        super().__init__(layers, size, sights, rotary)
        import triton_dflash  # here, since Triton takes a while to import

        self.kernels = triton_dflash
        weight = self.layers[0].qkv
        self.cache = CudaKeyValues(len(self.layers), size, weight.device, weight.dtype)
        self.passes = GraphedPasses(weight.device, self.places)
        self._seen = PackedSights(self.sights, weight.device)

    def run(
        self, x: Tensor, start: int, wanted: Collection[int], tree: Tree | None = None, attend: Attend | None = None
    ) -> dict[int, Tensor]:
        rows = len(x)
        if attend is None and rows <= MOST_ROWS:
            self.cover()
            at = torch.full((1,), start, dtype=torch.int32, device=x.device)
            return self.run_at(x, at, wanted, None if tree is None else self.sight_of(tree))
        if attend is None and tree is None and self._seen.kinds == [Sight()] and x.dtype != torch.float32:
            attend = attend_lower_right
        return super().run(x, start, wanted, tree, attend)

    def through(
        self, kind: Hashable, ids: Tensor, start: int, wanted: Collection[int], before: Callable[[Tensor], Tensor],
        after: Callable[[dict[int, Tensor]], tuple[Tensor, ...]], tree: Tree | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """``after`` the states that ``run`` finds for what is ``before`` them: ids [n] to results, as one captured pass
        where the rows are few. ``kind`` stands for ``before`` and ``after``, which must not ask the host."""
        if len(ids) > MOST_ROWS:
            return after(self.run(before(ids), start, wanted, tree))
        sight, states = () if tree is None else self.sight_of(tree), frozenset(wanted)

        def compute(ids: Tensor, start: Tensor, *sight: Tensor) -> tuple[Tensor, ...]:
            return after(self.run_at(before(ids), start, states, (sight[0], sight[1]) if sight else None))

        return self.passes((kind, len(ids), states, tree is None), compute, ids, start, *sight)

    def cover(self) -> None:
        """Make the rotation's tables as long as the cache, before a pass: one that is captured cannot grow them."""
        self.rotary.range(0, self.cache.capacity)

    def places(self) -> tuple[Tensor, ...]:
        """What a captured pass finds by address; whoever made room for more has replaced it."""
        self.cover()
        return self.cache.tensor, self.rotary.cos, self.rotary.sin

    def sight_of(self, tree: Tree) -> tuple[Tensor, Tensor]:
        """A tree as ``run_at`` takes it: what each row sees of the others in each kind of layer, bits [W, n] int64, and
        the depths [n] int32."""
        return self._seen.tree(tree), tree.depth.int()

    def run_at(
        self, x: Tensor, start: Tensor, wanted: Collection[int], tree: tuple[Tensor, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """``run`` for up to ``MOST_ROWS`` rows with ``start`` int32 [1] and ``tree``, from ``sight_of``, on the device.
        Nothing is read back, and nothing that varies is taken for a constant."""
        rows = len(x)
        bits, depth = (self._seen.chain(rows), None) if tree is None else tree
        x, states = x.clone(), {}
        for index, (layer, kind) in enumerate(zip(self.layers, self.sights, strict=True)):
            self._layer_at(
                layer, self.cache.tensor[index], x, start, kind.window, bits[self._seen.kinds.index(kind)], depth
            )
            if index in wanted:
                states[index] = x.clone() if index + 1 < len(self.layers) else x
        return states

    def _layer_at(
        self, layer: LayerWeights, cache: Tensor, x: Tensor, start: Tensor, window: int | None, bits: Tensor,
        depth: Tensor | None,
    ) -> None:  # fmt: skip
        """``x`` becomes what is behind the layer."""
        eps, kernels = self.size.eps, self.kernels
        mixed = F.linear(F.rms_norm(x, x.shape[-1:], layer.input_norm, eps), layer.qkv, layer.qkv_bias)
        q = kernels.block_kv(
            mixed, layer.q_norm, layer.k_norm, self.rotary.cos, self.rotary.sin, cache, start, eps, depth
        )
        attended = kernels.block_attention(q, cache[0], cache[1], start, bits, window, depth)
        add_product(x, attended.transpose(0, 1).flatten(1), layer.output, layer.output_bias)
        normed = F.rms_norm(x, x.shape[-1:], layer.post_norm, eps)
        gated = kernels.swiglu(F.linear(normed, layer.gate_up, layer.gate_up_bias))
        add_product(x, gated, layer.down, layer.down_bias)


class ContextWriter:
    """The drafter's context: features to keys and values of every draft layer, in four launches.

    ``fc`` [H, F] and ``norm`` [H] are the projection's, ``kv`` [L*2*g*d, H] all layers' keys' and values' weights one
    above the other, ``k_norms`` [L, d] each layer's. ``stack`` is the drafter's."""

    def __init__(
        self, fc: Tensor, norm: Tensor, kv: Tensor, kv_bias: Tensor | None, k_norms: Tensor, stack: CudaStack
    ) -> None:
        self._fc, self._norm, self._kv, self._bias, self._k_norms = fc, norm, kv, kv_bias, k_norms
        self._stack, self.kernels = stack, stack.kernels

    def write(self, features: Tensor, tables: tuple[Tensor, Tensor], cache: Tensor, start: int) -> None:
        """``features`` [n, F] into ``cache`` at ``start``, with room for n rows: as one captured pass where they are
        few. The cache is the stack's, and so are the tables that are read: such a pass finds them by address."""
        assert cache is self._stack.cache.tensor, "features go into the stack's own cache"
        if len(features) > MOST_ROWS:
            self._stack.cover()
            self.write_at(features, torch.full((1,), start, dtype=torch.int32, device=features.device))
        else:
            self._stack.passes(("observe", len(features)), self.write_at, features, start)

    def write_at(self, features: Tensor, start: Tensor) -> tuple[()]:
        """``write`` with ``start`` int32 [1] on the device. Whoever keeps fewer rows writes over the rest later."""
        stack = self._stack
        eps, tables = stack.size.eps, (stack.rotary.cos, stack.rotary.sin)
        context = F.rms_norm(F.linear(features, self._fc), self._norm.shape, self._norm, eps)
        mixed = F.linear(context, self._kv, self._bias)
        self.kernels.context_kv(mixed, self._k_norms, *tables, stack.cache.tensor, start, eps)
        return ()


def add_product(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Add ``y`` [n, in] times ``weight`` [out, in] transposed to ``x`` [n, out], where it is."""
    if bias is not None:
        x += bias
    x.addmm_(y, weight.T)


def attend_lower_right(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """``Attend`` for the last n of the keys' positions, causal: without the mask, by flash attention on CUDA."""
    bias = causal_lower_right(q.shape[1], keys.shape[1])
    return F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=bias, enable_gqa=True)[0]
