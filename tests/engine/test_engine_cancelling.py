"""Cancelling, errors in mid-round and reuse: the record stays true and the engine stays usable."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine_cases import PROMPT, Boom, ignore_silent_rounds, kinds, scripted_pair, timeless
from tiny_models import PlannedDrafter, ScriptedDrafter, TinyPair, scripted_rule

from dflash.engine import Engine
from dflash.errors import UsageError

pytestmark = ignore_silent_rounds

# Cancelling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(), (1,), (3,)], ids=["right", "first wrong", "third wrong"])
def test_closing_after_any_round_leaves_cache_and_engine_whole(
    pair: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter], wrong: tuple[int, ...]
) -> None:
    engine = pair.engine(scripted(*wrong))
    rounds = len(engine.generate(PROMPT, max_new_tokens=20).steps)
    for closed_after in range(rounds + 1):
        stream = engine.stream(PROMPT, max_new_tokens=20)
        for _ in range(closed_after):
            next(stream)
        stream.close()
        assert list(stream) == []
        result = stream.result()
        assert result.token_ids == oracle[: len(result.token_ids)]
        assert result.metrics.num_tokens == len(result.token_ids)
        assert result.finish_reason == ("length" if closed_after == rounds else "cancelled")
        if closed_after:
            committed = len(PROMPT) + len(result.token_ids)
            assert pair.target.length == engine.drafter.length == committed - 1
            assert pair.cached == committed - 1
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == oracle[:20]


def test_closing_twice_or_after_the_end_is_harmless(pair: TinyPair, oracle: list[int]) -> None:
    stream = pair.engine().stream(PROMPT, max_new_tokens=6)
    result = stream.result()
    stream.close()
    stream.close()
    assert (stream.finish_reason, stream.result()) == ("length", result)
    assert result.token_ids == oracle[:6]


def test_leaving_a_with_block_cancels(pair: TinyPair, oracle: list[int]) -> None:
    engine = pair.engine()
    with engine.stream(PROMPT, max_new_tokens=20) as stream:
        next(stream)
    assert stream.result().finish_reason == "cancelled"
    assert stream.result().token_ids == oracle[:1]


def test_a_forgotten_stream_does_not_matter(pair: TinyPair, oracle: list[int]) -> None:
    engine = pair.engine()
    stream = engine.stream(PROMPT, max_new_tokens=20)
    next(stream)
    next(stream)
    del stream
    gc.collect()
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == oracle[:20]


def test_a_new_stream_ends_the_one_before_it(pair: TinyPair, oracle: list[int]) -> None:
    engine = pair.engine()
    older = engine.stream(PROMPT, max_new_tokens=20)
    next(older)
    newer = engine.stream(PROMPT, max_new_tokens=20)
    first = next(newer)
    assert list(older) == []
    assert older.result().finish_reason == "cancelled"
    assert older.result().token_ids == oracle[:1]
    assert first.kind == "prefill"
    assert newer.result().token_ids == oracle[:20]


def test_a_refused_request_leaves_the_running_one_alone(pair: TinyPair, oracle: list[int]) -> None:
    engine = pair.engine()
    running = engine.stream(PROMPT, max_new_tokens=20)
    next(running)
    with pytest.raises(UsageError):
        engine.stream(PROMPT, max_new_tokens=-1)
    assert running.result().token_ids == oracle[:20]


def test_closing_in_mid_round_makes_that_round_the_last(pair: TinyPair, oracle: list[int]) -> None:
    """From a signal handler or another thread, ``close`` cannot interrupt a round that is running."""
    target = pair.rule_target(scripted_rule(PROMPT + oracle))
    streams: list[Any] = []

    def plan(context: list[int], count: int) -> list[int]:
        streams[0].close()
        return oracle[len(context) - len(PROMPT) :][:count]

    engine = Engine(pair.backend, target, PlannedDrafter(target, plan), check=True)
    streams.append(engine.stream(PROMPT, max_new_tokens=20))
    result = streams[0].result()
    assert kinds(result) == ["prefill", "round"]
    assert (result.token_ids, result.finish_reason) == (oracle[:6], "cancelled")
    assert target.length == len(PROMPT) + 5


def test_closing_from_another_thread_cancels(pair: TinyPair, oracle: list[int]) -> None:
    target = pair.rule_target(scripted_rule(PROMPT + oracle))

    def plan(context: list[int], count: int) -> list[int]:
        time.sleep(0.01)
        return [0] * count

    engine = Engine(pair.backend, target, PlannedDrafter(target, plan), check=True)
    stream = engine.stream(PROMPT, max_new_tokens=2000)
    timer = threading.Timer(0.05, stream.close)
    timer.start()
    result = stream.result()
    timer.join()
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.token_ids) < 2000
    assert target.length == len(PROMPT) + len(result.token_ids) - 1


# Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["propose", "observe", "forward", "keep"])
def test_an_error_in_mid_round_leaves_a_true_record_and_a_usable_engine(
    pair: TinyPair, oracle: list[int], monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException]
) -> None:
    engine = pair.engine(ScriptedDrafter(pair, PROMPT + oracle), prefill_chunk=2)
    owner = engine.drafter if method in ("propose", "observe") else pair.target
    inner, calls = getattr(owner, method), iter(range(100))

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == 3:
            raise error
        return inner(*args, **options)

    monkeypatch.setattr(owner, method, failing)
    stream = engine.stream(PROMPT, max_new_tokens=20)
    with pytest.raises(error):
        list(stream)
    monkeypatch.undo()
    result = stream.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == [token for step in stream.steps for token in step.committed]
    assert 0 < len(result.token_ids) < 20
    assert result.token_ids == oracle[: len(result.token_ids)]
    for speculate in (False, True):
        again = engine.generate(PROMPT, max_new_tokens=20, speculate=speculate)
        assert again.token_ids == oracle[:20]


def test_an_error_inside_the_target_does_not_leak_features_into_the_next_request(
    pair: TinyPair, oracle: list[int]
) -> None:
    engine = pair.engine()
    with pair.failing_layer(1, Boom), pytest.raises(Boom):  # behind the first tap, before the second
        engine.generate(PROMPT)
    assert engine.generate(PROMPT, max_new_tokens=4, speculate=False).token_ids == oracle[:4]
    assert engine.generate(PROMPT, max_new_tokens=4).token_ids == oracle[:4]


def test_a_round_that_failed_leaves_no_text_of_uncommitted_tokens(pair: TinyPair) -> None:
    engine = scripted_pair(pair, "abcdefghijklmnop")
    calls, inner = iter(range(100)), engine.drafter.observe

    def failing(features: Any, token_count: int) -> None:
        if next(calls) == 2:
            raise Boom
        inner(features, token_count)

    engine.drafter.observe = failing  # type: ignore[method-assign]
    stream = engine.stream("?", max_new_tokens=11)
    with pytest.raises(Boom):
        list(stream)
    result = stream.result()
    assert bytes(result.token_ids).decode() == result.text == "abcdef"
    assert result.finish_reason == "cancelled"


def test_the_check_of_the_invariants_can_fail(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = pair.target.keep
    monkeypatch.setattr(pair.target, "keep", lambda path: keep(range(max(len(path) - 1, 0))))
    with pytest.raises(AssertionError, match="the target holds"):
        pair.engine().generate(PROMPT, max_new_tokens=12)


# Reuse ----------------------------------------------------------------------------------------------------------


def test_a_long_request_leaves_nothing_behind_for_a_short_one(pair: TinyPair) -> None:
    used, fresh = pair.engine(), pair.engine()
    used.generate([9, 8, 7] * 20, max_new_tokens=60, block_size=9)
    after = used.generate([4, 2], max_new_tokens=12)
    assert timeless(after.steps) == timeless(fresh.generate([4, 2], max_new_tokens=12).steps)
    assert after.token_ids == pair.oracle([4, 2], 12)


def test_speculative_plain_and_speculative_again_on_one_engine(pair: TinyPair, oracle: list[int]) -> None:
    engine = pair.engine()
    outputs = [engine.generate(PROMPT, max_new_tokens=15, speculate=on).token_ids for on in (True, False, True)]
    assert outputs == [oracle[:15]] * 3
    engine.generate(PROMPT, max_new_tokens=15, speculate=False)
    assert engine.drafter.length == 0, "plain decoding costs the drafter nothing"
