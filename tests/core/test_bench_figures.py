"""The suites' figures, from synthetic measurements: which ratio is of what, and what an interruption leaves."""

from __future__ import annotations

import json

import pytest

from dflash.metrics import Metrics
from dflash.prompts import EvalPrompt, PromptSet
from dflash.suites.end_to_end import Answer, ArmError, EndToEnd, Turn, measure_arms
from dflash.suites.kernels import Kernels, ProductShape, product_shapes
from dflash.suites.rounds import Rounds, Sample
from dflash.types import StepEvent


def event(draft: float, verify: float, overhead: float) -> StepEvent:
    return StepEvent("round", 0, 0, 1, (2,), 0, (3,), "correction", draft, verify, overhead)


def plan(**changes) -> Rounds:
    return Rounds(
        **{"contexts": (16, 64), "block_sizes": (1, 8), "own_block_size": 8, "repeats": 2, "rounds": 2} | changes
    )


def sample(repeat: int, context: int, scale: float) -> Sample:
    held = {
        1: [event(0.0, 10 * scale, 0.0), event(0.0, 10 * scale, 0.0)],
        8: [event(4 * scale, 16 * scale, 5 * scale), event(4 * scale, 16 * scale, 5 * scale)],
    }
    return Sample(repeat, context, held, [(10.0, event(2.0, 7.0, 0.5)), (10.0, event(2.0, 7.0, 0.5))])


def test_a_cell_of_rounds_is_what_its_events_say() -> None:
    rounds = plan(samples=[sample(0, 16, 1), sample(0, 64, 3), sample(1, 64, 8), sample(1, 16, 2)])
    record = rounds.to_dict()
    assert not record["partial"] and record["repeats"] == 2
    plain, block, far_plain, far = record["cells"]
    assert [(cell["context"], cell["block_size"]) for cell in record["cells"]] == [(16, 1), (16, 8), (64, 1), (64, 8)]
    assert block["draft_seconds"] == {"median": 6, "min": 4, "max": 8}
    assert block["verify_seconds"]["median"] == 24 and block["seconds"] == {"median": 37.5, "min": 25, "max": 50}
    assert block["overhead_share"] == {"median": 0.2, "min": 0.2, "max": 0.2}
    assert block["draft_over_verify"]["median"] == 0.25 and plain["draft_over_verify"] is None
    assert block["verify_over_one_row"]["median"] == 1.6 and plain["verify_over_one_row"]["median"] == 1
    assert far["over_shortest_context"] == {"median": 3.5, "min": 3, "max": 4}  # 3 ÷ 1 and 8 ÷ 2, within a repeat
    assert plain["over_shortest_context"]["median"] == 1 and far_plain["over_shortest_context"]["median"] == 3.5
    assert record["real"][0] == {
        "context": 16,
        "block_size": 8,
        "rounds": 2,
        "seconds": {"median": 10, "min": 10, "max": 10},
        "overhead_share": {"median": pytest.approx(0.1), "min": pytest.approx(0.1), "max": pytest.approx(0.1)},
    }
    json.dumps(record)


def test_ratios_of_rounds_are_of_neighbours() -> None:
    """Each block's verification is divided by the one-row pass of its own round, not by the median of all."""
    one = Sample(0, 16, {1: [event(0, 1, 0), event(0, 100, 0), event(0, 3, 0)]})
    one.held[8] = [event(1, 2, 0), event(1, 200, 0), event(1, 9, 0)]
    cell = plan(contexts=(16,), repeats=1, samples=[one]).to_dict()["cells"][1]
    assert cell["verify_over_one_row"]["median"] == 2


