"""The stack of decoder layers in plain PyTorch: what rows see, trees, the cache, and the formulas in float64."""

from __future__ import annotations

import cpu_dflash
import pytest
import torch
import torch.nn.functional as F
from cpu_cases import Kind, Reference, assert_near, fill, kinds, needs_compiled, sees
from tiny_models import make_config, make_drafter
from torch import Tensor
from torch_dflash.products import FEW_ROWS, product
from torch_dflash.stack import (
    FIRST_CAPACITY,
    KeyValues,
    LayerWeights,
    PlainStack,
    Sight,
    StackSize,
    Tree,
    attention,
    attention_weights,
    rms_norm,
)

from dflash.errors import BackendError

CPU = torch.device("cpu")
TREES = {
    "chain": [-1, 0, 1, 2],
    "roots": [-1, -1, -1],
    "fork": [-1, 0, 0, 1, 2, 2, 0],
    "two trees": [-1, 0, -1, 2, 1, 3, 2],
    "one row": [-1],
}
BOTH_PATHS = [pytest.param(True, id="compiled", marks=needs_compiled), pytest.param(False, id="turned")]


# What rows see -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, end", [(1, 1), (1, 9), (4, 4), (5, 17)])
@pytest.mark.parametrize(
    "sight", [Sight(), Sight(False), Sight(True, 3), Sight(False, 3), Sight(False, 1), Sight(True, 99)]
)
def test_a_mask_is_what_each_row_sees(sight: Sight, rows: int, end: int) -> None:
    mask = sight.mask(rows, end, CPU)
    for row in range(rows):
        at = end - rows + row
        for key in range(end):
            wanted = (key <= at or not sight.causal) and (sight.window is None or abs(at - key) < sight.window)
            assert (True if mask is None else bool(mask[row, key])) == wanted, f"row {row}, key {key}"


def test_no_mask_where_everything_is_seen() -> None:
    assert Sight().mask(1, 9, CPU) is None and Sight(False).mask(4, 9, CPU) is None


@pytest.mark.parametrize("start", [0, 1, 6])
@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("name", TREES)
def test_a_trees_rows_see_their_ancestors(name: str, window: int | None, start: int) -> None:
    parents = TREES[name]
    tree, rows = Tree(parents, len(parents), CPU), len(parents)
    depth = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    assert tree.depth.tolist() == depth
    mask, everything = tree.mask(window, start), Sight(True, window)
    assert mask.shape == (rows, start + rows) and mask.dtype == torch.bool
    for row in range(rows):
        for key in range(start):
            assert bool(mask[row, key]) == (window is None or start + depth[row] - key < window)
        for key in range(rows):
            assert bool(tree.ancestors[row, key]) == sees(Sight(), row, key, tree.depth, parents)
            assert bool(mask[row, start + key]) == sees(everything, row, key, tree.depth, parents)


@pytest.mark.parametrize(
    "parents, rows, sentence",
    [
        ([-1, 0], 3, "the tree has 3 rows and 2 parents; each row has one"),
        ([-1, 0, 1, 2], 3, "the tree has 3 rows and 4 parents; each row has one"),
        ([0, 0], 2, "row 0 of the tree has parent 0; it must be -1 or an earlier row"),
        ([-1, 1], 2, "row 1 of the tree has parent 1; it must be -1 or an earlier row"),
        ([-1, 2, 0], 3, "row 1 of the tree has parent 2; it must be -1 or an earlier row"),
        ([-1, 0, -2], 3, "row 2 of the tree has parent -2; it must be -1 or an earlier row"),
    ],
)
def test_parents_that_make_no_tree_are_refused(parents: list[int], rows: int, sentence: str) -> None:
    with pytest.raises(BackendError) as caught:
        Tree(parents, rows, CPU)
    assert str(caught.value) == sentence


def test_a_path_leads_from_a_root_down() -> None:
    tree = Tree(TREES["two trees"], 7, CPU)
    for path in ((), (0,), (2,), (0, 1, 4), (2, 3, 5), (2, 6)):
        assert tree.check_path(path) == len(path)
    for path, row, before in (
        ((1,), 1, -1),
        ((0, 3), 3, 0),
        ((2, 3, 6), 6, 3),
        ((0, 7), 7, 0),
        ((-1,), -1, -1),
        ((0, 0), 0, 0),
    ):
        with pytest.raises(BackendError, match=f"is no path of the tree: row {row} does not follow {before}$"):
            tree.check_path(path)


