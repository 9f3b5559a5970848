"""What a page shows of a race: the same request by plain decoding and by DFlash, each step with the time it ended at.

The two run one after the other, because on one machine they would slow each other; a page replays them side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash.comparison import Comparison
from dflash.token_texts import TokenTexts
from dflash.tokenizer import Tokenizer
from dflash.types import GenerationResult
from gradio_dflash.figures import HELP
from gradio_dflash.view import FINISHED, committed_tokens

ARMS = {"plain": "Plain decoding", "dflash": "DFlash"}


def race_view(comparison: Comparison, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Both arms, who was faster and by how much, and whether the tokens are the same."""
    at = comparison.first_difference
    return {
        "state": "done",
        "arms": [
            _arm("plain", comparison.plain, tokenizer),
            _arm("dflash", comparison.speculative, tokenizer),
        ],
        "speedup": comparison.speedup,
        "break_even": comparison.break_even,
        "identical": at is None,
        "first_difference": at,
        "verdict": f"Identical tokens: {comparison.verdict}.",
        "reading": reading(comparison),
        "help": HELP,
    }


def reading(comparison: Comparison) -> str:
    """The race in words."""
    ours, plain = comparison.speculative.metrics, comparison.plain.metrics
    speedup, needed, tau = comparison.speedup, comparison.break_even, ours.mean_acceptance_length
    if speedup is None:
        return "There was nothing to decode, so nothing was measured."
    words = (
        f"DFlash took {ours.total_seconds:.2f} s and plain decoding {plain.total_seconds:.2f} s for the same request."
    )
    if needed is None or tau is None:
        return f"{words} The answer ended before there was a round and a plain step to compare."
    words += f" A round costs as much as {needed:.2f} plain steps here and brought {tau:.2f} tokens (τ)"
    if speedup >= 1:
        return f"{words}, so drafting paid."
    if tau < needed:
        return f"{words}. Where τ is below the cost of a round, drafting is the slower way."
    return f"{words}. The rounds paid, and what came before them, the drafter's reading of the prompt too, cost more."


def _arm(name: str, result: GenerationResult, tokenizer: Tokenizer | None) -> dict[str, Any]:
    metrics = result.metrics
    return {
        "name": name,
        "label": ARMS[name],
        "steps": list(_steps(result, tokenizer)),
        "seconds": metrics.total_seconds,
        "ttft": metrics.ttft,
        "tokens": metrics.num_tokens,
        "tokens_per_second": metrics.end_to_end_tokens_per_second,
        "tau": metrics.mean_acceptance_length,
        "finish": FINISHED[result.finish_reason],
    }


def _steps(result: GenerationResult, tokenizer: Tokenizer | None) -> Iterator[list[Any]]:
    """[seconds since the request began, tokens committed] of each step. The steps' own times leave out what lies
    between them; the last one ends when the request did."""
    texts = TokenTexts.of_steps(result.steps, tokenizer)
    inside = sum(step.seconds for step in result.steps)
    scale = result.metrics.total_seconds / inside if inside else 1.0
    seconds, at = 0.0, 0
    for step in result.steps:
        seconds += step.seconds * scale
        yield [round(seconds, 5), committed_tokens(step, texts, at)]
        at += len(step.committed)
