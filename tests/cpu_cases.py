"""What the tests of a CPU's compiled passes share: poisoned memory, thread counts, and stacks with a float64 reference.

Shapes: n rows, H hidden size, h heads, g key/value heads, d head size, C capacity of the cache [L, 2, g, C, d]."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import cpu_dflash
import pytest
import torch
from torch import Tensor
from torch_dflash.cpu_stack import Scratch
from torch_dflash.rotary import Rotary
from torch_dflash.stack import LayerWeights, PlainStack, Sight, StackSize

from dflash.rope import RopeConfig

INTERMEDIATE, EPS = 131, 1e-5
SIZES = ((8, 8, 64), (8, 4, 80), (6, 1, 96), (8, 1, 128), (4, 2, 256), (3, 1, 8), (5, 5, 20))  # h, g, d
SIGHTS = {
    "causal": [Sight()] * 2,
    "both ways": [Sight(False)] * 2,
    "window of 5": [Sight(True, 5)] * 2,
    "window of 300 both ways": [Sight(False, 300)] * 2,
    "mixed": [Sight(), Sight(False, 300), Sight(True, 5), Sight(False), Sight(False, 3)],
}

if os.environ.get("DFLASH_REQUIRE_COMPILER"):
    assert cpu_dflash.reason_against() is None, cpu_dflash.reason_against()
needs_compiled = pytest.mark.skipif(
    cpu_dflash.reason_against() is not None, reason=f"no compiled passes: {cpu_dflash.reason_against()}"
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory, and the scratch of every pass, holds NaN or the largest whole number: what is left out shows."""

    def of(scratch: Scratch, size: int) -> int:
        plain(scratch, size)
        scratch._floats.fill_(torch.nan)
        return scratch._floats.data_ptr()

    plain, before = Scratch.of, torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scratch, "of", of)
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


@dataclass(frozen=True)
class Kind:
    """A stack's shape, and a few seeded weights for it."""

    size: tuple[int, int, int]
    sights: Sequence[Sight]
    hidden: int = 64
    normed: bool = True
    biased: bool = True
    partial: float = 1.0

    @property
    def stack_size(self) -> StackSize:
        return StackSize(*self.size, eps=EPS)

    def rotary(self) -> Rotary:
        return Rotary(RopeConfig(1e4, partial=self.partial), self.size[2])

    def layers(self) -> list[LayerWeights]:
        torch.manual_seed(sum(self.size) + self.hidden)
        return [self._layer() for _ in self.sights]

    def _layer(self) -> LayerWeights:
        heads, groups, d = self.size

        def product(outputs: int, inputs: int) -> Tensor:
            return torch.randn(outputs, inputs) / inputs**0.5

        def norm(size: int, wanted: bool = True) -> Tensor | None:
            return 1 + 0.3 * torch.randn(size) if wanted else None

        def bias(size: int) -> Tensor | None:
            return 0.3 * torch.randn(size) if self.biased else None

        qkv = (heads + 2 * groups) * d
        return LayerWeights(
            input_norm=norm(self.hidden),
            qkv=product(qkv, self.hidden),
            qkv_bias=bias(qkv),
            q_norm=norm(d, self.normed),
            k_norm=norm(d, self.normed),
            output=product(self.hidden, heads * d),
            output_bias=bias(self.hidden),
            post_norm=norm(self.hidden),
            gate_up=product(2 * INTERMEDIATE, self.hidden),
            gate_up_bias=bias(2 * INTERMEDIATE),
            down=product(self.hidden, INTERMEDIATE),
            down_bias=bias(self.hidden),
        )


def kinds() -> dict[str, Kind]:
    """Every size with every kind of sight; the other properties take turns."""
    made = {}
    turns = itertools.cycle(itertools.product((64, 97), (True, False), (True, False), (1.0, 0.5)))
    for size, (name, sights) in itertools.product(SIZES, SIGHTS.items()):
        hidden, normed, biased, partial = next(turns)
        made[f"{'-'.join(map(str, size))}, {name}"] = Kind(size, sights, hidden, normed, biased, partial)
    return made


