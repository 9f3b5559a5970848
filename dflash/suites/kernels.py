"""Matrix products of few rows on a CPU, which are what a round waits for, against the bandwidth of its memory.

Every product of a target's pass and of its drafter's is timed by ``torch.nn.functional.linear`` and by what the backend
uses, on as many weights of its shape in turn as no cache holds. Bandwidth counts the weights' bytes alone: what must be
read at least. The **roofline** is the fastest that this machine's threads were seen to read a buffer of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash.bench import spread

ROWS = (1, 4, 8, 16, 64)
LINEAR, BACKEND = "linear", "backend"
TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True)
class ProductShape:
    """One product: ``x`` [rows, ``columns``] times a weight [``outputs``, ``columns``] transposed. A pass of the target
    has ``target`` of them, each with weights of its own, and one of the drafter ``draft``."""

    name: str
    outputs: int
    columns: int
    target: int = 0
    draft: int = 0

    def count(self, model: str) -> int:
        return self.target if model == TARGET else self.draft


def product_shapes(target: Mapping[str, int], draft: Mapping[str, int]) -> list[ProductShape]:
    """The products of both models' passes. Each gives ``layers``, ``hidden``, ``intermediate``, ``queries`` and
    ``keys`` (heads × their size), and ``vocabulary``; a drafter's context products are not among them, since they have
    as many rows as a round commits."""
    counts: dict[tuple[str, int, int], dict[str, int]] = {}
    for model, sizes in ((TARGET, target), (DRAFT, draft)):
        hidden, inner, layers = sizes["hidden"], sizes["intermediate"], sizes["layers"]
        for name, outputs, columns, count in (
            ("queries, keys, values", sizes["queries"] + 2 * sizes["keys"], hidden, layers),
            ("attention output", hidden, sizes["queries"], layers),
            ("gate and up", 2 * inner, hidden, layers),
            ("down", hidden, inner, layers),
            ("head", sizes["vocabulary"], hidden, 1),
        ):
            counts.setdefault((name, outputs, columns), {})[model] = count
    return [
        ProductShape(name, outputs, columns, count.get(TARGET, 0), count.get(DRAFT, 0))
        for (name, outputs, columns), count in counts.items()
    ]


@dataclass
class Kernels:
    """What was measured so far: for each shape and number of rows the seconds of one product, by way and repeat."""

    shapes: Sequence[ProductShape]
    rows: Sequence[int]
    repeats: int
    itemsize: int
    backend: str = ""
    """What the backend's products go through."""
    roofline: dict[str, list[float]] = field(default_factory=dict)
    """Bytes a second by what read them, of each repeat."""
    seconds: dict[tuple[ProductShape, int], dict[str, list[float]]] = field(default_factory=dict)

    @property
    def partial(self) -> bool:
        return sum(self._whole(key) for key in self.seconds) < len(self.shapes) * len(self.rows)

    def _whole(self, key: tuple[ProductShape, int]) -> bool:
        return all(len(self.seconds[key].get(way, ())) == self.repeats for way in (LINEAR, BACKEND))

    def to_dict(self) -> dict[str, Any]:
        """``products`` by shape and rows; ``passes`` sums them over a model's pass, where all of it was measured."""
        fastest = max((max(values) for values in self.roofline.values()), default=0.0)
        measured = [key for key in self.seconds if self._whole(key)]
        return {
            "repeats": self.repeats,
            "partial": self.partial,
            "backend_products": self.backend,
            "roofline": {
                "bytes_per_second": fastest,
                **{name: spread(values) for name, values in self.roofline.items()},
            },
            "products": [self._product(shape, rows, fastest) for shape, rows in measured],
            "passes": [
                self._pass(model, rows, fastest)
                for model in (TARGET, DRAFT)
                for rows in self.rows
                if self._of(model) and all((shape, rows) in measured for shape in self._of(model))
            ],
        }

    def _of(self, model: str) -> list[ProductShape]:
        return [shape for shape in self.shapes if shape.count(model)]

    def _product(self, shape: ProductShape, rows: int, fastest: float) -> dict[str, Any]:
        seconds = self.seconds[shape, rows]
        size = shape.outputs * shape.columns * self.itemsize
        return {**asdict(shape), "rows": rows, "bytes": size, **_compared(seconds, size, fastest)}

    def _pass(self, model: str, rows: int, fastest: float) -> dict[str, Any]:
        shapes = self._of(model)
        size = sum(shape.outputs * shape.columns * shape.count(model) for shape in shapes) * self.itemsize
        summed = {
            way: [sum(self.seconds[s, rows][way][at] * s.count(model) for s in shapes) for at in range(self.repeats)]
            for way in (LINEAR, BACKEND)
        }
        return {"model": model, "rows": rows, "bytes": size, **_compared(summed, size, fastest)}


def _compared(seconds: Mapping[str, Sequence[float]], size: int, fastest: float) -> dict[str, Any]:
    ways = {
        way: {
            "seconds": spread(values),
            "bytes_per_second": spread([size / value for value in values]),
            "of_roofline": spread([size / value / fastest for value in values]) if fastest else None,
        }
        for way, values in seconds.items()
    }
    pairs = zip(seconds[LINEAR], seconds[BACKEND], strict=True)
    return {**ways, "linear_over_backend": spread([linear / backend for linear, backend in pairs])}
