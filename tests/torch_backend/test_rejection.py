"""Rejection sampling in PyTorch: the target's law, exactly, for drafts that were drawn and for drafts that were not.

Samples of four tokens are held to the enumerated law by ``sampling_law``. Mutants, the shipped code with one piece
of it replaced, are held to the same test and must fail it by far."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import cpu_dflash
import numpy as np
import pytest
import torch
import triton_dflash
from graph_tape import Tapes
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_law import CAUGHT, CHANCE, DRAWN, SHARP, SMALL, law, mutant, p_value, sample_four
from tiny_models import RuleTarget, TinyPair
from torch import Tensor
from torch_dflash.cuda_stack import CudaStack
from torch_dflash.graphs import Recorder
from torch_dflash.sampling import draft_samples, draw, shape_probabilities
from torch_dflash.verify import RejectionVerifier

from dflash.errors import BackendError
from dflash.types import Proposal, SamplingParams, TargetOutput, Verdict
from dflash.uniforms import Uniforms

CPU = torch.device("cpu")
TARGET = RuleTarget(SHARP, SMALL)
NAIVE = sys.modules["triton_dflash.verify_rejection"].naive  # type: ignore[attr-defined]
SAMPLES = 1000
STOP = 1  # where two outputs in three end


def drawing(samples: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda logits, sampling, uniforms: samples(torch.from_numpy(logits), sampling, torch.from_numpy(uniforms))


DRAW = drawing(draft_samples)

# The law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["argmax", "sample"])
@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("name", DRAWN)
def test_the_law_of_four_tokens_is_kept(name: str, rule: str, policy: str) -> None:
    counts = sample_four(TARGET, DRAWN[name], DRAW, samples=SAMPLES, verify=rule, draft_policy=policy)
    chances = law(SamplingParams(**DRAWN[name]), SHARP, 4)
    assert sum(chances.values()) == pytest.approx(1)
    assert p_value(counts, chances) > CHANCE


@pytest.mark.parametrize("block_size", [2, 6])
@pytest.mark.parametrize("policy", ["argmax", "sample"])
def test_the_law_is_kept_in_blocks_that_a_stop_or_the_budget_cuts(policy: str, block_size: int) -> None:
    """Blocks of six have more slots than the budget has tokens, and a stop may come before the correction."""
    name = "temperature 1.7, top-k 3, top-p 0.85"
    options = {"verify": "rejection", "draft_policy": policy, "block_size": block_size, "stop": (STOP,)}
    counts = sample_four(TARGET, DRAWN[name], DRAW, samples=SAMPLES, **options)
    chances = law(SamplingParams(**DRAWN[name]), SHARP, 4, stop=(STOP,))
    assert sum(chance for output, chance in chances.items() if output[-1] == STOP) > 0.3
    assert p_value(counts, chances) > CHANCE


ACCEPTS = "uniforms[0, :count].double() * given < own"
RESIDUAL = "(chances - taken * (accepted < count)).clamp(min=0)"
AIM = "uniforms[1].gather(0, accepted[None]).double() * cumulative[-1]"
RULE_MUTANTS = {
    "p and q swapped in the acceptance": ("plain", ACCEPTS, "uniforms[0, :count].double() * own < given"),
    "q left out of the acceptance": ("plain", ACCEPTS, "uniforms[0, :count].double() < own"),
    "the acceptance asks the drafter": ("plain", ACCEPTS, "uniforms[0, :count].double() < given"),
    "one number for all acceptances": ("argmax", ACCEPTS, "uniforms[0, :1].double() * given < own"),
    "acceptance behind a rejection": ("plain", ".long().cumprod(0).sum()", ".long().sum()"),
    "the correction from p": ("top-k", RESIDUAL, "chances"),
    "the residual not normalised": ("top-k", AIM, "uniforms[1].gather(0, accepted[None]).double()"),
    "the residual |p − q|": ("plain", RESIDUAL, "(chances - taken * (accepted < count)).abs()"),
    "the bonus from a residual": ("shaped", RESIDUAL, "(chances - taken).clamp(min=0)"),
    "the residual of the row before": ("top-k", "accepted.clamp(max=count - 1)", "(accepted - 1).clamp(min=0)"),
    "acceptance numbers again for the residual": ("plain", AIM, AIM.replace("uniforms[1]", "uniforms[0]")),
}
NUMBERS = "self._numbers(self._position, self._position + len(logits))"
ACCEPTING = 'Uniforms(sampling.seed, "accept")'
DRAWN_BY = "self._stream.range", 'Uniforms(self.sampling.seed, "draft").range'
VERIFIER_MUTANTS = {
    "acceptance by the draft's numbers": ("shaped", ACCEPTING, 'Uniforms(sampling.seed, "draft")'),
    "acceptance by the target's numbers": ("argmax", ACCEPTING, "Uniforms(sampling.seed)"),
    "the next token by the draft's numbers": (
        "shaped",
        "self._stream.range",
        'Uniforms(self.sampling.seed, "draft").range',
    ),
    "numbers that begin anew each round": ("argmax", NUMBERS, "self._numbers(1, 1 + len(logits))"),
    "top-k and top-p of the draft alone": ("shaped", "self.sampling.top_k or self.sampling.top_p < 1", "False"),
    "the temperature twice": ("shaped", "self.sampling).log(), 1.0", "self.sampling).log(), temperature"),
}
DRAFT_MUTANTS = {
    "drawn at another temperature than q's": ("cold", "draw(q, uniforms), q", "draw(q.square(), uniforms), q"),
    "q before temperature, top-k and top-p": ("top-k", "draw(q, uniforms), q", "draw(q, uniforms), logits.softmax(-1)"),
    "the argmax with a q that is not one-hot": ("plain", "draw(q, uniforms), q", "q.argmax(-1), q"),
    "one number for all slots": ("shaped", "draw(q, uniforms), q", "draw(q, uniforms[:1].expand(len(q))), q"),
}
SCENES = {  # where a mutant shows: setting, draft policy, block size
    "plain": ("temperature 1", "sample", 3),
    "cold": ("temperature 0.5", "sample", 3),
    "top-k": ("temperature 1, top-k 2", "sample", 3),
    "shaped": ("temperature 1.7, top-k 3, top-p 0.85", "sample", 3),
    "argmax": ("temperature 1.7", "argmax", 4),
}


def p_of(scene: str, verifier: Any = None, draw: Any = DRAW) -> float:
    name, policy, block_size = SCENES[scene]
    options = {"verify": "rejection", "draft_policy": policy, "block_size": block_size}
    counts = sample_four(TARGET, DRAWN[name], draw, verifier, samples=SAMPLES, **options)
    return p_value(counts, law(SamplingParams(**DRAWN[name]), SHARP, 4))


@pytest.mark.parametrize("name", RULE_MUTANTS)
def test_a_broken_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, *edit = RULE_MUTANTS[name]
    monkeypatch.setattr(triton_dflash, "verify_rejection", mutant(NAIVE, edit))
    assert p_of(scene) < CAUGHT


@pytest.mark.parametrize("name", VERIFIER_MUTANTS)
def test_a_broken_verifier_is_caught(name: str) -> None:
    scene, *edit = VERIFIER_MUTANTS[name]
    broken = mutant(RejectionVerifier, edit)
    assert p_of(scene, lambda sampling: broken(sampling, device=CPU)) < CAUGHT


@pytest.mark.parametrize("name", DRAFT_MUTANTS)
def test_a_broken_draft_is_caught(name: str) -> None:
    scene, *edit = DRAFT_MUTANTS[name]
    assert p_of(scene, draw=drawing(mutant(draft_samples, edit))) < CAUGHT


# Verdicts ---------------------------------------------------------------------------------------------------------


def verdict_of(
    p: Any,
    q: Any,
    drafted: list[int],
    deciding: float | list[float] = 0.0,
    drawing: float = 0.0,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> Verdict:
    """The verdict on rows of probabilities: ``p`` [1 + count, V], ``q`` [count, V] or None."""
    verifier = RejectionVerifier(sampling or SamplingParams(1.0, seed=0), device=CPU, **options)
    rows = len(drafted) + 1
    decides = torch.as_tensor(deciding, dtype=torch.float64).expand(rows)
    verifier._uniforms = torch.stack((decides, torch.full((rows,), drawing, dtype=torch.float64)))
    tokens = torch.tensor(drafted, dtype=torch.long)
    given = None if q is None else torch.as_tensor(q, dtype=torch.float32)
    proposal = Proposal(tokens, torch.cat((torch.tensor([0]), tokens)), len(drafted), q=given)
    return verifier.verify(proposal, TargetOutput(torch.as_tensor(p, dtype=torch.float32).log(), None))


HALVES, THIRDS = [0.0, 0.5, 0.5, 0.0], [0.0, 1 / 3, 1 / 3, 1 / 3]


@pytest.mark.parametrize("q", [None, [[0.7, 0.1, 0.1, 0.1]], [[1.0, 0.0, 0.0, 0.0]]], ids=["one-hot", "drawn", "sure"])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_token_of_probability_zero_is_never_accepted_even_by_zero(q: Any, top_k: int) -> None:
    sampling = SamplingParams(1.0, top_k, seed=0)
    for token in (0, 3):
        verdict = verdict_of([HALVES, HALVES], q, [token], 0.0, 0.0, sampling)
        assert (verdict.accepted, verdict.next_token) == (0, 1 if token == 0 or q is None else verdict.next_token)
        assert verdict.next_token in (1, 2)


def test_not_strictly_below_would_accept_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(triton_dflash, "verify_rejection", mutant(NAIVE, (ACCEPTS, ACCEPTS.replace("<", "<="))))
    assert verdict_of([HALVES, HALVES], None, [0]).accepted == 1


def test_what_top_k_or_top_p_rule_out_is_never_accepted() -> None:
    p = [[0.1, 0.2, 0.3, 0.4]] * 2
    for sampling in (SamplingParams(1.0, 2, seed=0), SamplingParams(1.0, top_p=0.6, seed=0)):
        for token, accepted in ((0, 0), (1, 0), (2, 1), (3, 1)):
            verdict = verdict_of(p, None, [token], 0.0, 0.99, sampling)
            assert verdict.accepted == accepted and verdict.next_token in (2, 3)


def test_a_drafter_that_is_the_target_is_always_accepted() -> None:
    p = torch.randn(9, 50, generator=torch.Generator().manual_seed(3)).softmax(-1)
    exact = p.log().softmax(-1)  # as the verifier rounds it
    drafted = exact[:8].argmax(-1).tolist()
    assert verdict_of(p, exact[:8], drafted, 1 - 2**-53).accepted == 8


def test_an_empty_residual_gives_way_to_the_targets_distribution() -> None:
    """Where q ≥ p everywhere, as only rounding can have it, or a q whose sum is not one."""
    p = [[0.0, 0.5, 0.5, 0.0]] * 2
    for q, expected in (([[0.6, 0.6, 0.6, 0.6]], (1, 2)), ([[0.0, 0.5 + 1e-6, 0.5, 0.0]], (1, 2))):
        for drawing, token in zip((0.0, 0.9), expected, strict=True):
            verdict = verdict_of(p, q, [1], 1 - 2**-53, drawing)
            assert (verdict.accepted, verdict.next_token) == (0, token)
    sure = [[0.0, 1.0, 0.0, 0.0]] * 2  # p is sure of the draft, which is accepted by any number
    assert verdict_of(sure, None, [1], 1 - 2**-53).accepted == 1


def test_the_correction_comes_from_what_q_leaves_of_p() -> None:
    p, q = [[0.5, 0.1, 0.4, 0.0]] * 2, [[0.1, 0.8, 0.0, 0.1]]
    for drawing, token in ((0.0, 0), (0.499, 0), (0.501, 2), (1 - 2**-53, 2)):
        verdict = verdict_of(p, q, [1], 0.2, drawing)  # 0.2 · 0.8 is not below 0.1; the residual is 0.4 and 0.4
        assert (verdict.accepted, verdict.next_token, verdict.kind) == (0, token, "correction")
    assert verdict_of(p, q, [1], 0.12).accepted == 1
    assert verdict_of(p, q, [0], 1 - 2**-53).accepted == 1, "p is five times q there"
    assert verdict_of(p, q, [3], 0.0).accepted == 0, "drawn, and ruled out by the target"


def test_only_the_rejected_row_decides_the_correction() -> None:
    p = [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.6, 0.0, 0.4, 0.0]]
    q = [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    verdict = verdict_of(p, q, [0, 2, 0], 0.5)
    assert (verdict.accepted, verdict.next_token, verdict.drafted) == (1, 3, (0, 2, 0))
    q[1] = p[1]
    verdict = verdict_of(p, q, [0, 3, 0], 0.5)
    assert (verdict.accepted, verdict.next_token, verdict.kind) == (3, 0, "bonus"), "of which no q is taken"


def test_nothing_drafted_is_plain_sampling() -> None:
    assert verdict_of([[0.0, 0.25, 0.75, 0.0]], None, [], 0.9, 0.3).next_token == 2
    assert verdict_of([[0.0, 0.25, 0.75, 0.0]], None, [], 0.9, 0.2).next_token == 1


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(
    rows=st.lists(st.lists(st.integers(0, 6), min_size=5, max_size=5).filter(any), min_size=2, max_size=2),
    drafted=st.integers(0, 4),
    numbers=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    known=st.booleans(),
)
def test_a_verdict_follows_the_definition(
    rows: list[list[int]], drafted: int, numbers: tuple[float, float], known: bool
) -> None:
    p, q = (np.array(row) / sum(row) for row in rows)
    if not known:
        q = np.eye(5)[drafted]
    margin = numbers[0] * q[drafted] - p[drafted]
    if abs(margin) < 1e-6 and p[drafted] > 0:
        return  # within what float32 logits leave open
    verdict = verdict_of(np.stack((p, p)), q[None] if known else None, [drafted], *numbers)
    assert verdict.accepted == int(margin < 0)
    if not verdict.accepted:
        residual = np.maximum(p - q, 0)
        residual[residual < 1e-6] = 0
        mass = residual if residual.sum() else p
        sums = mass.cumsum() / mass.sum()
        assert mass[verdict.next_token] > 0
        assert sums[verdict.next_token] >= numbers[1] - 1e-5
        assert verdict.next_token == 0 or sums[verdict.next_token - 1] <= numbers[1] + 1e-5


def test_detail_tells_p_and_q() -> None:
    p, q = [[0.5, 0.1, 0.4, 0.0]] * 3, torch.tensor([[0.1, 0.8, 0.0, 0.1], [0.3, 0.3, 0.3, 0.1]])
    verifier = RejectionVerifier(SamplingParams(1.0, seed=0), device=CPU, detail=True)
    tokens = torch.tensor([1, 2])
    proposal = Proposal(tokens, torch.tensor([0, 1, 2]), 2, q.gather(-1, tokens[:, None])[:, 0], q)
    verdict = verifier.verify(proposal, TargetOutput(torch.tensor(p).log(), None))
    assert verdict.draft_probs == pytest.approx([0.8, 0.3])
    assert verdict.target_probs == pytest.approx([0.1, 0.4])
    assert verdict.drafted == (1, 2)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(1.0, seed=1), SamplingParams(0.8, 3, 0.9, seed=1)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_and_no_token(bad: float, sampling: SamplingParams) -> None:
    logits = torch.zeros(2, 5, dtype=torch.float16)
    logits[1, 2] = bad
    proposal = Proposal(torch.tensor([1]), torch.tensor([0, 1]), 1)
    with pytest.raises(BackendError, match="logits are not numbers in float16"):
        RejectionVerifier(sampling, device=CPU).verify(proposal, TargetOutput(logits, None))


def test_blocks_beyond_the_numbers_drawn_ahead_are_verified() -> None:
    """And each position has the numbers of its own."""
    verifier, seen = RejectionVerifier(SamplingParams(1.0, seed=3), device=CPU), 0
    for count in (0, 600, 2, 300):
        rows = torch.eye(3)[[0] * count + [1]] * 99.0
        proposal = Proposal(torch.zeros(count).long(), torch.zeros(count + 1).long(), count)
        verdict = verifier.verify(proposal, TargetOutput(rows, None))
        assert (verdict.accepted, verdict.next_token) == (count, 1)
        seen += count + 1
        assert verifier._position == seen
    numbers = verifier._numbers(seen, seen + 4).numpy()
    assert (numbers == [Uniforms(3, name).range(seen, seen + 4) for name in ("accept", "target")]).all()


def test_temperature_zero_is_greedy() -> None:
    logits = torch.eye(4)[[1, 2, 3]] * 9.0
    for drafted, accepted, token in (([1, 2], 2, 3), ([1, 0], 1, 2), ([0, 2], 0, 1)):
        tokens = torch.tensor(drafted)
        proposal = Proposal(tokens, torch.cat((torch.tensor([0]), tokens)), 2)
        verdict = RejectionVerifier(SamplingParams(), device=CPU).verify(proposal, TargetOutput(logits, None))
        assert (verdict.accepted, verdict.next_token) == (accepted, token)


# Drafts -----------------------------------------------------------------------------------------------------------


def test_samples_are_drawn_from_the_shaped_draft_logits() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    sampling = SamplingParams(0.7, 12, 0.9)
    tokens, q = draft_samples(logits, sampling, torch.linspace(0, 0.999, 6, dtype=torch.float64))
    assert torch.equal(q, shape_probabilities(logits, sampling))
    assert torch.equal(tokens, draw(q, torch.linspace(0, 0.999, 6, dtype=torch.float64)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, slice(None)], ids=["one", "all"])
def test_a_drafter_whose_logits_are_no_numbers_still_tells_what_it_drew_from(bad: float, where: Any) -> None:
    logits = torch.zeros(2, 5)
    logits[1, where] = bad
    for sampling in (SamplingParams(1.0), SamplingParams(0.5, 2, 0.9)):
        tokens, q = draft_samples(logits, sampling, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
        torch.testing.assert_close(q.sum(-1), torch.ones(2))
        assert (q.gather(-1, tokens[:, None]) > 0).all()


def test_the_stack_for_cuda_drafts_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through captured passes (here tapes), whose results a later pass may write over."""
    sampling, found, tapes = SamplingParams(1.2, top_p=0.9, seed=3), [], Tapes()
    monkeypatch.setattr(Recorder, "capture", lambda self, run: tapes(run))
    for way in (True, False):
        for module in ("stacks", "verify"):
            monkeypatch.setattr(f"torch_dflash.{module}.use_cuda", lambda device, dtype, way=way: way)
        with cpu_dflash.forced(False):
            pair = TinyPair()
            drafter = pair.drafter()
            assert isinstance(drafter.stack, CudaStack) == way
            options = {"sampling": sampling, "verify": "rejection", "draft_policy": "sample", "detail": True}
            found.append(pair.engine(drafter).generate([5, 9, 40], max_new_tokens=20, ignore_eos=True, **options))
    assert found[0].token_ids == found[1].token_ids
    for ours, theirs in zip(found[0].steps, found[1].steps, strict=True):
        assert ours.drafted == theirs.drafted
        assert (ours.draft_probs or ()) == pytest.approx(theirs.draft_probs or (), rel=1e-4, abs=1e-6)
    assert tapes.replays > 5
