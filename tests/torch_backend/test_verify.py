"""Verification keeps the target's distribution: exactly the law of plain sampling, for any proposal.

Samples are held to the law by ``sampling_law``. Rules that are broken in ways that ports have shipped are held to the
same test and must fail it by far."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_law import CAUGHT, CHANCE, PLANS, RULE, SETTINGS, VOCAB, law, likeliest, p_value, sample, shaped, stubborn
from tiny_models import RuleTarget
from torch.utils._python_dispatch import TorchDispatchMode
from torch_dflash.sampling import draw, shape_probabilities
from torch_dflash.verify import MatchVerifier

from dflash.errors import BackendError
from dflash.types import Proposal, SamplingParams, TargetOutput, Verdict

TARGET = RuleTarget(RULE, VOCAB)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SETTINGS)
def test_match_keeps_the_law_of_several_tokens_for_any_proposal(name: str, plan: str) -> None:
    chances = law(SamplingParams(**SETTINGS[name]))
    assert sum(chances.values()) == pytest.approx(1)
    assert p_value(sample(TARGET, SETTINGS[name], PLANS[plan]), chances) > CHANCE


def test_plain_sampling_keeps_the_law_too() -> None:
    name = "temperature 1.2, top-k 4, top-p 0.8"
    chances = law(SamplingParams(**SETTINGS[name]))
    assert p_value(sample(TARGET, SETTINGS[name], stubborn, speculate=False), chances) > CHANCE


class WithNumbersOfItsOwn(MatchVerifier):
    """Has random numbers that belong to no output position."""

    _used = 500

    def _fresh(self) -> torch.Tensor:
        self._used += 1
        return self._numbers(self._used, self._used + 1)


class FreshCorrection(WithNumbersOfItsOwn):
    """Broken: the correction is drawn anew instead of being the sample that rejected the draft."""

    def verify(self, proposal: Proposal, output: TargetOutput) -> Verdict:
        verdict = super().verify(proposal, output)
        fresh = draw(shape_probabilities(output.logits[verdict.accepted][None], self.sampling), self._fresh())
        return Verdict(verdict.drafted, verdict.accepted, int(fresh))


class CorrectionNeverTheDraft(WithNumbersOfItsOwn):
    """Broken: a second chance for the draft, as rejection sampling's residual would be right to exclude it."""

    def verify(self, proposal: Proposal, output: TargetOutput) -> Verdict:
        verdict = super().verify(proposal, output)
        if verdict.kind == "bonus":
            return verdict
        probs = shape_probabilities(output.logits[verdict.accepted][None], self.sampling)
        if float(self._fresh()) < float(probs[0, verdict.drafted[verdict.accepted]]):
            return Verdict(verdict.drafted, verdict.accepted, verdict.drafted[verdict.accepted])
        return verdict


class OneUniformARound(MatchVerifier):
    """Broken: the rows of a block share a random number, so tokens are right one by one and wrong together."""

    def _choices(self, logits: torch.Tensor) -> torch.Tensor:
        chosen = self._numbers(self._position, self._position + 1).expand(len(logits))
        return draw(shape_probabilities(logits, self.sampling), chosen)


class WithoutTopP(MatchVerifier):
    """Broken: the block's rows ignore top-p, which plain decoding honours."""

    def __init__(self, sampling: SamplingParams, **options: Any) -> None:
        super().__init__(SamplingParams(sampling.temperature, sampling.top_k, 1.0, sampling.seed), **options)


class AcceptsByProbability(WithNumbersOfItsOwn):
    """Broken: accepts a draft with the target's probability, but takes the correction from a sample of its own; as
    though the drafter's distribution were known and were one."""

    def verify(self, proposal: Proposal, output: TargetOutput) -> Verdict:
        probs = shape_probabilities(output.logits, self.sampling)
        drafted = tuple(proposal.tokens.tolist())
        accepted = 0
        for token, row in zip(drafted, probs, strict=False):
            if float(self._fresh()) >= float(row[token]):
                break
            accepted += 1
        return Verdict(drafted, accepted, int(draw(probs[accepted][None], self._fresh())))


