"""The engine held to its contract: the target's own tokens, cut exactly where asked, whatever the drafter does."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from byte_tokenizer import ByteTokenizer
from tiny_models import (
    MASK,
    VOCAB,
    PlannedDrafter,
    RuleTarget,
    ScriptedDrafter,
    TinyPair,
    chain_rule,
    make_config,
    make_drafter,
    make_target,
    scripted_target,
)
from torch_dflash.backend import TorchBackend
from torch_dflash.drafter import TorchDrafter
from torch_dflash.sampling import shape_probabilities
from torch_dflash.target import TorchTarget

from dflash.engine import Engine
from dflash.errors import PromptError, UsageError
from dflash.fallback import PLAIN_STEPS, ROUNDS, WARM_ROUNDS
from dflash.types import GenerationResult, SamplingParams, StepEvent

pytestmark = pytest.mark.filterwarnings("ignore:none of:RuntimeWarning")  # most drafters here are meant to fail

PROMPT = [5, 17, 200, 33]
BLOCK = make_config().block_size  # 5: the anchor and 4 slots
LENGTH = 40
EVERY_SLOT = tuple(range(1, BLOCK))


@pytest.fixture(scope="module")
def oracle(tiny: TinyPair) -> list[int]:
    return tiny.oracle(PROMPT, LENGTH)


@pytest.fixture(scope="module")
def scripted(oracle: list[int]) -> Callable[..., ScriptedDrafter]:
    """S(n) for ``PROMPT``."""
    return lambda *wrong_at: ScriptedDrafter(PROMPT + oracle, wrong_at)


def kinds(result: GenerationResult) -> list[str]:
    return [step.kind for step in result.steps]


def timeless(steps: list[StepEvent]) -> list[StepEvent]:
    return [replace(step, draft_seconds=0.0, verify_seconds=0.0, overhead_seconds=0.0) for step in steps]


def scripted_pair(text: str, *, prompt: str = "?", block: int = BLOCK, right: int = BLOCK) -> Engine:
    """An engine whose target writes ``text`` byte by byte; the drafter knows the first ``right`` slots of a round."""
    script = [*prompt.encode(), *text.encode()]
    target = scripted_target(script)

    def plan(context: list[int], count: int) -> list[int]:
        ahead = [*script[len(context) :], *([script[-1]] * count)][:count]
        return [token if slot < right else (token + 1) % VOCAB for slot, token in enumerate(ahead)]

    drafter = PlannedDrafter(plan, make_config(block_size=block))
    return Engine(TorchBackend(), target, drafter, ByteTokenizer(), check=True)


# Token for token ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_float32_equals_the_oracle_for_every_kind_of_drafter(family: str) -> None:
    pair = TinyPair(family, seed=3)
    expected = pair.oracle(PROMPT, 24)
    drafters = [pair.drafter(), *(ScriptedDrafter(PROMPT + expected, wrong) for wrong in ((), EVERY_SLOT, (2,), (4,)))]
    for drafter in drafters:
        result = pair.engine(drafter).generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        assert result.token_ids == expected
    plain = pair.engine().generate(PROMPT, max_new_tokens=24, ignore_eos=True, speculate=False)
    assert plain.token_ids == expected
    assert set(kinds(plain)) == {"prefill", "plain"}


@pytest.mark.parametrize("wrong", range(1, BLOCK + 1))
def test_a_round_accepts_up_to_the_first_wrong_slot(
    tiny: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter], wrong: int
) -> None:
    result = tiny.engine(scripted(wrong)).generate(PROMPT, max_new_tokens=LENGTH)
    assert result.token_ids == oracle
    full = [step for step in result.steps[1:] if len(step.drafted) == BLOCK - 1]
    assert full and all(step.accepted == wrong - 1 for step in full)
    kind = "bonus" if wrong == BLOCK else "correction"
    assert all(step.next_kind == kind and len(step.committed) == wrong for step in full[:-1])


def test_steps_tell_the_positions_anchors_and_tokens_of_the_output(
    tiny: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter]
) -> None:
    result = tiny.engine(scripted(3)).generate(PROMPT, max_new_tokens=20)
    prefill, *rounds = result.steps
    assert (prefill.kind, prefill.index, prefill.position) == ("prefill", 0, len(PROMPT) - 1)
    assert (prefill.anchor, prefill.drafted, prefill.committed) == (PROMPT[-1], (), tuple(oracle[:1]))
    everything = PROMPT + oracle
    for index, step in enumerate(rounds, 1):
        assert step.index == index
        assert everything[step.position] == step.anchor
        after = step.position + 1
        assert list(step.committed) == everything[after : after + len(step.committed)]
        assert list(step.drafted[: step.accepted]) == everything[after : after + step.accepted]


def test_generate_is_the_drained_stream(tiny: TinyPair) -> None:
    engine = tiny.engine()
    stream = engine.stream(PROMPT, max_new_tokens=12)
    steps = list(stream)
    whole = engine.generate(PROMPT, max_new_tokens=12)
    assert timeless(steps) == timeless(whole.steps)
    assert stream.result().token_ids == whole.token_ids
    assert stream.result() is stream.result()


def test_sixteen_bit_greedy_is_near_tie_exact() -> None:
    """Blocks and single rows round differently, so every token is teacher-forced through the target one at a time and
    must be its argmax or within ``gap`` of it. At logits of about 4 a step of bfloat16 is 1/64; the gap is eight."""
    gap = 8 / 64
    config = make_config()
    model = make_target().to(torch.bfloat16)
    target = TorchTarget(model, config.target_layer_ids)
    heads = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    own = TorchDrafter(make_drafter(config).to(torch.bfloat16), *heads)

    def gaps(prompt: list[int], output: list[int]) -> list[float]:
        target.reset()
        found, fed = [], prompt
        for token in output:
            logits = target.forward(fed).logits[-1].float()
            target.keep(range(len(fed)))
            found.append(float(logits.max() - logits[token]))
            fed = [token]
        return found

    for first in range(3):
        prompt = [first, 17, 200]
        plain = Engine(TorchBackend(), target, own).generate(prompt, max_new_tokens=20, speculate=False).token_ids
        for drafter in (own, ScriptedDrafter(prompt + plain), ScriptedDrafter(prompt + plain, (3,))):
            output = Engine(TorchBackend(), target, drafter, check=True).generate(prompt, max_new_tokens=20).token_ids
            assert max(gaps(prompt, output)) <= gap
        output[9] = (output[9] + 1) % VOCAB
        assert max(gaps(prompt, output)) > gap, "the check must catch a wrong token"


# Stops and budgets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(), (2,), EVERY_SLOT], ids=["right", "second wrong", "wrong"])
def test_the_first_stop_id_ends_the_output_at_every_offset_of_a_block(
    tiny: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter], wrong: tuple[int, ...]
) -> None:
    engine = tiny.engine(scripted(*wrong))
    for stop in oracle[: 2 * BLOCK + 2]:
        result = engine.generate(PROMPT, max_new_tokens=LENGTH, stop_token_ids=[stop])
        assert result.token_ids == oracle[: oracle.index(stop) + 1]
        assert result.finish_reason == "stop"
        assert result.metrics.num_tokens == len(result.token_ids)
        last = result.steps[-1]
        assert last.committed[-1] == stop
        assert last.accepted <= len(last.committed)
        assert (last.next_kind is None) == (last.kind == "prefill" or last.accepted == len(last.committed))


def test_a_stop_id_as_the_very_first_token_ends_at_the_prefill(tiny: TinyPair, oracle: list[int]) -> None:
    result = tiny.engine().generate(PROMPT, stop_token_ids=[oracle[0]])
    assert result.token_ids == oracle[:1]
    assert (result.finish_reason, kinds(result)) == ("stop", ["prefill"])
    assert result.metrics.mean_acceptance_length is None


@pytest.mark.parametrize("wrong", [(), (1,), (3,)], ids=["right", "first wrong", "third wrong"])
def test_every_budget_is_met_exactly(
    tiny: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter], wrong: tuple[int, ...]
) -> None:
    engine = tiny.engine(scripted(*wrong))
    for budget in range(2 * BLOCK + 2):
        result = engine.generate(PROMPT, max_new_tokens=budget)
        assert result.token_ids == oracle[:budget]
        assert result.finish_reason == "length"
        assert result.metrics.num_tokens == budget == sum(len(step.committed) for step in result.steps)
        committed = result.metrics.per_step_committed
        assert sum(committed) == max(budget - 1, 0)


def test_stop_ids_come_from_both_configs_and_may_be_several(oracle: list[int]) -> None:
    model = make_target(eos_token_id=[oracle[7], 298])
    model.generation_config.eos_token_id = [oracle[9], 297]
    target = TorchTarget(model, (0, 2))
    assert target.info.stop_token_ids == tuple(sorted({oracle[7], oracle[9], 297, 298}))
    engine = Engine(TorchBackend(), target, ScriptedDrafter(PROMPT + oracle), check=True)
    first = min(oracle.index(oracle[7]), oracle.index(oracle[9]))
    assert engine.generate(PROMPT, max_new_tokens=LENGTH).token_ids == oracle[: first + 1]
    assert engine.generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True).token_ids == oracle
    stopped = engine.generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, stop_token_ids=[oracle[2]])
    assert stopped.token_ids == oracle[: oracle.index(oracle[2]) + 1]


def test_a_target_without_stop_ids_runs_to_its_budget() -> None:
    pair = TinyPair(eos_token_id=None)
    assert pair.target.info.stop_token_ids == ()
    assert pair.engine().generate(PROMPT, max_new_tokens=9).finish_reason == "length"


def test_the_mask_id_survives_in_prompt_and_output(tiny: TinyPair, oracle: list[int]) -> None:
    prompt = [MASK, 5, MASK, MASK]
    assert tiny.engine().generate(prompt, max_new_tokens=12).token_ids == tiny.oracle(prompt, 12)
    mask = oracle[2]  # a mask that the target itself writes, several times
    assert oracle.count(mask) > 1
    engine = tiny.engine(tiny.drafter(mask_token_id=mask))
    assert engine.generate(PROMPT, max_new_tokens=LENGTH).token_ids == oracle
    engine = tiny.engine(ScriptedDrafter(PROMPT + oracle, config=make_config(mask_token_id=mask)))
    assert engine.generate(PROMPT, max_new_tokens=LENGTH).token_ids == oracle


# The context's end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(), (2,)], ids=["right", "second wrong"])
@pytest.mark.parametrize("prompt_length", [4, 19, 22, 23])
def test_the_output_fills_the_context_to_its_last_position(prompt_length: int, wrong: tuple[int, ...]) -> None:
    pair = TinyPair(max_position_embeddings=24)
    prompt = [(7 * index + 3) % VOCAB for index in range(prompt_length)]
    room = 24 - prompt_length
    expected = pair.oracle(prompt, room)
    engine = pair.engine(ScriptedDrafter(prompt + expected, wrong))
    result = engine.generate(prompt, max_new_tokens=100, ignore_eos=True)
    assert result.token_ids == expected
    assert result.finish_reason == "length"
    assert any(f"room for {room} of the 100" in note for note in result.notes)
    assert pair.target.length == 23
    assert not engine.generate(prompt, max_new_tokens=room).notes


def test_no_token_is_ever_fed_beyond_the_context() -> None:
    """``RuleTarget`` asserts it in every forward."""
    for prompt_length in range(1, 16):
        target = RuleTarget(chain_rule(12), 12, max_positions=16)
        engine = Engine(TorchBackend(), target, PlannedDrafter(lambda context, count: [3] * count), check=True)
        prompt = list(range(1, prompt_length + 1))
        prompt = [token % 12 for token in prompt]
        result = engine.generate(prompt, max_new_tokens=99, block_size=9)
        assert result.token_ids == target.greedy(prompt, 16 - prompt_length)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    engine = TinyPair(max_position_embeddings=24).engine()
    with pytest.raises(PromptError, match=r"24 tokens.*context holds 24"):
        engine.generate([3] * 24)
    assert len(engine.generate([3] * 23).token_ids) == 1


# Cancelling, reuse, errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(), (1,), (3,)], ids=["right", "first wrong", "third wrong"])
def test_closing_after_any_round_leaves_cache_and_engine_whole(
    tiny: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter], wrong: tuple[int, ...]
) -> None:
    engine = tiny.engine(scripted(*wrong))
    rounds = len(engine.generate(PROMPT, max_new_tokens=20).steps)
    for closed_after in range(rounds + 1):
        stream = engine.stream(PROMPT, max_new_tokens=20)
        for _ in range(closed_after):
            next(stream)
        stream.close()
        assert list(stream) == []
        result = stream.result()
        assert result.token_ids == oracle[: len(result.token_ids)]
        assert result.metrics.num_tokens == len(result.token_ids)
        assert result.finish_reason == ("length" if closed_after == rounds else "cancelled")
        if closed_after:
            committed = len(PROMPT) + len(result.token_ids)
            assert tiny.target.length == engine.drafter.length == committed - 1
            assert tiny.target.cache.inner.get_seq_length() == committed - 1
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == oracle[:20]


def test_closing_twice_or_after_the_end_is_harmless(tiny: TinyPair, oracle: list[int]) -> None:
    stream = tiny.engine().stream(PROMPT, max_new_tokens=6)
    result = stream.result()
    stream.close()
    stream.close()
    assert (stream.finish_reason, stream.result()) == ("length", result)
    assert result.token_ids == oracle[:6]


def test_leaving_a_with_block_cancels(tiny: TinyPair, oracle: list[int]) -> None:
    engine = tiny.engine()
    with engine.stream(PROMPT, max_new_tokens=20) as stream:
        next(stream)
    assert stream.result().finish_reason == "cancelled"
    assert stream.result().token_ids == oracle[:1]


def test_a_forgotten_stream_does_not_matter(tiny: TinyPair, oracle: list[int]) -> None:
    engine = tiny.engine()
    stream = engine.stream(PROMPT, max_new_tokens=20)
    next(stream)
    next(stream)
    del stream
    gc.collect()
    assert engine.generate(PROMPT, max_new_tokens=20).token_ids == oracle[:20]


def test_a_new_stream_ends_the_one_before_it(tiny: TinyPair, oracle: list[int]) -> None:
    engine = tiny.engine()
    older = engine.stream(PROMPT, max_new_tokens=20)
    next(older)
    newer = engine.stream(PROMPT, max_new_tokens=20)
    first = next(newer)
    assert list(older) == []
    assert older.result().finish_reason == "cancelled"
    assert older.result().token_ids == oracle[:1]
    assert first.kind == "prefill"
    assert newer.result().token_ids == oracle[:20]


def test_a_refused_request_leaves_the_running_one_alone(tiny: TinyPair, oracle: list[int]) -> None:
    engine = tiny.engine()
    running = engine.stream(PROMPT, max_new_tokens=20)
    next(running)
    with pytest.raises(UsageError):
        engine.stream(PROMPT, max_new_tokens=-1)
    assert running.result().token_ids == oracle[:20]


def test_closing_in_mid_round_makes_that_round_the_last(oracle: list[int]) -> None:
    """From a signal handler or another thread, ``close`` cannot interrupt a round that is running."""
    target = scripted_target(PROMPT + oracle)
    streams: list[Any] = []

    def plan(context: list[int], count: int) -> list[int]:
        streams[0].close()
        return oracle[len(context) - len(PROMPT) :][:count]

    engine = Engine(TorchBackend(), target, PlannedDrafter(plan), check=True)
    streams.append(engine.stream(PROMPT, max_new_tokens=20))
    result = streams[0].result()
    assert kinds(result) == ["prefill", "round"]
    assert (result.token_ids, result.finish_reason) == (oracle[:6], "cancelled")
    assert target.length == len(PROMPT) + 5


def test_closing_from_another_thread_cancels(oracle: list[int]) -> None:
    target = scripted_target(PROMPT + oracle)

    def plan(context: list[int], count: int) -> list[int]:
        time.sleep(0.01)
        return [0] * count

    engine = Engine(TorchBackend(), target, PlannedDrafter(plan), check=True)
    stream = engine.stream(PROMPT, max_new_tokens=2000)
    timer = threading.Timer(0.05, stream.close)
    timer.start()
    result = stream.result()
    timer.join()
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.token_ids) < 2000
    assert target.length == len(PROMPT) + len(result.token_ids) - 1


class Boom(Exception):
    pass


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["propose", "observe", "forward", "keep"])
def test_an_error_in_mid_round_leaves_a_true_record_and_a_usable_engine(
    tiny: TinyPair, oracle: list[int], monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException]
) -> None:
    engine = tiny.engine(ScriptedDrafter(PROMPT + oracle), prefill_chunk=2)
    owner = engine.drafter if method in ("propose", "observe") else tiny.target
    inner, calls = getattr(owner, method), iter(range(100))

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == 3:
            raise error
        return inner(*args, **options)

    monkeypatch.setattr(owner, method, failing)
    stream = engine.stream(PROMPT, max_new_tokens=20)
    with pytest.raises(error):
        list(stream)
    monkeypatch.undo()
    result = stream.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == [token for step in stream.steps for token in step.committed]
    assert 0 < len(result.token_ids) < 20
    assert result.token_ids == oracle[: len(result.token_ids)]
    for speculate in (False, True):
        again = engine.generate(PROMPT, max_new_tokens=20, speculate=speculate)
        assert again.token_ids == oracle[:20]


def test_an_error_inside_the_target_does_not_leak_features_into_the_next_request(
    tiny: TinyPair, oracle: list[int]
) -> None:
    def fail(*_: Any) -> None:
        raise Boom

    engine = tiny.engine()
    hook = tiny.model.model.layers[1].register_forward_hook(fail)  # behind the first tap, before the second
    try:
        with pytest.raises(Boom):
            engine.generate(PROMPT)
    finally:
        hook.remove()
    assert engine.generate(PROMPT, max_new_tokens=4, speculate=False).token_ids == oracle[:4]
    assert engine.generate(PROMPT, max_new_tokens=4).token_ids == oracle[:4]


def test_a_round_that_failed_leaves_no_text_of_uncommitted_tokens() -> None:
    engine = scripted_pair("abcdefghijklmnop")
    calls, inner = iter(range(100)), engine.drafter.observe

    def failing(features: torch.Tensor, token_count: int) -> None:
        if next(calls) == 2:
            raise Boom
        inner(features, token_count)

    engine.drafter.observe = failing  # type: ignore[method-assign]
    stream = engine.stream("?", max_new_tokens=11)
    with pytest.raises(Boom):
        list(stream)
    result = stream.result()
    assert bytes(result.token_ids).decode() == result.text == "abcdef"
    assert result.finish_reason == "cancelled"


def test_a_long_request_leaves_nothing_behind_for_a_short_one(tiny: TinyPair) -> None:
    used, fresh = tiny.engine(), tiny.engine()
    used.generate([9, 8, 7] * 20, max_new_tokens=60, block_size=9)
    after = used.generate([4, 2], max_new_tokens=12)
    assert timeless(after.steps) == timeless(fresh.generate([4, 2], max_new_tokens=12).steps)
    assert after.token_ids == tiny.oracle([4, 2], 12)


def test_speculative_plain_and_speculative_again_on_one_engine(tiny: TinyPair, oracle: list[int]) -> None:
    engine = tiny.engine()
    outputs = [engine.generate(PROMPT, max_new_tokens=15, speculate=on).token_ids for on in (True, False, True)]
    assert outputs == [oracle[:15]] * 3
    engine.generate(PROMPT, max_new_tokens=15, speculate=False)
    assert engine.drafter.length == 0, "plain decoding costs the drafter nothing"


# Prefill and conditioning ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 17])
def test_prefill_in_chunks_gives_the_same_proposals_as_in_one_piece(tiny: TinyPair, chunk: int) -> None:
    prompt = [(11 * index + 2) % VOCAB for index in range(17)]
    whole = tiny.engine().generate(prompt, max_new_tokens=16)
    chunked = tiny.engine(prefill_chunk=chunk).generate(prompt, max_new_tokens=16)
    assert [step.drafted for step in chunked.steps] == [step.drafted for step in whole.steps]
    assert len({step.drafted for step in whole.steps}) > 3, "the context must matter for this to mean anything"
    assert chunked.token_ids == whole.token_ids


def test_a_lost_context_would_change_the_proposals(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above must catch: a drafter that is given only the last chunk."""
    prompt = [(11 * index + 2) % VOCAB for index in range(17)]
    whole = tiny.engine().generate(prompt, max_new_tokens=6)
    drafter = tiny.drafter()
    engine = Engine(tiny.backend, tiny.target, drafter, prefill_chunk=4)
    observe = drafter.observe
    monkeypatch.setattr(drafter, "observe", lambda features, count: (drafter.reset(), observe(features, count)))
    lost = engine.generate(prompt, max_new_tokens=6)
    assert lost.token_ids == whole.token_ids
    assert [step.drafted for step in lost.steps] != [step.drafted for step in whole.steps]


