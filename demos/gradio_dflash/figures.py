"""The figures a page shows, and what each of them means. They are computed in ``dflash.metrics`` and nowhere else."""

from __future__ import annotations

import math
from typing import Any

from dflash.metrics import Metrics

# Name in dflash.metrics → what a page calls it, and its definition (the vocabulary is vLLM's).
HELP: dict[str, tuple[str, str]] = {
    "mean_acceptance_length": (
        "τ, mean acceptance length",
        "Committed tokens ÷ rounds, the correction or bonus included: how many tokens one pass of the target brings. "
        "Plain decoding has 1.",
    ),
    "draft_acceptance_rate": ("draft acceptance rate", "Accepted draft tokens ÷ drafted tokens."),
    "acceptance_rate_per_position": (
        "acceptance by slot",
        "For each slot of the block: rounds that accepted it ÷ rounds that drafted it. A slot can only be accepted "
        "when all slots before it were, so it falls from left to right.",
    ),
    "acceptance_histogram": (
        "acceptance histogram",
        "How many rounds accepted exactly 0, 1, 2 … drafted tokens.",
    ),
    "num_spec_steps": ("rounds", "Rounds: blocks that were drafted and verified, one pass of the target each."),
    "num_draft_tokens": ("drafted tokens", "All tokens the drafter proposed; the anchor is not one of them."),
    "num_accepted_draft_tokens": ("accepted draft tokens", "Drafted tokens that the target agreed with."),
    "num_tokens": ("tokens", "Tokens of the answer, the stop token included when there was one."),
    "num_prompt_tokens": ("prompt tokens", "Tokens of the prompt, the chat template's own included."),
    "ttft": (
        "TTFT, time to first token",
        "From the request to the first token, the drafter's reading of the prompt included.",
    ),
    "tpot": ("TPOT, time per token", "(End − first token) ÷ (tokens − 1)."),
    "decode_tokens_per_second": ("decode tok/s", "Tokens after the first ÷ the time of their rounds."),
    "end_to_end_tokens_per_second": ("end-to-end tok/s", "All tokens ÷ the whole time, the prompt's included."),
    "total_seconds": ("total time", "From the request to its end."),
    "draft_seconds": ("draft", "Time of the rounds spent in the drafter's passes."),
    "verify_seconds": ("verify", "Time of the rounds spent in the target's passes and in judging the drafts."),
    "overhead_seconds": (
        "overhead",
        "The rest of the rounds' time: committing, and taking the new tokens' features into the drafter's context.",
    ),
    "peak_memory": (
        "peak memory",
        "Most memory in use during the request: of the device's allocator, of the process where there is none to ask.",
    ),
    "speedup": (
        "speedup",
        "Plain decoding time ÷ speculative time, end to end, of the same request here, one after the other.",
    ),
    "break_even": (
        "break-even τ",
        "Time of a round ÷ time of a plain step. Speculation pays where τ is above it.",
    ),
}


def values(metrics: Metrics, speedup: float | None = None) -> dict[str, Any]:
    """Every figure by its name, None where it is not known; ``HELP`` explains each."""
    known = metrics.to_dict() | {"speedup": speedup, "peak_memory": metrics.peak_memory or None}
    return {name: _number(known[name]) for name in HELP if name in known}


def _number(figure: Any) -> Any:
    """A rate over no time at all is none."""
    return None if isinstance(figure, float) and not math.isfinite(figure) else figure