@pytest.mark.parametrize(
    "broken", [FreshCorrection, CorrectionNeverTheDraft, OneUniformARound, WithoutTopP, AcceptsByProbability]
)
def test_a_broken_rule_is_caught(broken: type[MatchVerifier]) -> None:
    name = "temperature 0.6, top-p 0.9"
    counts = sample(TARGET, SETTINGS[name], likeliest, lambda sampling: broken(sampling, device=torch.device("cpu")))
    assert p_value(counts, law(SamplingParams(**SETTINGS[name]))) < CAUGHT


# Shaping and drawing ----------------------------------------------------------------------------------------------

logit_rows = st.lists(st.integers(-40, 40), min_size=2, max_size=9)


@settings(derandomize=True, database=None, deadline=None)
@given(
    logits=logit_rows,
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
)
def test_shaping_follows_its_definition(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    """Where ties or rounding leave the choice open, only the probabilities, sorted, are told."""
    sampling = SamplingParams(temperature, top_k, top_p)
    ours = shape_probabilities(torch.tensor([logits]) / 8, sampling)[0]
    assert ours.dtype == torch.float32
    theirs = torch.tensor(shaped([logit / 8 for logit in logits], sampling))
    torch.testing.assert_close(ours.sort().values, theirs.sort().values, atol=1e-5, rtol=1e-4)
    if len(set(logits)) == len(logits):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_top_k_of_equal_logits_keeps_exactly_k() -> None:
    probs = shape_probabilities(torch.zeros(2, 6), SamplingParams(1.0, top_k=2))
    assert (probs > 0).sum(-1).tolist() == [2, 2]


def test_the_likeliest_token_always_stays() -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    for sampling in (SamplingParams(1.0, top_p=1e-9), SamplingParams(1.0, top_k=1), SamplingParams(1e-45)):
        probs = shape_probabilities(logits, sampling)
        assert torch.equal(probs.argmax(-1), logits.argmax(-1))
        assert (probs > 0).sum(-1).tolist() == [1] * 20
        torch.testing.assert_close(probs.sum(-1), torch.ones(20))


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_and_logits_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [1.0, 2.0, float("-inf")]])
    probs = shape_probabilities(logits, SamplingParams(temperature))
    assert probs.isfinite().all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))
    assert probs[1, 2] == 0


@settings(derandomize=True, database=None, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=1, max_size=12).filter(any),
    uniform=st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1, exclude_max=True)),
)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    probs = torch.tensor([weights])
    token = int(draw(probs / probs.sum(), torch.tensor([uniform], dtype=torch.float64)))
    assert weights[token] > 0


def test_zero_probability_is_respected_at_both_ends_and_in_the_middle() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for uniform, expected in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3)):
        assert draw(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


def test_a_draft_of_probability_zero_is_never_accepted_even_at_uniform_zero() -> None:
    verifier = MatchVerifier(SamplingParams(1.0, top_k=2, seed=0), device=torch.device("cpu"))
    verifier._uniforms = torch.zeros(9, dtype=torch.float64)
    drafted = torch.tensor([0])  # the first token of the vocabulary, where a draw of 0 would land
    logits = torch.tensor([[-5.0, 1.0, 2.0], [-5.0, 1.0, 2.0]])
    verdict = verifier.verify(Proposal(drafted, torch.tensor([1, 0]), 1), TargetOutput(logits, None))
    assert (verdict.accepted, verdict.next_token) == (0, 1)


def test_draws_are_as_frequent_as_their_probabilities() -> None:
    probs = torch.tensor([0.1, 0.0, 0.25, 0.65])
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(draw(probs.expand(1000, 4), uniforms), minlength=4)
    assert counts.tolist() == [100, 0, 250, 650]


# Verdicts ---------------------------------------------------------------------------------------------------------


def verdict_of(drafted: list[int], choices: list[int], **options: Any) -> Verdict:
    logits = torch.nn.functional.one_hot(torch.tensor(choices), VOCAB) * 9.0
    verifier = MatchVerifier(SamplingParams(), device=torch.device("cpu"), **options)
    tokens = torch.tensor(drafted, dtype=torch.long)
    proposal = Proposal(tokens, torch.cat((torch.tensor([1]), tokens)), len(drafted))
    return verifier.verify(proposal, TargetOutput(logits, None))


@pytest.mark.parametrize(
    ("drafted", "choices", "accepted", "next_token", "kind"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 4, "bonus"),
        ([1, 2, 3], [1, 2, 0, 4], 2, 0, "correction"),
        ([1, 2, 3], [0, 2, 3, 4], 0, 0, "correction"),
        ([1, 2, 3], [1, 0, 3, 4], 1, 0, "correction"),
        ([2], [2, 1], 1, 1, "bonus"),
        ([], [3], 0, 3, "bonus"),
    ],
)
def test_drafts_stand_up_to_the_first_that_is_not_the_targets(
    drafted: list[int], choices: list[int], accepted: int, next_token: int, kind: str
) -> None:
    for detail in (False, True):
        verdict = verdict_of(drafted, choices, detail=detail)
        assert (verdict.accepted, verdict.next_token, verdict.kind) == (accepted, next_token, kind)
        assert verdict.drafted == tuple(drafted)
        assert verdict.draft_probs is None
        assert (verdict.target_probs is not None) == (detail and bool(drafted))


