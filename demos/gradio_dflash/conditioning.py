"""What a page shows of a round's conditioning: where each slot looks, layer by layer, and what the drafter says when
the context's features are zero. The figures are ``dflash.probe``'s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dflash.engine import Engine
from dflash.errors import UsageError
from dflash.probe import Probe, RoundProbe
from dflash.token_texts import TokenTexts
from dflash.trace import Trace
from dflash.types import StepEvent

SHOWN = 256  # context tokens, the newest ones; what stands before them is summed up
OTHERS = 48  # rounds that are drafted again beside the one looked into


def look_inside(engine: Engine, trace: Trace, index: int, stop: Callable[[], bool]) -> dict[str, Any]:
    """Round ``index`` of a generation of this engine, and how other rounds fare without conditioning; ``stop`` breaks
    the latter off. Raises ``UsageError`` where there is no such round."""
    rounds = [step for step in trace.steps if step.kind == "round"]
    if not rounds:
        raise UsageError("this answer has no rounds to look into; ask for more than one token")
    event = next((step for step in rounds if step.index == index), None)
    if event is None:
        raise UsageError(f"there is no round {index}; there are {rounds[0].index} to {rounds[-1].index}")
    ids = [*trace.prompt_ids, *(token for step in trace.steps for token in step.committed)]
    probe = Probe(engine, ids)
    look = probe.round(event.position, len(event.drafted))
    texts = TokenTexts(engine.tokenizer)
    for known in (ids, look.drafted, look.blind_drafted):
        texts.learn(known)
    others = _spread(rounds, OTHERS)
    found = probe.acceptance([(step.position, len(step.drafted)) for step in others], stop)
    shown = max(0, look.position - SHOWN)
    return {
        "state": "done",
        "index": event.index,
        "rounds": len(rounds),
        "anchor": texts.of(look.anchor),
        "context": [texts.of(token) for token in ids[shown : look.position]],
        "earlier": shown,
        "slots": [texts.of(token) for token in look.drafted],
        "layers": [_layer(weights, shown, look.position) for weights in look.attention],
        "with": _draft(look.drafted, look.draft_probs, look.accepted, look.wanted, texts),
        "without": _draft(look.blind_drafted, look.blind_probs, look.blind_accepted, look.wanted, texts),
        "wanted": [texts.of(token) for token in look.wanted],
        "others": {
            "rounds": [[step.index, *pair] for step, pair in zip(others, found, strict=False)],
            "mean_with": _mean([accepted for accepted, _ in found]),
            "mean_without": _mean([blind for _, blind in found]),
        },
        "reading": reading(look, found),
    }


def reading(look: RoundProbe, others: Sequence[tuple[int, int]]) -> str:
    """What switching the conditioning off did, in words."""
    count = len(look.drafted)
    words = (
        f"With its conditioning the drafter has {look.accepted} of {count} guesses accepted in this round. With the "
        f"target's hidden states replaced by zeros it has {look.blind_accepted}: it then knows the anchor and how long "
        "the text is, and nothing of what it says."
    )
    if len(others) > 1:
        seeing, blind = (1 + sum(part) / len(others) for part in zip(*others, strict=True))
        words += (
            f" Over the {len(others)} rounds below, a round brings {seeing:.2f} tokens with it and {blind:.2f} without."
        )
    return words


def _layer(weights: np.ndarray, shown: int, context: int) -> dict[str, Any]:
    """One layer's weights [1 + count, context + 1 + count], rounded so that a row still sums to about 1."""
    return {
        "earlier": _short(weights[:, :shown].sum(-1)),
        "context": _short(weights[:, shown:context]),
        "block": _short(weights[:, context:]),
    }


def _short(values: np.ndarray) -> list[Any]:
    rounded: list[Any] = np.round(values.astype(np.float64), 5).tolist()
    return rounded


def _draft(
    drafted: Sequence[int], probs: Sequence[float], accepted: int, wanted: Sequence[int], texts: TokenTexts
) -> dict[str, Any]:
    """A block as cells: its fates as verifying would have told them, as far as the text reaches."""
    known = accepted < len(wanted)  # the token after the accepted ones
    rejected = accepted if known and accepted < len(drafted) else None
    fates = [
        "accepted" if slot < accepted else "rejected" if slot == rejected else "discarded"
        for slot in range(len(drafted))
    ]
    return {
        "slots": [
            [texts.of(token), fate, round(float(chance), 5)]
            for token, fate, chance in zip(drafted, fates, probs, strict=True)
        ],
        "accepted": accepted,
        "next": [texts.of(wanted[accepted]), "correction"] if rejected is not None else None,
    }


def _spread(rounds: Sequence[StepEvent], most: int) -> list[StepEvent]:
    """At most ``most`` of the rounds, evenly spread."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[at * (len(rounds) - 1) // (most - 1)] for at in range(most)]


def _mean(accepted: Sequence[int]) -> float | None:
    """Tokens a round: the accepted ones and the target's own."""
    return round(1 + sum(accepted) / len(accepted), 3) if accepted else None
