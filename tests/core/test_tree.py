"""Candidate trees: the most likely prefixes and no others, held to brute force; and what a tree is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import UsageError
from dflash.tree import MOST_NODES, CandidateTree, best_first, chain

ANCHOR = 7
INF = math.inf


def random_marginals(seed: int, slots: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k likeliest of a vocabulary of 50 in each slot, in no order, with the rest's probability left over."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((slots, 50)) * 2
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = rng.permuted(np.argsort(-log_probs, axis=-1)[:, :k], axis=-1)
    return ids, np.take_along_axis(log_probs, ids, axis=-1).astype(np.float32)


def every_prefix(ids: np.ndarray, log_probs: np.ndarray) -> dict[tuple[int, ...], float]:
    """The log-probability of every prefix that has one above −inf, summed from the anchor on."""
    found: dict[tuple[int, ...], float] = {}
    for length in range(1, len(ids) + 1):
        for ranks in product(range(ids.shape[1]), repeat=length):
            total = 0.0
            for slot, rank in enumerate(ranks):
                total += float(log_probs[slot, rank])
            if total > -INF:
                found[tuple(int(ids[slot, rank]) for slot, rank in enumerate(ranks))] = total
    return found


def prefix(tree: CandidateTree, row: int) -> tuple[int, ...]:
    """The tokens from the anchor to ``row``, the anchor left out."""
    return tuple(tree.tokens[list(tree.path_to(row))].tolist()[1:])


def fields(tree: CandidateTree) -> list[list[float]]:
    return [array.tolist() for array in (tree.tokens, tree.parents, tree.depths, tree.log_probs, tree.ranks)]


@st.composite
def marginals(draw: Any, most_slots: int = 4, most_k: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Coarse log-probabilities with ties, zeros and −inf among them."""
    slots, k = draw(st.integers(1, most_slots)), draw(st.integers(1, most_k))
    level = st.one_of(st.just(-INF), st.integers(0, 12).map(lambda eighths: -eighths / 8))
    log_probs = draw(st.lists(st.lists(level, min_size=k, max_size=k), min_size=slots, max_size=slots))
    ids = [draw(st.lists(st.integers(0, 20), min_size=k, max_size=k, unique=True)) for _ in range(slots)]
    return np.array(ids), np.array(log_probs)


# The most likely prefixes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_it_is_the_most_likely_prefixes_for_every_budget(slots: int, k: int) -> None:
    for seed in range(5):
        ids, log_probs = random_marginals(seed, slots, k)
        best = sorted(every_prefix(ids, log_probs).items(), key=lambda item: -item[1])
        assert len(best) == sum(k**length for length in range(1, slots + 1))
        budgets = range(1, min(len(best) + 2, MOST_NODES + 1))
        for budget in (*budgets, MOST_NODES):
            tree = best_first(ANCHOR, ids, log_probs, budget)
            assert [(prefix(tree, row), tree.log_probs[row]) for row in range(1, len(tree))] == best[:budget]


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(given=marginals(), budget=st.integers(1, 90))
def test_it_is_as_likely_as_any_where_prefixes_are_equally_likely(
    given: tuple[np.ndarray, np.ndarray], budget: int
) -> None:
    """Also with candidates of −inf and of log-probability 0."""
    everything = every_prefix(*given)
    tree = best_first(ANCHOR, *given, budget)
    assert tree.log_probs[1:].tolist() == sorted(everything.values(), reverse=True)[:budget]
    prefixes = [prefix(tree, row) for row in range(1, len(tree))]
    assert len(set(prefixes)) == len(prefixes)
    assert [everything[one] for one in prefixes] == tree.log_probs[1:].tolist()


@settings(derandomize=True, database=None, deadline=None)
@given(given=marginals(6, 8), budget=st.integers(1, MOST_NODES))
def test_it_is_a_tree_of_the_slots_candidates(given: tuple[np.ndarray, np.ndarray], budget: int) -> None:
    ids, log_probs = given
    tree = best_first(ANCHOR, ids, log_probs, budget)
    assert (tree.tokens[0], tree.parents[0], tree.depths[0], tree.log_probs[0], tree.ranks[0]) == (ANCHOR, -1, 0, 0, 0)
    assert math.copysign(1, tree.log_probs[0]) == 1
    for row in range(1, len(tree)):
        parent, slot = tree.parents[row], tree.depths[row] - 1
        assert 0 <= parent < row and tree.depths[row] == tree.depths[parent] + 1
        place = ids[slot].tolist().index(tree.tokens[row])
        assert tree.log_probs[row] == tree.log_probs[parent] + log_probs[slot, place]
        assert (log_probs[slot] > log_probs[slot, place]).sum() <= tree.ranks[row]
        assert tree.ranks[row] < (log_probs[slot] >= log_probs[slot, place]).sum()
    for row, below in enumerate(tree.children):
        assert list(below) == [other for other in range(len(tree)) if tree.parents[other] == row]
        assert [tree.ranks[one] for one in below] == list(range(len(below))), "likelier siblings come first"
        assert len({tree.tokens[one] for one in below}) == len(below)


