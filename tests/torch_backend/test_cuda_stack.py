"""The stack for CUDA computes what the plain one does, and a captured pass whatever it is given next.

Where there is no GPU, the kernels' plain twins run, and graphs are tapes (``graph_tape``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton_dflash
from graph_tape import Tape, Tapes, plain_twins
from tiny_models import make_config, make_drafter
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch_dflash.cuda_stack import MOST_ROWS, ContextWriter, CudaStack, add_product
from torch_dflash.rotary import Rotary
from torch_dflash.stack import LayerWeights, PlainStack, Sight, StackSize, Tree, packed

from dflash.rope import RopeConfig


@pytest.fixture(autouse=True)
def twins() -> Iterator[None]:
    with plain_twins():
        yield


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, INTERMEDIATE, VOCAB = 32, 48, 50
SIZE = StackSize(heads=4, groups=2, head_dim=8, eps=1e-5)
KINDS = {  # sights of the layers, norms of queries and keys, biases, rotated share of a head
    "target": ([Sight()] * 3, False, False, 1.0),
    "target with norms": ([Sight()] * 3, True, False, 1.0),
    "target with biases": ([Sight()] * 2, False, True, 0.5),
    "drafter": ([Sight(False)] * 2, True, False, 1.0),
    "drafter with windows": ([Sight(False), Sight(False, 9), Sight(True, 9), Sight(True, 70)], True, True, 1.0),
}


def weights(normed: bool, biased: bool, dtype: torch.dtype) -> LayerWeights:
    def of(*shape: int, around: float = 0.0) -> Tensor:
        return (around + 0.2 * torch.randn(*shape)).to(DEVICE, dtype)

    qkv, attended = (SIZE.heads + 2 * SIZE.groups) * SIZE.head_dim, SIZE.heads * SIZE.head_dim
    return LayerWeights(
        input_norm=of(HIDDEN, around=1),
        qkv=of(qkv, HIDDEN),
        qkv_bias=of(qkv) if biased else None,
        q_norm=of(SIZE.head_dim, around=1) if normed else None,
        k_norm=of(SIZE.head_dim, around=1) if normed else None,
        output=of(HIDDEN, attended),
        output_bias=of(HIDDEN) if biased else None,
        post_norm=of(HIDDEN, around=1),
        gate_up=of(2 * INTERMEDIATE, HIDDEN),
        gate_up_bias=of(2 * INTERMEDIATE) if biased else None,
        down=of(HIDDEN, INTERMEDIATE),
        down_bias=of(HIDDEN) if biased else None,
    )


def stacks(kind: str, dtype: torch.dtype = torch.float32) -> tuple[PlainStack, CudaStack]:
    """Both with the same weights, and nothing but NaN in their caches."""
    torch.manual_seed(len(kind))
    sights, normed, biased, partial = KINDS[kind]
    layers = [weights(normed, biased, dtype) for _ in sights]
    rotary = [Rotary(RopeConfig(1e4, partial=partial), SIZE.head_dim, DEVICE) for _ in range(2)]
    made = PlainStack(layers, SIZE, sights, rotary[0]), CudaStack(layers, SIZE, sights, rotary[1])
    for stack in made:
        stack.cache.tensor.fill_(torch.nan)
    return made


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def parents(rows: int) -> list[int]:
    """Of a random tree; the first and the last row continue the cache."""
    return [-1, *(int(torch.randint(-1, row, ())) for row in range(1, rows - 1)), -1][:rows]


def assert_same(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert found.shape == expected.shape and found.isfinite().all()
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_passes_equal_the_plain_stacks(kind: str) -> None:
    """A prompt, blocks of all sizes, rewinds and a cache that grows; states behind any layer, and the caller's rows as
    they were."""
    both = stacks(kind)
    last, start = len(both[0].layers) - 1, 0
    for rows, kept in ((70, 70), (1, 1), (5, 2), (16, 16), (33, 0), (64, 30), (65, 65), (2, 2), (400, 400), (16, 7)):
        x = random(rows, HIDDEN)
        before, states = x.clone(), []
        for stack in both:
            stack.cache.room(start + rows, start)
            states.append(stack.run(x, start, {0, last}))
        assert torch.equal(x, before) and states[1].keys() == {0, last}
        for index in states[1]:
            assert_same(states[1][index], states[0][index])
        start += kept
    assert both[1].cache.capacity > 512
    for ours, theirs in zip(*(stack.cache.tensor[..., :start, :] for stack in reversed(both)), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["target with norms", "drafter with windows"])
@torch.inference_mode()
def test_trees_equal_the_plain_stacks(kind: str) -> None:
    """And so does what a path leaves in the cache, which the next pass attends to."""
    both, start = stacks(kind), 20
    last = len(both[0].layers) - 1
    for stack, x in zip(both, [random(20, HIDDEN)] * 2, strict=True):
        stack.run(x, 0, ())
    for rows in (1, 2, 7, 20, MOST_ROWS, MOST_ROWS + 6):
        tree, x = Tree(parents(rows), rows, DEVICE), random(rows, HIDDEN)
        path = [rows - 1] if rows < 5 else [row for row in range(rows) if tree.ancestors[rows - 2, row]]
        states = [stack.run(x, start, (last,), tree)[last] for stack in both]
        assert_same(states[1], states[0])
        for stack in both:
            stack.cache.move(start, torch.tensor(path, device=DEVICE))
        start += len(path)
    x = random(4, HIDDEN)
    theirs, ours = (stack.run(x, start, (last,))[last] for stack in both)
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_prompts_in_half_precision(dtype: torch.dtype) -> None:
    """They take PyTorch's attention without a mask; the block after them the kernels."""
    both = stacks("target", dtype)
    for start, rows in ((0, 70), (70, 80), (150, 6)):
        x = random(rows, HIDDEN, dtype=dtype)
        theirs, ours = (stack.run(x, start, (2,))[2].float() for stack in both)
        assert_same(ours, theirs, 0.03)


