"""Rejection sampling and draft policies in the engine: the law of a model, seeds, what a request may ask."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import PROMPT, SAMPLED, ignore_silent_rounds
from sampling_law import CHANCE, p_value, shaped
from tiny_models import TinyPair

from dflash.errors import UsageError
from dflash.types import DRAFT_POLICIES, SamplingParams
from dflash.uniforms import Uniforms

pytestmark = ignore_silent_rounds

HOT = SamplingParams(temperature=1.3, top_k=40, seed=11)
REJECTION = {"verify": "rejection", "draft_policy": "sample"}
LETTERS, SAMPLES = 6, 300


def law_of(model: Any, sampling: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every output after ``PROMPT``, from the plain model over everything before each token."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        outputs = list(chances)
        ids = torch.tensor([[token % LETTERS for token in PROMPT] + list(output) for output in outputs])
        rows = model(ids).logits[:, -1].tolist()
        chances = {
            (*output, token): chances[output] * share
            for output, row in zip(outputs, rows, strict=True)
            for token, share in enumerate(shaped(row, sampling))
        }
    return chances


@pytest.mark.parametrize("policy", DRAFT_POLICIES)
def test_a_models_law_is_kept(pair: TinyPair, policy: str) -> None:
    """A real drafter beside a real target, of six tokens, through their caches."""
    pair = pair.another(vocab_size=LETTERS, seed=2)
    engine = pair.engine(pair.drafter(vocab_size=LETTERS, mask_token_id=LETTERS - 1, block_size=3))
    prompt, settings = [token % LETTERS for token in PROMPT], {"temperature": 1.6, "top_k": 4}
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    for seed in range(SAMPLES):
        sampling = SamplingParams(**settings, seed=seed)
        result = engine.generate(
            prompt, max_new_tokens=4, sampling=sampling, ignore_eos=True, verify="rejection", draft_policy=policy
        )
        counts[tuple(result.token_ids)] += 1
        accepted += sum(step.accepted for step in result.steps)
        drafted += sum(len(step.drafted) for step in result.steps)
    assert 0.15 < accepted / drafted < 0.85, "both ways of a verdict are taken"
    assert p_value(counts, law_of(pair.model, SamplingParams(**settings), 4)) > CHANCE


@pytest.mark.parametrize("policy", DRAFT_POLICIES)
def test_a_seed_gives_the_same_tokens_again(pair: TinyPair, policy: str) -> None:
    engine, options = pair.engine(), {"max_new_tokens": 16, "verify": "rejection", "draft_policy": policy}
    first = engine.generate(PROMPT, sampling=HOT, **options)
    assert engine.generate(PROMPT, sampling=HOT, **options).token_ids == first.token_ids
    others = [
        engine.generate(PROMPT, sampling=SamplingParams(1.3, 40, seed=seed), **options) for seed in (1, 2, None, None)
    ]
    assert len({tuple(result.token_ids) for result in (first, *others)}) == 5


def test_a_seeds_tokens_are_the_same_on_every_backend(pair: TinyPair, tiny: TinyPair) -> None:
    for policy in DRAFT_POLICIES:
        options = {"max_new_tokens": 16, "sampling": HOT, "verify": "rejection", "draft_policy": policy}
        ours, theirs = (one.engine().generate(PROMPT, **options) for one in (pair, tiny))
        assert ours.token_ids == theirs.token_ids
        assert [step.drafted for step in ours.steps] == [step.drafted for step in theirs.steps]


def test_under_match_a_seeds_tokens_do_not_depend_on_the_draft_policy(pair: TinyPair) -> None:
    engine = pair.engine()
    plain = engine.generate(PROMPT, max_new_tokens=20, sampling=SAMPLED, speculate=False).token_ids
    for policy in DRAFT_POLICIES:
        assert engine.generate(PROMPT, max_new_tokens=20, sampling=SAMPLED, draft_policy=policy).token_ids == plain
    rejection = engine.generate(PROMPT, max_new_tokens=20, sampling=SAMPLED, speculate=False, verify="rejection")
    assert rejection.token_ids == plain, "without a draft nothing is rejected"


@pytest.mark.parametrize("policy", DRAFT_POLICIES)
@pytest.mark.parametrize("verify", ["greedy", "match", "rejection"])
def test_at_temperature_zero_every_rule_and_policy_is_greedy(
    pair: TinyPair, oracle: list[int], verify: str, policy: str
) -> None:
    """As in the limit, where both distributions are sure; a temperature next to 0 shows it."""
    for sampling in (SamplingParams(), SamplingParams(1e-30, seed=1)):
        if sampling.greedy or verify != "greedy":
            result = pair.engine().generate(
                PROMPT, max_new_tokens=12, sampling=sampling, verify=verify, draft_policy=policy
            )
            assert result.token_ids == oracle[:12]


def test_slots_are_drawn_by_their_positions_numbers_from_the_shaped_draft_logits(pair: TinyPair) -> None:
    """And ``draft_probs`` tells the probability that each was drawn with."""
    sampling = SamplingParams(1.4, 30, 0.95, seed=3)
    engine = pair.engine()
    result = engine.generate(PROMPT, max_new_tokens=14, sampling=sampling, detail=True, **REJECTION)
    everything, numbers = PROMPT + result.token_ids, Uniforms(3, "draft").range(0, 40)
    shadow, backend = pair.drafter(), pair.backend

    def draft_rows(length: int, anchor: int, count: int) -> np.ndarray:
        pair.target.reset()
        pair.target.tapping = True
        features = pair.target.forward(everything[:length]).features
        pair.target.keep(range(length))
        shadow.reset()
        shadow.observe(features, length)
        return backend.numpy(shadow.logits(anchor, count))

    rounds = [step for step in result.steps if step.kind == "round"]
    assert len(rounds) > 2 and any(len(set(step.drafted)) > 1 for step in rounds)
    unlikely = 0
    for step in rounds:
        rows = backend.run(lambda step=step: draft_rows(step.position, step.anchor, len(step.drafted)))
        first = step.position - len(PROMPT) + 1
        assert step.draft_probs is not None
        for row, token, chance, number in zip(
            rows, step.drafted, step.draft_probs, numbers[first : first + len(rows)], strict=True
        ):
            q = np.array(shaped(row.tolist(), sampling))
            sums = q.cumsum()
            assert sums[token] - q[token] - 1e-5 <= number <= sums[token] + 1e-5
            assert chance == pytest.approx(q[token], abs=1e-4)
            unlikely += token != row.argmax()
    assert unlikely > 3


def test_an_unknown_policy_is_refused(pair: TinyPair) -> None:
    with pytest.raises(UsageError, match="draft_policy is 'beam'; there are argmax, sample"):
        pair.engine().generate(PROMPT, draft_policy="beam")
    with pytest.raises(UsageError, match=r"'typical'.*greedy, match, rejection"):
        pair.engine().generate(PROMPT, verify="typical")


def test_purposes_of_a_seed_are_streams_of_their_own_and_the_targets_is_as_it_was() -> None:
    """The target's numbers are those of ``numpy.random.PCG64(seed)``: goldens hold tokens that were drawn with them."""
    raw = np.random.PCG64(7).random_raw(3000)
    streams = {name: Uniforms(7, name).range(0, 3000) for name in ("target", "accept", "draft")}  # type: ignore[arg-type]
    assert (streams["target"] == (raw >> 11) * 2.0**-53).all()
    bound = 4 / 3000**0.5  # of a correlation between independent streams, at four standard deviations
    correlations = np.corrcoef(list(streams.values()))
    assert (np.abs(correlations - np.eye(3)) < bound).all()
    for shift in (1, 2, 3):
        assert abs(np.corrcoef(streams["accept"][shift:], streams["draft"][:-shift])[0, 1]) < bound
    assert all(numbers.min() >= 0 and numbers.max() < 1 for numbers in streams.values())