@settings(derandomize=True, database=None, deadline=None)
@given(given=marginals(), budgets=st.tuples(st.integers(1, 90), st.integers(1, 90)).map(sorted), data=st.data())
def test_it_depends_on_nothing_but_the_marginals(
    given: tuple[np.ndarray, np.ndarray], budgets: list[int], data: st.DataObject
) -> None:
    """Neither on the order of candidates, equally likely ones included; and a smaller budget's tree is a part."""
    ids, log_probs = given
    smaller, larger = (fields(best_first(ANCHOR, ids, log_probs, budget)) for budget in budgets)
    assert smaller == [values[: len(smaller[0])] for values in larger]
    order = [data.draw(st.permutations(range(ids.shape[1]))) for _ in ids]
    turned = [np.take_along_axis(array, np.array(order), axis=-1) for array in (ids, log_probs)]
    assert fields(best_first(ANCHOR, *turned, budgets[1])) == larger


def test_equally_likely_candidates_are_ordered_by_id_and_prefixes_by_when_they_became_reachable() -> None:
    tree = best_first(ANCHOR, [[5, 3], [9, 4]], np.full((2, 2), -1.0), 6)
    assert tree.tokens.tolist() == [ANCHOR, 3, 5, 4, 4, 9, 9]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2, 1, 2]
    certain = best_first(ANCHOR, [[5, 3], [9, 4], [8, 2]], np.zeros((3, 2)), 7)
    assert fields(certain)[:2] == [[ANCHOR, 3, 5, 4, 4, 9, 2, 9], [-1, 0, 0, 1, 2, 1, 3, 2]]


def test_one_candidate_a_slot_is_a_chain() -> None:
    log_probs = [[-0.5], [-0.25], [-2.0], [0.0]]
    for budget in (1, 3, 4, 50):
        count = min(budget, 4)
        tree = best_first(ANCHOR, [[3], [1], [4], [1]], log_probs, budget)
        assert tree.is_chain and tree.height == count
        alike = chain(ANCHOR, [3, 1, 4, 1][:count], [one for (one,) in log_probs][:count])
        assert fields(tree) == fields(alike)


def test_a_candidate_without_any_chance_never_enters_and_nothing_behind_an_empty_slot() -> None:
    ids = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3]]
    log_probs = [[-1, -INF, -2], [-INF, -3, -INF], [-INF] * 3, [-1, -1, -1]]
    tree = best_first(ANCHOR, ids, log_probs, MOST_NODES)
    assert [prefix(tree, row) for row in range(len(tree))] == [(), (1,), (3,), (1, 5), (3, 5)]
    assert len(best_first(ANCHOR, ids[:1], [[-INF] * 3], 5)) == 1, "the anchor alone"
    padded = best_first(ANCHOR, [[4, 0, 0]], [[-1, -INF, -INF]], 5)
    assert padded.tokens.tolist() == [ANCHOR, 4], "the ids of what cannot enter do not matter"


def test_a_rounding_above_zero_is_zero() -> None:
    tree = best_first(ANCHOR, [[1, 2], [3, 4]], np.array([[1e-7, -20], [-1, -2]], dtype=np.float32), 4)
    assert tree.log_probs.tolist() == [0, 0, -1, -2, -20]


# How long a walk is to be expected ---------------------------------------------------------------------------------


def committed(tree: CandidateTree, drawn: Any) -> int:
    """Tokens committed where the target's choice at depth d is drawn[d], whatever comes before it."""
    row, length = 0, 1
    while matching := [below for below in tree.children[row] if tree.tokens[below] == drawn[tree.depths[row]]]:
        (row,), length = matching, length + 1
    return length


