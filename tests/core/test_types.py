"""The values that travel: what they refuse, and that they survive JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from dflash.errors import DFlashError, UsageError
from dflash.types import SamplingParams, StepEvent, Verdict


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
        ("top_k", -1), ("top_k", 1.5), ("top_k", math.nan), ("top_k", None),
        ("top_p", 0.0), ("top_p", 1.01), ("top_p", -1), ("top_p", math.nan), ("top_p", "x"),
        ("seed", -1), ("seed", 2**63), ("seed", 1.5),
    ],
)  # fmt: skip
def test_sampling_values_outside_their_range_are_refused_by_name_and_value(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name) as raised:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert str(value) in str(raised.value)
    assert raised.value.exit_code == 2
    assert isinstance(raised.value, DFlashError)


@pytest.mark.parametrize(
    "values", [{}, {"temperature": 2}, {"top_k": 1}, {"top_p": 1}, {"top_p": 1e-9}, {"seed": 0}, {"seed": 2**63 - 1}]
)
def test_sampling_values_at_the_edge_are_taken(values: dict[str, float]) -> None:
    assert SamplingParams(**values).greedy == (values.get("temperature", 0) == 0)  # type: ignore[arg-type]


def test_a_verdict_ends_in_a_bonus_only_after_a_fully_accepted_block() -> None:
    assert Verdict((4, 5, 6), 3, 7).kind == "bonus"
    assert Verdict((4, 5, 6), 2, 7).kind == "correction"
    assert Verdict((4, 5, 6), 0, 7).kind == "correction"


def test_a_step_survives_json() -> None:
    step = StepEvent(
        "round", 3, 17, 5, (6, 7, 8), 2, (6, 7, 9), "correction", 0.1, 0.2, 0.3, (0.5, 0.25, 1.0), (0.9, 0.8, 0), "é\n"
    )  # fmt: skip
    assert StepEvent.from_dict(json.loads(json.dumps(step.to_dict()))) == step
    assert step.seconds == pytest.approx(0.6)


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
