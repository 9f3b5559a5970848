"""The compiled stack computes what the plain one does, and every row the same bits whatever comes with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import cpu_dflash
import pytest
import torch
from cpu_cases import (
    SIGHTS,
    SIZES,
    Kind,
    Reference,
    assert_near,
    assert_same_bits,
    fill,
    kinds,
    needs_compiled,
    poisoned,
    threads,
)
from tiny_models import TinyPair, make_config, make_drafter
from torch import Tensor
from torch_dflash import stacks
from torch_dflash.cpu_stack import Chooser, ContextWriter, CpuStack, narrow_copy
from torch_dflash.rotary import Rotary
from torch_dflash.stack import LayerWeights, PlainStack, Sight, StackSize, Tree, rms_norm
from torch_dflash.stacks import make_chooser, make_context_writer, make_head, make_stack, reads_narrow

from dflash.rope import RopeConfig

pytestmark = needs_compiled

STARTS = (0, 1, 255, 256, 257, 1025)  # a stretch of keys whose softmax is computed together is 256 long
ROWS = (1, 2, 7, 16, 64, 65, 130)
KINDS = kinds()


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned(), torch.inference_mode():
        yield


def both(kind: Kind) -> tuple[PlainStack, CpuStack]:
    given = (kind.layers(), kind.stack_size, kind.sights)
    return PlainStack(*given, kind.rotary()), CpuStack(*given, kind.rotary())


def rounded(layers: list[LayerWeights]) -> list[LayerWeights]:
    """Whose products bfloat16 holds exactly."""
    names = ("qkv", "output", "gate_up", "down")
    return [replace(layer, **{name: getattr(layer, name).bfloat16().float() for name in names}) for layer in layers]


def parents_of(rows: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(-1, row, (), generator=generator)) for row in range(1, rows))]


# Passes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_passes_equal_the_plain_stacks(name: str) -> None:
    """States and the cache, for each start, number of rows and choice of layers, as chain and as tree; the kinds take
    turns with the pairs of a start and a number of rows."""
    kind = KINDS[name]
    plain, compiled = both(kind)
    layers = len(kind.sights)
    choices = itertools.cycle([(), (0, layers - 1), (layers - 1,), range(layers)])
    place = list(KINDS).index(name)
    pairs = [(start, rows) for i, start in enumerate(STARTS) for j, rows in enumerate(ROWS) if (i + j + place) % 3 == 0]
    for turn, (start, rows) in enumerate(pairs):
        for stack in (plain, compiled):
            fill(stack, start, start + rows, seed=turn)
        before, x, wanted = compiled.cache.tensor.clone(), torch.randn(rows, kind.hidden), next(choices)
        given, tree = x.clone(), Tree(parents_of(rows, turn), rows, x.device) if turn % 3 == 2 else None
        expected, found = (stack.run(given, start, wanted, tree) for stack in (plain, compiled))
        assert sorted(found) == sorted(wanted) and torch.equal(given, x)
        for index in wanted:
            assert_near(found[index], expected[index])
        new = slice(start, start + rows)
        assert_near(compiled.cache.tensor[..., new, :], plain.cache.tensor[..., new, :])
        for untouched in (slice(0, start), slice(start + rows, None)):
            assert_same_bits(compiled.cache.tensor[..., untouched, :], before[..., untouched, :], "of the cache")


@pytest.mark.parametrize("name", list(KINDS)[1::4])
def test_passes_are_as_exact_as_the_plain_stacks(name: str) -> None:
    """Error against the formulas in float64 at most twice the plain code's."""
    kind = KINDS[name]
    stacks_, start, rows = both(kind), 300, 6
    x, errors = torch.randn(rows, kind.hidden), []
    for stack in stacks_:
        fill(stack, start, start + rows)
        exact, written = Reference(kind, stack.cache.tensor, start).run(x)
        states = stack.run(x, start, range(len(exact)))
        new = stack.cache.tensor[..., start : start + rows, :]
        errors.append([*(states[at] - state for at, state in enumerate(exact)), *(new - written)])
    for plain, compiled in zip(*errors, strict=True):
        assert compiled.abs().max() <= max(2 * plain.abs().max().item(), 1e-6)