def every_draw(ids: np.ndarray, log_probs: np.ndarray) -> Iterator[tuple[float, list[int]]]:
    """Every outcome of the slots drawn independently, with its probability; −1 stands for all other tokens."""
    slots = []
    for of_slot, chances in zip(ids.tolist(), np.exp(log_probs.astype(np.float64)).tolist(), strict=True):
        slots.append([*zip(of_slot, chances, strict=True), (-1, 1 - sum(chances))])
    for outcome in product(*slots):
        yield math.prod(chance for _, chance in outcome), [*(token for token, _ in outcome), -1]


@pytest.mark.parametrize("budget", [1, 2, 5, 11, 40])
def test_the_expected_length_is_the_mean_over_every_outcome(budget: int) -> None:
    ids, log_probs = random_marginals(3, 4, 3)
    tree = best_first(ANCHOR, ids, log_probs, budget)
    outcomes = list(every_draw(ids, log_probs))
    assert sum(chance for chance, _ in outcomes) == pytest.approx(1)
    mean = sum(chance * committed(tree, drawn) for chance, drawn in outcomes)
    assert tree.expected_length() == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("budget", [7, 32, 256])
def test_the_expected_length_is_what_a_simulation_commits(budget: int) -> None:
    """Seven slots, eight candidates; the mean of 4,000 rounds within 4 standard errors."""
    ids, log_probs = random_marginals(4, 7, 8)
    tree, rng, rounds = best_first(ANCHOR, ids, log_probs, budget), np.random.default_rng(5), 4000
    drawn = np.full((rounds, 8), -1)
    for slot, chances in enumerate(np.exp(log_probs.astype(np.float64))):
        tokens, weights = np.append(ids[slot], -1), np.append(chances, 1 - chances.sum())
        drawn[:, slot] = rng.choice(tokens, rounds, p=weights)
    lengths = np.array([committed(tree, row) for row in drawn])
    assert abs(lengths.mean() - tree.expected_length()) < 4 * lengths.std() / math.sqrt(rounds)
    assert abs(lengths.mean() - 1 - tree.expected_length()) > 4 * lengths.std() / math.sqrt(rounds), "and can fail"


def test_the_expected_length_grows_with_the_budget_and_is_above_the_chains() -> None:
    ids, log_probs = random_marginals(6, 6, 8)
    lengths = [best_first(ANCHOR, ids, log_probs, budget).expected_length() for budget in range(1, 65)]
    assert all(after > before for before, after in pairwise(lengths))
    places = log_probs.argmax(-1)[:, None]
    tokens, likeliest = (np.take_along_axis(array, places, -1)[:, 0] for array in (ids, log_probs))
    assert lengths[5] > chain(ANCHOR, tokens.tolist(), likeliest).expected_length() > 1


def test_a_chain_whose_probabilities_are_unknown_has_no_expected_length() -> None:
    with pytest.raises(UsageError, match="without log-probabilities; its expected length is not known"):
        chain(ANCHOR, [1, 2]).expected_length()
    assert chain(ANCHOR, []).expected_length() == 1


# What a tree is ----------------------------------------------------------------------------------------------------

FORK = dict(tokens=[7, 1, 2, 1, 3], parents=[-1, 0, 0, 1, 1], depths=[0, 1, 1, 2, 2], log_probs=[0, -1, -2, -1, -3])


def fork(**changes: Any) -> CandidateTree:
    return CandidateTree(**{name: np.array(values) for name, values in (FORK | dict(ranks=[0] * 5) | changes).items()})


def test_paths_lead_from_the_anchor() -> None:
    tree = fork()
    assert [tree.path_to(row) for row in range(5)] == [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 4)]
    assert tree.children == ((1, 2), (3, 4), (), (), ())
    assert len(tree) == 5 and tree.height == 2 and not tree.is_chain
    for row in (-1, 5):
        with pytest.raises(UsageError, match=f"the tree has no row {row}; its rows are 0 to 4"):
            tree.path_to(row)


def test_a_chain_is_one_branch() -> None:
    tree = chain(ANCHOR, [4, 4, 9], [-0.5, -1.0, -INF])
    assert fields(tree) == [[ANCHOR, 4, 4, 9], [-1, 0, 1, 2], [0, 1, 2, 3], [0, -0.5, -1.5, -INF], [0] * 4]
    assert tree.is_chain and tree.path_to(3) == (0, 1, 2, 3)
    alone = chain(ANCHOR, [])
    assert alone.is_chain and alone.height == 0 and alone.children == ((),)
    unknown = chain(ANCHOR, np.array([4, 5])).log_probs
    assert unknown[0] == 0 and np.isnan(unknown[1:]).all()


