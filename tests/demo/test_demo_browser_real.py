"""The served page with the real pair: an answer, a race, and a look into the conditioning."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import PLAYER, Site, choose, expect, generate, look_inside, open_tab, race
from browser_reading import TOKENS, check_block, read

pytest_plugins = ["browser_fixtures"]
pytestmark = pytest.mark.slow
QUESTION = "Write a Python function that adds two numbers."
BUDGET = 32


@pytest.fixture(scope="module")
def page(site: Site, chromium: Any) -> Iterator[Any]:
    """With an answer of the bundled pair."""
    from browser_fixtures import visits

    with visits(chromium) as visit:
        page = visit(site.url)
        choose(page, "dflash-pair", "smollm2-135m")
        page.fill("#dflash-budget input[type=number]", str(BUDGET))
        generate(page, QUESTION)
        yield page


def test_it_answers_word_for_word(page: Any, site: Site, shoot: Callable[..., None]) -> None:
    answer = site.studio.load("smollm2-135m").generate(QUESTION, max_new_tokens=BUDGET)
    tokens = page.locator(PLAYER).evaluate(TOKENS)
    assert "".join(text for text, _, _, special in tokens if not special) == answer.text
    assert "\n" in answer.text
    assert "smollm2-135m" in page.inner_text(f"{PLAYER} >> .status summary")
    best = max(answer.steps, key=lambda step: step.accepted)
    page.locator(f"{PLAYER} >> .timeline .bar[data-place='{best.index}']").click()
    trace = site.answer.trace
    assert [step.committed for step in trace.steps] == [step.committed for step in answer.steps]
    check_block(read(page.locator(PLAYER)), trace.steps[best.index], trace)
    shoot(page, "real-watch")


def test_a_race_compares_and_replays(page: Any, shoot: Callable[..., None]) -> None:
    race(page)
    lanes = page.locator(".race .lane")
    plain, ours = (lanes.nth(at).locator(".token:not(.special)").all_text_contents() for at in (0, 1))
    assert plain == ours and "".join(plain)
    states = lanes.locator(".state").all_text_contents()
    seconds = [float(re.search(r"finished after ([\d.]+) s", state).group(1)) for state in states]  # type: ignore[union-attr]
    result = page.locator(".race .result")
    assert "✓ yes" in result.locator(".card.same").inner_text()
    shown = float(re.search(r"([\d.]+) ×", result.locator(".card.speed").inner_text()).group(1))  # type: ignore[union-attr]
    assert shown == pytest.approx(seconds[0] / seconds[1], abs=0.02)
    assert "break-even" in result.locator(".card.need").inner_text()
    shoot(page, "real-race")

    slider = page.get_by_label("time in the race")
    slider.evaluate("(it) => { it.value = it.max / 3; it.dispatchEvent(new Event('input', { bubbles: true })); }")
    part = [lanes.nth(at).locator(".token").count() for at in (0, 1)]
    assert all(0 < count < len(plain) for count in part), part
    # Where the faster one has just ended, whatever their start: earlier, nearly equal ones may still change places.
    slider.evaluate(
        "(it, at) => { it.value = at; it.dispatchEvent(new Event('input', { bubbles: true })); }", min(seconds) + 0.01
    )
    share = [float(lanes.nth(at).locator(".progress").get_attribute("aria-valuenow")) for at in (0, 1)]
    assert (share[1] > share[0]) == (seconds[1] < seconds[0]), "who is faster is ahead"
    page.get_by_role("button", name="4× real time").click()
    page.get_by_role("button", name="restart from the beginning").click()
    expect(lanes.nth(0).locator(".state")).to_have_text(re.compile("writes|reads"))
    shoot(page, "real-race-running")
    expect(page.locator(".race .play")).to_have_attribute("aria-label", "play again from the beginning", timeout=30_000)
    assert lanes.nth(1).locator(".token:not(.special)").all_text_contents() == ours


def test_the_conditioning_is_shown_and_switched_off(page: Any, site: Site, shoot: Callable[..., None]) -> None:
    look_inside(page)
    panel = page.locator(".conditioning:visible")
    shoot(page, "real-conditioning")
    layers = site.studio.load("smollm2-135m").drafter.config.num_hidden_layers
    rows = panel.locator(".layer")
    assert rows.count() == 1 + layers
    seen = []
    slots = panel.get_by_role("radiogroup", name="slot", exact=True).get_by_role("radio")
    for slot in (1, slots.count() - 1):
        slots.nth(slot).click()
        for row in range(rows.count()):
            widths = (
                rows.nth(row)
                .locator(".stack .part")
                .evaluate_all("(all) => all.map((it) => Number(it.style.flexGrow))")
            )
            assert sum(widths) == pytest.approx(1, abs=0.001)
        seen.append(rows.nth(0).locator(".figures").inner_text())
    assert seen[0] != seen[1], "another slot looks elsewhere"
    rows.nth(layers).click()
    assert "draft layer" in panel.locator(".heat .heading").inner_text()
    means = [float(value) for value in panel.locator(".means .value").all_text_contents()]
    assert means[0] > means[1] >= 1, "without its conditioning the drafter is worth less"
    with_, without = (panel.locator(f".grid .{name} .big").inner_text() for name in ("with", "without"))
    accepted = [int(re.match(r"\d+", text).group()) for text in (with_, without)]  # type: ignore[union-attr]
    index = int(page.input_value("#dflash-round input"))
    event = site.answer.trace.steps[index]
    assert accepted[0] == event.accepted >= accepted[1]


def test_no_answer_no_look(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    open_tab(page, "Conditioning")
    page.click("#dflash-look")
    expect(page.locator(".toast-body")).to_contain_text("There is no answer yet to look into; generate one first.")