def test_a_key_weighs_its_exponential_to_the_last_places() -> None:
    """One key before the block whose value is 1, and each row's own, whose score and value are 0: what is attended is
    e^score / (1 + e^score)."""
    eye, nothing = torch.eye(16), torch.zeros(16, 16)
    qkv = torch.cat((nothing.index_put((torch.tensor(8), torch.tensor(0)), torch.tensor(1.0)), nothing, nothing))
    layer = LayerWeights(
        input_norm=torch.ones(16), qkv=qkv, qkv_bias=None, q_norm=None, k_norm=None, output=eye.roll(1, 0),
        output_bias=None, post_norm=torch.ones(16), gate_up=torch.zeros(16, 16), gate_up_bias=None,
        down=torch.zeros(16, 8), down_bias=None,
    )  # fmt: skip
    stack = CpuStack([layer], StackSize(1, 1, 16, 0.0), [Sight()], Rotary(RopeConfig(1e4, partial=0.5), 16))
    alone = Tree([-1] * 64, 64, eye.device)  # no row sees another
    for weakest in (-1.0, -8.0, -80.0):
        fill(stack, 1, 65)
        cache = stack.cache.tensor[0, :, 0]  # keys and values [2, C, d]
        cache[:, 0] = 0
        cache[0, 0, 8], cache[1, 0, 0] = weakest, 1
        x = torch.zeros(64, 16)
        x[:, 0], x[:, 15] = torch.linspace(0.01, 1, 64), torch.linspace(1, 0.01, 64)
        scores = (rms_norm(x, torch.ones(16), 0.0)[:, 0] * weakest).double() / 4
        expected = scores.exp() / (1 + scores.exp())
        found = stack.run(x, 1, {0}, alone)[0][:, 1].double()  # where x itself is 0
        off = (found / expected - 1).abs() / torch.finfo(torch.float32).eps
        assert (off <= 4 - scores).all(), f"{off.max():.1f} units of the last place"  # and the score's own rounding


@pytest.mark.parametrize("sights", ["causal", "window of 5", "both"])
@pytest.mark.parametrize("size", [(8, 4, 80), (4, 2, 256), (3, 1, 8), (5, 5, 20)], ids=str)
@pytest.mark.parametrize("narrow", [False, True], ids=["", "narrow"])
def test_rows_one_by_one_are_the_blocks_bits(size: tuple[int, int, int], sights: str, narrow: bool) -> None:
    """Also where the block begins in one stretch of keys and ends in the next."""
    kind = Kind(size, SIGHTS.get(sights) or [Sight(), Sight(True, 5), Sight(True, 300)], hidden=97)
    stack = CpuStack(kind.layers(), kind.stack_size, kind.sights, kind.rotary(), narrow=narrow)
    last = len(kind.sights) - 1
    for start in (0, 250, 1018):
        fill(stack, start, start + 64)
        x = torch.randn(64, kind.hidden)
        whole = stack.run(x, start, {0, last})
        cache = stack.cache.tensor.clone()
        for step in (1, 3, 16):
            fill(stack, start, start + 64)
            parts = [stack.run(x[at : at + step], start + at, {0, last}) for at in range(0, 64, step)]
            for index in (0, last):
                assert_same_bits(torch.cat([part[index] for part in parts]), whole[index], f"{step} rows a pass")
            assert_same_bits(stack.cache.tensor, cache, f"cache, {step} rows a pass")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_threads_change_no_bit(size: tuple[int, int, int]) -> None:
    kind, narrow = Kind(size, SIGHTS["mixed"], hidden=97), SIZES.index(size) % 2 == 1
    stack = CpuStack(kind.layers(), kind.stack_size, kind.sights, kind.rotary(), narrow=narrow)
    for start, rows, parents in ((0, 1, None), (700, 1, None), (250, 16, None), (513, 7, parents_of(7))):
        x, found = torch.randn(rows, kind.hidden), []
        for count in (1, 2, 3):
            fill(stack, start, start + rows)
            with threads(count):
                states = stack.run(x, start, {0, 4}, parents and Tree(parents, rows, x.device))
            found.append(torch.cat([part.flatten() for part in (*states.values(), stack.cache.tensor)]))
            assert_same_bits(found[-1], found[0], f"{rows} rows at {start}, {count} threads")


