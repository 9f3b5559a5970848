"""How likely the target is to accept what was drafted, learned from the rounds so far.

Model. Slot k, given that all before it were accepted, is accepted with the probability σ(b_k + s): b_k is learned over
all requests, while s, the level, belongs to one request and follows it. Where the drafter tells its confidence c_k in
the slot, a second model of the same form takes it in, σ(b'_k + s' + w · logit c_k) with w ≥ 0 (Platt's scaling). Both
are extended Kalman filters that keep each parameter's variance and leave out how they covary. How far requests lie
apart is learned too; where rounds keep surprising in one direction, the level is taken to be unknown again. What the
second one makes of a round is less a matter of luck than its verdict, so the first learns from the mean of the two.

A tree's confidence in depth k is the drafter's probability that one of its branches goes on there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash.types import StepEvent

REACHED = 0.3  # slots that are likelier reached than this teach by what is expected of them
PRIOR_REQUESTS, MOST_REQUESTS = 3, 20  # that the variance between requests is believed to be known from
DRIFT_KEPT, SHIFT = 0.8, 2.5  # of the last rounds' surprise; standard deviations of it that tell of a new text
FARTHEST = 7.0  # of a logit


class _First(NamedTuple):
    """What is believed before anything is seen, and how fast it may change. ``bias`` and ``slope`` are of logits, the
    others variances; those of a slot's bias and of the slope do not fall below the ``least``."""

    bias: float
    slope: float
    slot: float
    level: float
    of_slope: float
    step: float = 0.004  # what each round, or plain step, adds to the level's
    least: float = 0.004
    least_slope: float = 0.0005


BLIND = _First(bias=1.0, slope=0.0, slot=1.0, level=3.0, of_slope=0.0)
TOLD = _First(bias=0.0, slope=1.0, slot=0.5, level=0.5, of_slope=0.1)


