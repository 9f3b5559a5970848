"""Acceptance and speed figures by their definitions, computed by hand."""

from __future__ import annotations

import json
import random

import pytest

from dflash.metrics import Metrics, break_even, per_prompt
from dflash.types import StepEvent


def step(kind: str, drafted: int = 0, accepted: int = 0, committed: int = 1, seconds: float = 1.0) -> StepEvent:
    draft, verify, rest = (seconds / 4, seconds / 2, seconds / 4) if kind == "round" else (0.0, seconds, 0.0)
    return StepEvent(
        kind, 0, 0, 5, tuple(range(drafted)), accepted, tuple(range(committed)), None, draft, verify, rest
    )  # fmt: skip


# A prefill, four rounds (the last cut by a stop: three accepted, no correction or bonus), two plain steps.
STEPS = [
    step("prefill", seconds=3.0),
    step("round", 4, 2, 3),
    step("round", 4, 4, 5),
    step("round", 4, 0, 1),
    step("round", 3, 3, 3),
    step("plain", seconds=0.5),
    step("plain", seconds=0.5),
]
METRICS = Metrics.from_steps(STEPS, num_prompt_tokens=7)


def test_totals_count_rounds_only_and_never_the_anchor() -> None:
    assert METRICS.num_spec_steps == 4
    assert METRICS.num_draft_tokens == 15
    assert METRICS.num_accepted_draft_tokens == 9
    assert METRICS.num_plain_steps == 2
    assert METRICS.num_tokens == 1 + 12 + 2
    assert METRICS.num_prompt_tokens == 7


def test_mean_acceptance_length_counts_the_correction_or_bonus_and_nothing_that_was_cut() -> None:
    assert METRICS.mean_acceptance_length == 12 / 4


def test_draft_acceptance_rate_is_accepted_over_drafted() -> None:
    assert METRICS.draft_acceptance_rate == 9 / 15


def test_acceptance_per_position_divides_by_the_rounds_that_drafted_it() -> None:
    assert METRICS.acceptance_rate_per_position == (3 / 4, 3 / 4, 2 / 4, 1 / 3)


def test_histogram_counts_rounds_by_accepted_tokens() -> None:
    assert METRICS.acceptance_histogram == (1, 0, 1, 1, 1)
    assert sum(METRICS.acceptance_histogram) == METRICS.num_spec_steps


def test_the_ordered_record_is_kept() -> None:
    assert METRICS.per_step_drafted == (4, 4, 4, 3)
    assert METRICS.per_step_accepted == (2, 4, 0, 3)


def test_a_drafter_that_is_never_right_has_rate_zero_and_length_one() -> None:
    metrics = Metrics.from_steps([step("prefill")] + [step("round", 4, 0, 1)] * 3)
    assert metrics.draft_acceptance_rate == 0
    assert metrics.mean_acceptance_length == 1
    assert metrics.acceptance_rate_per_position == (0, 0, 0, 0)
    assert metrics.acceptance_histogram == (3, 0, 0, 0, 0)


def test_round_seconds_are_the_sum_of_their_parts() -> None:
    assert METRICS.draft_seconds == pytest.approx(1.0)
    assert METRICS.verify_seconds == pytest.approx(2.0)
    assert METRICS.overhead_seconds == pytest.approx(1.0)
    assert METRICS.decode_seconds == pytest.approx(4.0 + 1.0)
    assert STEPS[1].seconds == pytest.approx(1.0)


def test_speeds_leave_the_prefill_out_or_in_as_they_say() -> None:
    assert METRICS.ttft == 3.0
    assert METRICS.tpot == pytest.approx(5.0 / 14)
    assert METRICS.decode_tokens_per_second == pytest.approx(14 / 5.0)
    assert METRICS.end_to_end_tokens_per_second == pytest.approx(15 / 8.0)


def test_ratios_without_a_denominator_are_none() -> None:
    for metrics in (Metrics.from_steps([]), Metrics.from_steps([step("prefill")])):
        assert metrics.mean_acceptance_length is None
        assert metrics.draft_acceptance_rate is None
        assert metrics.tpot is None
        assert metrics.decode_tokens_per_second is None
        assert metrics.acceptance_rate_per_position == metrics.acceptance_histogram == ()
        json.dumps(metrics.to_dict())
    assert Metrics.from_steps([]).end_to_end_tokens_per_second is None


def test_a_merge_is_weighted_by_tokens_however_the_set_is_split() -> None:
    """Ratios of sums, never means of ratios."""
    rng = random.Random(0)
    runs = []
    for _ in range(6):
        accepted = [rng.randrange(5) for _ in range(rng.randrange(1, 9))]
        runs.append(Metrics.from_steps([step("prefill")] + [step("round", 4, n, n + 1) for n in accepted]))
    whole = Metrics.merge(runs)
    assert whole == Metrics.merge([Metrics.merge(runs[:2]), Metrics.merge(runs[2:5]), Metrics.merge(runs[5:])])
    rounds, tokens = sum(run.num_spec_steps for run in runs), sum(run.num_tokens - 1 for run in runs)
    assert whole.mean_acceptance_length == pytest.approx(tokens / rounds)
    assert whole.tpot == pytest.approx(sum(run.decode_seconds for run in runs) / tokens)
    assert whole.ttft == 1.0


def test_a_merge_of_one_token_runs_has_no_time_per_token() -> None:
    assert Metrics.merge([Metrics.from_steps([step("prefill")])] * 3).tpot is None


def test_per_prompt_figures_come_with_their_spread() -> None:
    runs = [Metrics.from_steps([step("round", 4, n, n + 1)]) for n in (0, 2, 4)]
    figures = per_prompt([*runs, Metrics.from_steps([])], "mean_acceptance_length")
    assert figures == {"mean": 3.0, "stdev": 2.0, "min": 1.0, "max": 5.0}
    assert per_prompt([Metrics.from_steps([])], "mean_acceptance_length") is None


def test_break_even_is_the_price_of_a_round_in_plain_steps() -> None:
    plain = Metrics.from_steps([step("prefill")] + [step("plain", seconds=0.25)] * 4)
    assert break_even(METRICS, plain) == pytest.approx(1.0 / 0.25)
    assert break_even(plain, METRICS) is None
    assert break_even(METRICS, Metrics.from_steps([])) is None


def test_to_dict_holds_every_figure_under_its_name() -> None:
    record = json.loads(json.dumps(METRICS.to_dict()))
    for name in (
        "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length", "ttft", "tpot",
        "draft_acceptance_rate", "acceptance_rate_per_position", "acceptance_histogram", "per_step_drafted",
        "per_step_accepted", "draft_seconds", "verify_seconds", "overhead_seconds", "decode_tokens_per_second",
        "end_to_end_tokens_per_second", "peak_memory", "num_tokens", "num_prompt_tokens",
    ):  # fmt: skip
        expected = getattr(METRICS, name)
        assert record[name] == (list(expected) if isinstance(expected, tuple) else expected)
    assert "acceptance" not in record, "a bare acceptance says nothing"
