"""The served page in a real browser, as visitors use it: watching, stopping, waiting, what goes wrong, and what they
take away. A small pair answers, so that every answer is known."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import PHONE, PLAYER, QUESTION, Site, expect, generate, open_tab
from browser_reading import TOKENS, check_block, contrast, read
from demo_pairs import MARKUP, STORY
from gradio_dflash import words

from dflash.trace import Trace

pytest_plugins = ["browser_fixtures"]
PROMPT = "#dflash-prompt textarea"
ENDED = f"{PLAYER} >> .status[data-kind=ended]"
COUNT = f"{PLAYER} >> .written .token"
FATES = ("accepted", "correction", "plain")  # that the small pair's answer has; test_demo_browser_page has all


def wait(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    """For what happens at the server."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_tokens_appear_while_it_runs_each_with_its_fate(site: Site, visit: Callable[..., Any], shoot: Any) -> None:
    page = visit(site.url)
    shoot(page, "watch-empty")
    site.pause = 0.15
    generate(page, QUESTION, wait=False)
    counts: list[int] = []
    while not page.locator(ENDED).count():
        counts.append(page.locator(COUNT).count())
        if len(counts) == 8:
            shoot(page, "watch-running")
            site.pause = 0.04
    assert len(set(counts)) >= 4, "the text came all at once"
    tokens = page.locator(PLAYER).evaluate(TOKENS)
    answer = site.studio.load("small").generate(QUESTION, max_new_tokens=128)
    assert "".join(text for text, _, _, special in tokens if not special) == answer.text == STORY
    own = {"prefill": "plain", "plain": "plain"}
    fates = [
        fate
        for step in answer.steps
        for fate in ["accepted"] * step.accepted
        + [own.get(step.kind) or step.next_kind] * (len(step.committed) - step.accepted)
    ]
    assert [fate for _, fate, _, _ in tokens] == fates
    assert set(FATES) <= set(fates)
    assert page.locator(COUNT).last.text_content() == "<eos>"
    shoot(page, "watch-ended")


@pytest.fixture(scope="module")
def answered(site: Site, chromium: Any) -> Iterator[Any]:
    """A page with an answer, and its trace."""
    from browser_fixtures import visits

    with visits(chromium) as visit:
        page = visit(site.url, accept_downloads=True)
        generate(page, QUESTION)
        page.wait_for_selector("#dflash-trace-file:not([disabled])")
        yield page, site.answer.trace


def test_blocks_and_figures_are_those_of_the_events(answered: Any, site: Site) -> None:
    page, trace = answered
    player = page.locator(PLAYER)
    page.locator(f"{PLAYER} >> .timeline .bar").first.click()
    check_block(read(player), trace.steps[0], trace)
    for event in trace.steps[1:]:
        page.keyboard.press("ArrowRight")
        check_block(read(player), event, trace)
    metrics = trace.tail["metrics"]
    cards = page.locator(f"{PLAYER} >> .cards .card")
    shown = dict(cards.evaluate_all("(all) => all.map((it) => [it.dataset.key, it.innerText.split('\\n')])"))
    assert f"{metrics['mean_acceptance_length']:.2f}" in shown["mean_acceptance_length"]
    assert f"{100 * metrics['draft_acceptance_rate']:.1f}%" in shown["draft_acceptance_rate"]
    assert str(metrics["num_tokens"]) in shown["num_tokens"]
    assert str(metrics["num_spec_steps"]) in shown["num_spec_steps"]
    # Definitions come on hover and on focus.
    tip = page.locator(".dflash-tip:visible")
    cards.nth(0).hover()
    expect(tip).to_have_text(re.compile("^Committed tokens ÷ rounds"))
    page.keyboard.press("Tab")
    cards.nth(1).focus()
    expect(tip).to_have_text("Accepted draft tokens ÷ drafted tokens.")