def test_detail_tells_the_probabilities_behind_the_first_rejection_too() -> None:
    verdict = verdict_of([0, 2, 3], [1, 2, 3, 4], detail=True)
    certain = math.exp(9) / (math.exp(9) + VOCAB - 1)
    unlikely = 1 / (math.exp(9) + VOCAB - 1)
    assert verdict.accepted == 0
    assert verdict.target_probs == pytest.approx([unlikely, certain, certain])


@pytest.mark.parametrize("bad", [(0, math.nan), (-1, math.nan), (2, math.inf), (slice(None), math.nan)], ids=str)
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.8, 3, 0.9, seed=1), SamplingParams(1.0, seed=1)]
)
def test_logits_that_are_no_numbers_are_an_error_and_no_token(sampling: SamplingParams, bad: tuple[Any, float]) -> None:
    logits = torch.zeros(3, VOCAB, dtype=torch.float16)
    logits[0, bad[0]] = bad[1]
    proposal = Proposal(torch.tensor([1, 1]), torch.tensor([0, 1, 1]), 2)
    with pytest.raises(BackendError, match="logits are not numbers in float16"):
        MatchVerifier(sampling, device=torch.device("cpu")).verify(proposal, TargetOutput(logits, None))


class ReadsOnHost(TorchDispatchMode):
    """Refuses every operation that fetches a value from the device by itself."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, 3, 0.9, seed=1)])
def test_a_verdict_is_fetched_once_and_nothing_before_it(sampling: SamplingParams, detail: bool) -> None:
    verifier = MatchVerifier(sampling, device=torch.device("cpu"), detail=detail)
    tokens = torch.tensor([1, 2])
    proposal = Proposal(tokens, torch.tensor([0, 1, 2]), 2, probs=torch.tensor([0.5, 0.5]))
    with ReadsOnHost():
        assert verifier.verify(proposal, TargetOutput(torch.zeros(3, VOCAB), None)).drafted == (1, 2)
        with pytest.raises(AssertionError):
            tokens[torch.tensor(0)]


def test_a_block_beyond_the_numbers_drawn_ahead_is_verified() -> None:
    verifier = MatchVerifier(SamplingParams(1.0, seed=3), device=torch.device("cpu"))
    tokens = torch.zeros(600, dtype=torch.long)
    for _ in range(3):
        verdict = verifier.verify(
            Proposal(tokens, torch.zeros(601, dtype=torch.long), 600), TargetOutput(torch.zeros(601, 3), None)
        )
        assert len(verdict.drafted) == 600


def test_uniform_numbers_belong_to_output_positions() -> None:
    """The same logits, verified in blocks or one by one, give the same tokens."""
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(2))
    sampling = SamplingParams(1.0, seed=5)

    def tokens(plan: list[int]) -> list[int]:
        verifier = MatchVerifier(sampling, device=torch.device("cpu"))
        out: list[int] = []
        for count in plan:
            drafted = torch.tensor([9] * count, dtype=torch.long)  # never right: one token a round
            block = torch.zeros(count + 1, dtype=torch.long)
            rows = logits[len(out) : len(out) + count + 1]
            out.append(verifier.verify(Proposal(drafted, block, count), TargetOutput(rows, None)).next_token)
        return out

    assert tokens([0] * 8) == tokens([3] * 8) == tokens([4, 0, 2, 1, 3, 0, 0, 4])