class Acceptance:
    """Of the slots 1 … ``most``. ``begin`` a request, ``learn`` from its steps."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._blind, self._told = _Filter(most, BLIND), _Filter(most, TOLD)

    def begin(self) -> None:
        """A new request, whose level is unknown."""
        self._blind.begin()
        self._told.begin()

    def survival(self, count: int, *, optimism: float = 0.0) -> list[float]:
        """[1 + count]: the probability that the first k slots are all accepted, before anything is drafted.
        ``optimism``: standard deviations to believe above the mean."""
        return _products(self._blind.chances([0.0] * count, optimism))

    def survival_given(self, confidences: Sequence[float]) -> list[float]:
        """[1 + count]: the same, given the drafter's probability of each slot's token."""
        return _products(self._told.chances([logit(c) for c in confidences]))

    def survivals_given(self, confidences: np.ndarray) -> np.ndarray:
        """[n, depth]: the probability that each depth is reached, given n trees' confidences [n, depth]; 0 where a
        tree has no node of that depth."""
        return self._told.chances_of_trees(confidences).cumprod(1)

    def learn(self, event: StepEvent, confidences: Sequence[float] = (), coverage: Sequence[float] = ()) -> None:
        """Take in a round: each accepted slot, and the first rejected one unless the round was cut before it; or that
        a plain step has gone by. ``confidences`` are those of the drafted slots, verified or not. A tree's round has a
        ``coverage`` too, its confidence in each depth; what became of a chain in it, its verdict does not tell."""
        self._blind.wait()
        self._told.wait()
        if event.kind != "round":
            return
        outcomes = [1.0] * event.accepted + [0.0] * (event.next_kind == "correction")
        seen = outcomes[: self.most]
        if confidences:
            logits = [logit(c) for c in confidences[: self.most]]
            self._told.learn([logit(c) for c in coverage] if coverage else logits, seen)
            seen, reached = [] if coverage else seen, 1.0
            for k, chance in enumerate(self._told.chances(logits)):
                if k < len(seen):
                    seen[k] = (seen[k] + chance) / 2
                elif reached >= REACHED:
                    seen.append(chance)
                else:
                    break
                reached *= chance
        self._blind.learn([0.0] * self.most, seen)


class _Filter:
    def __init__(self, most: int, first: _First) -> None:
        self._first = first
        self._bias, self._variance = [first.bias] * most, [first.slot] * most
        self._slope, self._of_slope = first.slope, first.of_slope
        self._between, self._requests = first.level, PRIOR_REQUESTS  # how far requests lie apart, seen in how many
        self._level, self._of_level = 0.0, first.level
        self._drift = 0.0, 0.0  # how far the last rounds were from what was expected, and the variance of that

    def begin(self) -> None:
        if self._of_level < self._between / 2:  # the last request has told something of its level
            self._requests = min(self._requests + 1, MOST_REQUESTS)
            self._between += (self._level**2 + self._of_level - self._between) / self._requests
        self._level, self._of_level = 0.0, self._between
        self._drift = 0.0, 0.0

    def wait(self) -> None:
        """A step goes by: the level may have changed."""
        self._of_level = min(self._first.level, self._of_level + self._first.step)

    def chances(self, logits: Sequence[float], optimism: float = 0.0) -> list[float]:
        """Of each slot, given that all before it were accepted."""
        level, slope, of_level = self._level, self._slope, self._of_level
        hope = [optimism * math.sqrt(v + of_level) for v in self._variance] if optimism else [0.0] * len(logits)
        return [
            1 / (1 + math.exp(-_bounded(bias + level + slope * x + more)))
            for bias, x, more in zip(self._bias, logits, hope, strict=False)
        ]

    def chances_of_trees(self, confidences: np.ndarray) -> np.ndarray:
        edge = 1 / (1 + math.exp(FARTHEST))
        known = confidences.clip(edge, 1 - edge)
        bias = np.array(self._bias[: confidences.shape[1]]) + self._level
        scores = (self._slope * np.log(known / (1 - known)) + bias).clip(-FARTHEST, FARTHEST)
        return (confidences > 0) / (1 + np.exp(-scores))

    def learn(self, logits: Sequence[float], outcomes: Sequence[float]) -> None:
        """Take in what became of the first slots: 1 accepted, 0 rejected, between them what is expected."""
        first, drift, spread = self._first, DRIFT_KEPT * self._drift[0], DRIFT_KEPT**2 * self._drift[1]
        for k, (x, outcome) in enumerate(zip(logits, outcomes, strict=False)):
            slot, level, of_slope = self._variance[k], self._of_level, self._of_slope
            chance = 1 / (1 + math.exp(-_bounded(self._bias[k] + self._level + self._slope * x)))
            weight = chance * (1 - chance)
            share = 1 + weight * (slot + level + x * x * of_slope)
            step, shrink = (outcome - chance) / share, weight / share
            drift, spread = drift + outcome - chance, spread + weight
            self._bias[k] += slot * step
            self._variance[k] = max(first.least, slot - slot * slot * shrink)
            self._level += level * step
            self._of_level = level - level * level * shrink
            if of_slope:
                self._slope = max(0.0, self._slope + of_slope * x * step)
                self._of_slope = max(first.least_slope, of_slope - (of_slope * x) ** 2 * shrink)
        if drift * drift > SHIFT**2 * spread and spread > 0.5:  # the text has changed: what was known of it is old
            self._of_level, drift, spread = max(self._of_level, first.level / 2), 0.0, 0.0
        self._drift = drift, spread


def logit(chance: float) -> float:
    """log(p / (1 − p)), at most ``FARTHEST`` from 0."""
    if not chance > 0:
        return -FARTHEST
    return FARTHEST if chance >= 1 else _bounded(math.log(chance / (1 - chance)))


def _bounded(score: float) -> float:
    return max(-FARTHEST, min(FARTHEST, score))


def _products(chances: Sequence[float]) -> list[float]:
    left, products = 1.0, [1.0]
    for chance in chances:
        products.append(left := left * chance)
    return products
