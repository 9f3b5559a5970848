"""One thread owns MLX: whoever loads, generates, closes or interrupts, the work runs there and comes back whole."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
from mlx_dflash.backend import MlxBackend
from mlx_dflash.thread import on_device_thread
from tiny_mlx import MlxPair
from tiny_models import make_config, make_drafter, make_target, save_pair

import dflash
from dflash.errors import BackendError, RewindError
from dflash.types import SamplingParams

PROMPT = [5, 17, 200, 33]


@pytest.fixture(scope="module")
def pair() -> MlxPair:
    return MlxPair()


@pytest.fixture(scope="module")
def oracle(pair: MlxPair) -> list[int]:
    return pair.oracle(PROMPT, 20)


def in_a_thread(call: Any) -> Any:
    """What ``call`` returns or raises, on a fresh thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(call).result()


# Who calls does not matter --------------------------------------------------------------------------------------


def test_everything_runs_on_one_thread_whoever_asks() -> None:
    run = MlxBackend().run
    names = [run(threading.current_thread), in_a_thread(lambda: MlxBackend().run(threading.current_thread))]
    assert names[0] is names[1]
    assert names[0] not in (threading.current_thread(), threading.main_thread())


def test_a_pair_loaded_on_one_thread_generates_on_others(tmp_path: Path, oracle: list[int]) -> None:
    config = make_config()
    target, draft = save_pair(tmp_path, make_target(), config, make_drafter(config))
    engine = in_a_thread(lambda: dflash.load(target=target, draft=draft, backend="mlx", device="cpu", check=True))
    for _ in range(3):
        assert in_a_thread(lambda: engine.generate(PROMPT, max_new_tokens=20).token_ids) == oracle
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == oracle


def test_a_stream_may_be_read_by_another_thread_at_every_step(pair: MlxPair, oracle: list[int]) -> None:
    stream = pair.engine().stream(PROMPT, max_new_tokens=20)
    events = [in_a_thread(lambda: next(stream, None)) for _ in range(25)]
    assert [token for event in events if event for token in event.committed] == oracle
    assert events[-1] is None
    assert in_a_thread(stream.result).token_ids == oracle


def test_threads_that_take_turns_each_get_their_own_output(pair: MlxPair) -> None:
    """As behind a server: many threads, one engine, one request at a time."""
    prompts = [[index, 17, 200] for index in range(6)]
    expected = [pair.oracle(prompt, 8) for prompt in prompts]
    engine, lock, outputs = pair.engine(), threading.Lock(), {}

    def serve(index: int) -> None:
        for _ in range(2):
            with lock:
                outputs[index] = engine.generate(prompts[index], max_new_tokens=8).token_ids

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [outputs[index] for index in range(len(prompts))] == expected


def test_two_engines_may_run_at_once_from_two_threads(pair: MlxPair, oracle: list[int]) -> None:
    other = MlxPair(seed=7)
    expected = other.oracle(PROMPT, 20)
    engines = [pair.engine(), other.engine()]
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(lambda engine: engine.generate(PROMPT, max_new_tokens=20).token_ids, engines))
    assert results == [oracle, expected]


def test_closing_from_another_thread_ends_the_stream_at_a_round(pair: MlxPair, oracle: list[int]) -> None:
    stream = pair.engine().stream(PROMPT, max_new_tokens=20)
    next(stream)
    next(stream)
    in_a_thread(stream.close)
    assert list(stream) == []
    result = stream.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == oracle[: len(result.token_ids)]
    assert pair.target.length == pair.cached == len(PROMPT) + len(result.token_ids) - 1


# What runs may call, raise and take its time ---------------------------------------------------------------------


def test_a_call_within_a_call_runs_at_once() -> None:
    order: list[str] = []

    def outer() -> str:
        order.append("outer")
        on_device_thread(lambda: order.append("inner"))
        order.append("after")
        return "done"

    assert on_device_thread(outer) == "done"
    assert order == ["outer", "inner", "after"]