@torch.inference_mode()
def test_attention_is_asked_for_what_it_weighs() -> None:
    """Whoever wants to see the weights gets the plain stack's masks and keys."""
    both, seen = stacks("drafter with windows"), []
    x = random(6, HIDDEN)

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        seen.append((keys.shape[1], None if mask is None else tuple(mask.shape)))
        return q

    for stack in both:
        stack.run(random(30, HIDDEN), 0, ())
        stack.run(x, 30, (), attend=attend)
    assert seen[:4] == seen[4:] == [(36, None), (36, (6, 36)), (36, (6, 36)), (36, (6, 36))]


class Target:
    """A target's pass around a stack: ids and start to logits [n, V] and features [n, 2*H]."""

    def __init__(self, stack: PlainStack) -> None:
        generator = torch.Generator().manual_seed(7)
        self.stack, self.calls = stack, 0
        self.embedding, self.head = (
            torch.randn(VOCAB, HIDDEN, generator=generator).to(DEVICE) for _ in range(2)
        )  # fmt: skip

    def forward(self, ids: Tensor, start: int, tree: Tree | None = None) -> tuple[Tensor, Tensor]:
        return self.outputs(self.stack.run(self.embed(ids), start, (0, 2), tree))

    def embed(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return F.embedding(ids, self.embedding)

    def outputs(self, states: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        return F.linear(states[2], self.head), torch.cat([states[0], states[2]], dim=-1)


def taped(stack: PlainStack) -> tuple[CudaStack, Tapes]:
    """A stack whose passes are captured as tapes, where there are no graphs."""
    assert isinstance(stack, CudaStack)
    tapes = Tapes()
    if DEVICE.type == "cpu":
        stack.passes._recorder.capture = tapes  # type: ignore[method-assign]
    return stack, tapes


PAST = torch.randn(3, 2, 2, 1000, 8, generator=torch.Generator().manual_seed(8))


def remember(stack: PlainStack, start: int, most: int | None = None) -> None:
    """A cache that holds ``start`` tokens, room for the most rows of a pass, and nothing else."""
    stack.cache.room(start + MOST_ROWS, min(start, stack.cache.capacity), most)
    stack.cache.tensor.fill_(torch.nan)[..., :start, :] = PAST[..., :start, :].to(DEVICE)


@torch.inference_mode()
def test_a_captured_pass_serves_other_ids_and_places() -> None:
    """Blocks of several sizes, chains and trees, each four times before the cache grows, four times until it does so
    once more and the rotation's tables with it, and four times after; in between each other, forth and back."""
    plain, ours = (Target(stack) for stack in stacks("target with norms"))
    stack, tapes = taped(ours.stack)
    kinds = [(1, False), (2, False), (8, False), (8, True), (16, False), (64, True)]
    for start in (90, 17, 0, 91, 530, 90, 531, 3, 930, 33, 931, 530):
        for rows, branching in kinds:
            ids = torch.randint(0, VOCAB, (rows,), device=DEVICE)
            tree = Tree(parents(rows), rows, DEVICE) if branching else None
            for target in (plain, ours):
                remember(target.stack, start, 900 if start < 900 else None)
            found = stack.through("forward", ids, start, (0, 2), ours.embed, ours.outputs, tree)
            for a, b in zip(found, plain.forward(ids, start, tree), strict=True):
                assert_same(a, b)
            end = start + rows
            assert_same(ours.stack.cache.tensor[..., start:end, :], plain.stack.cache.tensor[..., start:end, :])
        if start == 3:
            assert ours.stack.cache.capacity == 900 and len(ours.stack.rotary.cos) == 1024
    assert len(ours.stack.rotary.cos) >= ours.stack.cache.capacity > 1024
    if DEVICE.type == "cpu":
        assert len(tapes.made) == 3 * len(kinds) and tapes.replays == 3 * 3 * len(kinds)
    assert ours.calls == 3 * 2 * len(kinds), "once as they come, once for the record; then replayed"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="graphs are real here")
@torch.inference_mode()
def test_a_tape_shows_what_a_graph_would_freeze() -> None:
    """So the test above can fail: a start that is the host's number stays what it was, and who asks is refused."""
    _, ours = (Target(stack) for stack in stacks("target"))
    ids, start = torch.arange(4), torch.tensor([9], dtype=torch.int32)
    remember(ours.stack, 30)
    expected = {at: ours.forward(ids, at)[0] for at in (9, 20)}
    assert (expected[20] - expected[9]).abs().max() > 0.01
    stack, _ = taped(ours.stack)

    def pass_at() -> Tensor:
        return ours.outputs(stack.run_at(ours.embed(ids), start, (0, 2)))[0]

    for compute, then in ((lambda: ours.forward(ids, 9)[0], 9), (pass_at, 20)):
        start.fill_(9)
        with Tape() as tape:
            logits = compute()
        assert_same(logits, expected[9])
        start.fill_(20)
        tape.replay()
        assert_same(logits, expected[then])
    for ask in (
        start.item,
        start.tolist,
        start.nonzero,
        lambda: int(start),
        lambda: ids[ids > 0],
        lambda: torch.tensor(1),
    ):
        with pytest.raises(RuntimeError, match="not permitted"), Tape():
            ask()


@torch.inference_mode()
def test_a_drafters_round_captured() -> None:
    """Features into the context of all layers, more rows than are kept; then a block after an anchor, whose tokens are
    those of the plain stack."""
    config = make_config(
        layer_types=("full_attention", "sliding_attention"), sliding_window=9, causal=(False, False), block_size=8
    )
    model = make_drafter(config).to(DEVICE).requires_grad_(False)
    layers, size = [LayerWeights.of(layer) for layer in model.layers], StackSize(4, 2, 8, config.rms_norm_eps)
    sights = [Sight(causal, window) for causal, window in zip(config.causal, config.windows(), strict=True)]
    plain, ours = (kind(layers, size, sights, Rotary(config.rope, 8, DEVICE)) for kind in (PlainStack, CudaStack))
    assert sights == [Sight(False), Sight(False, 9)]
    stack, tapes = taped(ours)
    k_norms = torch.stack([layer.self_attn.k_norm.weight for layer in model.layers])
    writer = ContextWriter(model.fc.weight, model.hidden_norm.weight, *model.stacked_kv(), k_norms, stack)
    embedding, head = random(300, HIDDEN), random(300, HIDDEN)
    masks = torch.full((7,), config.mask_token_id, device=DEVICE)

    def embed(ids: Tensor) -> Tensor:
        return F.embedding(ids, embedding)

    def tokens_of(states: dict[int, Tensor]) -> tuple[Tensor]:
        return (F.linear(model.norm(states[1][1:]), head).argmax(-1),)

    length = 0
    for anchor in range(40):
        rows, kept = (20, 20) if length == 0 else (8, 1 + anchor % 8)
        features = random(rows, config.feature_size)
        for stack in (plain, ours):
            stack.cache.room(length + rows + 8, length)
        writer.write(features, ours.rotary.range(length, length + rows), ours.cache.tensor, length)
        for layer, (keys, values) in zip(
            plain.cache.tensor,
            model.context_kv(model.project(features[:kept])[None], plain.rotary.range(length, length + kept)),
            strict=True,
        ):
            layer[:, :, length : length + kept] = torch.stack((keys[0], values[0]))
        length += kept
        assert_same(ours.cache.tensor[..., :length, :], plain.cache.tensor[..., :length, :])
        ids = torch.cat((torch.tensor([anchor], device=DEVICE), masks))
        (tokens,) = stack.through("propose", ids, length, (1,), embed, tokens_of)
        assert torch.equal(tokens, tokens_of(plain.run(embed(ids), length, (1,)))[0])
    if DEVICE.type == "cpu":
        assert len(tapes.made) == 2 and tapes.replays == 38 + 39


def test_a_long_pass_is_not_captured() -> None:
    plain, ours = (Target(stack) for stack in stacks("target"))
    stack, tapes = taped(ours.stack)
    ids = torch.randint(0, VOCAB, (MOST_ROWS + 1,), device=DEVICE)
    with torch.inference_mode():
        for _ in range(3):
            found = stack.through("forward", ids, 0, (0, 2), ours.embed, ours.outputs)
        for a, b in zip(found, plain.forward(ids, 0), strict=True):
            assert_same(a, b)
    assert ours.calls == 3 and not tapes.made


@torch.inference_mode()
def test_what_a_layer_launches() -> None:
    """Nothing but what the module's first lines say; views are no launches."""
    _, ours = stacks("target with norms")
    remember(ours, 30)
    said: list[str] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                said.append(name)
                with _disable_current_modes():
                    return getattr(triton_dflash, name)(*args)

            return call

    ours.kernels, x, start = Noting(), random(5, HIDDEN), torch.tensor([30], dtype=torch.int32, device=DEVICE)
    ours.run_at(x, start, ())  # what is made for a number of rows is made
    counts = []
    for layers in (1, 2):
        said.clear()
        ours.layers, ours.sights = ours.layers[:layers] * layers, [Sight()] * layers
        with Tape() as tape:
            ours.run_at(x, start, ())
        done = Counter(func.overloadpacket.__name__ for func, *_ in tape.steps if not func.is_view)
        counts.append(done + Counter(said))
    assert counts[1] - counts[0] == {
        "rms_norm": 2, "linear": 2, "addmm_": 2, "block_kv": 1, "block_attention": 1, "swiglu": 1,
    }  # fmt: skip


def test_more_keys_than_bits_can_tell() -> None:
    sees = torch.ones(3, 64, dtype=torch.bool)
    sees[1, 63], sees[2, :63] = False, False
    assert packed(sees).tolist() == [-1, 2**63 - 1, -(2**63)]


def test_a_product_is_added_where_it_belongs() -> None:
    x, y, weight, bias = random(3, 5), random(3, 4), random(5, 4), random(5)
    expected, place = x + F.linear(y, weight, bias), x.data_ptr()
    add_product(x, y, weight, bias)
    assert x.data_ptr() == place
    torch.testing.assert_close(x, expected)