# The cache ---------------------------------------------------------------------------------------------------


def test_the_cache_doubles_up_to_the_most_and_keeps_what_it_holds() -> None:
    cache = KeyValues(3, StackSize(4, 2, 8, 1e-5), CPU, torch.float32)
    assert cache.tensor.shape == (3, 2, 2, FIRST_CAPACITY, 8)
    held = torch.randn(3, 2, 2, 100, 8)
    cache.tensor[..., :100, :] = held
    before = cache.tensor
    cache.room(FIRST_CAPACITY, 100)
    assert cache.tensor is before
    for end, most, capacity in (
        (513, None, 1026),
        (1027, 1500, 1500),
        (1501, 9000, 3002),
        (8000, 9000, 9000),
        (9001, 9001, 9001),
    ):
        cache.room(end, 100, most)
        assert cache.capacity == capacity and torch.equal(cache.tensor[..., :100, :], held)


@pytest.mark.parametrize("path", [(0, 1), (1, 2, 4), (3,), (0, 2, 3, 6)])
def test_a_path_moves_to_the_front(path: tuple[int, ...]) -> None:
    cache = KeyValues(2, StackSize(4, 2, 8, 1e-5), CPU, torch.float32)
    cache.tensor.normal_()
    before = cache.tensor.clone()
    cache.move(20, torch.tensor(path))
    for to, row in enumerate(path):
        assert torch.equal(cache.tensor[..., 20 + to, :], before[..., 20 + row, :])
    for untouched in (slice(0, 20), slice(20 + len(path), None)):
        assert torch.equal(cache.tensor[..., untouched, :], before[..., untouched, :])