def test_dark_by_the_switch(answered: Any, shoot: Any) -> None:
    page, _ = answered
    button = page.locator(".dflash.intro .theme")
    button.click()
    assert page.evaluate("document.body.classList.contains('dark')")
    page.locator(f"{PLAYER} >> .timeline .bar").last.click()
    page.wait_for_timeout(400)  # transitions of colours
    found = {fate: contrast(page.locator(f"{PLAYER} >> .token[data-fate={fate}]")) for fate in FATES}
    found |= {
        at: contrast(page.locator(at)) for at in (".dflash.intro p", f"{PLAYER} >> .story", f"{PLAYER} >> .cards .note")
    }
    assert min(found.values()) >= 4.5, found
    shoot(page, "watch-dark")
    button.click()
    assert not page.evaluate("document.body.classList.contains('dark')")


def test_what_is_saved_shows_the_same(answered: Any, site: Site, visit: Callable[..., Any], tmp_path: Path) -> None:
    page, trace = answered
    with page.expect_download() as download:
        page.click("#dflash-trace-file")
    download.value.save_as(tmp_path / "saved.jsonl")
    with page.expect_download() as download:
        page.click("#dflash-page-file")
    download.value.save_as(tmp_path / "saved.html")
    assert Trace.load(tmp_path / "saved.jsonl").steps == trace.steps
    live = page.locator(PLAYER).evaluate(TOKENS)

    open_tab(page, "Replay")
    page.set_input_files("#dflash-upload input[type=file]", tmp_path / "saved.jsonl")
    page.wait_for_selector(ENDED)
    exported = visit((tmp_path / "saved.html").as_uri(), offline=True)
    exported.wait_for_selector(ENDED)
    place = max(range(len(trace.steps)), key=lambda at: len(trace.steps[at].committed))
    for shown in (page, exported):
        assert shown.locator(PLAYER).evaluate(TOKENS) == live
        shown.locator(f"{PLAYER} >> .timeline .bar[data-place='{place}']").click()
        check_block(read(shown.locator(PLAYER)), trace.steps[place], trace)
    (tmp_path / "other.jsonl").write_text('{"not": "a trace"}\n')
    page.get_by_role("button", name="Clear").or_(page.get_by_role("button", name="Remove")).first.click()
    page.set_input_files("#dflash-upload input[type=file]", tmp_path / "other.jsonl")
    expect(page.locator(".toast-body")).to_contain_text("is not a whole trace of format 1.")
    exported.get_by_role("button", name="to the first step").click()
    exported.get_by_role("button", name="play", exact=True).click()
    expect(exported.locator(".where h3")).to_have_text("Round 1")


def test_every_control_explains_itself(site: Site, visit: Callable[..., Any], shoot: Any) -> None:
    page = visit(site.url)
    page.get_by_role("button", name="Settings").first.click()
    tip = page.locator(".dflash-tip:visible")
    expect(page.locator("#dflash-budget")).to_be_visible()
    names = {"Race": "race", "Conditioning": "round look", "Replay": "upload replay"}
    explained = set()
    for tab in ("Watch", *names):
        open_tab(page, tab)
        for name, sentence in words.CONTROLS.items():
            control = page.locator(f"#{name}")
            if name in explained or not (control.count() and control.is_visible()):
                continue
            control.hover()
            expect(tip).to_have_text(sentence)
            explained.add(name)
    assert explained == set(words.CONTROLS)
    page.keyboard.press("Tab")
    page.focus("#dflash-temperature input[type=range]")
    expect(tip).to_have_text(words.CONTROLS["dflash-temperature"])
    shoot(page, "settings")


def test_stop_ends_it_at_the_next_round(site: Site, visit: Callable[..., Any], shoot: Any) -> None:
    page = visit(site.url)
    site.pause = 0.3
    generate(page, QUESTION, wait=False)
    page.wait_for_selector(f"{COUNT} >> nth=2")
    page.click("#dflash-stop")
    page.wait_for_selector(f"{PLAYER} >> .status[data-kind=cancelled]")
    assert page.inner_text(f"{PLAYER} >> .status .word").startswith("Stopped by hand")
    shoot(page, "watch-stopped")
    stopped = "".join(page.locator(f"{PLAYER} >> .written .token:not(.special)").all_text_contents())
    assert stopped and STORY.startswith(stopped) and len(stopped) < len(STORY)
    site.pause = 0
    generate(page, QUESTION)  # and the next one runs to its end
    assert "".join(page.locator(f"{PLAYER} >> .written .token:not(.special)").all_text_contents()) == STORY