def test_features_are_held_no_longer_than_a_chunk(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, rows = tiny.drafter(), []
    engine = tiny.engine(drafter, prefill_chunk=4)
    inner = drafter.observe

    def observe(features: torch.Tensor, count: int) -> None:
        rows.append(len(features))
        assert features.shape[1] == drafter.config.feature_size
        inner(features, count)

    monkeypatch.setattr(drafter, "observe", observe)
    result = engine.generate([3] * 30, max_new_tokens=8)
    assert max(rows) <= max(4, BLOCK)
    assert not tiny.target.taps._seen
    assert result.metrics.peak_memory > 0


def test_prefill_computes_logits_of_one_row_only(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    inner = tiny.target.forward

    def forward(tokens: Any, **options: Any) -> Any:
        output = inner(tokens, **options)
        sizes.append((len(tokens), len(output.logits)))
        return output

    monkeypatch.setattr(tiny.target, "forward", forward)
    tiny.engine(prefill_chunk=8).generate([3] * 20, max_new_tokens=1)
    assert sizes == [(8, 1), (8, 1), (4, 1)]


def test_block_sizes_other_than_the_drafters_are_served(tiny: TinyPair, oracle: list[int]) -> None:
    engine = tiny.engine()
    for block in (2, 3, 9, 64):
        result = engine.generate(PROMPT, max_new_tokens=20, block_size=block)
        assert result.token_ids == oracle[:20]
        assert len(result.steps[1].drafted) == min(block - 1, 19)
        assert any("made for" in note for note in result.notes) == (block > BLOCK)


# Warnings, notes, fallback ---------------------------------------------------------------------------------------


def test_a_drafter_that_is_never_right_raises_a_visible_warning(oracle: list[int]) -> None:
    target = scripted_target(PROMPT + oracle)
    engine = Engine(TorchBackend(), target, PlannedDrafter(lambda context, count: [0] * count))
    with pytest.warns(RuntimeWarning, match="none of"):
        result = engine.generate(PROMPT, max_new_tokens=LENGTH)
    assert any("none of" in note for note in result.notes)
    assert result.token_ids == oracle
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not engine.generate(PROMPT, max_new_tokens=20).notes, "a few rounds may be bad luck"


class FakeClock:
    """Reads the time that target and drafter pretend to have spent."""

    def __init__(self, costs: dict[str, float]) -> None:
        self.costs, self.spent = costs, 0.0

    def spend(self, what: str) -> None:
        self.spent += self.costs[what]

    def now(self) -> float:
        return self.spent

    mark = now

    def seconds(self, start: float, end: float) -> float:
        return end - start


class TimedBackend(TorchBackend):
    def __init__(self, clock: FakeClock) -> None:
        self.fake = clock

    def clock(self, target: Any, *, exact: bool = False) -> Any:
        return self.fake


def timed_engine(output: list[int], right: int, costs: dict[str, float], **options: Any) -> Engine:
    """Drafting and verifying cost what ``costs`` says; the drafter knows the first ``right`` slots."""
    clock = FakeClock(costs)
    script = PROMPT + output
    target = scripted_target(script)
    forward = target.forward

    def timed_forward(tokens: Any, **forward_options: Any) -> Any:
        clock.spend("verify")
        return forward(tokens, **forward_options)

    def plan(context: list[int], count: int) -> list[int]:
        clock.spend("draft")
        ahead = [*script[len(context) :], *([0] * count)][:count]
        return [token if slot < right else (token + 1) % VOCAB for slot, token in enumerate(ahead)]

    target.forward = timed_forward  # type: ignore[method-assign]
    drafter = PlannedDrafter(plan)
    observe = drafter.observe

    def timed_observe(features: torch.Tensor, count: int) -> None:
        clock.spend("observe")
        observe(features, count)

    drafter.observe = timed_observe  # type: ignore[method-assign]
    return Engine(TimedBackend(clock), target, drafter, check=True, **options)


OUTPUT = [(13 * index + 1) % 250 + 2 for index in range(200)]


def test_drafting_that_loses_is_given_up_and_the_result_says_why() -> None:
    engine = timed_engine(OUTPUT, 1, {"draft": 2.0, "verify": 1.0, "observe": 0.25}, fallback=True)
    result = engine.generate(PROMPT, max_new_tokens=100)
    assert result.token_ids == OUTPUT[:100]
    (note,) = result.notes
    assert "without the drafter" in note and "2.00 tokens a round" in note and "2.60 plain steps" in note
    drafted = WARM_ROUNDS + ROUNDS
    assert kinds(result) == ["prefill"] + ["round"] * drafted + ["plain"] * (100 - 1 - 2 * drafted)
    assert engine.drafter.length < len(PROMPT) + 100 - PLAIN_STEPS, "the drafter is spared the rest"
    assert kinds(engine.generate(PROMPT, max_new_tokens=10)).count("round") > 0, "the next request tries again"


def test_drafting_that_wins_goes_on_after_the_comparison() -> None:
    engine = timed_engine(OUTPUT, 4, {"draft": 2.0, "verify": 1.0, "observe": 0.25}, fallback=True)
    result = engine.generate(PROMPT, max_new_tokens=150)
    assert result.token_ids == OUTPUT[:150]
    assert result.notes == ()
    assert kinds(result).count("plain") == PLAIN_STEPS
    assert kinds(result)[-1] == "round"


def test_the_first_rounds_warm_up_and_are_not_judged() -> None:
    costs = {"draft": 500.0, "verify": 1.0, "observe": 0.25}
    engine = timed_engine(OUTPUT, 4, costs, fallback=True)
    for index, step in enumerate(stream := engine.stream(PROMPT, max_new_tokens=150)):
        if index == WARM_ROUNDS:
            costs["draft"] = 2.0
        assert step.index == index
    assert stream.result().notes == ()


def test_without_fallback_a_losing_drafter_stays() -> None:
    engine = timed_engine(OUTPUT, 0, {"draft": 9.0, "verify": 1.0, "observe": 0.0})
    with pytest.warns(RuntimeWarning):
        assert "plain" not in kinds(engine.generate(PROMPT, max_new_tokens=60))


def test_where_a_rounds_time_goes_is_told_part_by_part() -> None:
    engine = timed_engine(OUTPUT, 2, {"draft": 2.0, "verify": 1.0, "observe": 0.25})
    result = engine.generate(PROMPT, max_new_tokens=20)
    prefill, *rounds = result.steps
    assert prefill.seconds == 1.25, "the drafter's share of the prefill counts"
    assert all((s.draft_seconds, s.verify_seconds, s.overhead_seconds) == (2.0, 1.0, 0.25) for s in rounds)
    assert result.metrics.decode_seconds == 3.25 * len(rounds)
    plain = engine.generate(PROMPT, max_new_tokens=5, speculate=False)
    assert [s.seconds for s in plain.steps] == [1.0] * 5
    assert all(s.draft_seconds == 0 for s in plain.steps)


def test_time_to_first_token_includes_the_drafters_prefill(oracle: list[int]) -> None:
    drafter = PlannedDrafter(lambda context, count: [0] * count)
    observe = drafter.observe

    def slow(features: torch.Tensor, count: int) -> None:
        time.sleep(0.02)
        observe(features, count)

    drafter.observe = slow  # type: ignore[method-assign]
    engine = Engine(TorchBackend(), scripted_target(PROMPT + oracle), drafter)
    metrics = engine.generate(PROMPT, max_new_tokens=3).metrics
    assert metrics.ttft is not None and 0.02 <= metrics.ttft <= metrics.total_seconds


def test_engine_metrics_are_those_of_its_steps(tiny: TinyPair, scripted: Callable[..., ScriptedDrafter]) -> None:
    metrics = tiny.engine(scripted(3)).generate(PROMPT, max_new_tokens=1 + 3 * 8).metrics
    assert metrics.per_step_accepted == (2,) * 8
    assert metrics.mean_acceptance_length == 3
    assert metrics.draft_acceptance_rate == 16 / sum(metrics.per_step_drafted)
    assert metrics.acceptance_rate_per_position == (1, 1, 0, 0)
    assert metrics.num_prompt_tokens == len(PROMPT)


# Probabilities and seeds -----------------------------------------------------------------------------------------

SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=11)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_detail_gives_the_targets_and_the_drafters_probability_of_every_drafted_token(
    tiny: TinyPair, oracle: list[int], sampling: SamplingParams
) -> None:
    engine = tiny.engine()
    result = engine.generate(PROMPT, max_new_tokens=12, sampling=sampling, detail=True)
    everything = PROMPT + result.token_ids
    assert all(step.target_probs is None for step in result.steps[:1])
    shadow = tiny.drafter()
    tiny.target.reset()
    tiny.target.tapping = True
    features = tiny.target.forward(everything).features
    tiny.target.keep(range(len(everything)))
    for step in result.steps[1:]:
        ids = everything[: step.position + 1] + list(step.drafted)
        logits = tiny.model(torch.tensor([ids])).logits[0, step.position : -1]
        law = logits.softmax(-1) if sampling.greedy else shape_probabilities(logits, sampling)
        expected = [float(row[token]) for row, token in zip(law, step.drafted, strict=True)]
        assert step.target_probs == pytest.approx(expected, abs=1e-5)
        shadow.reset()
        shadow.observe(features, step.position)
        drafts = shadow.logits(step.anchor, len(step.drafted)).softmax(-1)
        assert step.draft_probs == pytest.approx([float(row.max()) for row in drafts], abs=1e-5)
        assert step.drafted == tuple(drafts.argmax(-1).tolist())
    plain = engine.generate(PROMPT, max_new_tokens=4, sampling=sampling, detail=True, speculate=False)
    assert all(step.target_probs is None and step.draft_probs is None for step in plain.steps)
    assert all(s.target_probs is None for s in engine.generate(PROMPT, max_new_tokens=4, sampling=sampling).steps)


def test_detail_changes_no_token(tiny: TinyPair) -> None:
    engine = tiny.engine()
    for sampling in (SamplingParams(), SAMPLED):
        runs = [
            engine.generate(PROMPT, max_new_tokens=20, sampling=sampling, detail=detail) for detail in (True, False)
        ]
        assert runs[0].token_ids == runs[1].token_ids


def test_the_same_seed_gives_the_same_tokens_with_any_drafter_or_none(tiny: TinyPair, oracle: list[int]) -> None:
    plain = tiny.engine().generate(PROMPT, max_new_tokens=24, sampling=SAMPLED, speculate=False).token_ids
    assert plain != oracle[:24]
    knowing = ScriptedDrafter(PROMPT + plain)
    for drafter in (tiny.drafter(), tiny.drafter(seed=5), knowing, ScriptedDrafter(PROMPT + plain, (3,))):
        for block in (2, 5, 8):
            result = tiny.engine(drafter).generate(PROMPT, max_new_tokens=24, sampling=SAMPLED, block_size=block)
            assert result.token_ids == plain
    result = tiny.engine(knowing).generate(PROMPT, max_new_tokens=24, sampling=SAMPLED)
    assert result.metrics.draft_acceptance_rate == 1


def test_a_seeds_tokens_do_not_depend_on_the_budget(tiny: TinyPair) -> None:
    engine = tiny.engine()
    outputs = [engine.generate(PROMPT, max_new_tokens=n, sampling=SAMPLED).token_ids for n in (3, 12, 24)]
    assert outputs[0] == outputs[2][:3]
    assert outputs[1] == outputs[2][:12]


def test_different_seeds_and_no_seed_differ(tiny: TinyPair) -> None:
    engine = tiny.engine()
    hot = [SamplingParams(temperature=1.5, seed=seed) for seed in (1, 2, None, None)]
    outputs = [tuple(engine.generate(PROMPT, max_new_tokens=20, sampling=one).token_ids) for one in hot]
    assert len(set(outputs)) == 4


def test_a_temperature_next_to_zero_is_greedy(tiny: TinyPair, oracle: list[int]) -> None:
    for temperature in (1e-3, 1e-30, 1e-45):
        sampling = SamplingParams(temperature=temperature, seed=0)
        assert tiny.engine().generate(PROMPT, max_new_tokens=12, sampling=sampling).token_ids == oracle[:12]


# Text -----------------------------------------------------------------------------------------------------------

TEXT = "Olá — 東京 🙂! one, two, three; naïve fim."


@pytest.mark.parametrize("right", [0, 2, BLOCK], ids=["wrong", "two right", "right"])
@pytest.mark.parametrize("block", [2, 5, 9])
def test_text_streams_in_whole_characters_and_joins_to_the_whole(block: int, right: int) -> None:
    engine = scripted_pair(TEXT, block=block, right=right)
    stream = engine.stream("?", max_new_tokens=len(TEXT.encode()))
    pieces = [step.text for step in stream]
    assert "".join(pieces) == stream.text == stream.result().text == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_output_that_ends_inside_a_character_shows_it_as_unfinished() -> None:
    result = scripted_pair("a🙂").generate("?", max_new_tokens=3)
    assert result.text == "a\ufffd"
    assert "".join(step.text for step in result.steps) == result.text


@pytest.mark.parametrize("right", [0, 1, BLOCK], ids=["wrong", "one right", "right"])
@pytest.mark.parametrize("before", range(BLOCK + 2))
def test_a_stop_string_is_found_across_tokens_and_rounds(before: int, right: int) -> None:
    shown = "abcdefgh"[:before]
    engine = scripted_pair(shown + "STOP" + "more text", right=right)
    stream = engine.stream("?", max_new_tokens=30, stop="STOP")
    pieces = [step.text for step in stream]
    result = stream.result()
    assert result.text == "".join(pieces) == shown
    assert bytes(result.token_ids).decode() == shown + "STOP"
    assert result.finish_reason == "stop"
    plain = engine.generate("?", max_new_tokens=30, stop="STOP", speculate=False)
    assert (plain.text, plain.token_ids) == (result.text, result.token_ids)


def test_the_beginning_of_a_stop_string_that_never_ends_is_shown_at_last() -> None:
    for budget, expected in ((5, "abcST"), (6, "abcSTO"), (12, "abcSTOx SToS")):
        result = scripted_pair("abcSTOx SToSTxx").generate("?", max_new_tokens=budget, stop=["STOP"])
        assert (result.text, result.finish_reason) == (expected, "length")


def test_cancelling_shows_what_was_held_back() -> None:
    stream = scripted_pair("abSTOPxyz", right=2).stream("?", stop="STOP")
    assert [next(stream).text, next(stream).text] == ["a", "b"]
    stream.close()
    assert bytes(stream.result().token_ids).decode() == stream.result().text == "abST"


def test_the_stop_id_leaves_no_text_wherever_it_comes_from() -> None:
    engine = scripted_pair("abc.def")
    assert engine.generate("?", stop_token_ids=[ord(".")]).text == "abc"
    engine.target.info = replace(engine.target.info, stop_token_ids=(ord("c"),))
    result = engine.generate("?")
    assert (result.text, result.token_ids) == ("ab", list(b"abc"))
    assert engine.generate("?", max_new_tokens=7, ignore_eos=True).text == "abc.def"


def test_stop_strings_stop_ids_and_budget_compete_and_the_first_wins() -> None:
    engine = scripted_pair("abcdefghij")
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"stop": "de", "stop_token_ids": [ord("h")]}, "abc", "stop"),
        ({"stop": "gh", "stop_token_ids": [ord("d")]}, "abc", "stop"),
        ({"stop": "gh", "stop_token_ids": [ord("h")], "max_new_tokens": 4}, "abcd", "length"),
        ({"stop": ["zz", "fg", "ef"]}, "abcd", "stop"),
    ]
    for options, text, reason in cases:
        result = engine.generate("?", **{"max_new_tokens": 10, **options})
        assert (result.text, result.finish_reason) == (text, reason)


