"""What a page shows, read from its elements, beside what a trace says that it must show."""

from __future__ import annotations

import json
import math
from typing import Any

from dflash.trace import Trace
from dflash.types import StepEvent

READ = """(root) => {
  const text = (element, selector) => {
    const found = element.querySelector(selector);
    return found ? found.textContent : null;
  };
  return {
    title: text(root, ".where h3"),
    moment: root.querySelector(".blocks").dataset.moment,
    cells: [...root.querySelectorAll(".cells .cell")].map((cell) => ({
      classes: [...cell.classList],
      word: text(cell, ".word"),
      mark: text(cell, ".top .mark"),
      drafter: text(cell, ".odds.drafter .value"),
      target: text(cell, ".odds.target .value"),
      fall: cell.querySelector(".fall.out") ? text(cell, ".fall.out .chip bdi") : null,
      own: Boolean(cell.querySelector(".fall.out.correction, .fall.out.bonus")),
    })),
    terms: [...root.querySelectorAll(".sum .term")].map((term) => term.textContent),
    total: text(root, ".sum .total"),
    story: text(root, ".story"),
  };
}"""

# Tokens of the running text: [text, fate, place of the step, special].
TOKENS = """(root) => [...root.querySelectorAll(".written .text .token")].map((token) => [
  token.textContent, token.dataset.fate, Number(token.parentElement.dataset.place), token.classList.contains("special"),
])"""

# Contrast (WCAG 2) between the text of an element and what lies behind it; opacity of ancestors counts.
CONTRAST = """(element) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colour = (css) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, share, below) => below.map((value, k) => top[k] * share + value * (1 - share));
  const chain = [];
  for (let at = element; at; at = at.parentElement) chain.unshift(at);
  let back = [255, 255, 255];
  const groups = [];
  for (const at of chain) {
    const style = getComputedStyle(at);
    if (Number(style.opacity) < 1) groups.unshift([back, Number(style.opacity)]);
    const [r, g, b, a] = colour(style.backgroundColor);
    back = over([r, g, b], a, back);
  }
  const [r, g, b, a] = colour(getComputedStyle(element).color);
  let text = over([r, g, b], a, back);
  for (const [below, share] of groups) [text, back] = [over(text, share, below), over(back, share, below)];
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [one, two] = [light(text), light(back)].sort((x, y) => y - x);
  return (one + 0.05) / (two + 0.05);
}"""


def contrast(locator: Any) -> float:
    return float(locator.first.evaluate(CONTRAST))


def read(player: Any) -> dict[str, Any]:
    """The block view of a player."""
    return dict(player.evaluate(READ))


def visible(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "◌"


def check_chance(shown: str, chance: float | None, where: str) -> None:
    """A percentage on the page against the number, as precise as it is written."""
    if chance is None:
        assert shown == "–", where
    elif shown.startswith("<"):
        assert 0 < chance < 0.001, (where, shown, chance)
    else:
        number = shown.rstrip("%")
        assert math.isclose(float(number), 100 * chance, abs_tol=0.051 if "." in number else 0.51), (
            where,
            shown,
            chance,
        )


def check_block(shown: dict[str, Any], event: StepEvent, trace: Trace) -> None:
    """The block view of a round at its end against the event: cells, chances, the target's own token, and the sum."""
    words = {token: visible(trace.texts.of(token)) for token in (event.anchor, *event.drafted, *event.committed)}
    assert shown["title"] == (
        "Prefill" if event.kind == "prefill" else f"{event.kind.capitalize()} {event.index}"
    ).replace("Plain", "Plain step")
    assert shown["moment"] == "done"
    anchor, *cells = shown["cells"]
    assert anchor["word"] == words[event.anchor]
    own = len(event.committed) - event.accepted
    if event.kind == "round":
        check_cells(cells, event, words)
        expected = {"accepted": event.accepted, event.next_kind: own}
    else:
        assert [cell["fall"] for cell in cells] == [words[event.committed[0]]]
        expected = {"plain": 1}
    assert shown["terms"] == [f"{count} {fate}" for fate, count in expected.items() if count]
    total = sum(int(term.split()[0]) for term in shown["terms"])
    assert total == len(event.committed)
    assert shown["total"] == f"{total} token{'s' * (total != 1)} for one pass of the target"
    assert len(shown["story"]) > 30


def check_cells(cells: list[dict[str, Any]], event: StepEvent, words: dict[int, str]) -> None:
    *slots, bonus = cells
    assert [cell["word"] for cell in slots] == [words[token] for token in event.drafted]
    for slot, (cell, token) in enumerate(zip(slots, event.drafted, strict=True)):
        accepted = slot < event.accepted
        rejected = slot == event.accepted and event.next_kind == "correction"
        fate, mark = ("accepted", "✓") if accepted else ("rejected", "✗") if rejected else ("discarded", "·")
        where = f"round {event.index}, slot {slot + 1}"
        assert fate in cell["classes"] and cell["mark"] == mark, where
        assert event.draft_probs and event.target_probs
        check_chance(cell["drafter"], event.draft_probs[slot], where)
        check_chance(cell["target"], event.target_probs[slot] if slot <= event.accepted else None, where)
        assert cell["fall"] == (words[token] if accepted else words[event.committed[-1]] if rejected else None), where
        assert cell["own"] == rejected, where
    won = event.next_kind == "bonus"
    assert bonus["fall"] == (words[event.committed[-1]] if won else None)
    assert ("bonus" in bonus["classes"]) == won


def busiest_task(browser: Any, page: Any, act: Any) -> float:
    """The longest task of the page's main thread while ``act()`` runs, in milliseconds of that thread's own time: a
    machine that is busy with something else does not count."""
    browser.start_tracing(page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
    try:
        act()
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tasks = [
        event["tdur"] / 1000
        for event in events
        if event["name"] == "RunTask"
        and "tdur" in event
        and names.get((event["pid"], event["tid"])) == "CrRendererMain"
    ]
    assert len(tasks) > 20, "the browser told of no tasks"
    return float(max(tasks))