# What is computed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("sight", [Sight(False), Sight(), Sight(False, 4)])
def test_attention_and_its_weights_are_the_formulas(sight: Sight, groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    q, keys, values = (torch.randn(n, m, 16, generator=generator) for n, m in ((6, 5), (groups, 12), (groups, 12)))
    mask = sight.mask(5, 12, CPU)
    seen = torch.ones(5, 12, dtype=torch.bool) if mask is None else mask
    of_heads = []
    for head in range(6):
        scores = q[head].double() @ keys[head // (6 // groups)].double().T / 4
        of_heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1))
    mixed = torch.stack([w @ values[head // (6 // groups)].double() for head, w in enumerate(of_heads)])
    assert_near(attention(q, keys, values, mask), mixed, 1e-6)
    weights = attention_weights(q, keys, mask)
    assert weights.dtype == torch.float32
    assert_near(weights, torch.stack(of_heads).mean(0), 1e-6)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str
)
def test_rms_norm_is_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = (200 * torch.randn(5, 97)).to(dtype), torch.randn(97).to(dtype)  # squares overflow in float16
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    assert_near(found.double(), exact, tolerance)


KINDS = kinds()


@pytest.mark.parametrize("name", list(KINDS)[::3])
@torch.inference_mode()
def test_a_plain_pass_is_the_formulas(name: str) -> None:
    """A chain, a tree, and what both leave in the cache."""
    kind = KINDS[name]
    stack = PlainStack(kind.layers(), kind.stack_size, kind.sights, kind.rotary())
    for start, rows in ((0, 3), (11, 1), (301, 5)):
        fill(stack, start, start + rows)
        for parents in (None, [-1, 0, -1, 1, 1][:rows]):
            x = torch.randn(rows, kind.hidden)
            states, written = Reference(kind, stack.cache.tensor, start).run(x, parents)
            found = stack.run(x, start, range(len(states)), parents and Tree(parents, rows, CPU))
            for index, state in enumerate(states):
                assert_near(found[index], state)
            assert_near(stack.cache.tensor[..., start : start + rows, :], written)
            assert stack.cache.tensor[..., start + rows :, :].isnan().all()


@torch.inference_mode()
def test_attention_can_be_replaced() -> None:
    kind = Kind((4, 2, 8), [Sight(True, 5)] * 2)
    stack = PlainStack(kind.layers(), kind.stack_size, kind.sights, kind.rotary())
    fill(stack, 7, 10)
    seen: list[tuple[torch.Size, ...]] = []

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None and torch.equal(mask, Sight(True, 5).mask(3, 10, CPU))
        seen.append((q.shape, keys.shape, values.shape))
        return torch.zeros_like(q)

    x = torch.randn(3, kind.hidden)
    replaced = stack.run(x, 7, {1}, attend=attend)[1]
    assert seen == [((4, 3, 8), (2, 10, 8), (2, 10, 8))] * 2
    assert (replaced - stack.run(x, 7, {1})[1]).abs().max() > 0.1


def test_fused_weights_are_the_modules_own() -> None:
    """Nothing is in memory twice, and what a module learns afterwards is seen."""
    layer = make_drafter(make_config(attention_bias=True)).layers[0]
    x = torch.randn(3, 32)
    attention_of, mlp = layer.self_attn, layer.mlp
    parts = [attention_of.q_proj, attention_of.k_proj, attention_of.v_proj]
    expected = [part(x) for part in (*parts, mlp.gate_proj, mlp.up_proj)]
    fused = LayerWeights.of(layer)
    together = torch.cat((F.linear(x, fused.qkv, fused.qkv_bias), F.linear(x, fused.gate_up, fused.gate_up_bias)), -1)
    torch.testing.assert_close(together, torch.cat(expected, -1))
    torch.testing.assert_close(torch.cat([part(x) for part in (*parts, mlp.gate_proj, mlp.up_proj)], -1), together)
    with torch.no_grad():
        attention_of.v_proj.weight.zero_()
        mlp.gate_proj.weight.zero_()
    assert not fused.qkv[-attention_of.v_proj.out_features :].any() and not fused.gate_up[:40].any()
    assert fused.qkv[0].any() and fused.gate_up[40:].any()
    assert torch.equal(fused.q_norm, attention_of.q_norm.weight)


# Products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", BOTH_PATHS)
@pytest.mark.parametrize("lead", [(0,), (1,), (2,), (9,), (4, 16), (64,), (65,), (3, 0), (2, 1, 7), ()], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@torch.inference_mode()
def test_a_product_is_the_linear_one(lead: tuple[int, ...], biased: bool, compiled: bool) -> None:
    x, weight = torch.randn(*lead, 97), torch.randn(131, 194)
    bias = torch.randn(131) if biased else None
    for one in (weight[:, :97].contiguous(), weight[:, :97], weight[:, ::2], torch.randn(97, 131).T):
        with cpu_dflash.forced(compiled):
            found = product(x, one, bias)
        assert found.shape == (*lead, 131) and found.is_contiguous()
        torch.testing.assert_close(found, F.linear(x, one, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("compiled", BOTH_PATHS)
@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS, FEW_ROWS + 1])
def test_a_product_is_linear_itself_where_it_learns_or_is_cast(
    rows: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = torch.randn(rows, 24), torch.randn(9, 24), torch.randn(9)
    expected, calls = F.linear(x, weight, bias), []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *given: calls.append(given) or linear(*given))
    with cpu_dflash.forced(compiled):
        assert torch.equal(product(x, weight, bias), expected) and len(calls) == 1
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert product(x, weight, bias).dtype == torch.bfloat16 and len(calls) == 2
        with torch.no_grad():
            assert product(x, weight, bias).dtype == torch.float32 and len(calls) == 2 + (rows > FEW_ROWS)


@pytest.mark.parametrize("compiled", BOTH_PATHS)
@pytest.mark.parametrize(
    "x",
    [torch.ones(3, 12), torch.ones(3, 25), torch.ones(3, 24).double(), torch.ones(3, 24).bfloat16()],
    ids=["too narrow", "too wide", "float64", "bfloat16"],
)
def test_inputs_that_do_not_fit_the_weight_are_refused(x: Tensor, compiled: bool) -> None:
    """As ``F.linear`` refuses them: compiled code would read what lies behind them in memory."""
    weight = torch.ones(7, 24)
    with pytest.raises(RuntimeError):
        F.linear(x, weight)
    with cpu_dflash.forced(compiled), torch.inference_mode(), pytest.raises((RuntimeError, AssertionError)):
        product(x, weight)
