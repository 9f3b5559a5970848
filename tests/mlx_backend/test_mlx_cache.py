"""Caches that forget: full, rotating, quantised and combined ones, as if the rejected tokens had never been fed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_dflash.backend import MlxBackend
from mlx_dflash.cache import RewindableCache
from mlx_dflash.taps import parts_of
from mlx_dflash.target import MlxTarget
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from mlx_models import (
    HIDDEN,
    IDS,
    LAYERS,
    VOCAB,
    WINDOW,
    assert_close,
    feed,
    gap,
    make_model,
    settings_of,
    whole,
)
from tiny_models import ScriptedDrafter, make_config

from dflash.engine import Engine
from dflash.errors import BackendError, RewindError
from dflash.types import TargetInfo

BLOCK = 4
INFO = TargetInfo(LAYERS, HIDDEN, VOCAB, 256, (), "float32", "cpu")


def made(family: str = "llama", **changes: Any) -> MlxTarget:
    model = make_model(settings_of(family, **changes))
    return MlxTarget(model, parts_of(model), (0,), INFO)


def junk(ids: list[int]) -> list[int]:
    return [(token + 31) % VOCAB for token in ids]


def with_caches(*caches: Any) -> Any:
    """A model's cache as ``RewindableCache`` sees it, of these entries."""
    return RewindableCache(SimpleNamespace(make_cache=lambda: list(caches)))


# Full attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(1, BLOCK + 1))
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_rejected_tail_leaves_the_cache_as_if_it_had_never_been_fed(family: str, kept: int) -> None:
    """Every layer's keys and values, and the logits of what follows; ``kept`` 1 is a block with nothing accepted."""
    target = made(family)
    feed(target, IDS[: 10 + kept])
    straight = [layer.keys_and_values() for layer in target.cache.layers]
    target.reset()
    feed(target, IDS[:10])
    feed(target, IDS[10 : 10 + kept] + junk(IDS[10 + kept : 10 + BLOCK]), kept)
    assert target.length == 10 + kept
    for layer, expected in zip(target.cache.layers, straight, strict=True):
        for ours, theirs in zip(layer.keys_and_values(), expected, strict=True):
            assert_close(ours, theirs, 1e-5)
    after = feed(target, IDS[10 + kept : 20]).logits
    assert_close(after, whole(target.model, IDS[:20])[10 + kept :], 1e-5)


def test_length_counts_committed_tokens_only() -> None:
    target = made()
    assert target.length == 0
    target.forward(IDS[:7])
    assert target.length == 0, "nothing is committed before keep"
    target.keep(range(7))
    target.forward(IDS[7:11])
    assert target.length == 7
    target.keep(range(2))
    assert target.length == 9
    target.reset()
    assert target.length == 0


def test_keep_takes_leading_tokens_of_the_last_forward_only() -> None:
    target = made()
    target.forward(IDS[:4])
    for path in (range(5), [1, 2], [0, 2]):
        with pytest.raises(BackendError, match="leading tokens of the last 4"):
            target.keep(path)
    target.keep(range(0))
    assert target.length == 0


def test_a_forward_must_be_followed_by_keep() -> None:
    target = made()
    target.forward(IDS[:4])
    with pytest.raises(AssertionError, match="keep"):
        target.forward(IDS[4:8])
    target.reset()
    feed(target, IDS[:4])


def test_trees_are_refused() -> None:
    with pytest.raises(BackendError, match="tree"):
        made().forward(IDS[:3], parents=[-1, 0, 0])


# Sliding windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain_steps", [False, True], ids=["blocks", "blocks and plain steps"])
@pytest.mark.parametrize("prompt_length", [1, 3, WINDOW - BLOCK, WINDOW - 1, WINDOW, WINDOW + 1, 20])
@pytest.mark.parametrize("rejected", range(BLOCK))
def test_rejections_across_a_windows_wrap_leave_no_trace(rejected: int, prompt_length: int, plain_steps: bool) -> None:
    target, kept = made("llama, sliding"), BLOCK - rejected
    expected = whole(target.model)
    assert_close(feed(target, IDS[:prompt_length]).logits, expected[:prompt_length])
    position = prompt_length
    while position + BLOCK + 1 <= min(len(IDS), prompt_length + 3 * WINDOW):
        block = IDS[position : position + kept] + junk(IDS[position + kept : position + BLOCK])
        logits = feed(target, block, kept).logits
        assert_close(logits[:kept], expected[position : position + kept])
        position += kept
        if plain_steps:
            assert_close(feed(target, IDS[position : position + 1]).logits, expected[position : position + 1])
            position += 1
        assert target.length == position
        sliding = [layer for layer in target.cache.layers if isinstance(layer, RotatingKVCache)]
        assert sliding and all(layer.keys.shape[2] < WINDOW + BLOCK for layer in sliding), "it must not grow"


