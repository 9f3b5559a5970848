"""What a page shows of a generation: a pure function from its events to lines of JSON.

The page is a log that only grows: a head, a line a step, figures now and then, an end. Whoever holds the log holds the
page's whole state, so a live run, a saved trace and an exported file show the same by the same script, and an update
sends only what is new. Texts come as data, never as HTML; the lines hold no ``<`` at all.

Tokens are ``[text, fate, special]``, slots ``[text, fate, drafter's probability, target's probability]``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dflash.errors import DFlashError
from dflash.metrics import Metrics
from dflash.token_texts import TokenTexts
from dflash.trace import Trace
from dflash.types import StepEvent
from gradio_dflash import figures

FINISHED = {
    "stop": "The answer ended by itself: a stop token or stop string came.",
    "length": "The budget of new tokens is used up.",
    "cancelled": "Stopped by hand; what was committed stands.",
}
FIGURES_EVERY = 0.5  # seconds; the log keeps every line

# Facts of a request in the order a page shows them, and what it calls them.
_SETTINGS = {
    "target": "target",
    "draft": "drafter",
    "backend": "backend",
    "device": "device",
    "dtype": "number format",
    "block_size": "block size",
    "verify": "rule",
    "max_new_tokens": "budget",
}


class Log:
    """The lines of one generation so far, as one text; figures are added at most every ``FIGURES_EVERY`` seconds."""

    def __init__(self) -> None:
        self.text, self.ended, self._figures_due = "", False, 0.0

    def head(self, facts: Mapping[str, Any], prompt: str, run: str) -> None:
        self._add(head(facts, prompt, run))

    def status(self, text: str) -> None:
        self._add({"type": "status", "text": text})

    def steps(self, steps: Sequence[StepEvent], since: int, texts: TokenTexts) -> None:
        """The ``steps`` from number ``since`` on; ``texts`` has taken them in."""
        at = sum(len(step.committed) for step in steps[:since])
        lines = []
        for event in steps[since:]:
            lines.append(_line(step(event, texts, at)))
            at += len(event.committed)
        self.text += "".join(lines)
        if time.monotonic() >= self._figures_due:
            self.figures(Metrics.from_steps(steps, num_prompt_tokens=steps[0].position + 1 if steps else 0))
            self._figures_due = time.monotonic() + FIGURES_EVERY

    def figures(self, metrics: Metrics, speedup: float | None = None) -> None:
        self._add({"type": "figures", "values": figures.values(metrics, speedup)})

    def end(self, finish: str, notes: Sequence[str] = ()) -> None:
        self.ended = True
        self._add({"type": "end", "finish": finish, "text": FINISHED[finish], "notes": list(notes)})

    def error(self, text: str) -> None:
        self.ended = True
        self._add({"type": "error", "text": text})

    def _add(self, record: Mapping[str, Any]) -> None:
        self.text += _line(record)


def page_lines(trace: Trace) -> str:
    """The whole page of a finished generation."""
    log, texts = Log(), trace.texts
    log.head(trace.head, texts.prompt or "".join(map(texts.of, trace.prompt_ids)), "trace")
    log.steps(trace.steps, 0, texts)
    log.figures(metrics_of(trace))
    finish = trace.tail.get("finish_reason")
    log.end(finish if finish in FINISHED else "cancelled", [str(note) for note in trace.tail.get("notes", ())])
    return log.text


def head(facts: Mapping[str, Any], prompt: str, run: str) -> dict[str, Any]:
    """``facts`` are those of a trace's head; ``run`` tells one run's log from another's."""
    settings = [[name, str(facts[key])] for key, name in _SETTINGS.items() if facts.get(key) is not None]
    sampling = facts.get("sampling")
    if isinstance(sampling, Mapping):
        settings += [[name.replace("_", "-"), str(value)] for name, value in sampling.items() if value is not None]
    block_size = facts.get("block_size")
    return {
        "type": "head",
        "run": run,
        "prompt": prompt,
        "block_size": block_size if isinstance(block_size, int) else None,
        "settings": settings,
        "help": figures.HELP,
    }