@pytest.mark.parametrize("name", ["8-4-80, mixed", "5-5-20, causal", "3-1-8, both ways"])
def test_narrow_weights_give_what_the_rounded_ones_give(name: str) -> None:
    kind = KINDS[name]
    layers = kind.layers()
    given = (kind.stack_size, kind.sights)
    narrow = CpuStack(layers, *given, kind.rotary(), narrow=True)
    exact, wide = CpuStack(rounded(layers), *given, kind.rotary()), CpuStack(layers, *given, kind.rotary())
    last = len(layers) - 1
    for start, rows in ((0, 1), (256, 7), (300, 64)):
        x, states = torch.randn(rows, kind.hidden), []
        for stack in (narrow, exact, wide):
            fill(stack, start, start + rows)
            states.append(stack.run(x, start, {last})[last])
        assert_same_bits(states[0], states[1])
        assert not torch.equal(states[0], states[2])


def test_inputs_that_do_not_lie_side_by_side() -> None:
    kind = KINDS["3-1-8, mixed"]
    stack = CpuStack(kind.layers(), kind.stack_size, kind.sights, kind.rotary())
    fill(stack, 9, 14)
    wide = torch.randn(5, 2 * kind.hidden)
    assert torch.equal(stack.run(wide[:, ::2], 9, {1})[1], stack.run(wide[:, ::2].contiguous(), 9, {1})[1])


# Context -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", [False, True], ids=["", "narrow"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_context_equals_the_models_own(biased: bool, partial: float, narrow: bool) -> None:
    config = make_config(
        hidden_size=97, head_dim=20, attention_bias=biased, rope=RopeConfig(1e4, partial=partial), num_hidden_layers=3
    )
    model = make_drafter(config)
    if narrow:
        for linear in (model.fc, *(part for layer in model.layers for part in layer.self_attn.children())):
            if linear.weight.dim() == 2:
                linear.weight.data = linear.weight.bfloat16().float()
    size, rotary = StackSize(4, 2, 20, config.rms_norm_eps), Rotary(config.rope, 20)
    with cpu_dflash.forced(True):
        writer = make_context_writer(model, model.stacked_kv(), size, rotary)
    assert writer is not None
    for start, rows in itertools.product((0, 1, 300), (1, 2, 5, 64, 65, 130)):
        features, tables = torch.randn(rows, config.feature_size), rotary.range(start, start + rows)
        found = []
        for count in (1, 2, 3):
            cache = torch.full((3, 2, 2, 500, 20), torch.nan)
            with threads(count):
                writer.write(features, tables, cache, start)
            found.append(cache)
            assert_same_bits(cache, found[0], f"{rows} rows at {start}, {count} threads")
        with cpu_dflash.forced(False):
            pairs = model.context_kv(model.project(features[None]), tables)
        new = slice(start, start + rows)
        assert_near(found[0][..., new, :], torch.stack([torch.cat(pair) for pair in pairs]), 1e-5)
        found[0][..., new, :] = torch.nan
        assert found[0].isnan().all()


