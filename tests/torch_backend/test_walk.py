"""The walk through a candidate tree: held to plain Python, to a block's verdict, and to the target's own output."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TinyPair, make_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_dflash.native import NativeTarget
from torch_dflash.sampling import draw, shape_probabilities
from torch_dflash.verify import MatchVerifier
from torch_dflash.walk import TreeRows, walk

from dflash.errors import BackendError
from dflash.tree import CandidateTree, best_first, chain
from dflash.types import Proposal, SamplingParams, TargetOutput
from dflash.uniforms import Uniforms

CPU = torch.device("cpu")


def tree_of(tokens: list[int], parents: list[int]) -> CandidateTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    unknown = np.where(np.arange(len(tokens)), np.nan, 0)
    return CandidateTree(np.array(tokens), np.array(parents), np.array(depths), unknown, np.zeros(len(tokens), int))


def random_tree(rng: np.random.Generator, nodes: int, vocabulary: int, anchor: int = 0, deep: bool = False) -> Any:
    """Any shape; ``deep`` mostly continues the newest row. Siblings get different tokens."""
    tokens, parents, taken = [anchor], [-1], set()
    while len(tokens) <= nodes:
        parent = len(tokens) - 1 if deep and rng.random() < 0.8 else int(rng.integers(len(tokens)))
        token = int(rng.integers(vocabulary))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return tree_of(tokens, parents)


def walked(tree: CandidateTree, choices: list[int]) -> tuple[list[int], int]:
    """Path and next token, as ``walk`` finds them and one copy brings them to the host."""
    found = walk(TreeRows.of(tree, CPU), torch.tensor(choices))
    assert found.path.shape == (tree.height + 1,)
    length, next_token, *path = torch.cat(found).tolist()
    assert not any(path[length:])
    return path[:length], next_token


def followed(tree: CandidateTree, choices: list[int]) -> tuple[list[int], int]:
    """The same, a row at a time."""
    path = [0]
    while matching := [row for row in tree.children[path[-1]] if tree.tokens[row] == choices[path[-1]]]:
        (row,) = matching
        path.append(row)
    return path, choices[path[-1]]


@st.composite
def trees_and_choices(draw: Any) -> tuple[CandidateTree, list[int]]:
    """Few tokens and choices that often are one of a row's children, so that walks of every length come up."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tree = random_tree(rng, draw(st.integers(0, 40)), draw(st.integers(41, 60)), deep=draw(st.booleans()))
    rate = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    choices = []
    for below in tree.children:
        right = below and rng.random() < rate
        choices.append(int(tree.tokens[rng.choice(below)]) if right else int(rng.integers(60)))
    return tree, choices


@settings(derandomize=True, database=None, deadline=None, max_examples=400)
@given(trees_and_choices())
def test_a_walk_is_what_plain_python_finds(case: tuple[CandidateTree, list[int]]) -> None:
    assert walked(*case) == followed(*case)


def test_walks_of_every_length_up_a_deep_tree_are_found() -> None:
    """Beyond 16 levels too, where a side branch hangs on every row; each row's end is reached and told by its path."""
    spine, tokens, parents = 37, [0], [-1]
    for level in range(1, spine + 1):
        above = 2 * level - 3 if level > 1 else 0
        tokens += [5, 6]
        parents += [above, above]
    tree, found = tree_of(tokens, parents), set()
    assert tree.height == spine
    for end in range(len(tree)):
        choices = [9] * len(tree)
        path = list(tree.path_to(end))
        for row, after in pairwise(path):
            choices[row] = tokens[after]
        assert walked(tree, choices) == (path, 9)
        found.add(len(path))
    assert found == set(range(1, spine + 2))


TWO = tree_of([3, 1, 2, 4, 4], [-1, 0, 0, 1, 2])


@pytest.mark.parametrize(
    ("choices", "path", "next_token"),
    [
        ([9, 4, 4, 9, 9], [0], 9),  # nothing stands, though rows below match their parents
        ([1, 4, 4, 7, 8], [0, 1, 3], 7),
        ([2, 4, 4, 7, 8], [0, 2, 4], 8),  # the same tokens below another row
        ([2, 4, 6, 7, 8], [0, 2], 6),
        ([3, 3, 3, 3, 3], [0], 3),  # the anchor's own token is not its child
    ],
)
def test_the_path_of_a_fork(choices: list[int], path: list[int], next_token: int) -> None:
    assert walked(TWO, choices) == (path, next_token)