def test_a_mistake_is_told_in_a_sentence_and_the_next_request_works(
    site: Site, visit: Callable[..., Any], shoot: Any
) -> None:
    page = visit(site.url)
    page.fill(PROMPT, "")
    page.click("#dflash-generate")
    toast = page.locator(".toast-body")
    expect(toast).to_contain_text("The prompt is empty; give at least one token.")
    expect(toast).to_have_count(1)
    shoot(page, "watch-mistake")
    generate(page, QUESTION)
    assert page.locator(f"{PLAYER} >> .error:visible").count() == 0


def test_a_second_visitor_waits_and_is_told_so(site: Site, visit: Callable[..., Any], shoot: Any) -> None:
    first, second = visit(site.url), visit(site.url)
    site.pause = 0.4
    generate(first, QUESTION, wait=False)
    first.wait_for_selector(COUNT)
    second.fill(PROMPT, "And what comes then?")
    second.click("#dflash-generate")
    place = second.locator("#dflash-player .progress-text:visible")
    expect(place).to_contain_text(re.compile(r"queue: \d+/\d+"))
    box = place.bounding_box()
    seen = "([x, y]) => Boolean(document.elementsFromPoint(x, y).find((it) => it.matches('.progress-text')))"
    place.evaluate("(it) => (it.style.pointerEvents = 'auto')")  # what is cut off is found at no point
    assert second.evaluate(seen, [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2])
    shoot(second, "watch-queued")
    site.pause = 0
    second.wait_for_selector(ENDED)
    for page in (first, second):
        page.wait_for_selector(ENDED)
        assert "".join(page.locator(f"{PLAYER} >> .written .token:not(.special)").all_text_contents()) == STORY


def test_closing_the_page_ends_its_generation(site: Site, visit: Callable[..., Any]) -> None:
    page = visit(site.url)
    site.pause = 0.4
    generate(page, QUESTION, wait=False)
    page.wait_for_selector(COUNT)
    run = list(site.studio._runs.values())[-1]
    generation = run.watch.generation
    page.close()
    wait(run.ended.is_set)
    steps = len(generation.steps)
    assert generation.text != STORY
    wait(lambda: run not in site.studio._runs.values())
    threading.Event().wait(0.6)  # longer than a round
    assert len(generation.steps) == steps


def test_markup_is_shown_and_never_run(site: Site, visit: Callable[..., Any], shoot: Any) -> None:
    page = visit(site.url)
    asked = '<img src=x onerror="window.hacked=1"></script><script>window.hacked=2</script>!'
    generate(page, asked)
    assert page.text_content(f"{PLAYER} >> .given") == asked
    shown = "".join(page.locator(f"{PLAYER} >> .written .token").all_text_contents())
    assert shown.replace("<eos>", "") == MARKUP
    for _ in range(12):
        page.locator(f"{PLAYER} >> .stage").focus()
        page.keyboard.press("ArrowRight")
    page.locator(f"{PLAYER} >> .written .token").nth(4).hover()
    assert page.locator(".dflash img, .dflash-tip img, .dflash script").count() == 0
    assert page.evaluate("window.hacked") is None
    shoot(page, "watch-markup")


def test_on_a_phone_everything_is_in_reach(site: Site, visit: Callable[..., Any], shoot: Any) -> None:
    page = visit(site.url, viewport=PHONE, has_touch=True)
    for name in ("Watch", "Race", "Conditioning", "Replay", "Watch"):
        open_tab(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
    page.fill(PROMPT, QUESTION)
    page.tap("#dflash-generate")
    page.wait_for_selector(ENDED)
    page.locator(f"{PLAYER} >> .keypad button.next").tap()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for control in (
        "#dflash-generate",
        "#dflash-stop",
        f"{PLAYER} >> .keypad button.last",
        f"{PLAYER} >> .live-button",
    ):
        box = page.locator(control).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"], control
    shoot(page, "watch-phone")
