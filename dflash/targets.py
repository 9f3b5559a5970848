"""What targets of every backend refuse, in the same words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dflash.errors import BackendError


def check_dtype(dtype: str, known: Iterable[str]) -> None:
    """Raise ``BackendError`` for a number format that is neither ``auto`` nor ``known``."""
    if dtype not in ("auto", *known):
        raise BackendError(f"dtype is {dtype!r}; it must be auto, {', '.join(known)}")


def check_layer_ids(layer_ids: Sequence[int], count: int) -> None:
    """Raise ``BackendError`` where ``layer_ids`` are not all among a model's ``count`` layers."""
    if wrong := [index for index in layer_ids if not 0 <= index < count]:
        raise BackendError(f"target_layer_ids holds {wrong[0]}; the target's layers are 0 to {count - 1}")


def refuse_tree(parents: Sequence[int] | None) -> None:
    """Raise ``BackendError`` for a forward whose tokens are no chain."""
    if parents is not None:
        raise BackendError("this target cannot verify a tree")


def leading(path: Sequence[int], last: int) -> int:
    """How many leading tokens of the ``last`` ones ``path`` keeps; ``BackendError`` where it keeps others."""
    if list(path) != list(range(len(path))) or len(path) > last:
        raise BackendError(f"this target keeps leading tokens of the last {last} only, not {list(path)}")
    return len(path)