def test_the_anchor_alone_always_stands() -> None:
    assert walked(chain(3, []), [8]) == ([0], 8)


@pytest.mark.parametrize("shape", [(4,), (6,), (5, 1)])
def test_choices_are_one_a_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(BackendError) as caught:
        walk(TreeRows.of(TWO, CPU), torch.zeros(shape, dtype=torch.long))
    assert str(caught.value) == f"the tree has 5 rows and the choices are {list(shape)}; one a row"


FETCHES = [getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero")]


class Watched(TorchDispatchMode):
    """Counts operations, and refuses every one that fetches a value from the device."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in FETCHES
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_a_walk_waits_for_nothing_and_takes_few_steps() -> None:
    counts = {}
    for nodes, height in ((8, 2), (200, 2), (200, 16), (16, 16)):
        tree = tree_of([0, *range(nodes)], [-1, *range(height), *[0] * (nodes - height)])
        with Watched() as watched:
            found = walk(TreeRows.of(tree, CPU), torch.zeros(nodes + 1, dtype=torch.long))
            counts[nodes, height] = watched.operations
            for fetch in (int, bool, found.path.__getitem__):
                with pytest.raises(AssertionError):
                    fetch(found.length[0])
    assert counts[8, 2] == counts[200, 2] and counts[16, 16] == counts[200, 16]
    assert counts[200, 16] - counts[200, 2] == 3 * 3, "three more doublings, of three operations each"


# A chain is a block ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(1.0, seed=3), SamplingParams(0.7, 2, 0.9, seed=4)]
)
def test_a_chain_gets_the_verdict_of_a_block(sampling: SamplingParams) -> None:
    """Over several rounds of one request, blocks of every size; among few tokens, so that many stand."""
    generator, verifier = torch.Generator().manual_seed(6), MatchVerifier(sampling, device=CPU)
    position, kinds = 0, set()
    numbers = torch.from_numpy(Uniforms(sampling.seed).range(0, 2000))
    for number in range(160):
        count = number % 16
        logits = torch.randn(count + 1, 3, generator=generator)
        right = torch.rand(count, generator=generator) < 0.9
        block = torch.cat((torch.tensor([1]), torch.where(right, logits[:count].argmax(-1), 2)))
        verdict = verifier.verify(Proposal(block[1:], block, count), TargetOutput(logits, None))
        rows = TreeRows.of(chain(1, block[1:].tolist()), CPU)
        assert torch.equal(rows.tokens, block)
        found = walk(rows, chosen(logits, sampling, numbers, rows.positions(position)))
        length, next_token, *path = torch.cat(found).tolist()
        assert (length - 1, next_token) == (verdict.accepted, verdict.next_token)
        assert path[:length] == list(range(length))
        position += length
        if count:
            kinds.add("all" if verdict.accepted == count else "some" if verdict.accepted else "none")
    assert kinds == {"all", "some", "none"}


def chosen(logits: Tensor, sampling: SamplingParams, numbers: Tensor, positions: Tensor) -> Tensor:
    """Each row's choice [n], by the number of its output position."""
    return logits.argmax(-1) if sampling.greedy else draw(shape_probabilities(logits, sampling), numbers[positions])


def test_rows_draw_by_their_depth() -> None:
    rows = TreeRows.of(tree_of([0, 1, 2, 3, 4], [-1, 0, 0, 2, 3]), CPU)
    assert rows.positions(0).tolist() == [0, 1, 1, 2, 3]
    assert rows.positions(40).tolist() == [40, 41, 41, 42, 43]


# With a target -----------------------------------------------------------------------------------------------------

PROMPT = [9, 8, 7, 11, 3]
LENGTH = 48


class Rounds:
    """A request decoded with the trees of ``plan(anchor, done)``, where ``done`` counts the tokens before the anchor's
    next: ``output`` and what became of each round."""

    def __init__(
        self, target: NativeTarget, sampling: SamplingParams, plan: Callable[[int, int], CandidateTree]
    ) -> None:
        numbers = torch.from_numpy(Uniforms(sampling.seed).range(0, LENGTH + 99))
        self.output: list[int] = []
        self.paths: list[list[int]] = []
        target.reset()
        target.forward(PROMPT[:-1], last_only=True)
        target.keep(range(len(PROMPT) - 1))
        while len(self.output) < LENGTH:
            tree = plan((PROMPT + self.output)[-1], len(self.output))
            rows = TreeRows.of(tree, CPU)
            logits = target.forward(rows.tokens, parents=tree.parents.tolist()).logits
            choices = chosen(logits, sampling, numbers, rows.positions(len(self.output)))
            length, next_token, *path = torch.cat(walk(rows, choices)).tolist()
            target.keep(path[:length])
            self.paths.append(path[:length])
            self.output += [*tree.tokens[path[1:length]].tolist(), next_token]
            assert target.length == len(PROMPT) + len(self.output) - 1
        self.output = self.output[:LENGTH]


def hiding(truth: list[int], budget: int, seed: int, slots: int = 5, k: int = 4) -> Callable[[int, int], CandidateTree]:
    """Trees of marginals among whose candidates the ``truth`` is, at ranks and with probabilities that vary."""
    rng = np.random.default_rng(seed)

    def plan(anchor: int, done: int) -> CandidateTree:
        ids = np.stack([rng.permutation(300)[:k] for _ in range(slots)])
        for slot in range(slots):
            token = truth[done + slot] if done + slot < len(truth) else 0
            if token not in ids[slot]:
                ids[slot, rng.choice(k, p=[0.7, 0.15, 0.1, 0.05])] = token
        return best_first(anchor, ids, np.log(-np.sort(-rng.dirichlet([0.5] * k, slots)) + 1e-9), budget)

    return plan


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def served(request: pytest.FixtureRequest) -> tuple[NativeTarget, list[int]]:
    """A native target and its greedy output, found by the plain model without any cache."""
    pair = TinyPair(request.param)
    oracle = pair.oracle(PROMPT, LENGTH)
    return NativeTarget(pair.model, make_config().target_layer_ids), oracle


@pytest.mark.parametrize("budget", [1, 4, 16, 64, 256])
def test_trees_that_hold_the_targets_tokens_give_its_own_output_sooner(
    served: tuple[NativeTarget, list[int]], budget: int
) -> None:
    target, oracle = served
    rounds = Rounds(target, SamplingParams(), hiding(oracle, budget, seed=budget))
    assert rounds.output == oracle
    assert len(rounds.paths) < LENGTH
    if budget >= 16:
        assert any(path != list(range(len(path))) for path in rounds.paths), "rows had to move"
    if budget >= 64:
        assert max(map(len, rounds.paths)) == 6, "a whole path was accepted"


@pytest.mark.parametrize("nodes", [0, 1, 7, 30])
def test_random_trees_give_the_targets_own_output(served: tuple[NativeTarget, list[int]], nodes: int) -> None:
    target, oracle = served
    rng = np.random.default_rng(nodes)
    rounds = Rounds(target, SamplingParams(), lambda anchor, _: random_tree(rng, nodes, 300, anchor))
    assert rounds.output == oracle


@pytest.mark.parametrize("sampling", [SamplingParams(0.8, seed=5), SamplingParams(1.1, 20, 0.9, seed=6)])
def test_a_seed_gives_the_same_samples_with_trees_and_without(
    served: tuple[NativeTarget, list[int]], sampling: SamplingParams
) -> None:
    target, oracle = served
    plain = Rounds(target, sampling, lambda anchor, _: chain(anchor, [])).output
    assert plain != oracle
    assert Rounds(target, sampling, hiding(oracle, 16, seed=1)).output == plain, "of trees it rarely follows"
    for budget in (4, 16, 64):
        rounds = Rounds(target, sampling, hiding(plain, budget, seed=budget))
        assert rounds.output == plain
        assert len(rounds.paths) < LENGTH


def test_a_walk_that_keeps_the_wrong_rows_would_be_noticed(
    served: tuple[NativeTarget, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's rows left where they are, as for a chain."""
    target, oracle = served
    monkeypatch.setattr(target.stack.cache, "move", lambda *_: None)
    assert Rounds(target, SamplingParams(), hiding(oracle, 16, seed=16)).output != oracle
