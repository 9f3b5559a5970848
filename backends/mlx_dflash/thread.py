"""The one thread that uses MLX. Arrays that are not evaluated yet belong to the thread that made them, and evaluating
them on another one fails; a server's handlers and a user's own threads therefore all hand their work to this one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_owner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlx")
_here = threading.local()


def on_device_thread(call: Callable[[], T]) -> T:
    """What ``call`` returns, called on MLX's thread, also from within that thread. What it raises is raised here."""
    if getattr(_here, "owner", False):
        return call()
    return _owner.submit(_mark_and_call, call).result()


def _mark_and_call(call: Callable[[], T]) -> T:
    _here.owner = True
    return call()
