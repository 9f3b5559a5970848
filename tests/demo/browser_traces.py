"""Traces made by hand for the tests in a browser: every kind of step and fate, and a very long one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from dflash.metrics import Metrics
from dflash.trace import Trace
from dflash.types import StepEvent

HTML, SCRIPT = '<img src=x onerror="window.hacked=1">', "</script><script>window.hacked=2</script>"
WORDS = [
    "Say", " it", ":", "One", " two", " three", " four", " five", " six", " seven", "\n", "\n\n", "    ", "\treturn",
    "  two  spaces", HTML, SCRIPT, " 東京", "🍎", "&amp;", "<!--", "<|end|>",
]  # fmt: skip
PROMPT = "Say it:"
SPECIAL = {"<|end|>"}
_SECONDS = (0.004, 0.021, 0.0006)


def _id(word: str) -> int:
    return WORDS.index(word)


def _step(index: int, position: int, anchor: str, drafted: Sequence[str], committed: Sequence[str]) -> StepEvent:
    """A round (a plain step where nothing was drafted): guesses stand as far as ``committed`` says the same."""
    accepted = 0
    while accepted < min(len(drafted), len(committed)) and drafted[accepted] == committed[accepted]:
        accepted += 1
    kind = "round" if drafted else "plain"
    own = len(committed) > accepted and bool(drafted)
    return StepEvent(
        kind=kind,
        index=index,
        position=position,
        anchor=_id(anchor),
        drafted=tuple(map(_id, drafted)),
        accepted=accepted,
        committed=tuple(map(_id, committed)),
        next_kind=("bonus" if accepted == len(drafted) else "correction") if own else None,
        draft_seconds=_SECONDS[0] * bool(drafted),
        verify_seconds=_SECONDS[1] * (1 + index % 3),
        overhead_seconds=_SECONDS[2],
        draft_probs=tuple(0.93 / (slot + 1) for slot in range(len(drafted))) if drafted else None,
        target_probs=tuple(0.97 if slot < accepted else 0.0004 for slot in range(len(drafted))) if drafted else None,
    )


def every_fate() -> Trace:
    """A correction at the first slot and behind others, a bonus, a plain step, a cut by a stop; tokens that are HTML,
    white space and more than one byte a character."""
    rounds: list[tuple[list[str], list[str]]] = [
        ([" two", " three", " five", " six"], [" two", " three", " four"]),
        ([" five", " six", " seven", "\n"], [" five", " six", " seven", "\n", "\n\n"]),  # all stand, and a bonus
        ([HTML, " two", " two", " two"], [SCRIPT]),
        ([], ["\n"]),
        (["    ", "\treturn", "  two  spaces", HTML], ["    ", "\treturn", "  two  spaces", HTML, "&amp;"]),
        ([" 東京", "🍎", "<!--", "\n"], [" 東京", "🍎", SCRIPT]),
        (["<!--", "<|end|>", " two", " three"], ["<!--", "<|end|>"]),
    ]
    steps = [StepEvent("prefill", 0, 2, _id(":"), (), 0, (_id("One"),), None, 0.0, 0.09, 0.003)]
    position, anchor = 3, "One"
    for index, (drafted, committed) in enumerate(rounds, 1):
        steps.append(_step(index, position, anchor, drafted, committed))
        position, anchor = position + len(committed), committed[-1]
    return _trace(steps, "stop", block_size=5)


def very_long(tokens: int = 4000, block: int = 16) -> Trace:
    """So many tokens in short rounds of long blocks."""
    draw = random.Random(7)
    common = [" two", " three", " four", " five", " six", " seven", "\n", HTML]
    steps = [StepEvent("prefill", 0, 2, _id(":"), (), 0, (_id("One"),), None, 0.0, 0.09, 0.003)]
    position, anchor, written = 3, "One", 1
    while written < tokens:
        drafted = draw.choices(common, k=block - 1)
        accepted = draw.choice((0, 0, 1, 1, 2))
        wrong = drafted[accepted]
        committed = [*drafted[:accepted], draw.choice([word for word in common if word != wrong])][: tokens - written]
        steps.append(_step(len(steps), position, anchor, drafted, committed))
        position, anchor, written = position + len(committed), committed[-1], written + len(committed)
    return _trace(steps, "length", block_size=block)


def _trace(steps: list[StepEvent], finish: str, block_size: int) -> Trace:
    committed = [WORDS[token] for step in steps for token in step.committed]
    texts = {
        "vocabulary": {str(number): word for number, word in enumerate(WORDS)},
        "special": [_id(word) for word in SPECIAL],
        "running": ["" if word in SPECIAL else word for word in committed],
    }
    seconds = sum(step.seconds for step in steps) + 0.01
    metrics = Metrics.from_steps(
        steps, num_prompt_tokens=3, ttft=0.093, total_seconds=seconds, peak_memory=1_297_000_000
    )
    head: dict[str, Any] = {
        "target": "made-by-hand", "draft": "made-by-hand-dflash", "backend": "torch", "device": "cpu",
        "dtype": "float32", "block_size": block_size, "verify": "greedy", "max_new_tokens": 4096,
    }  # fmt: skip
    tail = {
        "token_ids": [token for step in steps for token in step.committed],
        "text": "".join(texts["running"]),  # type: ignore[arg-type]
        "finish_reason": finish,
        "metrics": metrics.to_dict(),
        "notes": [f"A note with {HTML} in it."],
        "texts": texts,
    }
    return Trace(head, [_id(word) for word in ("Say", " it", ":")], steps, tail)