@pytest.mark.parametrize(
    "error", [RewindError("no"), BackendError("no"), KeyError("x"), KeyboardInterrupt(), SystemExit(3)]
)
def test_errors_come_back_as_they_are_and_the_thread_goes_on(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        on_device_thread(fail)
    assert caught.value is error
    assert on_device_thread(lambda: 1 + 1) == 2


def test_a_generator_that_ends_says_so() -> None:
    """``StopIteration`` cannot be raised through a future by every library; ours carries it."""
    with pytest.raises(StopIteration):
        on_device_thread(iter(()).__next__)


def test_a_result_is_not_kept_alive() -> None:
    """Weights and caches of an engine that is gone must go too."""

    class Large:
        pass

    made = on_device_thread(Large)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_a_caller_that_is_interrupted_leaves_and_later_calls_wait_for_the_call(
    pair: MlxPair, oracle: list[int]
) -> None:
    """Ctrl-C arrives in the waiting thread, the main one; what MLX is doing goes on to its end."""
    done: list[str] = []

    def slow() -> None:
        time.sleep(0.3)
        done.append("slow")

    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            on_device_thread(slow)
        assert not done
        on_device_thread(lambda: done.append("next"))
        assert done == ["slow", "next"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert pair.engine().generate(PROMPT, max_new_tokens=20).token_ids == oracle


@pytest.mark.parametrize("speculate", [True, False])
def test_an_interrupted_generation_keeps_a_true_record_and_a_usable_engine(
    pair: MlxPair, oracle: list[int], monkeypatch: pytest.MonkeyPatch, speculate: bool
) -> None:
    """The interrupt comes while the round it stops still runs on MLX's thread."""
    engine, forward, calls = pair.engine(), pair.target.forward, iter(range(100))

    def slow(tokens: Any, **options: Any) -> Any:
        if next(calls) == 2:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            time.sleep(0.2)
        return forward(tokens, **options)

    monkeypatch.setattr(pair.target, "forward", slow)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    stream = engine.stream(PROMPT, max_new_tokens=20, speculate=speculate)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    monkeypatch.undo()
    result = stream.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == [token for step in stream.steps for token in step.committed]
    assert 0 < len(result.token_ids) < 20
    assert result.token_ids == oracle[: len(result.token_ids)]
    assert engine.generate(PROMPT, max_new_tokens=20, speculate=not speculate).token_ids == oracle


def test_sampling_is_set_up_on_the_thread_too(pair: MlxPair) -> None:
    sampling = SamplingParams(0.9, seed=4)
    outputs = [
        in_a_thread(lambda: pair.engine().generate(PROMPT, max_new_tokens=12, sampling=sampling).token_ids)
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]


# Beginning and end ----------------------------------------------------------------------------------------------

RACE = """
import threading, time
before, start, started = threading.active_count(), threading.Thread.start, []
import mlx.core as mx
from mlx_dflash.thread import on_device_thread as run
assert threading.active_count() == before, "importing starts nothing"
def slow_start(thread):
    if thread.name == "mlx":
        started.append(thread)
        time.sleep(0.1)
    start(thread)
threading.Thread.start = slow_start
barrier, found = threading.Barrier(8), []
def first():
    barrier.wait()
    found.append(run(threading.get_ident))
threads = [threading.Thread(target=first) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8 and len(set(found)) == 1 and len(started) == 1, (found, started)
array = run(lambda: mx.random.normal((64, 64)) @ mx.ones((64, 64)))
run(lambda: mx.async_eval(array))
print("whole")
"""
LATE = """
import atexit
from mlx_dflash.thread import on_device_thread as run
def late():
    try:
        print("late", run(lambda: 2))
    except Exception as error:
        print("late", type(error).__name__, error)
atexit.register(late)
print(run(lambda: 1))
"""


def ended(script: str) -> tuple[int, str, str]:
    """Exit status and output of a process that runs ``script``."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"], ids=["returns", "exits"])
def test_a_process_starts_the_thread_once_and_ends_in_order(end: str) -> None:
    """Eight threads race to be first; work may still be under way when the process ends."""
    assert ended(RACE + end) == (0, "whole\n", "")


def test_a_call_that_comes_after_the_threads_end_does_not_wait_for_ever() -> None:
    """A handler that was registered before MLX's first use runs after its thread has gone."""
    status, output, errors = ended(LATE)
    assert (status, errors) == (0, "")
    assert output.startswith("1\nlate ")


def test_arrays_that_are_put_off_do_not_leave_their_thread() -> None:
    """Why all this: MLX refuses to evaluate on one thread what another has built."""
    waiting = on_device_thread(lambda: mx.ones(3) + 1)
    with pytest.raises(RuntimeError):
        mx.eval(waiting)
    assert on_device_thread(waiting.tolist) == [2, 2, 2]
