"""Target, drafter and engine on the stack for CUDA: what is generated is what the target alone would say.

Where there is no GPU, the kernels' plain twins run, and graphs are tapes (``graph_tape``)."""

from __future__ import annotations

from collections.abc import Iterator

import cpu_dflash
import pytest
import torch
from graph_tape import Tapes, plain_twins
from tiny_models import TinyPair, make_target
from torch_dflash.cuda_stack import CudaStack
from torch_dflash.graphs import Recorder
from torch_dflash.native import NativeTarget

from dflash.types import SamplingParams


@pytest.fixture(autouse=True)
def twins() -> Iterator[None]:
    with plain_twins():
        yield


PROMPT = [5, 9, 40, 7, 7, 12]


class NativePair(TinyPair):
    def serve(self, model):
        return NativeTarget(model, (0, 2))


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tapes]:
    """Everything takes the way that it would on CUDA; what is compiled for a CPU would not show on a tape."""
    made = Tapes()
    monkeypatch.setattr(Recorder, "capture", lambda self, run: made(run))
    for module in ("stacks", "verify"):
        monkeypatch.setattr(f"torch_dflash.{module}.use_cuda", lambda device, dtype: True)
    with cpu_dflash.forced(False):
        yield made


@pytest.mark.filterwarnings("ignore:none of:RuntimeWarning")  # the tiny drafter knows nothing
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("count", [1, 4])
def test_the_output_is_the_targets(family: str, count: int, tapes: Tapes) -> None:
    """With a drafter that is always wrong and with the tiny one; the second prompt finds everything captured."""
    pair = NativePair(family)
    drafter = pair.drafter(causal=(False, True), layer_types=("full_attention", "sliding_attention"), sliding_window=8)
    assert isinstance(pair.target.stack, CudaStack) and isinstance(drafter.stack, CudaStack)
    for prompt in (PROMPT, PROMPT[::-1]):
        expected = pair.oracle(prompt, 40)
        for one in (drafter, pair.scripted(prompt, 48, wrong_at=(2,))):
            result = pair.engine(one).generate(prompt, max_new_tokens=40, block_size=count + 1, ignore_eos=True)
            assert result.token_ids == expected
    assert tapes.replays > 60


def test_sampling_and_detail(tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed gives the same tokens and the same probabilities as without any of it."""
    sampling, found = SamplingParams(temperature=0.8, top_p=0.9, seed=3), []
    for way in (True, False):
        for module in ("stacks", "verify"):
            monkeypatch.setattr(f"torch_dflash.{module}.use_cuda", lambda device, dtype, way=way: way)
        pair = NativePair("qwen3")
        engine = pair.engine(pair.drafter())
        found.append([engine.generate(PROMPT, max_new_tokens=30, sampling=sampling, ignore_eos=True, detail=True)])
        found[-1].append(engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True, detail=True))
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        for a, b in zip(ours.steps, theirs.steps, strict=True):
            assert (a.drafted, a.accepted) == (b.drafted, b.accepted)
            for name in ("draft_probs", "target_probs"):
                assert (getattr(a, name) or ()) == pytest.approx(getattr(b, name) or (), rel=1e-4, abs=1e-6)
    assert tapes.replays > 10


def test_a_tree_and_its_path(tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_target("qwen3")
    ours = NativeTarget(model, (0, 2))
    monkeypatch.setattr("torch_dflash.stacks.use_cuda", lambda device, dtype: False)
    theirs = NativeTarget(model, (0, 2))
    assert isinstance(ours.stack, CudaStack) and not isinstance(theirs.stack, CudaStack)
    generator = torch.Generator().manual_seed(1)
    parents, path = [-1, 0, 0, 2, 3, 1], [0, 2, 3]
    for target in (ours, theirs):
        target.forward(PROMPT)
        target.keep(range(6))
    for _ in range(5):
        ids = torch.randint(0, 300, (6,), generator=generator)
        for tokens, shape, kept in ((ids, parents, path), (ids[:2], None, [0])):
            outputs = [target.forward(tokens, parents=shape) for target in (ours, theirs)]
            for part in ("logits", "features"):
                a, b = (getattr(output, part) for output in outputs)
                assert (a - b).abs().max() < 1e-4 * b.abs().max()
            for target in (ours, theirs):
                target.keep(kept)
    assert tapes.replays == 2 * 4