def test_what_it_holds_cannot_be_written_to_and_is_its_own() -> None:
    tokens = np.array(FORK["tokens"])
    tree = fork(tokens=tokens)
    tokens[0] = 99
    assert tree.tokens[0] == 7
    for array in (tree.tokens, tree.parents, tree.depths, tree.log_probs, tree.ranks):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(tokens=[7, 1, 2, 1]), r"these are tokens \[4\], parents \[5\]"),
        (
            dict.fromkeys(("tokens", "parents", "depths", "ranks"), np.zeros(0, int)) | dict(log_probs=[]),
            "the anchor's",
        ),
        (dict(tokens=[[7]], parents=[[-1]], depths=[[0]], ranks=[[0]], log_probs=[[0]]), "a tree's arrays are"),
        (dict(tokens=[7.0, 1, 2, 1, 3]), "tokens are whole numbers; these are float64"),
        (dict(parents=[0, 0, 0, 1, 1]), "parents are -1 for row 0"),
        (dict(parents=[-1, -1, 0, 1, 1]), "an earlier row for every other"),
        (dict(parents=[-1, 0, 0, 3, 1]), "an earlier row for every other"),
        (dict(parents=[-1, 0, 0, 4, 1]), "an earlier row for every other"),
        (dict(depths=[0, 1, 1, 2, 3]), "depths are 0 for the anchor"),
        (dict(depths=[1, 2, 2, 3, 3]), "depths are 0 for the anchor"),
        (dict(tokens=[7, 1, 2, 1, -3]), "tokens and ranks are 0 or above"),
        (dict(ranks=[0, 0, -1, 0, 0]), "tokens and ranks are 0 or above"),
        (dict(log_probs=[-1, -1, -2, -1, -3]), "log_probs are 0 for the anchor"),
        (dict(log_probs=[math.nan, -1, -2, -1, -3]), "log_probs are 0 for the anchor"),
        (dict(log_probs=[0, -1, -2, -0.5, -3]), "nowhere above the parent's"),
        (dict(tokens=[7, 1, 1, 1, 3]), "two rows of a tree have the same parent and the same token"),
        (dict(tokens=[7, 1, 2, 3, 3]), "two rows of a tree have the same parent and the same token"),
    ],
)
def test_what_is_no_tree_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        fork(**changes)


@pytest.mark.parametrize("budget", [0, -1, MOST_NODES + 1, 2.0, "8", None])
def test_a_budget_is_a_whole_number_of_nodes(budget: Any) -> None:
    with pytest.raises(UsageError) as caught:
        best_first(ANCHOR, [[1, 2]], [[-1, -2]], budget)
    assert str(caught.value) == f"budget is {budget!r}; a tree has 1 to 256 nodes after the anchor"


@pytest.mark.parametrize(
    ("ids", "log_probs", "sentence"),
    [
        ([[1, 2]], [[-1.0]], r"both \[slots, k\] with at least one of each; these are \[1, 2\] and \[1, 1\]"),
        ([1, 2], [-1.0, -2.0], r"these are \[2\] and \[2\]"),
        (np.zeros((0, 4), int), np.zeros((0, 4)), r"these are \[0, 4\] and \[0, 4\]"),
        (np.zeros((3, 0), int), np.zeros((3, 0)), r"these are \[3, 0\] and \[3, 0\]"),
        ([[1.0, 2.0]], [[-1.0, -2.0]], "ids are whole numbers; these are float64"),
        ([[1, 2]], [[-1.0, 0.5]], "a log-probability is at most 0; these hold 0.5"),
        ([[1, 2]], [[-1.0, math.nan]], "a log-probability is at most 0; these hold nan"),
        ([[1, 2, 3], [4, 5, 4]], [[-1.0, -2, -3]] * 2, "slot 2 has the candidate 4 twice; each may be there once"),
        ([[-2, 1]], [[-1.0, -2.0]], "a tree's tokens and ranks are 0 or above"),
    ],
)
def test_what_are_no_candidates_is_refused(ids: Any, log_probs: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        best_first(ANCHOR, ids, log_probs, 4)


def test_log_probs_of_a_chain_are_one_a_token() -> None:
    with pytest.raises(UsageError, match=r"a chain of 2 tokens has log_probs \[2\]; these are \[1\]"):
        chain(ANCHOR, [1, 2], [-1.0])
    with pytest.raises(UsageError, match="a log-probability is at most 0; these hold 1"):
        chain(ANCHOR, [1], [1.0])
