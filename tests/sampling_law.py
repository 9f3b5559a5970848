"""Whether an engine's samples follow the law of plain sampling, on any backend.

The law of three tokens over a vocabulary of five is enumerated from its definition, and samples are held to it by a
chi-square test. One test in a thousand would fail by chance; the seeds are fixed, so none does."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tiny_models import PlannedDrafter, RuleTarget, chain_rule, make_config

from dflash.engine import Engine
from dflash.interfaces import Backend
from dflash.types import SamplingParams

VOCAB, LENGTH, PROMPT = 5, 3, [1, 3]
RULE = chain_rule(VOCAB, seed=4, spread=1.2)
SAMPLES = 1000
CHANCE = 1e-3  # a sound rule's p-value is below it once in a thousand
CAUGHT = 1e-9

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6, top-p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "temperature 1.7, top-k 3": {"temperature": 1.7, "top_k": 3},
    "temperature 1.2, top-k 4, top-p 0.8": {"temperature": 1.2, "top_k": 4, "top_p": 0.8},
}

# The law, from its definition -------------------------------------------------------------------------------------


def shaped(logits: Sequence[float], sampling: SamplingParams) -> list[float]:
    """Temperature, then the ``top_k`` likeliest, then the smallest set of likeliest ones that reaches ``top_p``."""
    highest = max(logits)
    weights = [math.exp((logit - highest) / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(weights[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        kept.append(token)
        reached += weights[token] / total
        if reached >= sampling.top_p:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def law(sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every output of ``LENGTH`` tokens."""
    chances = {}
    for output in itertools.product(range(VOCAB), repeat=LENGTH):
        chance, prefix = 1.0, list(PROMPT)
        for token in output:
            chance *= shaped(RULE(prefix).tolist(), sampling)[token]
            prefix.append(token)
        chances[output] = chance
    return chances


def p_value(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """Chi-square of ``counts`` against ``chances``; rare outputs share one cell, impossible ones are never forgiven."""
    total = sum(counts.values())
    cells, rest_seen, rest_expected = [], 0, 0.0
    for output, chance in chances.items():
        if chance == 0 and counts[output]:
            return 0.0
        if chance * total >= 5:
            cells.append((counts[output], chance * total))
        else:
            rest_seen, rest_expected = rest_seen + counts[output], rest_expected + chance * total
    if rest_expected > 0:
        cells.append((rest_seen, rest_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    half_freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


# Sampling with the engine -----------------------------------------------------------------------------------------

Plan = Callable[[list[int], int], list[int]]


def likeliest(context: list[int], count: int) -> list[int]:
    """What a good drafter says: the target's greedy continuation."""
    ids = list(context)
    for _ in range(count):
        ids.append(int(RULE(ids).argmax()))
    return ids[len(context) :]


def unlikeliest(context: list[int], count: int) -> list[int]:
    ids = list(context)
    for _ in range(count):
        ids.append(int(RULE(ids).argmin()))
    return ids[len(context) :]


def stubborn(context: list[int], count: int) -> list[int]:
    return [2] * count


PLANS: dict[str, Plan] = {"likeliest": likeliest, "unlikeliest": unlikeliest, "stubborn": stubborn}


def sample(
    target: RuleTarget,
    sampling: dict[str, Any],
    plan: Plan,
    verifier: Callable[[SamplingParams], Any] | None = None,
    *,
    speculate: bool = True,
    samples: int = SAMPLES,
) -> Counter[tuple[int, ...]]:
    """How often each output of ``LENGTH`` tokens comes, over as many seeds. ``verifier`` replaces the backend's."""
    backend = _cheap(target.backend, verifier)
    engine = Engine(backend, target, PlannedDrafter(target, plan, make_config(block_size=4)))

    def outputs() -> Counter[tuple[int, ...]]:
        counts: Counter[tuple[int, ...]] = Counter()
        for seed in range(samples):
            params = SamplingParams(**sampling, seed=seed)
            result = engine.generate(PROMPT, max_new_tokens=LENGTH, sampling=params, speculate=speculate)
            counts[tuple(result.token_ids)] += 1
        return counts

    return backend.run(outputs)


def _cheap(backend: Backend, verifier: Callable[[SamplingParams], Any] | None) -> Any:
    """With a verifier of the test's choice, and without the cost of measuring memory thousands of times."""
    changed: Any = copy.copy(backend)
    changed.reset_peak_memory = lambda target: None
    changed.peak_memory = lambda target: 0
    if verifier is not None:
        changed.verifier = lambda rule, sampling, target, *, detail=False: verifier(sampling)
    return changed
