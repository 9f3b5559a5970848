"""What the engine's tests share: one prompt, its scripted drafters, engines whose target writes a given text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from byte_tokenizer import ByteTokenizer
from tiny_models import VOCAB, PlannedDrafter, TinyPair, make_config, scripted_rule

from dflash.engine import Engine
from dflash.types import GenerationResult, SamplingParams, StepEvent

ignore_silent_rounds = pytest.mark.filterwarnings("ignore:none of:RuntimeWarning")  # most drafters are meant to fail

PROMPT = [5, 17, 200, 33]
BLOCK = make_config().block_size  # 5: the anchor and 4 slots
LENGTH = 40
EVERY_SLOT = tuple(range(1, BLOCK))
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=11)


class Boom(Exception):
    pass


def kinds(result: GenerationResult) -> list[str]:
    return [step.kind for step in result.steps]


def timeless(steps: list[StepEvent]) -> list[StepEvent]:
    return [replace(step, draft_seconds=0.0, verify_seconds=0.0, overhead_seconds=0.0) for step in steps]


def scripted_pair(pair: TinyPair, text: str, *, prompt: str = "?", block: int = BLOCK, right: int = BLOCK) -> Engine:
    """An engine whose target writes ``text`` byte by byte; the drafter knows the first ``right`` slots of a round."""
    script = [*prompt.encode(), *text.encode()]
    target = pair.rule_target(scripted_rule(script))

    def plan(context: list[int], count: int) -> list[int]:
        ahead = [*script[len(context) :], *([script[-1]] * count)][:count]
        return [token if slot < right else (token + 1) % VOCAB for slot, token in enumerate(ahead)]

    drafter = PlannedDrafter(target, plan, make_config(block_size=block))
    return Engine(pair.backend, target, drafter, ByteTokenizer(), check=True)  # type: ignore[arg-type]
