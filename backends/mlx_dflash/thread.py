"""The one thread that uses MLX. Arrays that are not evaluated yet belong to the thread that made them, and evaluating
them on another one fails; a server's handlers and a user's own threads therefore all hand their work to this one."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import mlx.core as mx

from dflash.errors import BackendError

T = TypeVar("T")

_calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()


def on_device_thread(call: Callable[[], T]) -> T:
    """What ``call`` returns, called on MLX's thread, also from within that thread. What it raises is raised here.

    A caller that is interrupted leaves; the call itself goes on to its end, and later ones wait for it."""
    if threading.current_thread() is _thread:
        return call()
    outcome: Future[T] = Future()
    with _lock:
        if _ended:
            raise BackendError("MLX's thread has ended with the process; nothing more can run on it")
        if not _thread.is_alive():
            _thread.start()
            atexit.register(_stop)
        _calls.put((call, outcome))
    return outcome.result()


def _work() -> None:
    while (order := _calls.get()) is not None:
        call, outcome = order
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)
        del order, call, outcome  # a waiting thread must not keep the last result alive
    mx.synchronize()
    if hasattr(mx, "clear_streams"):  # MLX aborts the process where a thread ends that still has streams
        mx.clear_streams()


def _stop() -> None:
    global _ended
    with _lock:
        _ended = True
        _calls.put(None)
    _thread.join()


_lock, _ended = threading.Lock(), False
_thread = threading.Thread(target=_work, name="mlx", daemon=True)
