"""Where an output is cut: at the first stop id, the first stop string, or the budget, whichever comes first."""

from __future__ import annotations

import pytest
from byte_tokenizer import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from dflash.stopping import Stopper, all_stop_ids

STOP, OTHER_STOP = 99, 98


def test_a_text_ends_by_the_models_ids_and_its_tokenizers() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.stop_token_ids = (OTHER_STOP,)
    assert all_stop_ids((STOP, 3), tokenizer) == (3, OTHER_STOP, STOP)
    assert all_stop_ids((STOP, STOP), None) == (STOP,)
    assert all_stop_ids((), tokenizer) == (OTHER_STOP,)


@pytest.mark.parametrize("offset", range(6))
def test_a_block_is_cut_at_a_stop_id_wherever_it_stands(offset: int) -> None:
    block = [1, 2, 3, 4, 5, 6]
    block[offset] = STOP
    stopper = Stopper((STOP,), budget=100)
    assert stopper.cut(block) == tuple(block[: offset + 1])
    assert stopper.reason == "stop"


def test_the_first_of_several_stop_ids_counts() -> None:
    stopper = Stopper((STOP, OTHER_STOP), budget=100)
    assert stopper.cut([5, OTHER_STOP, 6, STOP]) == (5, OTHER_STOP)
    assert stopper.reason == "stop"


@pytest.mark.parametrize("budget", range(1, 8))
def test_the_budget_is_spent_exactly(budget: int) -> None:
    stopper = Stopper((), budget)
    committed: list[int] = []
    for block in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        if stopper.reason is None:
            committed += stopper.cut(block)
    assert committed == list(range(1, budget + 1))
    assert (stopper.reason, stopper.left) == ("length", 0)


def test_no_budget_ends_before_the_first_token() -> None:
    assert Stopper((STOP,), 0).reason == "length"


def test_a_stop_id_on_the_last_token_of_the_budget_is_a_stop() -> None:
    stopper = Stopper((STOP,), 2)
    assert stopper.cut([1, STOP]) == (1, STOP)
    assert stopper.reason == "stop"


def test_a_stop_id_behind_the_budget_is_not_seen() -> None:
    stopper = Stopper((STOP,), 2)
    assert stopper.cut([1, 2, STOP]) == (1, 2)
    assert stopper.reason == "length"


def test_stop_strings_are_asked_once_for_every_committed_token_but_stop_ids() -> None:
    asked: list[int] = []
    stopper = Stopper((STOP,), 100, lambda token: bool(asked.append(token)))
    stopper.cut([1, 2])
    stopper.cut([3, STOP, 4])
    assert asked == [1, 2, 3]


def test_a_stop_string_cuts_behind_the_token_that_completes_it() -> None:
    stopper = Stopper((), 100, lambda token: token == 3)
    assert stopper.cut([1, 2, 3, 4]) == (1, 2, 3)
    assert stopper.reason == "stop"


@given(
    blocks=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6),
    stop_ids=st.sets(st.integers(0, 9), max_size=3),
    budget=st.integers(1, 20),
)
def test_blocks_of_any_size_are_cut_like_single_tokens(
    blocks: list[list[int]], stop_ids: set[int], budget: int
) -> None:
    in_blocks, one_by_one = Stopper(stop_ids, budget), Stopper(stop_ids, budget)
    committed: list[int] = []
    for block in blocks:
        if in_blocks.reason is None:
            committed += in_blocks.cut(block)
    expected: list[int] = []
    for token in (token for block in blocks for token in block):
        if one_by_one.reason is None:
            expected += one_by_one.cut([token])
    assert committed == expected
    assert (in_blocks.reason, in_blocks.left) == (one_by_one.reason, one_by_one.left)
    assert in_blocks.left == budget - len(committed)
