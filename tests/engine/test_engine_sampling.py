"""Probabilities of drafted tokens, and seeds: the same tokens with any drafter, any block size, any backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_cases import PROMPT, SAMPLED, ignore_silent_rounds
from tiny_models import ScriptedDrafter, TinyPair
from torch_dflash.sampling import shape_probabilities

from dflash.types import SamplingParams

pytestmark = ignore_silent_rounds


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_detail_gives_the_targets_and_the_drafters_probability_of_every_drafted_token(
    pair: TinyPair, sampling: SamplingParams
) -> None:
    engine = pair.engine()
    result = engine.generate(PROMPT, max_new_tokens=12, sampling=sampling, detail=True)
    everything = PROMPT + result.token_ids
    assert all(step.target_probs is None for step in result.steps[:1])
    shadow, run = pair.drafter(), pair.backend.run

    def features_of(ids: list[int]) -> Any:
        pair.target.reset()
        pair.target.tapping = True
        features = pair.target.forward(ids).features
        pair.target.keep(range(len(ids)))
        return features

    features = run(lambda: features_of(everything))

    def drafts_after(length: int, anchor: int, count: int) -> torch.Tensor:
        """What the drafter says behind a context of ``length`` tokens, probabilities [count, V]."""
        shadow.reset()
        shadow.observe(features, length)
        return torch.tensor(pair.backend.numpy(shadow.logits(anchor, count))).softmax(-1)

    for step in result.steps[1:]:
        ids = everything[: step.position + 1] + list(step.drafted)
        logits = pair.model(torch.tensor([ids])).logits[0, step.position : -1]
        law = logits.softmax(-1) if sampling.greedy else shape_probabilities(logits, sampling)
        expected = [float(row[token]) for row, token in zip(law, step.drafted, strict=True)]
        assert step.target_probs == pytest.approx(expected, abs=1e-5)
        drafts = run(lambda step=step: drafts_after(step.position, step.anchor, len(step.drafted)))
        assert step.draft_probs == pytest.approx([float(row.max()) for row in drafts], abs=1e-5)
        assert step.drafted == tuple(drafts.argmax(-1).tolist())
    plain = engine.generate(PROMPT, max_new_tokens=4, sampling=sampling, detail=True, speculate=False)
    assert all(step.target_probs is None and step.draft_probs is None for step in plain.steps)
    assert all(s.target_probs is None for s in engine.generate(PROMPT, max_new_tokens=4, sampling=sampling).steps)


def test_detail_changes_no_token(pair: TinyPair) -> None:
    engine = pair.engine()
    for sampling in (SamplingParams(), SAMPLED):
        runs = [
            engine.generate(PROMPT, max_new_tokens=20, sampling=sampling, detail=detail) for detail in (True, False)
        ]
        assert runs[0].token_ids == runs[1].token_ids


def test_the_same_seed_gives_the_same_tokens_with_any_drafter_or_none_on_any_backend(
    pair: TinyPair, tiny: TinyPair, oracle: list[int]
) -> None:
    plain = tiny.engine().generate(PROMPT, max_new_tokens=24, sampling=SAMPLED, speculate=False).token_ids
    assert plain != oracle[:24]
    assert pair.engine().generate(PROMPT, max_new_tokens=24, sampling=SAMPLED, speculate=False).token_ids == plain
    knowing = ScriptedDrafter(pair, PROMPT + plain)
    drafters = (pair.drafter(), pair.drafter(seed=5), knowing, ScriptedDrafter(pair, PROMPT + plain, (3,)))
    for drafter in drafters:
        for block in (2, 5, 8):
            result = pair.engine(drafter).generate(PROMPT, max_new_tokens=24, sampling=SAMPLED, block_size=block)
            assert result.token_ids == plain
    result = pair.engine(knowing).generate(PROMPT, max_new_tokens=24, sampling=SAMPLED)
    assert result.metrics.draft_acceptance_rate == 1


def test_a_seeds_tokens_do_not_depend_on_the_budget(pair: TinyPair) -> None:
    engine = pair.engine()
    outputs = [engine.generate(PROMPT, max_new_tokens=n, sampling=SAMPLED).token_ids for n in (3, 12, 24)]
    assert outputs[0] == outputs[2][:3]
    assert outputs[1] == outputs[2][:12]


def test_different_seeds_and_no_seed_differ(pair: TinyPair) -> None:
    engine = pair.engine()
    hot = [SamplingParams(temperature=1.5, seed=seed) for seed in (1, 2, None, None)]
    outputs = [tuple(engine.generate(PROMPT, max_new_tokens=20, sampling=one).token_ids) for one in hot]
    assert len(set(outputs)) == 4


def test_a_temperature_next_to_zero_is_greedy(pair: TinyPair, oracle: list[int]) -> None:
    for temperature in (1e-3, 1e-30, 1e-45):
        sampling = SamplingParams(temperature=temperature, seed=0)
        assert pair.engine().generate(PROMPT, max_new_tokens=12, sampling=sampling).token_ids == oracle[:12]


def test_match_at_temperature_zero_is_greedy(pair: TinyPair, oracle: list[int]) -> None:
    assert pair.engine().generate(PROMPT, max_new_tokens=12, verify="match").token_ids == oracle[:12]
