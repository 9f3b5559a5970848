"""Passes as CUDA graphs: all launches of a pass in one call of the host, which would otherwise take longer over them
than the GPU.

A graph keeps the addresses it was captured with and every number that the host decided. So whatever varies is an input:
it is copied into a buffer of the pass's own before each replay. What a pass finds by address, caches and tables, may be
replaced, which discards what was captured.

On a CPU the same steps are taken, and to replay is to call again. ``DFLASH_CUDA_GRAPHS=0`` turns graphs off.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

SWITCH = "DFLASH_CUDA_GRAPHS"

Compute = Callable[..., tuple[Tensor, ...]]
Run = Callable[[], tuple[Tensor, ...]]

_log = logging.getLogger("torch_dflash")


class GraphedPasses:
    """Runs functions of tensors, as graphs from the second time on: a kind of pass that comes once is not worth one.

    ``places`` tells which tensors the passes find by address at present. All graphs of one object share their memory,
    so one of them runs at a time."""

    def __init__(self, device: torch.device, places: Callable[[], Sequence[Tensor]]) -> None:
        self._places, self._on = places, os.environ.get(SWITCH, "1") != "0"
        if not self._on:
            _say_once(f"{SWITCH} is 0")
        self._recorder = CudaRecorder(device) if device.type == "cuda" and self._on else Recorder(device)
        self._passes: dict[Hashable, _Pass] = {}
        self._found: tuple[Tensor, ...] = ()

    @torch.inference_mode()
    def __call__(self, kind: Hashable, compute: Compute, *inputs: Tensor | int) -> tuple[Tensor, ...]:
        """``compute(*inputs)``, where a whole number arrives as int32 [1] on the device.

        ``kind`` stands for the function, its inputs' shapes and whatever else makes launches differ. The function must
        not ask the host."""
        found = tuple(self._places())
        if len(found) != len(self._found) or any(a is not b for a, b in zip(found, self._found, strict=True)):
            if self._passes:
                self._recorder.settle()
                self._passes.clear()
            self._found = found
        known = self._passes.get(kind)
        if known is None:
            known = _Pass(compute, inputs, self._recorder.device)
            with self._recorder.aside():
                results = known.run()
            self._passes[kind] = known
            return results
        known.load(inputs)
        if known.replay is None and self._on:
            try:
                known.replay = self._recorder.capture(known.run)
            except RuntimeError as error:
                self._on = False
                _say_once(f"a pass cannot be captured: {str(error).splitlines()[0]}")
        return known.run() if known.replay is None else known.replay()


class _Pass:
    """One kind of pass: its inputs' buffers, and how it is run again."""

    def __init__(self, compute: Compute, inputs: Sequence[Tensor | int], device: torch.device) -> None:
        self._compute = compute
        self._inputs = [
            x.to(device, copy=True) if isinstance(x, Tensor) else torch.full((1,), x, dtype=torch.int32, device=device)
            for x in inputs
        ]
        self.replay: Run | None = None

    def load(self, inputs: Sequence[Tensor | int]) -> None:
        for buffer, x in zip(self._inputs, inputs, strict=True):
            if isinstance(x, Tensor):
                assert x.shape == buffer.shape, "one kind of pass has inputs of one shape"
                buffer.copy_(x)
            else:
                buffer.fill_(x)

    def run(self) -> tuple[Tensor, ...]:
        return self._compute(*self._inputs)


class Recorder:
    """Where there are no graphs: everything is run as it comes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def aside(self) -> AbstractContextManager[Any]:
        """Within it launches go where others will be recorded, so that libraries have made ready by then."""
        return nullcontext()

    def capture(self, run: Run) -> Run:
        """A call that does what ``run`` would do now. Raises ``RuntimeError`` where it cannot be captured."""
        return run

    def settle(self) -> None:
        """Wait until nothing captured is running."""


class CudaRecorder(Recorder):
    """Captures on a stream of its own, into memory that all its graphs share."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def capture(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            results = run()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return tuple(result.clone() for result in results)  # the next graph may use their memory

        return replay

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


@functools.cache
def _say_once(reason: str) -> None:
    _log.info("no CUDA graphs: %s", reason)
