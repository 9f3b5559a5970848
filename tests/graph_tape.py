"""A CUDA graph for the CPU, one operation at a time: it keeps addresses and the host's numbers, and computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKING = {
    "item", "tolist", "numpy", "cpu", "__int__", "__index__", "__bool__", "__float__", "is_nonzero", "equal", "nonzero",
    "_local_scalar_dense", "masked_select", "unique_dim", "_unique2",
}  # fmt: skip
"""Operations that wait for the device."""
FROM_HOST = {"lift_fresh", "lift_fresh_copy"}
"""Numbers of the host's that become a tensor."""


def refuse(name: str) -> None:
    if name in ASKING | FROM_HOST:
        raise RuntimeError(f"{name} is not permitted when the stream is capturing")


class Refusing(TorchFunctionMode):
    """Some questions never become operations: a CPU's memory is read as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Within it operations are done and recorded; one that a capturing stream refuses raises ``RuntimeError``.

    ``replay`` does them again on the very tensors they were recorded with, and puts their results where the first ones
    lie. So whatever was a number of the host's, or a tensor that has been replaced since, is what it was then."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self.replays = 0
        self._within = ExitStack()

    def __enter__(self) -> Tape:
        self._within.enter_context(Refusing())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._within.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(func.overloadpacket.__name__)
        indices = args[1] if func.overloadpacket.__name__ in ("index", "index_put", "index_put_") else ()
        if any(x is not None and x.dtype == torch.bool for x in indices):
            refuse("nonzero")  # a mask for an index is looked through first
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, places in self.steps:
            for place, result in zip(places, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != result.data_ptr():  # not a view, nor in place
                    place.copy_(result)


class Tapes:
    """What takes the place of ``Recorder.capture``; ``made`` are the graphs so far."""

    def __init__(self) -> None:
        self.made: list[Tape] = []

    def __call__(self, run: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        tape = Tape()
        with torch.inference_mode(), tape:
            results = run()
        self.made.append(tape)

        def replay() -> tuple[Tensor, ...]:
            for result in results:
                if result.is_floating_point():
                    result.fill_(torch.nan)  # another graph has used their memory since
            tape.replay()
            return tuple(result.clone() for result in results)

        return replay

    @property
    def replays(self) -> int:
        return sum(tape.replays for tape in self.made)


@contextmanager
def plain_twins() -> Iterator[None]:
    """Where there is no GPU, the kernels' plain code, also when other tests have asked for the interpreter: what that
    computes would not show on a tape."""
    from triton_dflash import forced

    with nullcontext() if torch.cuda.is_available() else forced(False):
        yield