def test_text_ids_and_messages_are_the_same_prompt() -> None:
    engine = scripted_pair("answer", prompt="question")
    prompts: list[Any] = ["question", list(b"question"), [{"role": "user", "content": "question"}]]
    results = [engine.generate(prompt, max_new_tokens=6) for prompt in prompts]
    assert [result.text for result in results] == ["answer"] * 3
    assert all(result.prompt_ids == list(b"question") for result in results)


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "error", "says"),
    [
        ([], {}, PromptError, "empty"),
        ("text", {}, PromptError, "no tokenizer"),
        ([{"role": "user", "content": "x"}], {}, PromptError, "no tokenizer"),
        ([5, VOCAB], {}, PromptError, f"the id {VOCAB}.*0 to {VOCAB - 1}"),
        ([-1], {}, PromptError, "the id -1"),
        ([1.5], {}, PromptError, r"it holds 1\.5"),
        (PROMPT, {"max_new_tokens": -1}, UsageError, "max_new_tokens is -1"),
        (PROMPT, {"block_size": 1}, UsageError, "block_size is 1"),
        (PROMPT, {"block_size": -3}, UsageError, "block_size is -3"),
        (PROMPT, {"verify": "typical"}, UsageError, "'typical'.*greedy, match"),
        (PROMPT, {"verify": "greedy", "sampling": SamplingParams(temperature=1.0)}, UsageError, "temperature 0"),
        (PROMPT, {"stop": "x"}, UsageError, "tokenizer"),
    ],
)
def test_bad_requests_are_refused_with_what_was_found(
    tiny: TinyPair, prompt: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        tiny.engine().stream(prompt, **options)


@pytest.mark.parametrize("prompt", ["", "  \n", []])
def test_empty_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(PromptError, match="empty"):
        scripted_pair("x").generate(prompt)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(UsageError, match="none of them may be empty"):
        scripted_pair("x").generate("?", stop=["a", ""])


def test_a_chunk_below_one_is_refused(tiny: TinyPair) -> None:
    with pytest.raises(UsageError, match="prefill_chunk is 0"):
        tiny.engine(prefill_chunk=0)


def test_match_at_temperature_zero_is_greedy(tiny: TinyPair, oracle: list[int]) -> None:
    assert tiny.engine().generate(PROMPT, max_new_tokens=12, verify="match").token_ids == oracle[:12]


def test_the_check_of_the_invariants_can_fail(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = tiny.target.keep
    monkeypatch.setattr(tiny.target, "keep", lambda path: keep(range(max(len(path) - 1, 0))))
    with pytest.raises(AssertionError, match="the target holds"):
        tiny.engine().generate(PROMPT, max_new_tokens=12)


def test_prompts_and_options_of_any_integer_kind_and_no_other() -> None:
    pair = TinyPair()
    engine, prompt = pair.engine(), [5, 9, 23]
    expected = engine.generate(prompt, max_new_tokens=4, ignore_eos=True).token_ids
    for same in (tuple(prompt), torch.tensor(prompt), torch.tensor(prompt).numpy()):
        assert engine.generate(same, max_new_tokens=4, ignore_eos=True).token_ids == expected
    four = torch.tensor([4]).numpy()[0]
    assert engine.generate(prompt, max_new_tokens=four, block_size=four, ignore_eos=True).token_ids == expected
    for wrong in ([prompt], [1.5], torch.tensor([prompt]), None, [5, {"role": "user"}]):
        with pytest.raises(PromptError, match="flat list of token ids"):
            engine.generate(wrong)
    with pytest.raises(PromptError, match="stop_token_ids must be"):
        engine.generate(prompt, stop_token_ids=7)
    for option in ({"max_new_tokens": 1.5}, {"max_new_tokens": "3"}, {"block_size": 2.5}):
        with pytest.raises(UsageError, match="is "):
            engine.generate(prompt, **option)


def test_stop_ids_come_from_the_tokenizer_too() -> None:
    """A tokenizer's end token that the model's configuration does not name ends the output as well."""
    pair = TinyPair()
    prompt = [5, 9, 23]
    output = pair.oracle(prompt, 12)
    end = next(token for token in output[3:] if token not in pair.target.info.stop_token_ids)
    tokenizer = ByteTokenizer()
    tokenizer.stop_token_ids = (end,)
    engine = Engine(pair.backend, pair.target, pair.drafter(), tokenizer, check=True)  # type: ignore[arg-type]
    assert engine.stop_token_ids == tuple(sorted({*pair.target.info.stop_token_ids, end}))
    result = engine.generate(prompt, max_new_tokens=12)
    assert result.token_ids == output[: output.index(end) + 1]
    assert result.finish_reason == "stop"
    assert engine.generate(prompt, max_new_tokens=12, ignore_eos=True).token_ids == output
