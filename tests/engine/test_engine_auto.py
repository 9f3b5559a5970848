"""``block_size="auto"``: a controller plans every round, and the output stays what it was."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import TinyPair

from dflash.controller import Decision
from dflash.errors import UsageError
from dflash.trace import Trace
from dflash.types import SamplingParams

PROMPT = [5, 17, 200, 33]


@pytest.mark.filterwarnings("ignore:none of:RuntimeWarning")  # the tiny drafter knows nothing
@pytest.mark.parametrize("wrong_at", [(), (1,), (3,)])
def test_the_output_is_the_targets_whatever_is_planned(tiny: Any, wrong_at: tuple[int, ...]) -> None:
    expected = tiny.oracle(PROMPT, 60)
    engine = tiny.engine(tiny.scripted(PROMPT, 80, wrong_at=wrong_at))
    for _ in range(2):  # the second request knows costs
        result = engine.generate(PROMPT, max_new_tokens=60, block_size="auto", ignore_eos=True)
        assert result.token_ids == expected
        plans = [Decision.from_dict(step.plan) for step in result.steps[1:] if step.plan]
        assert len(plans) == len(result.steps) - 1
        for plan, step in zip(plans, result.steps[1:], strict=True):
            assert (plan.kind, plan.verify) == (step.kind, len(step.drafted))


@pytest.mark.filterwarnings("ignore:none of:RuntimeWarning")
def test_a_seed_gives_the_same_tokens_with_and_without_a_controller(tiny: Any) -> None:
    sampling, engine = SamplingParams(temperature=0.9, seed=7), tiny.engine()
    ways: list[dict[str, Any]] = [{"block_size": "auto"}, {"block_size": 3}, {"speculate": False}]
    outputs = [
        engine.generate(PROMPT, max_new_tokens=40, sampling=sampling, ignore_eos=True, **way).token_ids for way in ways
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_hopeless_drafter_is_given_up_and_the_next_request_tries_again(tiny: Any) -> None:
    engine = tiny.engine(tiny.scripted(PROMPT, 400, wrong_at=(1,)))
    first = engine.generate(PROMPT, max_new_tokens=300, block_size="auto", ignore_eos=True)
    assert first.token_ids == tiny.oracle(PROMPT, 300)
    rounds = [step for step in first.steps if step.kind == "round"]
    assert 0 < len(rounds) < 100
    second = engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True)  # as ever, without a controller
    assert all(step.kind == "round" and step.plan is None for step in second.steps[1:])


def test_plans_are_in_the_trace(tiny: Any, tmp_path: Any) -> None:
    engine = tiny.engine(tiny.scripted(PROMPT, 64))
    generation = engine.stream(PROMPT, max_new_tokens=20, block_size="auto", ignore_eos=True)
    steps = list(generation)
    result = generation.result()
    trace = Trace.of_request(engine, {"max_new_tokens": 20, "block_size": "auto"}, result)
    trace.save(tmp_path / "trace.jsonl")
    again = Trace.load(tmp_path / "trace.jsonl")
    planned = [step.plan for step in again.steps]
    assert planned[0] is None and all(plan is not None for plan in planned[1:])
    assert [Decision.from_dict(plan) for plan in planned[1:] if plan] == [
        Decision.from_dict(step.plan) for step in steps[1:] if step.plan
    ]


def test_another_word_than_auto_is_refused(tiny: TinyPair) -> None:
    with pytest.raises(UsageError, match="block_size is 'often'"):
        tiny.engine().generate(PROMPT, block_size="often")  # type: ignore[arg-type]
