"""A finished text looked into: the rounds drafted again are the rounds that were, and blind ones know nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_cases import Boom, ignore_silent_rounds
from tiny_models import TinyPair

from dflash.engine import Engine
from dflash.errors import UsageError
from dflash.probe import Probe
from dflash.types import GenerationResult, SamplingParams, StepEvent

pytestmark = ignore_silent_rounds

VOCAB = 10  # so few tokens that a random drafter is right now and then
TEXT = [2, 4, 3, 5, 2, 2]
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=3)
Making = Callable[..., Engine]


@pytest.fixture(scope="module")
def engine_of(pair: TinyPair) -> Making:
    """An engine with a target of ``VOCAB`` tokens, and a drafter of these changes."""
    pairs: dict[tuple[int, int], TinyPair] = {}

    def make(seed: int = 3, longest: int = 512, chunk: int = 7, **changes: Any) -> Engine:
        if (seed, longest) not in pairs:
            pairs[seed, longest] = pair.another("llama", seed, vocab_size=VOCAB, max_position_embeddings=longest)
        own = pairs[seed, longest]
        drafter = own.drafter(seed, vocab_size=VOCAB, mask_token_id=VOCAB - 1, **changes)
        return own.engine(drafter, prefill_chunk=chunk)

    return make


def generated(engine: Engine, sampling: SamplingParams = GREEDY, count: int = 60) -> GenerationResult:
    return engine.generate(TEXT, max_new_tokens=count, sampling=sampling, ignore_eos=True, detail=True)


def whole(result: GenerationResult) -> list[int]:
    return result.prompt_ids + result.token_ids


def rounds_of(result: GenerationResult) -> list[StepEvent]:
    """The rounds that no budget cut."""
    return [step for step in result.steps if step.kind == "round" and step.next_kind is not None]


def asked(rounds: list[StepEvent]) -> list[tuple[int, int]]:
    return [(step.position, len(step.drafted)) for step in rounds]


# The rounds that were ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "sampling", "chunk"), [(3, GREEDY, 1), (3, GREEDY, 7), (5, GREEDY, 512), (1, SAMPLED, 7)]
)
def test_a_round_drafted_again_is_the_round_that_was(
    engine_of: Making, seed: int, sampling: SamplingParams, chunk: int
) -> None:
    engine = engine_of(seed, chunk=chunk)
    result = generated(engine, sampling)
    ids, rounds = whole(result), rounds_of(result)
    probe = Probe(engine, ids)
    probed = [probe.round(*one) for one in asked(rounds)]
    assert [one.accepted for one in probed] == [step.accepted for step in rounds]
    assert len({step.accepted for step in rounds}) > 2, "the drafter is right in some rounds and wrong in others"
    for step, one in zip(rounds, probed, strict=True):
        assert (one.position, one.anchor, one.drafted) == (step.position, step.anchor, step.drafted)
        assert step.draft_probs is not None
        np.testing.assert_allclose(one.draft_probs, step.draft_probs, rtol=1e-3)
        assert one.wanted == tuple(ids[step.position + 1 :][: len(step.drafted)])
        assert len(one.blind_drafted) == len(one.blind_probs) == len(step.drafted)
        assert one.blind_accepted == agreed(one.blind_drafted, one.wanted)
    assert any(one.blind_accepted != one.accepted for one in probed)
    assert probe.acceptance(asked(rounds)) == [(one.accepted, one.blind_accepted) for one in probed]


def agreed(drafted: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    count = 0
    while count < len(wanted) and drafted[count] == wanted[count]:
        count += 1
    return count


def test_at_the_texts_end_a_round_is_compared_with_what_is_there(engine_of: Making) -> None:
    engine = engine_of()
    ids = whole(generated(engine))
    probe = Probe(engine, ids)
    for behind in (0, 1, 3):
        one = probe.round(len(ids) - 1 - behind, 4)
        assert one.wanted == tuple(ids[len(ids) - behind :]) and len(one.drafted) == 4
        assert one.accepted == agreed(one.drafted, one.wanted) <= behind


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_attention_is_over_context_and_block(engine_of: Making, kind: str) -> None:
    engine = engine_of(layer_types=(kind, "full_attention"), sliding_window=6)
    probe = Probe(engine, whole(generated(engine)))
    for position, count in ((1, 1), (20, 4), (31, 9)):
        one = probe.round(position, count)
        assert one.attention.dtype == np.float32 and one.attention.shape == (2, 1 + count, position + 1 + count)
        np.testing.assert_allclose(one.attention.sum(-1), 1, atol=1e-5)
        beyond = one.attention[0, 0, : max(0, position - 5)]
        assert (beyond == 0).all() if kind == "sliding_attention" else (beyond > 0).all()
        assert (one.attention[1] > 0).all()


# Blind -------------------------------------------------------------------------------------------------------------


def test_a_blind_round_knows_the_length_of_its_context_and_nothing_else(engine_of: Making) -> None:
    engine = engine_of()
    ids = whole(generated(engine))
    changed = [(token + 3) % VOCAB for token in ids[:30]] + ids[30:]
    one, other = (Probe(engine, text).round(30, 4) for text in (ids, changed))
    assert (one.blind_drafted, one.blind_probs) == (other.blind_drafted, other.blind_probs)
    assert np.abs(np.subtract(one.draft_probs, other.draft_probs)).max() > 1e-3
    assert np.abs(one.attention - other.attention).max() > 1e-3
    longer = Probe(engine, [5, *ids]).round(31, 4)
    assert longer.anchor == one.anchor and np.abs(np.subtract(longer.blind_probs, one.blind_probs)).max() > 1e-4


def test_a_blind_round_is_the_drafters_own_over_features_of_nothing(pair: TinyPair, engine_of: Making) -> None:
    engine = engine_of()
    one = Probe(engine, whole(generated(engine))).round(23, 4)
    drafter, nothing = engine.drafter, np.zeros((23, engine.drafter.config.feature_size), dtype=np.float32)

    def propose() -> tuple[list[int], np.ndarray]:
        drafter.reset()
        drafter.observe(pair.array(nothing), 23)
        proposal = drafter.propose(one.anchor, 4, GREEDY, detail=True)
        return engine.backend.numpy(proposal.tokens).tolist(), engine.backend.numpy(proposal.probs)

    tokens, probs = engine.backend.run(propose)
    assert list(one.blind_drafted) == tokens
    np.testing.assert_allclose(one.blind_probs, probs, rtol=1e-4)


def test_without_a_context_there_is_nothing_to_be_blind_to(engine_of: Making) -> None:
    engine = engine_of()
    probe = Probe(engine, TEXT)
    one = probe.round(0, 4)
    assert one.attention.shape == (2, 5, 5)
    assert (one.drafted, one.draft_probs, one.accepted) == (one.blind_drafted, one.blind_probs, one.blind_accepted)
    assert Probe(engine, TEXT[:1]).round(0, 2).wanted == ()
    assert probe.acceptance([(0, 4), (0, 4), (1, 2)])[:2] == [(one.accepted, one.accepted)] * 2


# Several rounds ----------------------------------------------------------------------------------------------------


def test_rounds_of_any_size_and_place_are_what_they_are_alone(engine_of: Making) -> None:
    engine = engine_of()
    probe = Probe(engine, whole(generated(engine)))
    rounds = [(position, 1 + position % 9) for position in (0, 3, 3, 4, 10, 11, 12, 13, 14, 15, 30, 30, 31, 50, 60, 64)]
    alone = [probe.round(*one) for one in rounds]
    assert probe.acceptance(rounds) == [(one.accepted, one.blind_accepted) for one in alone]
    assert probe.acceptance([]) == []


def test_many_rounds_do_not_observe_their_contexts_anew(engine_of: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    ids = whole(generated(engine))
    probe, observe, rows = Probe(engine, ids), engine.drafter.observe, []

    def counted(features: Any, token_count: int) -> None:
        rows.append(token_count)
        observe(features, token_count)

    monkeypatch.setattr(engine.drafter, "observe", counted)
    probe.acceptance([(position, 4) for position in range(len(ids))])
    assert sum(rows) < 2 * 3 * len(ids), "with and without, and about twice for the batches"


def test_stopped_early_it_answers_for_the_first_rounds(engine_of: Making) -> None:
    engine = engine_of()
    probe = Probe(engine, whole(generated(engine)))
    rounds = [(position, 4) for position in range(2, 60, 3)]
    everything, lengths = probe.acceptance(rounds), []
    for patience in range(0, 2 * len(rounds) + 1, 4):
        left = iter(range(patience))
        found = probe.acceptance(rounds, stop=lambda left=left: next(left, None) is None)
        assert found == everything[: len(found)]
        lengths.append(len(found))
    assert lengths[0] == 0 and lengths == sorted(lengths) and 0 < lengths[5] < len(rounds)
    assert probe.acceptance(rounds, stop=lambda: False) == everything
    with pytest.raises(Boom):
        probe.acceptance(rounds, stop=raising)
    assert probe.acceptance(rounds[:5]) == everything[:5]


def raising(*_: Any, **__: Any) -> Any:
    raise Boom


# The engine around it ----------------------------------------------------------------------------------------------


def test_the_engine_generates_the_same_before_and_after(engine_of: Making) -> None:
    engine = engine_of()
    before = generated(engine)
    probe = Probe(engine, whole(before))
    assert generated(engine).token_ids == before.token_ids
    first = probe.round(20, 4)
    plain = engine.generate(TEXT, max_new_tokens=60, ignore_eos=True, speculate=False)
    assert plain.token_ids == before.token_ids
    again = probe.round(20, 4)
    assert (again.drafted, again.draft_probs) == (first.drafted, first.draft_probs)
    assert Probe(engine, whole(before)).round(20, 4).drafted == first.drafted, "tapping is on again"
    after = generated(engine)
    assert [step.drafted for step in after.steps] == [step.drafted for step in before.steps]


@pytest.mark.parametrize("use", ["made", "round", "acceptance"])
def test_a_generation_that_is_running_ends(engine_of: Making, use: str) -> None:
    engine = engine_of()
    ids = whole(generated(engine))
    probe = Probe(engine, ids)
    stream = engine.stream(TEXT, max_new_tokens=60, ignore_eos=True)
    steps = [next(stream) for _ in range(3)]
    uses = {"made": lambda: Probe(engine, ids), "round": lambda: probe.round(9, 4)}
    uses.get(use, lambda: probe.acceptance([(9, 4)]))()
    result = stream.result()
    assert result.finish_reason == "cancelled" and len(result.steps) == len(steps)
    assert whole(generated(engine)) == ids


def test_after_a_failure_engine_and_probe_work(engine_of: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    ids = whole(generated(engine))
    probe = Probe(engine, ids)
    expected = probe.round(20, 4), probe.acceptance([(5, 4), (20, 4)])
    for part, name in (
        (engine.target, "keep"),
        (engine.drafter, "observe"),
        (engine.drafter, "propose"),
        (engine.drafter, "attention"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, raising)
            with pytest.raises(Boom):
                Probe(engine, ids).round(20, 4)
        assert (engine.target.length, probe.round(20, 4).drafted) == (0, expected[0].drafted)
        assert probe.acceptance([(5, 4), (20, 4)]) == expected[1]
        assert whole(generated(engine)) == ids


def test_a_text_may_fill_the_targets_context(engine_of: Making) -> None:
    engine = engine_of(longest=32)
    result = generated(engine, count=500)
    ids = whole(result)
    assert len(ids) == 32 == engine.target.info.max_positions
    probe = Probe(engine, ids)
    rounds = rounds_of(result)
    assert [one for one, _ in probe.acceptance(asked(rounds))] == [step.accepted for step in rounds]
    assert probe.round(30, 1).wanted == (ids[31],)
    with pytest.raises(UsageError, match=r"count is 2 at position 30.*holds 32"):
        probe.round(30, 2)
    with pytest.raises(UsageError, match="has 33 tokens; the target's context holds 32"):
        Probe(engine, [*ids, 2])


def test_what_is_no_round_or_no_text_is_refused(engine_of: Making) -> None:
    engine = engine_of()
    probe = Probe(engine, TEXT)
    for position in (-1, len(TEXT)):
        with pytest.raises(UsageError, match=f"position is {position}; the text's tokens are 0 to 5"):
            probe.round(position, 2)
        with pytest.raises(UsageError, match="position is"):
            probe.acceptance([(0, 1), (position, 2)])
    with pytest.raises(UsageError, match="count is 0 at position 3"):
        probe.round(3, 0)
    with pytest.raises(UsageError, match="must not go down"):
        probe.acceptance([(3, 2), (2, 2)])
    with pytest.raises(UsageError, match="the text is empty"):
        Probe(engine, [])
    with pytest.raises(UsageError, match="holds the id 17; the target's ids are 0 to 9"):
        Probe(engine, [2, 17])
