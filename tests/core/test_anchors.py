"""Which blocks are drawn and what their slots must predict."""

from __future__ import annotations

import numpy as np
import pytest

from dflash import anchors
from dflash.anchors import default_gamma, draw_anchors, label_blocks, slot_weights, valid_anchors

MASK = np.array([0, 0, 0, 1, 1, 1, 0, 1, 1, 1], dtype=bool)
TOKENS = np.arange(100, 110)


def test_an_anchor_needs_itself_and_the_next_token_to_be_the_targets_own():
    assert valid_anchors(MASK).tolist() == [3, 4, 7, 8]
    assert valid_anchors(np.array([0, 1], dtype=bool)).tolist() == []
    assert valid_anchors(np.ones(5, dtype=bool)).tolist() == [0, 1, 2, 3]


def test_anchors_near_the_end_are_drawn_because_stop_tokens_are_learnt_there():
    drawn, keep = draw_anchors(MASK, 4, np.random.default_rng(0))
    assert keep.all() and drawn[-1] == len(MASK) - 2


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_draws_are_sorted_without_replacement_and_padded_with_a_keep_mask(count):
    seen = set()
    for seed in range(40):
        drawn, keep = draw_anchors(MASK, count, np.random.default_rng(seed))
        assert drawn.shape == keep.shape == (count,)
        assert keep.sum() == min(count, 4) and not keep[4:].any()
        assert (np.diff(drawn[keep]) > 0).all() and not drawn[~keep].any()
        seen.update(drawn[keep].tolist())
    assert seen == {3, 4, 7, 8}


def test_gamma_is_the_papers():
    assert [default_gamma(block) for block in (8, 10, 16)] == [4, 5, 7]


def test_slot_weights_decay_from_slot_one_and_leave_the_anchor_out():
    assert slot_weights(4, 2.0) == pytest.approx([0, 1, np.exp(-0.5), np.exp(-1.0)])


def labels_follow_the_definition() -> None:
    """Slot k of the block at a predicts token a+k, weighted keep · in bounds · mask[a+k] · exp(−(k−1)/γ)."""
    places, keep = np.array([4, 7, 8, 0]), np.array([True, True, True, False])
    labels, weights = anchors.label_blocks(TOKENS, MASK, places, keep, 4, 2.0)
    decay = [0, 1, np.exp(-0.5), np.exp(-1.0)]
    for block, anchor in enumerate(places):
        for slot in range(4):
            at = anchor + slot
            counts = keep[block] and at < len(TOKENS) and MASK[min(at, 9)] and slot > 0
            assert weights[block, slot] == pytest.approx(decay[slot] if counts else 0.0)
            if counts:
                assert labels[block, slot] == TOKENS[at]


def test_labels_and_weights():
    labels_follow_the_definition()
    _, weights = label_blocks(TOKENS, MASK, np.array([8]), np.array([True]), 4, 2.0)
    assert weights[0].tolist() == [0, 1, 0, 0], "past the end nothing counts, and the last token does"


def test_a_shift_of_the_labels_would_be_noticed(monkeypatch):
    def shifted(tokens, mask, places, keep, block, gamma):
        return label_blocks(np.roll(tokens, -1), mask, places, keep, block, gamma)

    monkeypatch.setattr(anchors, "label_blocks", shifted)
    with pytest.raises(AssertionError):
        labels_follow_the_definition()
