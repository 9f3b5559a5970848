"""The pure function from events to a page: what every kind of step shows, and that nothing else can get out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from demo_events import CONTROL, END, Bytes, Story, checked, records, running_text
from gradio_dflash import figures, view
from gradio_dflash.view import Log, json_text, page_lines, sentence
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import UsageError
from dflash.metrics import Metrics
from dflash.token_texts import TokenTexts
from dflash.trace import Trace
from dflash.types import StepEvent


def shown(event: StepEvent, at: int = 0, before: Sequence[StepEvent] = ()) -> dict[str, Any]:
    """A step as a page gets it."""
    texts = TokenTexts.of_steps([*before, event], Bytes())  # type: ignore[arg-type]
    return view.step(event, texts, at + sum(len(step.committed) for step in before))


def told(event: StepEvent) -> str:
    return str(shown(event)["story"])


# Fates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(4))
def test_a_correction_at_any_slot(accepted: int) -> None:
    step = shown(Story().round("wxyz", accepted, "!"))
    behind = 3 - accepted
    fates = ["accepted"] * accepted + ["rejected"] + ["discarded"] * behind
    assert [(text, fate) for text, fate, _, _ in step["slots"]] == list(zip("wxyz", fates, strict=True))
    assert step["next"] == ["!", "correction"]
    accepted_tokens = [[letter, "accepted", False] for letter in "wxyz"[:accepted]]
    assert step["tokens"] == [*accepted_tokens, ["!", "correction", False]]


def test_a_bonus_follows_a_block_without_a_fault() -> None:
    step = shown(Story().round("wxyz", 4, "!"))
    assert [fate for _, fate, _, _ in step["slots"]] == ["accepted"] * 4
    assert step["next"] == ["!", "bonus"]
    assert [fate for _, fate, _ in step["tokens"]] == ["accepted"] * 4 + ["bonus"]


@pytest.mark.parametrize("accepted", range(1, 5))
def test_a_round_cut_by_a_stop_or_the_budget_rejects_nothing(accepted: int) -> None:
    step = shown(Story().round("wxyz", accepted, None))
    assert [fate for _, fate, _, _ in step["slots"]] == ["accepted"] * accepted + ["discarded"] * (4 - accepted)
    assert step["next"] is None
    assert [fate for _, fate, _ in step["tokens"]] == ["accepted"] * accepted


@pytest.mark.parametrize("kind", ["prefill", "plain"])
def test_what_the_target_writes_alone_is_plain(kind: str) -> None:
    story = Story()
    step = shown(story.first("A") if kind == "prefill" else story.plain("A"))
    assert (step["kind"], step["slots"], step["next"]) == (kind, [], None)
    assert step["tokens"] == [["A", "plain", False]]


def test_a_step_tells_its_place_its_anchor_and_its_times() -> None:
    story = Story("Hi?")
    first = story.first("A")
    event = story.round("bc", 1, "d", times=(0.0012345678, 0.02, 0.0))
    step = shown(event, before=[first])
    assert (step["type"], step["kind"], step["index"], step["position"]) == ("step", "round", 1, 3)
    assert step["anchor"] == ["A", False]
    assert (step["draft"], step["verify"], step["overhead"]) == (0.0012346, 0.02, 0.0)


# Probabilities -----------------------------------------------------------------------------------------------------


def test_probabilities_are_rounded_and_the_targets_end_at_the_rejected_slot() -> None:
    event = Story().round(
        "wxyz", 1, "!", draft_probs=(0.123456789, 1.0, 1e-12, 0.5), target_probs=(0.9, 0.25, 0.7, 1.0)
    )
    slots = shown(event)["slots"]
    assert [ours for _, _, ours, _ in slots] == [0.12346, 1.0, 1e-12, 0.5]
    assert [theirs for _, _, _, theirs in slots] == [0.9, 0.25, None, None]


def test_after_a_whole_block_every_probability_counts() -> None:
    event = Story().round("wx", 2, "!", draft_probs=(0.5, 0.5), target_probs=(0.25, 0.75))
    assert [theirs for _, _, _, theirs in shown(event)["slots"]] == [0.25, 0.75]


def test_without_detail_there_are_none() -> None:
    assert all(slot[2:] == [None, None] for slot in shown(Story().round("wx", 1, "!"))["slots"])


# Texts -------------------------------------------------------------------------------------------------------------

TEXT = "A naïve — 東京 👩‍👩‍👧\n\n\tif a <b> && \"c\": 'd'\r\n  </script><!-- \u2028 end"


def cut(text: str, sizes: Sequence[int]) -> Trace:
    """A trace whose rounds accept so many bytes of ``text`` each, in turn; some characters fall into two rounds."""
    story, ids, at, turn = Story(), list(text.encode()), 1, 0
    story.first(ids[:1])
    while at < len(ids):
        right = ids[at : at + sizes[turn % len(sizes)]]
        own = ids[at + len(right) : at + len(right) + 1]
        wrong = [7] * (turn % 3) if own else []
        story.round([*right, *wrong], len(right), own or None)
        at, turn = at + len(right) + len(own), turn + 1
    return story.trace("stop")


@pytest.mark.parametrize("sizes", [[0], [1], [1, 2, 3], [7], [0, 5]], ids=str)
def test_running_text_joins_to_the_exact_text(sizes: list[int]) -> None:
    lines = page_lines(cut(TEXT, sizes))
    checked(lines)
    assert running_text(lines) == TEXT


def test_control_tokens_are_named_and_marked_and_no_text() -> None:
    story = Story()
    first = story.first("a")
    step = shown(story.round([CONTROL, 98, END], 3, None), before=[first])
    assert step["tokens"] == [["<|257|>", "accepted", True], ["b", "accepted", False], ["<|256|>", "accepted", True]]
    assert shown(Story().round([END], 1, "b"))["slots"][0][0] == "<|256|>"
    assert running_text(page_lines(story.trace())) == "ab"


def test_a_stop_token_as_correction_is_marked_too() -> None:
    step = shown(Story().round("xy", 1, [END]))
    assert step["next"] == ["<|256|>", "correction"]
    assert step["tokens"][-1] == ["<|256|>", "correction", True]


def test_half_a_character_is_spelt_in_the_block_and_empty_in_the_text() -> None:
    step = shown(Story().round("é€".encode()[:4], 3, [0x82]))
    assert [text for text, *_ in step["slots"]] == ["‹C3›", "‹A9›", "‹E2›", "‹82›"]
    assert [text for text, *_ in step["tokens"]] == ["", "é", "", "\ufffd"]


def test_an_answer_that_ends_in_mid_character_is_the_engines_text() -> None:
    story = Story()
    story.first("a")
    story.round("€".encode()[:2], 2, None)
    assert running_text(page_lines(story.trace())) == story.result().text == "a\ufffd"


def test_markup_in_any_place_never_leaves_json() -> None:
    story = Story("<img src=x>")
    story.first("<")
    story.round("/scr<", 3, "<")
    head = {"target": "<b>", "draft": "</script>", "block_size": 5, "sampling": {"temperature": "<i>"}}
    lines = page_lines(story.trace("stop", head, notes=["a <note>"]))
    checked(lines)
    read = records(lines)
    assert read[0]["prompt"] == "<img src=x>" and ["target", "<b>"] in read[0]["settings"]
    assert read[-1]["notes"] == ["a <note>"]
    assert running_text(lines) == "</sc<"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_json_text_is_read_as_what_it_was_and_ends_no_element(value: Any) -> None:
    text = json_text(value)
    assert json.loads(text) == value
    assert "<" not in text and "\n" not in text and text.isascii()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused_rather_than_sent(number: float) -> None:
    with pytest.raises(ValueError):
        json_text({"seconds": number})


# Stories -----------------------------------------------------------------------------------------------------------


def test_the_prefill_says_what_it_read() -> None:
    assert told(Story("Hi?").first()).startswith("The target read the 3 tokens of the prompt and wrote the first token")
    assert "the 1 token of the prompt" in told(Story("H").first())


def test_a_plain_step_says_so() -> None:
    assert told(Story().plain("a")) == "No draft in this step: one pass of the target, one token."


@pytest.mark.parametrize(
    ("drafted", "accepted", "own", "end"),
    [
        ("wxyz", 0, "!", "and disagreed with the first one already: not “w” but “!”."),
        ("wxyz", 1, "!", "first one. Then it wanted “!”, not “x”. The 2 guesses behind it rested on it and fell too."),
        ("wxyz", 2, "!", "first 2. Then it wanted “!”, not “y”. The 1 guess behind it rested on it and fell too."),
        ("wxyz", 3, "!", "and agreed with the first 3. Then it wanted “!”, not “z”."),
        ("wxyz", 4, "!", "and agreed with all 4. That pass also tells what comes next: the bonus “!”."),
        ("wxyz", 2, None, "ends with this round, so what was guessed behind its last token is thrown away."),
        ("wxyz", 4, None, "checked them all in one pass. The answer ends with this round."),
        ("w", 1, "!", "checked it in one pass and agreed. That pass also tells what comes next: the bonus “!”."),
        ("w", 0, "!", "checked it in one pass and disagreed: not “w” but “!”."),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_round_says_why_it_committed_what_it_did(drafted: str, accepted: int, own: str | None, end: str) -> None:
    story = told(Story().round(drafted, accepted, own))
    guessed = "1 token" if len(drafted) == 1 else f"{len(drafted)} tokens"
    assert story.startswith(f"The drafter guessed {guessed} in one pass; the target checked ")
    assert story.endswith(end)


# The log -----------------------------------------------------------------------------------------------------------


def made() -> Story:
    story = Story()
    story.first("A")
    story.round("bcd", 3, "e")
    story.round("fgh", 1, "i")
    story.plain("j")
    story.round("klm", 2, None)
    return story


def test_lines_only_grow_and_are_the_same_whether_steps_come_alone_or_at_once() -> None:
    steps, texts, log = made().steps, TokenTexts(Bytes()), Log()  # type: ignore[arg-type]
    for at in range(len(steps)):
        before = log.text
        texts.take(steps[at : at + 1])
        log.steps(steps[: at + 1], at, texts)
        assert log.text.startswith(before) and len(log.text) > len(before) and log.text.endswith("\n")
    at_once = Log()
    at_once.steps(steps, 0, TokenTexts.of_steps(steps, Bytes()))  # type: ignore[arg-type]
    assert records(log.text, "step") == records(at_once.text, "step")


def test_figures_come_with_the_first_step_and_then_not_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = [100.0], made().steps
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log, texts = Log(), TokenTexts.of_steps(steps, Bytes())  # type: ignore[arg-type]
    counts = []
    for at in range(len(steps)):
        log.steps(steps[: at + 1], at, texts)
        counts.append(len(records(log.text, "figures")))
        now[0] += 0.2
    assert counts == [1, 1, 1, 2, 2]
    log.steps(steps, len(steps), texts)
    assert records(log.text, "figures")[1]["values"]["num_spec_steps"] == 2


def test_a_page_is_a_head_its_steps_figures_and_an_end() -> None:
    lines = page_lines(made().trace("stop", {"block_size": 4}, notes=["one", "two"]))
    checked(lines)
    kinds = [record["type"] for record in records(lines)]
    assert kinds[0] == "head" and kinds[-2:] == ["figures", "end"] and kinds.count("step") == 5
    assert records(lines)[-1] == {
        "type": "end",
        "finish": "stop",
        "text": view.FINISHED["stop"],
        "notes": ["one", "two"],
    }
    assert records(lines)[0]["block_size"] == 4 and records(lines)[0]["prompt"] == "Hi?"


@pytest.mark.parametrize("finish", view.FINISHED)
def test_every_end_has_a_sentence(finish: Any) -> None:
    end = records(page_lines(made().trace(finish)))[-1]
    assert end["finish"] == finish and end["text"].endswith((".", "stands."))


def test_the_head_names_the_settings_in_order_and_explains_every_figure() -> None:
    facts = {
        "sampling": {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "seed": None},
        "verify": "match", "draft": "D", "target": "T", "block_size": 8, "backend": "torch", "unknown": "x",
    }  # fmt: skip
    head = view.head(facts, "p", "r")
    assert head["settings"] == [
        ["target", "T"], ["drafter", "D"], ["backend", "torch"], ["block size", "8"], ["rule", "match"],
        ["temperature", "0.5"], ["top-k", "0"], ["top-p", "1.0"],
    ]  # fmt: skip
    assert set(head["help"]) >= set(figures.values(Metrics.from_steps([])))
    assert all(len(words) == 2 and words[1].endswith(".") for words in head["help"].values())


def test_figures_are_those_of_metrics() -> None:
    metrics = replace(made().result().metrics, ttft=0.125, total_seconds=2.0, peak_memory=99)
    values = figures.values(metrics, speedup=1.5)
    known = metrics.to_dict()
    assert values == {name: known[name] for name in values if name != "speedup"} | {"speedup": 1.5}
    assert {"mean_acceptance_length", "draft_acceptance_rate", "ttft", "tpot", "peak_memory"} <= set(values)
    assert figures.values(replace(metrics, peak_memory=0))["peak_memory"] is None
    empty = figures.values(Metrics.from_steps([]))
    assert empty["mean_acceptance_length"] is None and empty["ttft"] is None and empty["num_tokens"] == 0
    json_text(empty)


# Traces --------------------------------------------------------------------------------------------------------------


def test_a_saved_trace_shows_what_it_showed(tmp_path: Path) -> None:
    trace = cut(TEXT, [0, 4])
    trace.save(tmp_path / "trace.jsonl.gz")
    assert page_lines(Trace.load(tmp_path / "trace.jsonl.gz")) == page_lines(trace)


def test_the_clocks_figures_are_the_recorded_ones_and_the_others_are_counted_again() -> None:
    trace = made().trace()
    recorded = {"ttft": 9.0, "total_seconds": 10.0, "peak_memory": 11, "mean_acceptance_length": 99.0}
    values = records(page_lines(replace(trace, tail=trace.tail | {"metrics": recorded})), "figures")[-1]["values"]
    assert (values["ttft"], values["total_seconds"], values["peak_memory"]) == (9.0, 10.0, 11)
    assert values["mean_acceptance_length"] == pytest.approx(8 / 3)
    assert values["num_prompt_tokens"] == 3 and values["end_to_end_tokens_per_second"] == 1.0


@pytest.mark.parametrize(
    "recorded",
    [None, 5, [], {"ttft": float("nan")}, {"total_seconds": float("inf")}, {"ttft": -1, "peak_memory": "much"},
     {"total_seconds": None, "peak_memory": float("nan")}, {"total_seconds": 0.0}, {"ttft": 10**400}],
    ids=str,
)  # fmt: skip
def test_recorded_figures_that_are_none_are_not_believed(recorded: Any) -> None:
    trace = made().trace()
    lines = page_lines(replace(trace, tail=trace.tail | {"metrics": recorded}))
    checked(lines)
    assert records(lines, "figures")[-1]["values"]["num_spec_steps"] == 3


def test_an_older_trace_without_texts_shows_numbers() -> None:
    trace = made().trace()
    lines = page_lines(replace(trace, tail={key: value for key, value in trace.tail.items() if key != "texts"}))
    checked(lines)
    assert records(lines, "step")[1]["slots"][0][0] == f"<{ord('b')}>"
    assert records(lines, "step")[1]["tokens"][0] == [f"<{ord('b')}>", "accepted", False]


def test_a_trace_with_a_bare_head_and_end_is_shown_too() -> None:
    lines = page_lines(Trace({}, [], [], {}))
    assert [record["type"] for record in records(lines)][-1] == "end" and records(lines)[-1]["notes"] == []
    checked(page_lines(Trace({"sampling": 5, "block_size": "8", "target": ["x"]}, [1], made().steps, {"notes": [5]})))


# Anything ------------------------------------------------------------------------------------------------------------

TOKENS = st.integers(0, 260)
CHANCES = st.floats(0, 1)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Generations as an engine could make them."""
    story = Story(draw(st.text(max_size=4)) or "?")
    story.first([draw(TOKENS)])
    for last in [*([False] * draw(st.integers(0, 6))), draw(st.booleans())]:
        if draw(st.integers(0, 4)) == 0:
            story.plain([draw(TOKENS)])
            continue
        drafted = draw(st.lists(TOKENS, min_size=1, max_size=7))
        accepted = draw(st.integers(1 if last else 0, len(drafted)))
        chances = st.lists(CHANCES, min_size=len(drafted), max_size=len(drafted)).map(tuple)
        detail = {"draft_probs": draw(chances), "target_probs": draw(chances)} if draw(st.booleans()) else {}
        times = draw(st.tuples(*[st.floats(0, 1e6)] * 3))
        story.round(drafted, accepted, None if last else [draw(TOKENS)], times, **detail)
    return story


@settings(max_examples=60, deadline=None)
@given(stories(), st.sampled_from(list(view.FINISHED)))
def test_any_generation_keeps_to_the_format(story: Story, finish: Any) -> None:
    trace = story.trace(finish)
    lines = page_lines(trace)
    checked(lines)
    assert running_text(lines) == story.result().text
    steps = records(lines, "step")
    assert [len(step["tokens"]) for step in steps] == [len(step.committed) for step in story.steps]
    assert [step["index"] for step in steps] == list(range(len(steps)))
    values = records(lines, "figures")[-1]["values"]
    assert values == json.loads(json.dumps(figures.values(story.result().metrics)))


def test_an_error_is_a_sentence_but_for_the_names_it_begins_with() -> None:
    assert sentence(UsageError("the budget is 0; it must be 1")) == "The budget is 0; it must be 1."
    assert sentence(UsageError("block_size is 1; it must be 2")) == "block_size is 1; it must be 2."
    assert sentence(UsageError("qwen is no pair; did you mean qwen3-8b?")) == "Qwen is no pair; did you mean qwen3-8b?"
