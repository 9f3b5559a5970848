"""Prefill and conditioning: chunks, what is held while they run, blocks of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import BLOCK, PROMPT, ignore_silent_rounds
from tiny_models import VOCAB, TinyPair

from dflash.engine import Engine

pytestmark = ignore_silent_rounds


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 17])
def test_prefill_in_chunks_gives_the_same_proposals_as_in_one_piece(pair: TinyPair, chunk: int) -> None:
    prompt = [(11 * index + 2) % VOCAB for index in range(17)]
    whole = pair.engine().generate(prompt, max_new_tokens=16)
    chunked = pair.engine(prefill_chunk=chunk).generate(prompt, max_new_tokens=16)
    assert [step.drafted for step in chunked.steps] == [step.drafted for step in whole.steps]
    assert len({step.drafted for step in whole.steps}) > 3, "the context must matter for this to mean anything"
    assert chunked.token_ids == whole.token_ids


def test_a_lost_context_would_change_the_proposals(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above must catch: a drafter that is given only the last chunk."""
    prompt = [(11 * index + 2) % VOCAB for index in range(17)]
    whole = pair.engine().generate(prompt, max_new_tokens=6)
    drafter = pair.drafter()
    engine = Engine(pair.backend, pair.target, drafter, prefill_chunk=4)
    observe = drafter.observe
    monkeypatch.setattr(drafter, "observe", lambda features, count: (drafter.reset(), observe(features, count)))
    lost = engine.generate(prompt, max_new_tokens=6)
    assert lost.token_ids == whole.token_ids
    assert [step.drafted for step in lost.steps] != [step.drafted for step in whole.steps]


def test_features_are_held_no_longer_than_a_chunk(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, rows = pair.drafter(), []
    engine = pair.engine(drafter, prefill_chunk=4)
    inner = drafter.observe

    def observe(features: Any, count: int) -> None:
        rows.append(len(features))
        assert features.shape[1] == drafter.config.feature_size
        inner(features, count)

    monkeypatch.setattr(drafter, "observe", observe)
    result = engine.generate([3] * 30, max_new_tokens=8)
    assert max(rows) <= max(4, BLOCK)
    assert not pair.held_features
    assert result.metrics.peak_memory > 0


def test_prefill_computes_logits_of_one_row_only(pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    inner = pair.target.forward

    def forward(tokens: Any, **options: Any) -> Any:
        output = inner(tokens, **options)
        sizes.append((len(tokens), len(output.logits)))
        return output

    monkeypatch.setattr(pair.target, "forward", forward)
    pair.engine(prefill_chunk=8).generate([3] * 20, max_new_tokens=1)
    assert sizes == [(8, 1), (8, 1), (4, 1)]


def test_block_sizes_other_than_the_drafters_are_served(pair: TinyPair, oracle: list[int]) -> None:
    engine = pair.engine()
    for block in (2, 3, 9, 64):
        result = engine.generate(PROMPT, max_new_tokens=20, block_size=block)
        assert result.token_ids == oracle[:20]
        assert len(result.steps[1].drafted) == min(block - 1, 19)
        assert any("made for" in note for note in result.notes) == (block > BLOCK)