def step(event: StepEvent, texts: TokenTexts, at: int) -> dict[str, Any]:
    """One step; ``at`` is the number of its first committed token in the output."""
    fates = slot_fates(event)
    drafter, target = event.draft_probs or (), event.target_probs or ()
    slots = [
        [
            texts.of(token),
            fate,
            _rounded(drafter[slot]) if drafter else None,
            # What stands behind a rejected slot was judged after a token that never came: it says nothing.
            _rounded(target[slot]) if target and slot <= event.accepted else None,
        ]
        for slot, (token, fate) in enumerate(zip(event.drafted, fates, strict=True))
    ]
    return {
        "type": "step",
        "kind": event.kind,
        "index": event.index,
        "position": event.position,
        "anchor": [texts.of(event.anchor), texts.special(event.anchor)],
        "slots": slots,
        "next": [texts.of(event.committed[-1]), event.next_kind] if event.next_kind else None,
        "tokens": committed_tokens(event, texts, at),
        "draft": _rounded(event.draft_seconds),
        "verify": _rounded(event.verify_seconds),
        "overhead": _rounded(event.overhead_seconds),
        "story": story(event, texts),
    }


def committed_tokens(event: StepEvent, texts: TokenTexts, at: int) -> list[list[Any]]:
    """What a step committed, as running text; ``at`` is the number of its first token in the output."""
    own = len(event.committed) - event.accepted  # correction or bonus, or a token without a draft
    tokens = []
    for token, fate in zip(
        event.committed, ["accepted"] * event.accepted + [event.next_kind or "plain"] * own, strict=True
    ):
        special = texts.special(token)
        tokens.append([texts.of(token) if special else texts.running[at], fate, special])
        at += 1
    return tokens


def slot_fates(event: StepEvent) -> list[str]:
    """What became of each drafted token. A round cut by a stop or the budget has no correction, and what lies behind
    the cut was never judged: it counts as discarded, none of it as rejected."""
    rejected = event.accepted if event.next_kind == "correction" else None
    return [
        "accepted" if slot < event.accepted else "rejected" if slot == rejected else "discarded"
        for slot in range(len(event.drafted))
    ]


def story(event: StepEvent, texts: TokenTexts) -> str:
    """Why this step committed what it did, in words."""
    if event.kind == "prefill":
        prompt = _count(event.position + 1, "token")
        return (
            f"The target read the {prompt} of the prompt and wrote the first token itself. "
            "What it computed on the way, its hidden states, goes to the drafter, which guesses from now on."
        )
    if event.kind == "plain":
        return "No draft in this step: one pass of the target, one token."
    drafted, accepted = len(event.drafted), event.accepted
    them = "it" if drafted == 1 else "them all"
    begun = f"The drafter guessed {_count(drafted, 'token')} in one pass; the target checked {them} in one pass"
    if event.next_kind is None:
        rest = ", so what was guessed behind its last token is thrown away" if accepted < drafted else ""
        return f"{begun}. The answer ends with this round{rest}."
    own = f"{_quoted(texts, event.committed[-1])}"
    if event.next_kind == "bonus":
        which = "" if drafted == 1 else f" with all {drafted}"
        return f"{begun} and agreed{which}. That pass also tells what comes next: the bonus {own}."
    wrong = _quoted(texts, event.drafted[accepted])
    agreed = f"agreed with the first {accepted}" if accepted > 1 else "agreed with the first one" if accepted else ""
    if not accepted:
        which = "" if drafted == 1 else " with the first one already"
        return f"{begun} and disagreed{which}: not {wrong} but {own}."
    behind = drafted - accepted - 1
    rest = f" The {_count(behind, 'guess', 'guesses')} behind it rested on it and fell too." if behind else ""
    return f"{begun} and {agreed}. Then it wanted {own}, not {wrong}.{rest}"


def metrics_of(trace: Trace) -> Metrics:
    """The figures of a trace: recomputed from its steps; the clock's and the device's own as they were recorded."""
    recorded = trace.tail.get("metrics")
    known = recorded if isinstance(recorded, Mapping) else {}

    def number(name: str) -> float | None:
        value = known.get(name)
        return value if isinstance(value, (int, float)) and 0 <= value < float("inf") else None

    return Metrics.from_steps(
        trace.steps,
        num_prompt_tokens=len(trace.prompt_ids),
        ttft=number("ttft"),
        total_seconds=number("total_seconds"),
        peak_memory=int(number("peak_memory") or 0),
    )


def sentence(error: DFlashError) -> str:
    """An error as a page says it."""
    text = str(error)
    if text.partition(" ")[0].isalpha():  # and not the name of an option or a model
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "?")) else text + "."


def json_text(record: Any) -> str:
    """JSON that can stand anywhere in a page: it holds no ``<`` and no line separator."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _line(record: Any) -> str:
    return json_text(record) + "\n"


def _rounded(number: float) -> float:
    """Five significant digits are more than anyone reads."""
    return float(f"{number:.5g}")


def _quoted(texts: TokenTexts, token: int) -> str:
    return f"“{texts.of(token)}”"


def _count(number: int, one: str, more: str | None = None) -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"
