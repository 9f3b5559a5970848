"""What ``dflash bench`` measures with PyTorch itself: threads, the memory's bandwidth, products of few rows."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from cpu_dflash import use_compiled
from torch import Tensor

from dflash.engine import Engine
from dflash.errors import BackendError, UsageError
from dflash.suites.kernels import BACKEND, LINEAR, Kernels, ProductShape, product_shapes
from torch_dflash.products import product

BUFFER = 256 << 20  # bytes: more than the caches of any processor this may run on
WORKING_SET = 256 << 20  # bytes of weights in turn
TIMES = 5


def threads() -> int:
    """Threads that PyTorch computes with on a CPU."""
    return torch.get_num_threads()


def measure_products(
    engine: Engine,
    rows: Sequence[int],
    *,
    repeats: int = 3,
    report: Callable[[int, int, str], None] = lambda done, total, text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Kernels:
    """Time the products of this engine's models on the CPU; ``stopped`` is asked after each. Raises ``UsageError``, or
    ``BackendError`` for an engine that is not PyTorch's on a CPU."""
    if repeats < 1 or not rows or min(rows) < 1:
        raise UsageError(f"repeats is {repeats} and rows are {list(rows)}; all must be at least 1")
    if engine.backend.name != "torch" or engine.target.info.device != "cpu":
        raise BackendError(
            f"these are PyTorch's products on a CPU; the engine is {engine.backend.name}'s on "
            f"{engine.target.info.device} (give --backend torch --device cpu)"
        )
    dtype = getattr(torch, engine.target.info.dtype)
    shapes = product_shapes(*_sizes(engine))
    compiled = use_compiled(torch.device("cpu"), dtype)
    result = Kernels(shapes, tuple(rows), repeats, dtype.itemsize, "cpu_dflash" if compiled else "PyTorch")
    total = repeats * (1 + len(shapes))
    for repeat in range(repeats):
        report(repeat * (1 + len(shapes)), total, "reading a buffer")
        for name, speed in _bandwidths():
            result.roofline.setdefault(name, []).append(speed)
        for at, shape in enumerate(shapes, repeat * (1 + len(shapes)) + 1):
            report(at, total, f"repeat {repeat + 1}, {shape.name}")
            for count, way, seconds in _time(shape, rows, dtype, first=repeat):
                result.seconds.setdefault((shape, count), {}).setdefault(way, []).append(seconds)
                if stopped():
                    return result
    report(total, total, "done")
    return result


def measure_triton() -> dict[str, Any]:
    """What ``python -m triton_dflash.bench`` reports: ``kernels``, ``copy_bytes_per_second`` and its ``options``; its
    table goes to stderr. Raises ``BackendError`` where Triton is not installed."""
    try:
        from triton_dflash import bench
    except ImportError as error:
        raise BackendError(f"the kernels cannot be imported ({error}); pip install 'dflash-lab[kernels]'") from None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = bench.main([])
    if code:
        raise BackendError("the kernels' benchmark did not end well; its reason is above")
    report: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    return {
        "kernels": report.pop("kernels"),
        "copy_bytes_per_second": report.pop("copy_bytes_per_second"),
        "options": report,
    }


def _sizes(engine: Engine) -> Iterator[dict[str, int]]:
    """What ``product_shapes`` wants to know of the target, and of the drafter."""
    target: Any = engine.target
    config = target.model.config.get_text_config()
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    yield {
        "layers": engine.target.info.num_layers,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "queries": heads * head,
        "keys": (getattr(config, "num_key_value_heads", None) or heads) * head,
        "vocabulary": engine.target.info.vocab_size,
    }
    draft = engine.drafter.config
    yield {
        "layers": draft.num_hidden_layers,
        "hidden": draft.hidden_size,
        "intermediate": draft.intermediate_size,
        "queries": draft.num_attention_heads * draft.head_dim,
        "keys": draft.num_key_value_heads * draft.head_dim,
        "vocabulary": engine.target.info.vocab_size,
    }


def _bandwidths() -> Iterator[tuple[str, float]]:
    """Bytes a second of a buffer read (summed, and multiplied with another one as a product of one row does), and read
    and written (copied; both count), each the best of a few."""
    buffer, other = torch.ones(BUFFER // 4), torch.ones(BUFFER // 4)
    size = buffer.numel() * 4
    matrix, vector = buffer.view(-1, 1 << 12), torch.ones(1 << 12)
    for name, moved, call in (
        ("sum", size, lambda: buffer.sum()),
        ("matrix times vector", size, lambda: matrix @ vector),
        ("copy", 2 * size, lambda: other.copy_(buffer)),
    ):
        call()
        yield name, moved / min(_seconds(call) for _ in range(TIMES))


@torch.inference_mode()
def _time(shape: ProductShape, rows: Sequence[int], dtype: torch.dtype, *, first: int) -> Iterator[Any]:
    """(rows, way, seconds of one product), the ways taking turns, on weights none of which is in a cache."""
    each = shape.outputs * shape.columns * dtype.itemsize
    copies = max(2, -(-WORKING_SET // each))
    weights = torch.rand(copies, shape.outputs, shape.columns).sub_(0.5).to(dtype)
    ways: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [(LINEAR, F.linear), (BACKEND, product)]
    for count in rows:
        x = torch.rand(count, shape.columns).sub_(0.5).to(dtype)
        taken: dict[str, list[float]] = {LINEAR: [], BACKEND: []}
        for turn in range(1 + TIMES):
            for way, multiply in ways if (turn + first) % 2 == 0 else reversed(ways):
                seconds = _seconds(partial(_all, multiply, x, weights)) / copies
                if turn:  # the first one warms up
                    taken[way].append(seconds)
        for way, values in taken.items():
            yield count, way, median(values)


def _all(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Tensor) -> None:
    for weight in weights:
        multiply(x, weight)


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
