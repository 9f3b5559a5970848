"""Shaping and drawing on MLX: the torch backend's numbers, in float32 alone, over vocabularies large and small."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_dflash.sampling import cumulative, draw, shape_probabilities
from mlx_dflash.verify import MatchVerifier
from sampling_law import shaped
from torch_dflash import sampling as on_torch

from dflash.types import Proposal, SamplingParams, TargetOutput

BELOW_ONE = 1 - 2**-53  # the largest number that a stream of uniforms holds; 1 in float32
ROWS = np.random.default_rng(4).normal(size=(6, 1300)).astype(np.float32) * 3  # across blocks of the running sums


def shape(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    return np.array(shape_probabilities(mx.array(logits), sampling))


def drawn(probs: np.ndarray, uniforms: list[float] | np.ndarray) -> list[int]:
    tokens: list[int] = draw(mx.array(probs), mx.array(np.asarray(uniforms), dtype=mx.float32)).tolist()
    return tokens


# Shaping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [5, 300, 512, 1300])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 7, 5000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_probabilities_are_the_torch_backends(temperature: float, top_k: int, top_p: float, columns: int) -> None:
    sampling, logits = SamplingParams(temperature, top_k, top_p), ROWS[:, :columns]
    ours, theirs = shape(logits, sampling), on_torch.shape_probabilities(torch.from_numpy(logits), sampling).numpy()
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours > 0, theirs > 0)
    np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=1e-4)


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=9, unique=True),
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
)
def test_shaping_follows_its_definition(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    sampling = SamplingParams(temperature, top_k, top_p)
    row = np.array([logits], dtype=np.float32) / 8
    np.testing.assert_allclose(shape(row, sampling)[0], shaped(row[0].tolist(), sampling), atol=1e-5, rtol=1e-4)


def test_top_k_of_equal_logits_keeps_exactly_k() -> None:
    probs = shape(np.zeros((2, 6), dtype=np.float32), SamplingParams(1.0, top_k=2))
    assert (probs > 0).sum(-1).tolist() == [2, 2]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(1.0, top_p=1e-9), SamplingParams(1.0, top_k=1), SamplingParams(1e-45)]
)
def test_the_likeliest_token_always_stays(sampling: SamplingParams) -> None:
    probs = shape(ROWS, sampling)
    np.testing.assert_array_equal(probs.argmax(-1), ROWS.argmax(-1))
    assert (probs > 0).sum(-1).tolist() == [1] * len(ROWS)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_and_logits_stay_finite(temperature: float) -> None:
    probs = shape(np.array([[3e38, -3e38, 0.0], [1.0, 2.0, -np.inf]], dtype=np.float32), SamplingParams(temperature))
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
    assert probs[1, 2] == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_logits_of_16_bits_are_shaped_in_32(dtype: mx.Dtype) -> None:
    logits, sampling = mx.array(ROWS).astype(dtype), SamplingParams(0.7, 50, 0.9)
    probs = shape_probabilities(logits, sampling)
    assert probs.dtype == mx.float32
    assert mx.array_equal(probs, shape_probabilities(logits.astype(mx.float32), sampling))


# Running sums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 3, 511, 512, 513, 1024, 1300])
def test_running_sums_are_the_definitions(columns: int) -> None:
    values = np.random.default_rng(columns).random((3, columns)).astype(np.float32)
    exact = values.astype(np.float64).cumsum(-1)
    np.testing.assert_allclose(np.array(cumulative(mx.array(values))), exact, rtol=3e-6)


def test_running_sums_stay_accurate_over_a_large_vocabulary() -> None:
    """In one go, float32 would lose what each of 150,000 tokens adds."""
    values = np.full((1, 150_000), 1 / 150_000, dtype=np.float32)
    exact = values.astype(np.float64).cumsum(-1)
    blocks = np.abs(np.array(cumulative(mx.array(values))) - exact).max()
    assert blocks < 1e-5
    assert blocks < np.abs(values.cumsum(-1, dtype=np.float32) - exact).max() / 10


# Drawing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [2, 5, 300, 1300])
def test_draws_are_the_torch_backends_for_the_same_uniforms(columns: int) -> None:
    rng = np.random.default_rng(columns)
    probs = rng.random((400, columns)).astype(np.float32) * (rng.random((400, columns)) > 0.3)
    probs[:, 0] += 1e-3  # no row is empty
    probs /= probs.sum(-1, keepdims=True)
    uniforms = rng.random(400)
    theirs = on_torch.draw(torch.from_numpy(probs), torch.from_numpy(uniforms)).tolist()
    assert drawn(probs, uniforms) == theirs
    assert len(set(theirs)) > columns / 4


@settings(derandomize=True, database=None, deadline=None, max_examples=120)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1)), min_size=1, max_size=12).filter(any),
    uniform=st.one_of(st.just(0.0), st.just(BELOW_ONE), st.floats(0, 1, exclude_max=True)),
)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    probs = np.array([weights], dtype=np.float32)
    (token,) = drawn(probs / probs.sum(), [uniform])
    assert probs[0, token] > 0


ADVERSARIAL: dict[str, np.ndarray] = {
    "behind the last": np.array([0.3, 0.7, 0.0, 0.0]),
    "before the first": np.array([0.0, 0.0, 1.0]),
    "between": np.array([0.5, 0.0, 0.5]),
    "a whole block before": np.concatenate((np.zeros(512), [1.0], np.zeros(700))),
    "a whole block between": np.concatenate(([0.5], np.zeros(600), [0.5], np.zeros(3))),
    "sums that rounding keeps below one": np.concatenate((np.full(999, 0.1 / 999), [0.9], np.zeros(300))),
    "a tail too small to add anything": np.concatenate(([1.0], np.full(5, 1e-20), np.zeros(5))),
    "as small as numbers get": np.array([0.0, 1e-38, 0.0, 1e-38, 0.0]),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 1e-9, 0.5, 1 - 1e-7, BELOW_ONE])
def test_zeros_are_never_drawn_wherever_they_lie(name: str, uniform: float) -> None:
    probs = ADVERSARIAL[name].astype(np.float32)[None]
    (token,) = drawn(probs, [uniform])
    assert probs[0, token] > 0


def test_the_ends_of_the_uniforms_draw_the_ends_of_what_is_possible() -> None:
    probs = np.tile(np.array([0.0, 0.5, 0.0, 0.5, 0.0], dtype=np.float32), (4, 1))
    assert drawn(probs, [0.0, 0.4999, 0.5, BELOW_ONE]) == [1, 1, 3, 3]


def test_draws_are_as_frequent_as_their_probabilities() -> None:
    probs = np.tile(np.array([0.1, 0.0, 0.25, 0.65], dtype=np.float32), (1000, 1))
    tokens = drawn(probs, (np.arange(1000) + 0.5) / 1000)
    assert np.bincount(tokens, minlength=4).tolist() == [100, 0, 250, 650]


def test_a_draft_of_probability_zero_is_never_accepted_even_at_uniform_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = MatchVerifier(SamplingParams(1.0, top_k=2, seed=0))
    monkeypatch.setattr(verifier._stream, "range", lambda start, end: np.zeros(end - start))
    drafted = mx.array([0], dtype=mx.int32)  # the first token of the vocabulary, where a draw of 0 would land
    logits = mx.array([[-5.0, 1.0, 2.0], [-5.0, 1.0, 2.0]])
    verdict = verifier.verify(Proposal(drafted, mx.array([1, 0]), 1), TargetOutput(logits, None))
    assert (verdict.accepted, verdict.next_token) == (0, 1)
