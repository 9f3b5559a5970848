"""The controller on simulated machines and drafters: what it loses against the best fixed plan, known in hindsight."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dflash.controller import Controller, Decision
from dflash.types import StepEvent

MOST = 15


@dataclass(frozen=True)
class Machine:
    """Seconds of a plain step, of drafting ``count`` slots, of verifying ``rows`` rows."""

    plain: float
    draft: Callable[[int], float]
    verify: Callable[[int], float]


MACHINES = {
    "two cores": Machine(10.2e-3, lambda count: 2.0e-3 + 0.08e-3 * count, lambda rows: 9.5e-3 + 0.75e-3 * rows),
    "a large GPU": Machine(20e-3, lambda count: 5.5e-3, lambda rows: 20e-3 + 0.05e-3 * rows),
    "drafting is dear": Machine(10e-3, lambda count: 12e-3, lambda rows: 10e-3 + 0.5e-3 * rows),
}
RATES = {"hopeless": 0.0, "poor": 0.35, "fair": 0.6, "good": 0.85, "perfect": 1.0}  # that a slot is accepted
TOKENS = 600


def accepted_of(chance: random.Random, rate: float, count: int) -> int:
    run = 0
    while run < count and chance.random() < rate:
        run += 1
    return run


def step(machine: Machine, decision: Decision, accepted: int, position: int, noise: Callable[[], float]) -> StepEvent:
    count = decision.verify if decision.kind == "round" else 0
    draft = machine.draft(count) * noise() if count else 0.0
    verify = (machine.verify(1 + count) if count else machine.plain) * noise()
    after = None if not count else "bonus" if accepted == count else "correction"
    return StepEvent(
        "round" if count else "plain", 1, position, 5, (7,) * count, accepted, (7,) * accepted + (8,), after, draft,
        verify, 0.0,
    )  # fmt: skip


def controlled(
    machine: Machine, rate: Callable[[int], float], seed: int, noise: Callable[[], float] = lambda: 1.0
) -> float:
    """Tokens a second over three requests of a fresh controller, whose costs it must learn first."""
    controller, chance = Controller(MOST), random.Random(seed)
    done, seconds = 0, 0.0
    for _ in range(3):
        controller.begin()
        here = 0
        while here < TOKENS:
            decision = controller.plan(300 + here, TOKENS - here)
            accepted = accepted_of(chance, rate(here), decision.verify if decision.kind == "round" else 0)
            event = step(machine, decision, accepted, 300 + here, noise)
            controller.learn(event, decision)
            here, seconds = here + accepted + 1, seconds + event.seconds
        done += here
    return done / seconds


def fixed(machine: Machine, rate: float, count: int) -> float:
    """Tokens a second of rounds with ``count`` slots, in the long run; of plain steps where there are none."""
    if not count:
        return 1 / machine.plain
    tokens = sum(rate**slot for slot in range(count + 1))
    return tokens / (machine.draft(count) + machine.verify(1 + count))


@pytest.mark.parametrize("drafter", RATES)
@pytest.mark.parametrize("name", MACHINES)
def test_it_comes_near_the_best_fixed_plan(name: str, drafter: str) -> None:
    machine, rate = MACHINES[name], RATES[drafter]
    best = max(fixed(machine, rate, count) for count in (0, 1, 3, 7, 11, 15))
    speeds = [controlled(machine, lambda _: rate, seed) for seed in range(5)]
    assert sum(speeds) / len(speeds) > 0.9 * best


def test_noise_does_not_fool_it() -> None:
    """Every tenth pass takes three times as long."""
    machine, chance = MACHINES["two cores"], random.Random(3)
    noise: Callable[[], float] = lambda: 3.0 if chance.random() < 0.1 else 1.0  # noqa: E731
    best = max(fixed(machine, 0.85, count) for count in (0, 1, 3, 7, 11, 15)) / 1.2  # of its mean
    speeds = [controlled(machine, lambda _: 0.85, seed, noise) for seed in range(5)]
    assert sum(speeds) / len(speeds) > 0.92 * best


def test_a_text_that_becomes_easy_is_noticed() -> None:
    machine = MACHINES["two cores"]
    speeds = [controlled(machine, lambda here: 0.1 if here < 200 else 0.95, seed) for seed in range(5)]
    plain = fixed(machine, 0.0, 0)
    assert sum(speeds) / len(speeds) > 1.15 * plain


def test_a_decision_survives_json() -> None:
    decision = Controller(MOST).plan(300, 100)
    assert Decision.from_dict(json.loads(json.dumps(decision.to_dict()))) == decision


def test_it_never_drafts_beyond_what_may_be_committed() -> None:
    controller, machine, chance = Controller(MOST), MACHINES["a large GPU"], random.Random(1)
    left = 60
    while left:
        decision = controller.plan(1000, left)
        assert decision.draft <= max(left - 1, 0) and decision.verify <= decision.draft
        accepted = accepted_of(chance, 0.9, decision.verify)
        controller.learn(step(machine, decision, accepted, 1000, lambda: 1.0), decision)
        left -= min(left, accepted + 1)
