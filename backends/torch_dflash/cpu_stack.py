"""The stack of decoder layers on a CPU: passes of few rows in one call of compiled code (``cpu_dflash``).

Prompts go in pieces of ``MOST_ROWS``, which is faster than PyTorch's own operations on all of them (512 tokens: 0.80 of
the time, 0.62 after 1,536 others). So a token's state is the same bits whether it passes alone, in a block, on a tree's
path or in any piece of a prompt. Shapes are those of ``stack``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
from cpu_dflash import MOST_ROWS
from cpu_dflash.build import library
from cpu_dflash.structures import Context, Head, Layer, Pass, address, linear, sized
from cpu_dflash.structures import Stack as Described
from torch import Tensor

from torch_dflash.rotary import Rotary
from torch_dflash.stack import Attend, LayerWeights, PackedSights, PlainStack, Sight, StackSize, Tree

AT_ONCE = 8192  # rows of a head
SLACK = 1e-5  # for the sums' own rounding


class Scratch:
    """Floats that grow on demand."""

    def __init__(self) -> None:
        self._floats = torch.empty(0)

    def of(self, size: int) -> int:
        if size > len(self._floats):
            self._floats = torch.empty(size + size // 4)
        return self._floats.data_ptr()


class CpuStack(PlainStack):
    """Implements ``Stack`` for float32 on a CPU. ``narrow`` computes few rows from bfloat16 copies of the products'
    weights: half the memory to read, for a drafter."""

    def __init__(
        self, layers: Sequence[LayerWeights], size: StackSize, sights: Sequence[Sight], rotary: Rotary, *,
        narrow: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(layers, size, sights, rotary)
        self._library = sized(library())
        self._seen = PackedSights(self.sights, torch.device("cpu"))
        self._causal = all(sight.causal for sight in self.sights)
        self._chain = torch.arange(MOST_ROWS)
        self._scratch = Scratch()
        self._read = [_narrowed(layer) for layer in self.layers] if narrow else self.layers
        self._described = (Layer * len(self.layers))(
            *(self._describe(layer, sight) for layer, sight in zip(self._read, self.sights, strict=True))
        )
        hidden, intermediate = self.layers[0].down.shape
        self._stack = Described(
            ctypes.addressof(self._described), len(self.layers), size.heads, size.groups, size.head_dim,
            2 * len(rotary.frequencies), hidden, intermediate, size.eps,
        )  # fmt: skip

    def _describe(self, layer: LayerWeights, sight: Sight) -> Layer:
        gate, up = layer.gate_up.chunk(2)
        gate_bias, up_bias = (None, None) if layer.gate_up_bias is None else layer.gate_up_bias.chunk(2)
        return Layer(
            address(layer.input_norm), address(layer.q_norm), address(layer.k_norm), address(layer.post_norm),
            linear(layer.qkv, layer.qkv_bias), linear(layer.output, layer.output_bias), linear(gate, gate_bias),
            linear(up, up_bias), linear(layer.down, layer.down_bias), self._seen.kinds.index(sight), sight.window or 0,
        )  # fmt: skip

    def run(
        self, x: Tensor, start: int, wanted: Collection[int], tree: Tree | None = None, attend: Attend | None = None
    ) -> dict[int, Tensor]:
        rows = len(x)
        if attend is not None or (rows > MOST_ROWS and (tree is not None or not self._causal)):
            return super().run(x, start, wanted, tree, attend)
        if rows > MOST_ROWS:  # a prompt
            parts = [self._run(part, start + at, wanted, None) for at, part in _pieces(x)]
            return {index: torch.cat([part[index] for part in parts]) for index in parts[0]}
        return self._run(x, start, wanted, tree)

    def _run(self, x: Tensor, start: int, wanted: Collection[int], tree: Tree | None) -> dict[int, Tensor]:
        rows = len(x)
        cos, sin = (table.contiguous() for table in self.tables(start, rows, tree))
        depth = self._chain if tree is None else tree.depth
        bits = self._seen.chain(rows) if tree is None else self._seen.tree(tree)
        count, threads = len(self.layers), torch.get_num_threads()
        states = torch.empty(len(wanted), *x.shape)
        found = dict(zip(sorted(wanted), states, strict=True))
        pointers = (ctypes.c_void_p * count)(*(found[at].data_ptr() if at in found else None for at in range(count)))
        moving = x.contiguous().clone()
        stack = ctypes.byref(self._stack)
        floats = self._library.scratch_floats(
            stack, ctypes.c_int64(rows), ctypes.c_int64(start + rows), ctypes.c_int64(threads)
        )
        described = Pass(
            moving.data_ptr(), self.cache.tensor.data_ptr(), address(cos), address(sin), address(depth), address(bits),
            ctypes.addressof(pointers), self._scratch.of(floats), rows, start, self.cache.capacity, threads,
        )  # fmt: skip
        self._library.decoder_layers(stack, ctypes.byref(described))
        return found


_narrow_copies: WeakValueDictionary[tuple[int, torch.Size], Tensor] = WeakValueDictionary()


def narrow_copy(weight: Tensor) -> Tensor:
    """``weight`` in bfloat16: one copy for all who keep it beside the weight itself, as a pair does its head."""
    key = (weight.data_ptr(), weight.shape)
    copy = _narrow_copies.get(key)
    if copy is None:
        copy = weight.bfloat16()
        _narrow_copies[key] = copy
    return copy


class ContextWriter:
    """The drafter's context, few rows at a time: features to keys and values of every draft layer in one call.

    ``fc`` [H, F] and ``norm`` [H] are the projection's, ``kv`` [L*2*g*d, H] all layers' keys' and values' weights one
    above the other, ``k_norms`` each layer's [d]."""

    def __init__(
        self, fc: Tensor, norm: Tensor, kv: Tensor, kv_bias: Tensor | None, k_norms: Sequence[Tensor], size: StackSize,
        rotated: int,
    ) -> None:  # fmt: skip
        self._library = sized(library())
        fc, norm, kv, *k_norms = (weight.detach() for weight in (fc, norm, kv, *k_norms))  # what stays where it lies
        self._kept = (fc, norm, kv, kv_bias, *k_norms)
        self._norms = (ctypes.c_void_p * len(k_norms))(*(address(weight) for weight in k_norms))
        self._scratch = Scratch()
        self._context = Context(
            linear(fc, None), linear(kv, kv_bias), address(norm), ctypes.addressof(self._norms), len(k_norms),
            size.groups, size.head_dim, rotated, size.eps,
        )  # fmt: skip

    def write(self, features: Tensor, tables: tuple[Tensor, Tensor], cache: Tensor, start: int) -> None:
        """``features`` [n, F] into ``cache`` [L, 2, g, C, d] at ``start``; ``tables`` [n, r/2] of their positions."""
        cos, sin = tables
        assert features.dim() == 2 and features.shape[1] == self._context.fc.inputs, "features of another target"
        assert len(features) == len(cos) == len(sin), "each row has a position"
        for at, part in _pieces(features.contiguous()):
            self._write(part, (cos[at : at + len(part)], sin[at : at + len(part)]), cache, start + at)

    def _write(self, features: Tensor, tables: tuple[Tensor, Tensor], cache: Tensor, start: int) -> None:
        rows, threads = len(features), torch.get_num_threads()
        context = ctypes.byref(self._context)
        floats = self._library.context_scratch_floats(context, ctypes.c_int64(rows), ctypes.c_int64(threads))
        cos, sin = (table.contiguous() for table in tables)
        described = Pass(
            address(features), cache.data_ptr(), address(cos), address(sin), None, None, None, self._scratch.of(floats),
            rows, start, cache.shape[-2], threads,
        )  # fmt: skip
        self._library.context_keys_values(context, ctypes.byref(described))


