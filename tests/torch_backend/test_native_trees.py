"""A tree through the native target: each row what the chain of its ancestors gives alone, and any of its paths kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import cpu_dflash
import pytest
import torch
from cpu_cases import assert_near, assert_same_bits, needs_compiled, poisoned, threads
from tiny_models import VOCAB, make_target
from torch import Tensor
from torch_dflash.cpu_stack import CpuStack
from torch_dflash.native import NativeTarget
from torch_dflash.stack import FIRST_CAPACITY
from torch_dflash.target import TorchTarget

from dflash.errors import BackendError

TAPS = (0, 2)
TREE = [-1, 0, 0, 1, 1, 2, 3, -1, 7, 6, 2]
"""0 ─┬─ 1 ─┬─ 3 ── 6 ── 9
     │     └─ 4
     └─ 2 ─┬─ 5
           └─ 10
   7 ── 8"""
PATHS = [(0, 1, 3, 6, 9), (0, 1, 4), (0, 2, 5), (0, 2, 10), (7, 8), (7,), (0,), (0, 1), (0, 2)]
BOTH = [pytest.param(True, id="compiled", marks=needs_compiled), pytest.param(False, id="plain")]
MODELS = {
    "llama, head size 16": ("llama", dict(head_dim=16)),
    "qwen3, head size 16": ("qwen3", dict(head_dim=16)),
    "qwen2, head size 8": ("qwen2", {}),
}


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def serve(name: str, compiled: bool) -> NativeTarget:
    family, changes = MODELS[name]
    with cpu_dflash.forced(compiled):
        target = NativeTarget(make_target(family, max_position_embeddings=4096, **changes), TAPS)
    assert isinstance(target.stack, CpuStack) == compiled
    target.stack.cache.tensor.fill_(torch.nan)
    return target


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def chain(target: NativeTarget, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits and features of ``tokens`` after ``prompt`` in a cache that knew nothing else."""
    target.reset()
    if prompt:
        feed(target, prompt)
    output = target.forward(tokens)
    target.keep(range(len(tokens)))
    return output.logits, output.features


def feed(target: NativeTarget, tokens: Sequence[int]) -> None:
    for start in range(0, len(tokens), 50):
        piece = tokens[start : start + 50]
        target.forward(piece)
        target.keep(range(len(piece)))