def test_a_context_written_in_pieces_is_the_same_bits() -> None:
    config = make_config()
    model, rotary = make_drafter(config), Rotary(config.rope, 8)
    kv, bias = model.stacked_kv()
    norms = [layer.self_attn.k_norm.weight for layer in model.layers]
    writer = ContextWriter(
        model.fc.weight, model.hidden_norm.weight, kv, bias, norms, StackSize(4, 2, 8, 1e-6), 8
    )  # fmt: skip
    features = torch.randn(70, 2 * config.feature_size)[:, ::2]
    found = []
    for step in (70, 1, 5):
        cache = torch.zeros(2, 2, 2, 80, 8)
        for at in range(0, 70, step):
            end = min(at + step, 70)
            writer.write(features[at:end], rotary.range(9 + at, 9 + end), cache, 9 + at)
        found.append(cache)
        assert cache.any()
        assert_same_bits(cache, found[0], f"{step} rows at a time")


@pytest.mark.parametrize("given, count", [((3, 32), 3), ((3, 65), 3), ((3, 64), 5)], ids=str)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_features_that_do_not_fit_are_refused_and_nothing_is_lost(
    given: tuple[int, int], count: int, compiled: bool
) -> None:
    """Compiled code would read what lies behind them in memory."""
    with cpu_dflash.forced(compiled):
        drafter = TinyPair().drafter()
        drafter.observe(torch.randn(3, 64), 3)
        with pytest.raises((RuntimeError, AssertionError)):
            drafter.observe(torch.randn(given), count)
        assert drafter.length == 3


# The likeliest token -----------------------------------------------------------------------------------------


def likeliest(head: Tensor, norm: Tensor, states: Tensor) -> Tensor:
    return (rms_norm(states, norm, 1e-6).to(head.dtype) @ head.T).argmax(-1)


@pytest.mark.parametrize("rows", [1, 15, 64, 65])
@pytest.mark.parametrize("hidden", [64, 97])
@pytest.mark.parametrize("vocabulary", [1, 97, 1025, 5000])
def test_the_choice_is_the_logits_argmax(vocabulary: int, hidden: int, rows: int) -> None:
    head, norm, states = torch.randn(vocabulary, hidden), 1 + torch.rand(hidden), 3 * torch.randn(rows, hidden)
    chooser = Chooser(head, norm, 1e-6)
    for count in (1, 2, 3):
        with threads(count):
            chosen = chooser.choose(states)
        assert chosen.shape == (rows,) and chosen.dtype == torch.int64
        assert torch.equal(chosen, likeliest(head, norm, states)), f"{count} threads"


@pytest.mark.parametrize("apart", [3e-3, 1e-4])
def test_scores_that_bfloat16_cannot_tell_apart(apart: float) -> None:
    """All rows of the head are one direction and a little more; the copy alone would choose wrongly."""
    direction, norm, states = torch.randn(97), torch.ones(97), torch.randn(32, 97)
    head = direction + apart * torch.randn(3000, 97)
    expected = likeliest(head.double(), norm, states)
    assert (likeliest(head.bfloat16().float(), norm, states) != expected).float().mean() > 0.5
    scores = rms_norm(states, norm, 1e-6).double() @ head.double().T
    chosen = Chooser(head, norm, 1e-6).choose(states)
    off = scores.max(-1).values - scores.gather(-1, chosen[:, None])[:, 0]
    assert off.max() <= 1e-6 * scores.abs().max()  # float32 cannot tell these apart


def test_of_equal_scores_the_first() -> None:
    head, norm, states = torch.randn(1025, 97), torch.ones(97), torch.randn(3, 97)
    copies = [3, 511, 512, 513, 1024]
    for row, best in enumerate(likeliest(head, norm, states).tolist()):
        repeated = head.clone()
        repeated[copies] = head[best]
        chooser = Chooser(repeated, norm, 1e-6)
        for count in (1, 2, 3):
            with threads(count):
                assert chooser.choose(states)[row] == min(best, *copies)
    assert Chooser(head[:1].expand(1025, 97).contiguous(), norm, 1e-6).choose(states).eq(0).all()
    assert Chooser(head, norm, 1e-6).choose(torch.zeros(5, 97)).eq(0).all()