def test_broken_off_rounds_say_partial_and_show_only_what_was_measured() -> None:
    record = plan(samples=[sample(0, 64, 3)]).to_dict()
    assert record["partial"] and [cell["context"] for cell in record["cells"]] == [64, 64]
    assert record["cells"][1]["over_shortest_context"] is None
    without_plain = plan(block_sizes=(8,), samples=[Sample(0, 16, {8: [event(1, 2, 1)]})]).to_dict()
    assert without_plain["cells"][0]["verify_over_one_row"] is None
    assert without_plain["real"][0]["overhead_share"] is None and without_plain["real"][0]["rounds"] == 0
    json.dumps(without_plain)


# End to end ------------------------------------------------------------------------------------------------------

PROMPTS = PromptSet("two", (EvalPrompt([1], id="a"), EvalPrompt([2], id="b")))
IDS = [[1], [2]]


def turn(prompt: str, repeat: int, **answers: tuple[list[int], float]) -> Turn:
    return Turn(prompt, repeat, {name: Answer(*answer) for name, answer in answers.items()})


def test_speeds_and_ratios_are_over_all_prompts_of_a_repeat() -> None:
    measured = EndToEnd(PROMPTS, 2, {name: {} for name in ("plain", "transformers")})
    measured.turns = [
        turn("a", 0, plain=([5] * 10, 1.0), transformers=([5] * 10, 2.0)),
        turn("b", 0, plain=([6] * 30, 1.0), transformers=([6] * 30, 6.0)),
        turn("a", 1, plain=([5] * 10, 2.0), transformers=([5] * 10, 2.0)),
        turn("b", 1, plain=([6] * 30, 2.0), transformers=([7] * 30, 2.0)),
    ]
    record = measured.to_dict()
    plain, library = record["arms"]["plain"], record["arms"]["transformers"]
    assert plain["tokens_per_second"] == {"median": 15, "min": 10, "max": 20} and plain["num_tokens"] == 40
    assert library["tokens_per_second"] == {"median": 7.5, "min": 5, "max": 10}
    assert plain["over"] == {"transformers": {"median": 2.5, "min": 1, "max": 4}}
    assert library["over"] == {"plain": {"median": 0.625, "min": 0.25, "max": 1}}
    assert plain["identical_prompts"] == 2 and library["identical_prompts"] == 1  # another token in one repeat of b
    assert not record["partial"] and record["prompts"] == 2


class Scripted:
    """An arm that answers ``[prompt's first id]`` and breaks down at its ``fails_at``-th answer."""

    def __init__(self, name: str, log: list[str], fails_at: int | None = None) -> None:
        self.name, self.about, self._log, self._fails_at, self._count = name, {"versions": {}}, log, fails_at, 0

    def run(self, ids, max_new_tokens):
        self._count += 1
        self._log.append(self.name)
        if self._count == self._fails_at:
            raise ArmError("it ran out of luck")
        rounds = [StepEvent("round", 1, 1, 1, (2, 3), 1, (2, 4), "correction", 0.1, 0.2, 0.0)]
        metrics = Metrics.from_steps(rounds) if self.name == "dflash" else None
        return Answer([ids[0]], 0.5, metrics)


def test_arms_take_turns_and_turns_in_going_first() -> None:
    log: list[str] = []
    arms = [Scripted(name, log) for name in ("plain", "dflash", "transformers")]
    record = measure_arms(arms, PROMPTS, IDS, 4, repeats=2).to_dict()
    assert log[:3] == ["plain", "dflash", "transformers"]  # the warm-up
    rounds = [log[at : at + 3] for at in range(3, len(log), 3)]
    assert [order[0] for order in rounds] == ["plain", "dflash", "dflash", "transformers"]
    assert all(sorted(order) == ["dflash", "plain", "transformers"] for order in rounds)
    assert record["arms"]["dflash"]["mean_acceptance_length"] == 2
    assert record["arms"]["plain"]["mean_acceptance_length"] is None