class Chooser:
    """The likeliest token of each state, by a copy of the head in bfloat16: half the bytes. The few tokens whose scores
    are so near the best one's that the rounding could have decided are scored again by ``head`` [V, H] itself, so the
    choice is the float32 argmax."""

    def __init__(self, head: Tensor, norm: Tensor, eps: float) -> None:
        self._library = sized(library())
        head, norm = head.detach(), norm.detach()  # what stays where it lies
        narrow = narrow_copy(head)
        error = max(float((part - part.bfloat16()).norm(dim=1).max()) for part in head.split(AT_ONCE))
        self._kept, self._hidden = (head, narrow, norm), head.shape[1]
        self._head = Head(linear(narrow, None), linear(head, None), address(norm), eps, (1 + SLACK) * error + SLACK)
        self._scratch = Scratch()

    def choose(self, states: Tensor) -> Tensor:
        """``states`` [n, H], before the final norm, to tokens [n]; of equal scores the first."""
        states = states.contiguous()
        rows, threads = len(states), torch.get_num_threads()
        head, counts = ctypes.byref(self._head), (ctypes.c_int64(rows), ctypes.c_int64(threads))
        chosen = torch.empty(rows * (1 + threads), dtype=torch.int64)
        floats = self._library.choice_scratch_floats(head, *counts)
        self._library.choose(
            head, ctypes.c_void_p(states.data_ptr()), counts[0], ctypes.c_void_p(self._scratch.of(floats)),
            ctypes.c_void_p(chosen.data_ptr()), counts[1],
        )  # fmt: skip
        return chosen[:rows]


def _pieces(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """``x`` in pieces of ``MOST_ROWS`` rows, each with where it begins."""
    yield from ((at, x[at : at + MOST_ROWS]) for at in range(0, len(x), MOST_ROWS))


def _narrowed(layer: LayerWeights) -> LayerWeights:
    names = ("qkv", "output", "gate_up", "down")
    return replace(layer, **{name: getattr(layer, name).bfloat16() for name in names})
