"""The rest of the backend's face: arrays on the host, a round's time, peak memory, the wired limit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
import mlx_dflash.target as target_module
import numpy as np
from mlx_models import make_model, save_model, serve, settings_of
from tiny_mlx import MlxPair

MEGABYTE = 1 << 20
PROMPT = [5, 17, 200, 33]


@pytest.fixture(scope="module")
def pair() -> MlxPair:
    return MlxPair()


# Arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_floats_come_to_the_host_in_float32(pair: MlxPair, dtype: mx.Dtype) -> None:
    values = pair.backend.numpy(mx.array([[0.5, -2.0], [1.5, 3.0]]).astype(dtype))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, [[0.5, -2.0], [1.5, 3.0]])


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.bool_])
def test_whole_numbers_come_to_the_host_as_they_are(pair: MlxPair, dtype: mx.Dtype) -> None:
    values = pair.backend.numpy(mx.array([0, 1, 1]).astype(dtype))
    assert values.dtype == np.dtype(str(dtype).removeprefix("mlx.core.").removesuffix("_"))
    np.testing.assert_array_equal(values, [0, 1, 1])


@pytest.mark.parametrize("block", [[7], [7, 1], [0, 299, 299, 5]])
def test_a_proposal_of_known_tokens_is_the_block_behind_its_anchor(pair: MlxPair, block: list[int]) -> None:
    proposal = pair.backend.proposal(block, pair.target)
    assert (proposal.count, proposal.block.tolist(), proposal.tokens.tolist()) == (len(block) - 1, block, block[1:])
    assert proposal.probs is None


def test_versions_name_what_computes(pair: MlxPair) -> None:
    assert {"mlx", "mlx-lm"} <= set(pair.backend.versions())


# Time -----------------------------------------------------------------------------------------------------------


def test_drafting_is_told_from_verifying_only_where_it_may_wait(pair: MlxPair) -> None:
    """Without detail a round has no second wait, and all of its device time counts as verifying."""
    engine = pair.engine()
    plain, exact = (engine.generate(PROMPT, max_new_tokens=12, detail=detail).steps[1:] for detail in (False, True))
    assert all(step.draft_seconds == 0 < step.verify_seconds for step in plain)
    assert all(step.draft_seconds > 0 and step.verify_seconds > 0 for step in exact)


def test_exact_marks_wait_for_what_was_put_off(pair: MlxPair) -> None:
    backend, target = pair.backend, pair.target

    def seconds(exact: bool) -> float:
        clock = backend.clock(target, exact=exact)
        start = clock.mark()
        work = mx.ones((400, 400))
        for _ in range(4):
            work = work @ work / 400
        mx.async_eval(work)
        end = clock.mark()
        mx.eval(work)
        return clock.seconds(start, end)

    assert backend.run(lambda: seconds(exact=False)) == 0
    assert backend.run(lambda: seconds(exact=True)) > 1e-3


# Memory ---------------------------------------------------------------------------------------------------------


def test_the_peak_is_what_was_held_at_most_since_the_reset(pair: MlxPair) -> None:
    backend, target = pair.backend, pair.target

    def hold(megabytes: int) -> None:
        mx.eval(mx.ones((megabytes, MEGABYTE // 4)))

    def peak_of(*sizes: int) -> int:
        """Bytes above what the process holds anyway."""
        backend.reset_peak_memory(target)
        for size in sizes:
            hold(size)
        return backend.peak_memory(target) - mx.get_active_memory()

    large, small = backend.run(lambda: peak_of(40, 2)), backend.run(lambda: peak_of(2))
    assert 40 * MEGABYTE <= large < 80 * MEGABYTE
    assert large - small >= 30 * MEGABYTE


def test_a_result_reports_its_own_peak_and_not_an_earlier_ones(pair: MlxPair) -> None:
    engine = pair.engine()

    def hold() -> int:
        held = mx.get_active_memory()
        mx.eval(mx.ones((64, MEGABYTE // 4)))
        return held

    held = pair.backend.run(hold)
    assert mx.get_peak_memory() >= held + 64 * MEGABYTE
    result = engine.generate(PROMPT, max_new_tokens=8)
    assert 0 < result.metrics.peak_memory < held + 32 * MEGABYTE


def test_a_longer_prompt_in_chunks_takes_less_at_once(pair: MlxPair) -> None:
    """Logits of the last row alone, and features only until they are projected."""
    peaks = []
    for chunk in (16, 480):
        engine = pair.engine(prefill_chunk=chunk)
        peaks.append(engine.generate([3] * 480, max_new_tokens=1).metrics.peak_memory)
    assert peaks[0] < peaks[1]


def test_what_a_generation_holds_goes_with_the_next(pair: MlxPair) -> None:
    engine, held = pair.engine(), []
    gc.collect()
    for _ in range(4):
        engine.generate([5, 17] * 40, max_new_tokens=12)
        held.append(pair.backend.run(mx.get_active_memory))
    assert max(held[1:]) - min(held[1:]) < MEGABYTE // 4


@pytest.mark.parametrize(
    ("info", "limits"),
    [
        ({"max_recommended_working_set_size": 12 * MEGABYTE, "device_name": "M"}, [12 * MEGABYTE]),
        ({"max_recommended_working_set_size": 12.0 * MEGABYTE}, [12 * MEGABYTE]),
        ({"max_recommended_working_set_size": 0}, []),
        ({"device_name": "cpu"}, []),
    ],
    ids=["recommended", "a float", "nothing", "a CPU"],
)
def test_the_wired_limit_is_what_the_device_recommends(
    info: dict[str, Any], limits: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(target_module.mx, "device_info", lambda *_: info)
    monkeypatch.setattr(target_module.mx, "set_wired_limit", set_to.append)
    settings = settings_of("llama")
    serve(save_model(tmp_path, make_model(settings), settings), (0,))
    assert set_to == limits
    assert all(isinstance(limit, int) for limit in set_to)
