"""Verification on MLX: the law of plain sampling, the torch backend's tokens for the same seeds, one wait a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import mlx.core as mx
import numpy as np
from mlx_dflash.backend import MlxBackend
from mlx_dflash.sampling import draw, shape_probabilities
from mlx_dflash.verify import MatchVerifier
from sampling_law import CAUGHT, CHANCE, PLANS, RULE, SETTINGS, VOCAB, law, likeliest, p_value, sample, stubborn
from tiny_mlx import MlxPair
from tiny_models import RuleTarget, ScriptedDrafter, TinyPair

from dflash.errors import BackendError
from dflash.types import Proposal, SamplingParams, TargetOutput

BACKEND = MlxBackend()
TARGET = RuleTarget(RULE, VOCAB, BACKEND, mx.array)  # type: ignore[arg-type]
ON_TORCH = RuleTarget(RULE, VOCAB)


@pytest.fixture(scope="module")
def pair() -> MlxPair:
    return MlxPair()


def proposal_of(*drafted: int, probs: mx.array | None = None) -> Proposal:
    tokens = mx.array([1, *drafted], dtype=mx.int32)
    return Proposal(tokens[1:], tokens, len(drafted), probs)


# The law --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["likeliest", "unlikeliest"])
def test_match_keeps_the_law_of_several_tokens(plan: str) -> None:
    name = "temperature 1.2, top-k 4, top-p 0.8"
    counts = sample(TARGET, SETTINGS[name], PLANS[plan], samples=500)
    assert p_value(counts, law(SamplingParams(**SETTINGS[name]))) > CHANCE


class OneUniformARound(MatchVerifier):
    """Broken: the rows of a block share a random number, so tokens are right one by one and wrong together."""

    def _choices(self, logits: mx.array) -> mx.array:
        uniform = self._stream.range(self._position, self._position + 1)  # type: ignore[union-attr]
        uniforms = mx.array(np.repeat(uniform, len(logits)), dtype=mx.float32)
        return draw(shape_probabilities(logits, self.sampling), uniforms).astype(mx.int32)


def test_a_broken_rule_is_caught() -> None:
    name = "temperature 0.6, top-p 0.9"
    counts = sample(TARGET, SETTINGS[name], likeliest, OneUniformARound, samples=500)
    assert p_value(counts, law(SamplingParams(**SETTINGS[name]))) < CAUGHT


@pytest.mark.parametrize("name", SETTINGS)
def test_a_seed_gives_the_torch_backends_tokens_with_a_drafter_and_without(name: str) -> None:
    """So whatever its law is, it is theirs, which is held to the definition with more samples."""
    theirs = sample(ON_TORCH, SETTINGS[name], stubborn, speculate=False, samples=120)
    assert len(theirs) > 10
    assert sample(TARGET, SETTINGS[name], likeliest, samples=120) == theirs
    assert sample(TARGET, SETTINGS[name], stubborn, speculate=False, samples=120) == theirs


def test_a_seed_gives_the_torch_backends_tokens_of_a_model_too(tiny: TinyPair, pair: MlxPair) -> None:
    prompt = [5, 17, 200, 33]
    for seed, top_k, top_p in ((1, 0, 1.0), (2, 20, 1.0), (3, 0, 0.9), (4, 50, 0.8)):
        sampling = SamplingParams(1.1, top_k, top_p, seed)
        theirs = tiny.engine().generate(prompt, max_new_tokens=24, sampling=sampling, speculate=False).token_ids
        for drafter in (pair.drafter(), ScriptedDrafter(pair, prompt + theirs, (3,))):
            assert pair.engine(drafter).generate(prompt, max_new_tokens=24, sampling=sampling).token_ids == theirs


# Verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize(
    ("drafted", "choices", "accepted", "next_token", "kind"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 4, "bonus"),
        ([1, 2, 3], [1, 2, 0, 4], 2, 0, "correction"),
        ([1, 2, 3], [0, 2, 3, 4], 0, 0, "correction"),
        ([1, 2, 3], [1, 0, 3, 4], 1, 0, "correction"),
        ([2], [2, 1], 1, 1, "bonus"),
        ([], [3], 0, 3, "bonus"),
    ],
)
def test_drafts_stand_up_to_the_first_that_is_not_the_targets(
    drafted: list[int], choices: list[int], accepted: int, next_token: int, kind: str, detail: bool
) -> None:
    logits = mx.array(np.eye(VOCAB, dtype=np.float32)[choices] * 9.0)
    verdict = MatchVerifier(SamplingParams(), detail=detail).verify(proposal_of(*drafted), TargetOutput(logits, None))
    assert (verdict.accepted, verdict.next_token, verdict.kind) == (accepted, next_token, kind)
    assert verdict.drafted == tuple(drafted)
    assert verdict.draft_probs is None
    assert (verdict.target_probs is not None) == (detail and bool(drafted))


def test_detail_tells_the_probabilities_behind_the_first_rejection_too() -> None:
    logits = mx.array(np.eye(VOCAB, dtype=np.float32)[[1, 2, 3, 4]] * 9.0)
    proposal = proposal_of(0, 2, 3, probs=mx.array([0.5, 0.25, 0.125]))
    verdict = MatchVerifier(SamplingParams(), detail=True).verify(proposal, TargetOutput(logits, None))
    certain, unlikely = (one / (math.exp(9) + VOCAB - 1) for one in (math.exp(9), 1))
    assert verdict.accepted == 0
    assert verdict.target_probs == pytest.approx([unlikely, certain, certain], rel=1e-5)
    assert verdict.draft_probs == (0.5, 0.25, 0.125)


def test_uniform_numbers_belong_to_output_positions() -> None:
    """The same logits, verified in blocks or one by one, with right drafts and wrong ones, give the same tokens."""
    logits, sampling = mx.random.normal((12, VOCAB), key=mx.random.key(2)), SamplingParams(1.0, seed=5)

    def tokens(plan: list[int], known: list[int], right: int) -> list[int]:
        """The first tokens, verified in blocks of these sizes whose first ``right`` slots are ``known`` to be right."""
        verifier = MatchVerifier(sampling)
        out: list[int] = []
        for count in plan:
            rows = logits[len(out) : len(out) + count + 1]
            slots = range(len(out), len(out) + count)
            drafted = [known[at] if at - len(out) < right else (known[at] + 1) % VOCAB for at in slots]
            verdict = verifier.verify(proposal_of(*drafted), TargetOutput(rows, None))
            assert verdict.accepted == min(right, count)
            out += [*verdict.drafted[: verdict.accepted], verdict.next_token]
        return out

    one_by_one = tokens([0] * 12, [], 0)
    assert len(set(one_by_one)) > 1
    for plan, right in (([3] * 8, 0), ([3, 3, 3], 3), ([4, 2, 3], 1), ([1, 0, 2, 3], 2)):
        found = tokens(plan, one_by_one, right)
        assert found == one_by_one[: len(found)]


def test_a_block_beyond_the_numbers_drawn_ahead_is_verified() -> None:
    verifier = MatchVerifier(SamplingParams(1.0, seed=3))
    for _ in range(3):
        verdict = verifier.verify(proposal_of(*[0] * 600), TargetOutput(mx.zeros((601, 3)), None))
        assert len(verdict.drafted) == 600


# Logits that are no numbers -------------------------------------------------------------------------------------

SAMPLINGS = [SamplingParams(), SamplingParams(0.8, 3, 0.9, seed=1), SamplingParams(1.0, seed=1)]
BAD: dict[str, Callable[[np.ndarray], None]] = {
    "all": lambda row: row.fill(np.nan),
    "the first": lambda row: row.__setitem__(0, np.nan),
    "the last": lambda row: row.__setitem__(-1, np.nan),
    "infinite": lambda row: row.__setitem__(2, np.inf),
}


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "shaped", "sampled"])
def test_logits_that_are_no_numbers_are_an_error_and_no_token(sampling: SamplingParams, bad: str, count: int) -> None:
    logits = np.zeros((count + 1, VOCAB), dtype=np.float32)
    BAD[bad](logits[0])
    output = TargetOutput(mx.array(logits).astype(mx.float16), None)
    with pytest.raises(BackendError, match="logits are not numbers in float16; bfloat16 and float32") as caught:
        MatchVerifier(sampling).verify(proposal_of(*[1] * count), output)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "shaped", "sampled"])
def test_tokens_that_are_ruled_out_are_no_error(sampling: SamplingParams) -> None:
    logits = mx.array([[-mx.inf, 2.0, 1.0, -mx.inf, -mx.inf]])
    assert MatchVerifier(sampling).verify(proposal_of(), TargetOutput(logits, None)).next_token in (1, 2)


def test_an_engine_whose_logits_overflow_says_so_and_stays_usable(
    pair: MlxPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, prompt = pair.target.model.lm_head.inner, [5, 17, 200, 33]
    broken = head.weight * mx.inf
    mx.eval(broken)
    monkeypatch.setitem(head, "weight", broken)
    with pytest.raises(BackendError, match="logits are not numbers in float32"):
        pair.engine().generate(prompt, max_new_tokens=8)
    monkeypatch.undo()
    assert pair.engine().generate(prompt, max_new_tokens=8).token_ids == pair.oracle(prompt, 8)


# One wait a round -----------------------------------------------------------------------------------------------

READS = ("tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__", "__iter__")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Whatever waits for the device, in order: ``mx.eval``, ``mx.synchronize`` and every way to read a value."""
    seen: list[str] = []

    def noted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("eval", "synchronize"):
        noted(mx, name)
    for name in READS:
        if hasattr(mx.array, name):
            noted(mx.array, name)
    yield seen


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "shaped"])
def test_a_round_waits_for_the_device_once(sampling: SamplingParams, pair: MlxPair, waits: list[str]) -> None:
    """Reads follow the one evaluation, of arrays that it has evaluated."""
    rounds, stream = [], pair.engine().stream([5, 17, 200, 33], max_new_tokens=20, sampling=sampling)
    waits.clear()
    for _ in stream:
        rounds.append(tuple(waits))
        waits.clear()
    prefill, *rest = rounds
    assert len(rest) > 3 and {step.kind for step in stream.steps[1:]} == {"round"}
    assert set(rest) == {("eval", "tolist")}
    assert prefill == ("eval", "eval", "tolist"), "one for the prompt's only chunk, and the first token"


def test_a_plain_step_waits_for_the_device_once(pair: MlxPair, waits: list[str]) -> None:
    for index, _ in enumerate(pair.engine().stream([5, 17, 200, 33], max_new_tokens=5, speculate=False)):
        assert index == 0 or waits == ["eval", "tolist"]
        waits.clear()


def test_reading_a_value_on_the_host_would_be_noticed(waits: list[str]) -> None:
    """Otherwise the tests above could not fail."""
    values = mx.zeros(3)
    assert (bool(values[0]), int(values[1]), float(values[2]), values.tolist(), values[0].item()) is not None
    np.array(values)
    assert {"__bool__", "__int__", "__float__", "tolist", "item"} <= set(waits)