def test_the_window_matters_to_that_model() -> None:
    """Otherwise the test above would hold for a cache that forgets nothing."""
    windowed, full = make_model(settings_of("llama, sliding")), make_model(settings_of("llama"))
    assert_close(whole(windowed)[:WINDOW], whole(full)[:WINDOW])
    assert gap(whole(windowed)[WINDOW + 2 :], whole(full)[WINDOW + 2 :]) > 1e-2


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    window=st.integers(2, 9),
    forwards=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=8),
)
def test_a_rotating_cache_still_holds_every_window_whole(window: int, forwards: list[tuple[int, int]]) -> None:
    """Each position's key is its number, so that what the cache holds can be read."""
    entry = RotatingKVCache(max_size=window)
    cache, length = with_caches(entry), 0
    for count, rejected in forwards:
        rejected = min(rejected, count - 1)
        rows = mx.arange(length, length + count, dtype=mx.float32).reshape(1, 1, count, 1)
        entry.update_and_fetch(rows, rows)
        cache.rewind(rejected)
        length += count - rejected
        assert entry.offset == length
        positions = [int(position) for position in entry.keys[..., :length, :].reshape(-1).tolist()]
        assert len(set(positions)) == len(positions)
        assert set(range(max(0, length - window + 1), length)) <= set(positions) <= set(range(length))


def test_an_engine_on_a_sliding_target_matches_the_oracle() -> None:
    backend = MlxBackend()
    target, prompt = backend.run(lambda: made("llama, sliding")), IDS[:6]

    def oracle() -> list[int]:
        ids = list(prompt)
        for _ in range(24):
            ids.append(int(mx.argmax(target.model(mx.array([ids]))[0, -1]).item()))
        target.taps.seen.clear()
        return ids

    script = backend.run(oracle)
    pair: Any = SimpleNamespace(backend=backend, target=target)
    for wrong_at in ((), (1,), (3,)):
        drafter = ScriptedDrafter(pair, script, wrong_at, make_config(block_size=BLOCK))
        engine = Engine(backend, target, drafter, prefill_chunk=4, check=True)  # type: ignore[arg-type]
        assert engine.generate(prompt, max_new_tokens=24).token_ids == script[6:]
        assert engine.generate(prompt, max_new_tokens=24, speculate=False).token_ids == script[6:]


# Other caches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_cache_forgets(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = made(head_dim=32)
    model = type(target.model)
    monkeypatch.setattr(
        model, "make_cache", lambda self: [QuantizedKVCache(group_size=32, bits=bits) for _ in self.layers]
    )
    target.reset()
    feed(target, IDS[:10])
    straight = feed(target, IDS[10:20]).logits
    for kept in range(1, BLOCK + 1):
        target.reset()
        feed(target, IDS[:10])
        feed(target, IDS[10 : 10 + kept] + junk(IDS[10 + kept : 10 + BLOCK]), kept)
        assert all(layer.offset == 10 + kept for layer in target.cache.layers)
        assert_close(feed(target, IDS[10 + kept : 20]).logits, straight[kept:], 1e-4)


def test_caches_in_a_list_forget_together() -> None:
    inner = KVCache(), RotatingKVCache(max_size=WINDOW)
    cache = with_caches(CacheList(*inner), CacheList(CacheList(deeper := KVCache())))
    rows = mx.zeros((1, 1, 12, 4))
    for entry in (*inner, deeper):
        entry.update_and_fetch(rows, rows)
    cache.rewind(3)
    assert [entry.offset for entry in (*inner, deeper)] == [9] * 3


def test_what_cannot_forget_is_refused_by_name_and_layers() -> None:
    with pytest.raises(RewindError, match=r"ArraysCache in layers 1, 3-4; a target needs attention layers"):
        with_caches(
            KVCache(), ArraysCache(2), KVCache(), CacheList(KVCache(), ArraysCache(2)), ArraysCache(1), KVCache()
        )


def test_a_refused_model_is_left_unwrapped() -> None:
    model = make_model(settings_of("llama"))
    before = {path: id(module) for path, module in model.named_modules()}
    model.__class__ = type("Stuck", (type(model),), {"make_cache": lambda self: [ArraysCache(2) for _ in self.layers]})
    with pytest.raises(RewindError, match="layers 0-3"):
        MlxTarget(model, parts_of(model), (0, 1), INFO)
    assert {path: id(module) for path, module in model.named_modules()} == before


@pytest.mark.parametrize("forwards", [[12, 1], [3, 1, 1, 1, 1, 1, 1], [1] * 9], ids=str)
def test_a_token_that_has_overwritten_another_cannot_be_forgotten(forwards: list[int]) -> None:
    """A plain step past the window writes over the oldest key; the engine never takes one back."""
    entry = RotatingKVCache(max_size=WINDOW)
    cache = with_caches(KVCache(), entry)
    for count in forwards:
        for one in cache.layers:
            one.update_and_fetch(mx.zeros((1, 1, count, 4)), mx.zeros((1, 1, count, 4)))
    with pytest.raises(RewindError, match=r"layer 1 forgot 0 tokens of 1 \(RotatingKVCache\)"):
        cache.rewind(1)


def test_no_cache_forgets_more_than_it_holds() -> None:
    entry = KVCache()
    entry.update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
    with pytest.raises(RewindError, match=r"layer 0 forgot 3 tokens of 5 \(KVCache\)"):
        with_caches(entry).rewind(5)


def test_rewinding_an_empty_cache_by_nothing_is_fine() -> None:
    with_caches(KVCache(), RotatingKVCache(max_size=WINDOW)).rewind(0)