def test_an_arm_that_breaks_down_is_named_and_the_others_go_on() -> None:
    log: list[str] = []
    arms = [Scripted("plain", log), Scripted("transformers", log, fails_at=1), Scripted("official", log, fails_at=3)]
    record = measure_arms(arms, PROMPTS, IDS, 4, repeats=2, missing={"llama.cpp": "nobody has it"}).to_dict()
    assert set(record["arms"]) == {"plain"} and record["arms"]["plain"]["over"] == {}
    assert record["not_measured"] == {
        "llama.cpp": "nobody has it",
        "transformers": "it ran out of luck",
        "official": "it ran out of luck",
    }
    assert log.count("transformers") == 1 and log.count("official") == 3 and log.count("plain") == 5


def test_an_interruption_keeps_whole_prompts_and_whole_repeats() -> None:
    log: list[str] = []
    arms = [Scripted("plain", log), Scripted("dflash", log)]
    record = measure_arms(arms, PROMPTS, IDS, 4, repeats=3, stopped=lambda: len(log) == 9).to_dict()
    assert record["partial"] and record["repeats"] == 1 and record["prompts"] == 2
    log.clear()
    nothing = measure_arms(arms, PROMPTS, IDS, 4, stopped=lambda: True)
    assert not nothing.turns and not log


# Kernels ---------------------------------------------------------------------------------------------------------

TARGET = {"layers": 30, "hidden": 4, "intermediate": 6, "queries": 4, "keys": 2, "vocabulary": 20}


def test_products_that_both_models_have_are_measured_once() -> None:
    shapes = product_shapes(TARGET, TARGET | {"layers": 3, "intermediate": 5})
    assert shapes == [
        ProductShape("queries, keys, values", 8, 4, 30, 3),
        ProductShape("attention output", 4, 4, 30, 3),
        ProductShape("gate and up", 12, 4, 30, 0),
        ProductShape("down", 4, 6, 30, 0),
        ProductShape("head", 20, 4, 1, 1),
        ProductShape("gate and up", 10, 4, 0, 3),
        ProductShape("down", 4, 5, 0, 3),
    ]


def test_bandwidth_counts_the_weights_and_a_pass_sums_its_products() -> None:
    one, two = ProductShape("down", 5, 10, target=3, draft=1), ProductShape("head", 20, 10, target=1)
    kernels = Kernels([one, two], (1,), 2, itemsize=4, roofline={"sum": [100.0, 200.0], "copy": [400.0, 50.0]})
    kernels.seconds = {
        (one, 1): {"linear": [4.0, 4.0], "backend": [1.0, 2.0]},
        (two, 1): {"linear": [8.0, 8.0], "backend": [4.0, 4.0]},
    }
    record = kernels.to_dict()
    assert record["roofline"]["bytes_per_second"] == 400 and record["roofline"]["sum"]["median"] == 150
    down = record["products"][0]
    assert down["bytes"] == 200 and down["backend"]["bytes_per_second"] == {"median": 150, "min": 100, "max": 200}
    assert down["backend"]["of_roofline"]["max"] == 0.5 and down["linear_over_backend"]["median"] == 3
    target, draft = record["passes"]
    assert (target["model"], target["bytes"]) == ("target", 3 * 200 + 800)
    assert target["linear"]["seconds"]["median"] == 20 and target["backend"]["seconds"] == {
        "median": 8.5,
        "min": 7,
        "max": 10,
    }
    assert (draft["model"], draft["bytes"], draft["backend"]["seconds"]["max"]) == ("draft", 200, 2)
    assert not record["partial"]
    json.dumps(record)


def test_a_pass_without_one_of_its_products_is_left_out() -> None:
    one, two = ProductShape("down", 5, 10, target=3, draft=1), ProductShape("head", 20, 10, target=1)
    kernels = Kernels([one, two], (1,), 1, itemsize=4, roofline={"sum": [1.0]})
    kernels.seconds = {(one, 1): {"linear": [4.0], "backend": [1.0]}, (two, 1): {"linear": [4.0]}}
    record = kernels.to_dict()
    assert record["partial"] and [part["model"] for part in record["passes"]] == ["draft"]
    assert len(record["products"]) == 1