def test_states_that_are_no_numbers_choose_a_token_and_spoil_no_other() -> None:
    head, norm, states = torch.randn(97, 64), torch.ones(64), torch.randn(9, 64)
    expected = likeliest(head, norm, states)
    states[[2, 5]], states[7, 3] = torch.nan, torch.inf
    chooser = Chooser(head, norm, 1e-6)
    for count in (1, 2, 3):
        with threads(count):
            chosen = chooser.choose(states)
            assert chooser.choose(torch.full((3, 64), torch.nan)).tolist() == [0, 0, 0]
        assert ((chosen >= 0) & (chosen < 97)).all()
        kept = [0, 1, 3, 4, 6, 8]
        assert torch.equal(chosen[kept], expected[kept])


# What is chosen for which weights ----------------------------------------------------------------------------


def test_narrow_copies_are_read_where_they_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["5-5-20, mixed"]
    exact, x = rounded(kind.layers()), torch.randn(3, kind.hidden)
    for layers, narrow in ((kind.layers(), False), (exact, True), ([*exact[:-1], kind.layers()[-1]], False)):
        with cpu_dflash.forced(True):
            made = make_stack(layers, kind.stack_size, kind.sights, kind.rotary())
        assert type(made) is CpuStack
        assert {part.qkv.dtype for part in made._read} == {torch.bfloat16 if narrow else torch.float32}
        plain = PlainStack(layers, kind.stack_size, kind.sights, kind.rotary())
        assert_near(made.run(x, 0, {4})[4], plain.run(x, 0, {4})[4])
    weight = exact[0].qkv
    size = weight.numel() * 2
    for left, narrow in ((None, True), (2 * size, True), (2 * size - 1, False), (0, False)):
        monkeypatch.setattr(stacks, "free_bytes", lambda device, left=left: left)
        assert reads_narrow(weight) == narrow


def test_what_is_made_is_what_is_forced() -> None:
    kind = KINDS["3-1-8, causal"]
    head, norm, model = torch.randn(97, 64), torch.ones(64), make_drafter(make_config())
    for compiled in (True, False):
        with cpu_dflash.forced(compiled):
            stack = make_stack(kind.layers(), kind.stack_size, kind.sights, kind.rotary())
            chooser = make_chooser(head, norm, 1e-6)
            writer = make_context_writer(model, model.stacked_kv(), StackSize(4, 2, 8, 1e-6), kind.rotary())
            assert type(stack) is (CpuStack if compiled else PlainStack)
            assert (chooser is not None, writer is not None) == (compiled, compiled)
            half = [replace(layer, qkv=layer.qkv.bfloat16()) for layer in kind.layers()]
            assert type(make_stack(half, kind.stack_size, kind.sights, kind.rotary())) is PlainStack
            assert make_chooser(head.bfloat16(), norm, 1e-6) is None


@pytest.mark.parametrize("exact", [True, False], ids=["bfloat16 weights", "float32 weights"])
@pytest.mark.parametrize("rows", [1, 5, 64, 65])
def test_logits(rows: int, exact: bool) -> None:
    head, bias, states = torch.randn(1025, 97), torch.randn(1025), torch.randn(rows, 97)
    head = head.bfloat16().float() if exact else head
    for one in (bias, None):
        for compiled in (True, False):
            with cpu_dflash.forced(compiled):
                logits = make_head(head, one)(states)
            assert_near(logits, torch.nn.functional.linear(states, head, one), 1e-5)


def test_a_copy_is_shared_while_somebody_keeps_it() -> None:
    head = torch.randn(97, 64)
    first = narrow_copy(head)
    assert narrow_copy(head) is first and first.dtype == torch.bfloat16 and narrow_copy(head[:50]) is not first
    del first
    head.mul_(2)
    assert torch.equal(narrow_copy(head), head.bfloat16())