def fill(stack: PlainStack, start: int, end: int, seed: int = 0) -> None:
    """Make room for ``end`` positions, of which the first ``start`` hold random keys and values; beyond is NaN."""
    stack.cache.room(end, 0)
    stack.cache.tensor.fill_(torch.nan)
    held = stack.cache.tensor[..., :start, :]
    held.copy_(torch.randn(held.shape, generator=torch.Generator().manual_seed(seed)))


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert found.shape == expected.shape
    assert found.isfinite().all(), "something was read that nobody wrote, or not written at all"
    off, most = (found - expected).abs().max().item(), expected.abs().max().item()
    assert off <= tolerance * most, f"off by {off:.3g} of {most:.3g}"


def bits(tensor: Tensor) -> Tensor:
    """By which a NaN equals itself."""
    return tensor.contiguous().view(torch.int32)


def assert_same_bits(found: Tensor, expected: Tensor, what: str = "") -> None:
    assert found.shape == expected.shape
    different = (bits(found) != bits(expected)).sum().item()
    assert not different, f"{different} of {found.numel()} numbers differ: {what}"


class Reference:
    """The layers of ``Kind`` in float64, head by head and key by key as the formulas say; the cache is a ``fill``-ed
    stack's."""

    def __init__(self, kind: Kind, cache: Tensor, start: int) -> None:
        self.kind, self.layers, self.start = kind, kind.layers(), start
        self.held = cache[..., :start, :].double()  # [L, 2, g, S, d]
        frequencies, factor = RopeConfig(1e4, partial=kind.partial).frequencies(kind.size[2])
        self.frequencies, self.factor = torch.tensor(frequencies), factor

    def run(self, x: Tensor, parents: Sequence[int] | None = None) -> tuple[list[Tensor], Tensor]:
        """States [n, H] behind each layer, and the rows' keys and values [L, 2, g, n, d]."""
        heads, groups, d = self.kind.size
        x, rows = x.double(), len(x)
        position = torch.tensor([self.start + row for row in range(rows)])
        if parents is not None:
            for row, parent in enumerate(parents):
                position[row] = self.start if parent < 0 else position[parent] + 1
        states, written = [], []
        for layer, sight, held in zip(self.layers, self.kind.sights, self.held, strict=True):
            mixed = linear(norm(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(rows, -1, d)
            q, k, v = mixed[:, :heads], mixed[:, heads : heads + groups], mixed[:, heads + groups :]
            q, k = self._turn(norm(q, layer.q_norm), position), self._turn(norm(k, layer.k_norm), position)
            attended = torch.empty(rows, heads, d, dtype=torch.float64)
            for row, head in itertools.product(range(rows), range(heads)):
                group = head // (heads // groups)
                seen = [m for m in range(rows) if sees(sight, row, m, position, parents)]
                back = 0 if sight.window is None else max(0, int(position[row]) - sight.window + 1)
                keys = torch.cat((held[0, group, back:], k[seen, group]))
                values = torch.cat((held[1, group, back:], v[seen, group]))
                attended[row, head] = (keys @ q[row, head] * d**-0.5).softmax(0) @ values
            x = x + linear(attended.reshape(rows, -1), layer.output, layer.output_bias)
            gate, up = linear(norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = x + linear(gate * gate.sigmoid() * up, layer.down, layer.down_bias)
            states.append(x)
            written.append(torch.stack((k, v)).transpose(1, 2))
        return states, torch.stack(written)

    def _turn(self, x: Tensor, position: Tensor) -> Tensor:
        angles = position[:, None, None] * self.frequencies
        cos, sin, half = angles.cos() * self.factor, angles.sin() * self.factor, len(self.frequencies)
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), dim=-1)


def sees(sight: Sight, row: int, key: int, position: Tensor, parents: Sequence[int] | None) -> bool:
    """Whether ``row`` of a pass sees its row ``key``: in a tree, its ancestors and itself."""
    if sight.window is not None and abs(int(position[row] - position[key])) >= sight.window:
        return False
    if parents is None:
        return key <= row or not sight.causal
    while row > key:
        row = parents[row]
    return row == key


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x @ weight.double().T
    return product if bias is None else product + bias.double()
