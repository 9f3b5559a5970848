"""Rejection sampling on MLX: the target's law, PyTorch's tokens for the same seeds, verdicts, one wait a round.

Fewer samples than on PyTorch, whose law is told in ``torch_backend/test_rejection.py``: a seed gives the same tokens on
both, and mutants of this backend's code are caught by themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
import mlx_dflash.verify
import numpy as np
import torch
import torch_dflash.sampling
from mlx_dflash.backend import MlxBackend
from mlx_dflash.sampling import draft_samples, draw
from mlx_dflash.verify import RejectionVerifier
from sampling_law import CAUGHT, CHANCE, DRAWN, SHARP, SMALL, law, mutant, p_value, sample_four
from tiny_models import RuleTarget

from dflash.errors import BackendError
from dflash.types import Proposal, SamplingParams, TargetOutput, Verdict

BACKEND = MlxBackend()
TARGET = RuleTarget(SHARP, SMALL, BACKEND, mx.array)  # type: ignore[arg-type]
ON_TORCH = RuleTarget(SHARP, SMALL)


def draws(logits: np.ndarray, sampling: SamplingParams, uniforms: np.ndarray) -> tuple[Any, Any]:
    return draft_samples(mx.array(logits), sampling, mx.array(uniforms, dtype=mx.float32))


def torch_draws(logits: np.ndarray, sampling: SamplingParams, uniforms: np.ndarray) -> tuple[Any, Any]:
    return torch_dflash.sampling.draft_samples(torch.from_numpy(logits), sampling, torch.from_numpy(uniforms))


@pytest.mark.parametrize(
    ("name", "rule", "policy"),
    [
        ("temperature 0.5", "rejection", "argmax"),
        ("temperature 1", "match", "sample"),
        ("temperature 1.7", "rejection", "sample"),
        ("temperature 1.7, top-k 3, top-p 0.85", "rejection", "sample"),
    ],
)
def test_the_law_of_four_tokens_is_kept(name: str, rule: str, policy: str) -> None:
    counts = sample_four(TARGET, DRAWN[name], draws, samples=300, verify=rule, draft_policy=policy)
    assert p_value(counts, law(SamplingParams(**DRAWN[name]), SHARP, 4)) > CHANCE


@pytest.mark.parametrize("name", ["temperature 1, top-k 2", "temperature 1, top-p 0.8"])
@pytest.mark.parametrize("policy", ["argmax", "sample"])
def test_a_seed_gives_the_torch_backends_tokens(name: str, policy: str) -> None:
    options: dict[str, Any] = {"samples": 80, "verify": "rejection", "draft_policy": policy}
    theirs = sample_four(ON_TORCH, DRAWN[name], torch_draws, **options)
    assert len(theirs) > 8
    assert sample_four(TARGET, DRAWN[name], draws, **options) == theirs


ACCEPTS = "limits * given < own"
RESIDUAL = "mx.maximum(chances - mx.where(stands < count, taken, 0), 0)"
TOP_2 = "temperature 1, top-k 2"
MUTANTS = {
    "p and q swapped in the acceptance": (TOP_2, ACCEPTS, "limits * own < given"),
    "acceptance behind a rejection": (TOP_2, "_in_a_row(limits * given < own)", "(limits * given < own).sum()"),
    "the correction from p": (TOP_2, RESIDUAL, "chances"),
    "one number for the acceptance and the next token": (
        "temperature 1.7", 'Uniforms(sampling.seed, "accept")', "Uniforms(sampling.seed)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_caught(name: str) -> None:
    setting, *edit = MUTANTS[name]
    policy, block_size = ("argmax", 4) if setting == "temperature 1.7" else ("sample", 3)
    options = {"verify": "rejection", "draft_policy": policy, "block_size": block_size}
    counts = sample_four(TARGET, DRAWN[setting], draws, mutant(RejectionVerifier, edit), samples=400, **options)
    assert p_value(counts, law(SamplingParams(**DRAWN[setting]), SHARP, 4)) < CAUGHT


def test_a_residual_that_is_not_normalised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_dflash.verify, "draw", mutant(draw, (" * sums[:, -1:]", "")))
    counts = sample_four(TARGET, DRAWN[TOP_2], draws, samples=400, verify="rejection", draft_policy="sample")
    assert p_value(counts, law(SamplingParams(**DRAWN[TOP_2]), SHARP, 4)) < CAUGHT


# Verdicts ---------------------------------------------------------------------------------------------------------


def verdict_of(
    p: Any, q: Any, drafted: list[int], deciding: float = 0.0, drawing: float = 0.0, **options: Any
) -> Verdict:
    verifier = RejectionVerifier(SamplingParams(1.0, seed=0), **options)
    verifier._accepting.range = lambda start, end: np.full(end - start, deciding)  # type: ignore[method-assign]
    verifier._stream.range = lambda start, end: np.full(end - start, drawing)  # type: ignore[method-assign, union-attr]
    block = mx.array([0, *drafted], dtype=mx.int32)
    proposal = Proposal(block[1:], block, len(drafted), q=None if q is None else mx.array(q))
    return verifier.verify(proposal, TargetOutput(mx.log(mx.array(p)), None))


HALVES = [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize("q", [None, [[0.7, 0.1, 0.1, 0.1]], [[1.0, 0.0, 0.0, 0.0]]], ids=["one-hot", "drawn", "sure"])
def test_a_token_of_probability_zero_is_never_accepted_even_by_zero(q: Any) -> None:
    for token in (0, 3):
        verdict = verdict_of([HALVES, HALVES], q, [token])
        assert verdict.accepted == 0 and verdict.next_token in (1, 2)


def test_not_strictly_below_would_accept_it() -> None:
    """So the test above can fail."""
    broken = mutant(RejectionVerifier, (ACCEPTS, ACCEPTS.replace("<", "<=")))(SamplingParams(1.0, seed=0))
    broken._accepting.range = lambda start, end: np.zeros(end - start)
    block = mx.array([0, 0], dtype=mx.int32)
    assert (
        broken.verify(Proposal(block[1:], block, 1), TargetOutput(mx.log(mx.array([HALVES] * 2)), None)).accepted == 1
    )


def test_an_empty_residual_gives_way_to_the_targets_distribution() -> None:
    for q in ([[0.6, 0.6, 0.6, 0.6]], [[0.0, 0.5 + 1e-6, 0.5, 0.0]]):
        for drawing, token in ((0.0, 1), (0.9, 2)):
            verdict = verdict_of([HALVES, HALVES], q, [1], 1 - 2**-53, drawing)
            assert (verdict.accepted, verdict.next_token) == (0, token)
    sure = [[0.0, 1.0, 0.0, 0.0]] * 2
    assert verdict_of(sure, None, [1], 1 - 2**-53).accepted == 1, "a number next to 1 must not be rounded to it"


def test_the_correction_comes_from_what_q_leaves_of_p() -> None:
    p, q = [[0.5, 0.1, 0.4, 0.0]] * 2, [[0.1, 0.8, 0.0, 0.1]]
    for drawing, token in ((0.0, 0), (0.499, 0), (0.501, 2), (1 - 2**-53, 2)):
        verdict = verdict_of(p, q, [1], 0.2, drawing)  # 0.2 · 0.8 is not below 0.1; the residual is 0.4 and 0.4
        assert (verdict.accepted, verdict.next_token, verdict.kind) == (0, token, "correction")
    assert verdict_of(p, q, [1], 0.12).accepted == 1
    assert verdict_of(p, q, [3]).accepted == 0, "drawn, and ruled out by the target"
    assert verdict_of([[0.0, 0.25, 0.75, 0.0]], None, [], 0.9, 0.3).next_token == 2


def test_only_the_rejected_row_decides_the_correction() -> None:
    p = [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.6, 0.0, 0.4, 0.0]]
    q = [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    verdict = verdict_of(p, q, [0, 2, 0], 0.5)
    assert (verdict.accepted, verdict.next_token, verdict.drafted) == (1, 3, (0, 2, 0))
    q[1] = p[1]
    verdict = verdict_of(p, q, [0, 3, 0], 0.5)
    assert (verdict.accepted, verdict.next_token, verdict.kind) == (3, 0, "bonus"), "of which no q is taken"


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(1.0, seed=1), SamplingParams(0.8, 3, 0.9, seed=1)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_and_no_token(bad: float, sampling: SamplingParams) -> None:
    logits = np.zeros((2, 5), dtype=np.float32)
    logits[1, 2] = bad
    block = mx.array([0, 1], dtype=mx.int32)
    with pytest.raises(BackendError, match="logits are not numbers in float16"):
        output = TargetOutput(mx.array(logits).astype(mx.float16), None)
        RejectionVerifier(sampling).verify(Proposal(block[1:], block, 1), output)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_drafter_whose_logits_are_no_numbers_still_tells_what_it_drew_from(bad: float) -> None:
    for where in (0, slice(None)):
        logits = np.zeros((2, 5), dtype=np.float32)
        logits[1, where] = bad
        tokens, q = draws(logits, SamplingParams(0.5, 2, 0.9), np.array([0.0, 1 - 2**-53]))
        np.testing.assert_allclose(np.array(q).sum(-1), 1, rtol=1e-6)
        assert (np.take_along_axis(np.array(q), np.array(tokens)[:, None], -1) > 0).all()