def ancestors(parents: Sequence[int], row: int) -> list[int]:
    """From the root down to ``row``."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def random_tree(rows: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(-1, row, (), generator=generator)) for row in range(1, rows))]


@pytest.mark.parametrize("compiled", BOTH)
@pytest.mark.parametrize("start", [0, 1, 253])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_is_what_its_ancestors_give_as_a_chain(name: str, start: int, compiled: bool) -> None:
    target, prompt = serve(name, compiled), ids(start, 1)
    for parents in (TREE, random_tree(16, 2), random_tree(64, 3)):
        tokens = ids(len(parents), len(parents))
        target.reset()
        feed(target, prompt)
        output = target.forward(tokens, parents=parents)
        assert output.logits.shape == (len(tokens), VOCAB) and output.features.shape == (len(tokens), 64)
        assert target.length == start
        target.keep(())
        for row in range(0, len(parents), 1 if len(parents) < 20 else 7):
            path = ancestors(parents, row)
            logits, features = chain(target, prompt, [tokens[at] for at in path])
            assert_near(output.logits[path], logits)
            assert_near(output.features[path], features)


@needs_compiled
@pytest.mark.parametrize("start", [0, 5, 253])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_is_the_bits_that_its_ancestors_give_as_a_chain(name: str, start: int) -> None:
    target, prompt, tokens, different = serve(name, True), ids(start, 1), ids(len(TREE), 2), []
    feed(target, prompt)
    features = target.forward(tokens, parents=TREE).features
    target.keep(())
    for row in range(len(TREE)):
        path = ancestors(TREE, row)
        if not torch.equal(features[path], chain(target, prompt, [tokens[at] for at in path])[1]):
            different.append(row)
    assert different == []


@pytest.mark.parametrize("compiled", BOTH)
def test_more_rows_than_a_compiled_pass_takes(compiled: bool) -> None:
    name, parents = "llama, head size 16", random_tree(80, 4)
    target, prompt, tokens = serve(name, compiled), ids(30, 1), ids(80, 2)
    feed(target, prompt)
    output = target.forward(tokens, parents=parents)
    target.keep(())
    for row in (0, 40, 64, 79):
        path = ancestors(parents, row)
        logits, features = chain(target, prompt, [tokens[at] for at in path])
        assert_near(output.logits[path], logits, 1e-4)
        assert_near(output.features[path], features, 1e-4)


@needs_compiled
def test_threads_change_no_bit_of_a_tree() -> None:
    target, prompt, tokens = serve("qwen3, head size 16", True), ids(250, 1), ids(len(TREE), 2)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            target.reset()
            feed(target, prompt)
            output = target.forward(tokens, parents=TREE)
            target.keep(())
            found.append(torch.cat((output.logits, output.features), dim=-1))
            assert_same_bits(found[-1], found[0], f"{count} threads")


@pytest.mark.parametrize("compiled", BOTH)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_kept_path_is_as_if_fed_as_a_chain(path: tuple[int, ...], compiled: bool) -> None:
    """What follows it, as a chain and as a tree, sees nothing else of the tree; nor does what is kept afterwards."""
    target, prompt, tokens, after = serve("qwen3, head size 16", compiled), ids(253, 1), ids(len(TREE), 2), ids(7, 3)
    feed(target, prompt)
    target.forward(tokens, parents=TREE)
    rows = target.stack.cache.tensor[..., [253 + at for at in path], :]
    target.keep(path)
    assert target.length == 253 + len(path)
    assert_same_bits(target.stack.cache.tensor[..., 253 : target.length, :], rows, "of the cache")
    outputs = [target.forward(after)]
    target.keep(range(2))
    outputs.append(target.forward(tokens, parents=TREE))
    target.keep(())

    feed_again = [*prompt, *(tokens[at] for at in path)]
    logits, features = chain(target, feed_again, after)
    assert_near(outputs[0].logits, logits)
    assert_near(outputs[0].features, features)
    target.reset()
    feed(target, [*feed_again, *after[:2]])
    assert_near(outputs[1].logits, target.forward(tokens, parents=TREE).logits)


@pytest.mark.parametrize("compiled", BOTH)
def test_nothing_kept_is_nothing_seen(compiled: bool) -> None:
    target, prompt, after = serve("llama, head size 16", compiled), ids(9, 1), ids(5, 3)
    expected, _ = chain(target, prompt, after)
    target.reset()
    feed(target, prompt)
    target.forward(ids(len(TREE), 2), parents=TREE)
    target.keep(())
    assert target.length == 9
    assert_near(target.forward(after).logits, expected)


@pytest.mark.parametrize("compiled", BOTH)
def test_a_reset_forgets_a_tree_that_was_not_kept(compiled: bool) -> None:
    target = serve("llama, head size 16", compiled)
    target.forward(ids(len(TREE), 2), parents=TREE)
    target.reset()
    assert target.length == 0
    target.forward(ids(4, 3))
    target.keep(range(2))  # a chain again: leading tokens
    assert target.length == 2
    with pytest.raises(BackendError, match="keeps leading tokens of the last 2 only"):
        target.forward(ids(2, 3))
        target.keep((1,))


@pytest.mark.parametrize("compiled", BOTH)
def test_other_paths_are_refused_and_nothing_is_lost(compiled: bool) -> None:
    target, prompt, tokens, after = serve("llama, head size 16", compiled), ids(20, 1), ids(len(TREE), 2), ids(3, 3)
    expected, _ = chain(target, [*prompt, *(tokens[at] for at in (0, 2, 5))], after)
    target.reset()
    feed(target, prompt)
    for wrong, parents in itertools.product([[1], [0]], ([-1], [0, -1], [-1, -1, 5])):
        with pytest.raises(BackendError, match="parent"):
            target.forward([*wrong, 3], parents=parents)
        assert target.length == 20
    target.forward(tokens, parents=TREE)
    cache = target.stack.cache.tensor.clone()
    for path in ((1,), (0, 3), (0, 2, 4), (2, 5), (0, 1, 2), (5, 2, 0), (0, 0), (11,), (0, 11), (-1,)):
        with pytest.raises(BackendError, match=r"is no path of the tree: row -?[0-9]+ does not follow -?[0-9]+$"):
            target.keep(path)
        assert target.length == 20
        assert_same_bits(target.stack.cache.tensor, cache, f"cache after {path}")
    target.keep((0, 2, 5))
    assert target.length == 23
    assert_near(target.forward(after).logits, expected)


@pytest.mark.parametrize("compiled", BOTH)
def test_rounds_of_trees_equal_one_chain(compiled: bool) -> None:
    """Over several stretches of keys and a cache that grows; paths of every kind are kept in turn."""
    target, committed = serve("qwen3, head size 16", compiled), ids(240, 1)
    feed(target, committed)
    features, logits = [], []
    for turn in range(100):
        rows = 2 + 9 * turn % 31
        parents, tokens = random_tree(rows, turn), ids(rows, 1000 + turn)
        output = target.forward(tokens, parents=parents)
        path = max((ancestors(parents, row) for row in range(rows)), key=len) if turn % 7 else []
        target.keep(path)
        committed += [tokens[at] for at in path]
        features.append(output.features[path])
        logits.append(output.logits[path])
        assert target.length == len(committed)
    assert target.length > FIRST_CAPACITY, "the cache has not grown"
    target.reset()
    feed(target, committed[:240])
    found = []
    for start in range(240, len(committed), 40):
        found.append(target.forward(piece := committed[start : start + 40]))
        target.keep(range(len(piece)))
    assert_near(torch.cat(features), torch.cat([output.features for output in found]))
    assert_near(torch.cat(logits), torch.cat([output.logits for output in found]))


@pytest.mark.parametrize("compiled", BOTH)
def test_a_tree_that_is_a_chain_is_one(compiled: bool) -> None:
    target, prompt, tokens = serve("qwen2, head size 8", compiled), ids(40, 1), ids(9, 2)
    logits, features = chain(target, prompt, tokens)
    target.reset()
    feed(target, prompt)
    output = target.forward(tokens, parents=range(-1, 8))
    assert_same_bits(output.logits, logits)
    assert_same_bits(output.features, features)
    target.keep(range(4))
    assert target.length == 44


@pytest.mark.parametrize("compiled", BOTH)
def test_the_last_row_alone_and_no_features(compiled: bool) -> None:
    target, tokens = serve("llama, head size 16", compiled), ids(len(TREE), 2)
    whole = target.forward(tokens, parents=TREE)
    target.keep(())
    target.tapping = False
    output = target.forward(tokens, parents=TREE, last_only=True)
    assert output.features is None
    assert_near(output.logits, whole.logits[-1:], 1e-5)


def test_a_target_served_through_transformers_refuses_trees() -> None:
    target = TorchTarget(make_target(), TAPS)
    with pytest.raises(BackendError, match="this target cannot verify a tree"):
        target.forward([3, 4], parents=[-1, 0])
    assert target.length == 0
    target.forward([3, 4])
    target.keep(range(2))
    assert target.length == 2
