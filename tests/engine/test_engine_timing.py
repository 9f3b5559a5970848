"""Warnings and notes, the fallback to plain decoding, and where a round's time goes."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from engine_cases import LENGTH, PROMPT, ignore_silent_rounds, kinds
from tiny_models import VOCAB, PlannedDrafter, ScriptedDrafter, TinyPair, scripted_rule

from dflash.engine import Engine
from dflash.fallback import PLAIN_STEPS, ROUNDS, WARM_ROUNDS

pytestmark = ignore_silent_rounds

OUTPUT = [(13 * index + 1) % 250 + 2 for index in range(200)]


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


def timed_engine(pair: TinyPair, output: list[int], right: int, costs: dict[str, float], **options: Any) -> Engine:
    """Drafting and verifying cost what ``costs`` says; the drafter knows the first ``right`` slots."""
    clock = FakeClock(costs)
    backend = copy.copy(pair.backend)
    backend.clock = lambda target, *, exact=False: clock  # type: ignore[method-assign]
    script = PROMPT + output
    target = pair.rule_target(scripted_rule(script))
    forward = target.forward

    def timed_forward(tokens: Any, **forward_options: Any) -> Any:
        clock.spend("verify")
        return forward(tokens, **forward_options)

    def plan(context: list[int], count: int) -> list[int]:
        clock.spend("draft")
        ahead = [*script[len(context) :], *([0] * count)][:count]
        return [token if slot < right else (token + 1) % VOCAB for slot, token in enumerate(ahead)]

    target.forward = timed_forward  # type: ignore[method-assign]
    drafter = PlannedDrafter(target, plan)
    observe = drafter.observe

    def timed_observe(features: Any, count: int) -> None:
        clock.spend("observe")
        observe(features, count)

    drafter.observe = timed_observe  # type: ignore[method-assign]
    return Engine(backend, target, drafter, check=True, **options)


# Warnings and fallback ------------------------------------------------------------------------------------------


def test_a_drafter_that_is_never_right_raises_a_visible_warning(pair: TinyPair, oracle: list[int]) -> None:
    target = pair.rule_target(scripted_rule(PROMPT + oracle))
    engine = Engine(pair.backend, target, PlannedDrafter(target, lambda context, count: [0] * count))
    with pytest.warns(RuntimeWarning, match="none of"):
        result = engine.generate(PROMPT, max_new_tokens=LENGTH)
    assert any("none of" in note for note in result.notes)
    assert result.token_ids == oracle
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not engine.generate(PROMPT, max_new_tokens=20).notes, "a few rounds may be bad luck"


def test_drafting_that_loses_is_given_up_and_the_result_says_why(pair: TinyPair) -> None:
    engine = timed_engine(pair, OUTPUT, 1, {"draft": 2.0, "verify": 1.0, "observe": 0.25}, fallback=True)
    result = engine.generate(PROMPT, max_new_tokens=100)
    assert result.token_ids == OUTPUT[:100]
    (note,) = result.notes
    assert "without the drafter" in note and "2.00 tokens a round" in note and "2.60 plain steps" in note
    drafted = WARM_ROUNDS + ROUNDS
    assert kinds(result) == ["prefill"] + ["round"] * drafted + ["plain"] * (100 - 1 - 2 * drafted)
    assert engine.drafter.length < len(PROMPT) + 100 - PLAIN_STEPS, "the drafter is spared the rest"
    assert kinds(engine.generate(PROMPT, max_new_tokens=10)).count("round") > 0, "the next request tries again"


def test_drafting_that_wins_goes_on_after_the_comparison(pair: TinyPair) -> None:
    engine = timed_engine(pair, OUTPUT, 4, {"draft": 2.0, "verify": 1.0, "observe": 0.25}, fallback=True)
    result = engine.generate(PROMPT, max_new_tokens=150)
    assert result.token_ids == OUTPUT[:150]
    assert result.notes == ()
    assert kinds(result).count("plain") == PLAIN_STEPS
    assert kinds(result)[-1] == "round"


def test_the_first_rounds_warm_up_and_are_not_judged(pair: TinyPair) -> None:
    costs = {"draft": 500.0, "verify": 1.0, "observe": 0.25}
    engine = timed_engine(pair, OUTPUT, 4, costs, fallback=True)
    for index, step in enumerate(stream := engine.stream(PROMPT, max_new_tokens=150)):
        if index == WARM_ROUNDS:
            costs["draft"] = 2.0
        assert step.index == index
    assert stream.result().notes == ()


def test_without_fallback_a_losing_drafter_stays(pair: TinyPair) -> None:
    engine = timed_engine(pair, OUTPUT, 0, {"draft": 9.0, "verify": 1.0, "observe": 0.0})
    with pytest.warns(RuntimeWarning):
        assert "plain" not in kinds(engine.generate(PROMPT, max_new_tokens=60))


# Times and figures ----------------------------------------------------------------------------------------------


def test_where_a_rounds_time_goes_is_told_part_by_part(pair: TinyPair) -> None:
    engine = timed_engine(pair, OUTPUT, 2, {"draft": 2.0, "verify": 1.0, "observe": 0.25})
    result = engine.generate(PROMPT, max_new_tokens=20)
    prefill, *rounds = result.steps
    assert prefill.seconds == 1.25, "the drafter's share of the prefill counts"
    assert all((s.draft_seconds, s.verify_seconds, s.overhead_seconds) == (2.0, 1.0, 0.25) for s in rounds)
    assert result.metrics.decode_seconds == 3.25 * len(rounds)
    plain = engine.generate(PROMPT, max_new_tokens=5, speculate=False)
    assert [s.seconds for s in plain.steps] == [1.0] * 5
    assert all(s.draft_seconds == 0 for s in plain.steps)


def test_time_to_first_token_includes_the_drafters_prefill(pair: TinyPair, oracle: list[int]) -> None:
    target = pair.rule_target(scripted_rule(PROMPT + oracle))
    drafter = PlannedDrafter(target, lambda context, count: [0] * count)
    observe = drafter.observe

    def slow(features: Any, count: int) -> None:
        time.sleep(0.02)
        observe(features, count)

    drafter.observe = slow  # type: ignore[method-assign]
    engine = Engine(pair.backend, target, drafter)
    metrics = engine.generate(PROMPT, max_new_tokens=3).metrics
    assert metrics.ttft is not None and 0.02 <= metrics.ttft <= metrics.total_seconds


def test_engine_metrics_are_those_of_its_steps(pair: TinyPair, scripted: Callable[..., ScriptedDrafter]) -> None:
    metrics = pair.engine(scripted(3)).generate(PROMPT, max_new_tokens=1 + 3 * 8).metrics
    assert metrics.per_step_accepted == (2,) * 8
    assert metrics.mean_acceptance_length == 3
    assert metrics.draft_acceptance_rate == 16 / sum(metrics.per_step_drafted)
    assert metrics.acceptance_rate_per_position == (1, 1, 0, 0)
    assert metrics.num_prompt_tokens == len(PROMPT)
