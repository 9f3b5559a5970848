"""A race as a page shows it: two arms, each step at its time, and what came of it in words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from demo_events import END, Bytes, Story
from gradio_dflash.race import race_view, reading
from gradio_dflash.view import json_text

from dflash.comparison import Comparison
from dflash.metrics import break_even
from dflash.types import GenerationResult


def plain(text: str = "abcdef€", seconds: float = 0.7) -> GenerationResult:
    """Plain decoding: a step a byte."""
    story, ids = Story(), text.encode()
    story.first(ids[:1], seconds=0.1)
    for byte in ids[1:]:
        story.plain([byte], seconds=0.06)
    result = story.result()
    return replace(result, metrics=replace(result.metrics, total_seconds=seconds))


def drafted(text: str = "abcdef€", seconds: float = 0.35) -> GenerationResult:
    """The same in rounds of three accepted guesses and a correction."""
    story, ids, at = Story(), text.encode(), 1
    story.first(ids[:1], seconds=0.1)
    while at < len(ids):
        right, own = ids[at : at + 3], ids[at + 3 : at + 4]
        story.round([*right, *([7] if own else [])], len(right), own or None, times=(0.02, 0.05, 0.01))
        at += 4
    result = story.result()
    return replace(result, metrics=replace(result.metrics, total_seconds=seconds))


def view(ours: GenerationResult, theirs: GenerationResult, dtype: str = "float32") -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(json_text(race_view(Comparison(ours, theirs, dtype), Bytes())))  # type: ignore[arg-type]
    return shown


def test_both_arms_show_every_token_at_its_time() -> None:
    ours, theirs = drafted(), plain()
    shown = view(ours, theirs)
    assert shown["state"] == "done" and [arm["name"] for arm in shown["arms"]] == ["plain", "dflash"]
    for arm, result in zip(shown["arms"], (theirs, ours), strict=True):
        times = [seconds for seconds, _ in arm["steps"]]
        assert times == sorted(times) and times[0] > 0
        assert times[-1] == pytest.approx(arm["seconds"]) == result.metrics.total_seconds
        assert [len(tokens) for _, tokens in arm["steps"]] == [len(step.committed) for step in result.steps]
        assert "".join(text for _, tokens in arm["steps"] for text, _, special in tokens if not special) == result.text
        assert (arm["tokens"], arm["tau"]) == (9, result.metrics.mean_acceptance_length)
        assert arm["tokens_per_second"] == pytest.approx(9 / arm["seconds"]) and arm["ttft"] == result.metrics.ttft
    fates = {fate for _, tokens in shown["arms"][1]["steps"] for _, fate, _ in tokens}
    assert fates == {"plain", "accepted", "correction"}
    assert {fate for _, tokens in shown["arms"][0]["steps"] for _, fate, _ in tokens} == {"plain"}


def test_time_between_steps_is_spread_over_them() -> None:
    shown = view(drafted(seconds=0.52), plain())
    assert [seconds for seconds, _ in shown["arms"][1]["steps"]] == pytest.approx(
        [0.2, 0.36, 0.52]
    )  # twice 0.1, 0.08 …


def test_who_was_faster_and_at_what_price() -> None:
    shown = view(drafted(), plain())
    assert shown["speedup"] == pytest.approx(2.0)
    assert shown["break_even"] == pytest.approx(0.08 / 0.06) == break_even(drafted().metrics, plain().metrics)
    assert (shown["identical"], shown["first_difference"]) == (True, None)
    assert shown["verdict"] == "Identical tokens: yes."
    assert shown["reading"] == (
        "DFlash took 0.35 s and plain decoding 0.70 s for the same request. A round costs as much as 1.33 plain steps "
        "here and brought 4.00 tokens (τ), so drafting paid."
    )
    assert {"speedup", "break_even", "mean_acceptance_length"} <= set(shown["help"])


def test_a_slower_drafter_is_told_so() -> None:
    shown = view(drafted(seconds=1.4), plain())
    assert shown["speedup"] == pytest.approx(0.5)
    assert shown["reading"].endswith(
        "The rounds paid, and what came before them, the drafter's reading of the prompt too, cost more."
    )
    rounds = drafted(seconds=1.4)
    costly = view(replace(rounds, metrics=replace(rounds.metrics, draft_seconds=1.0)), plain())
    assert costly["reading"].endswith("(τ). Where τ is below the cost of a round, drafting is the slower way.")


@pytest.mark.parametrize(("dtype", "why"), [("float32", ""), ("bfloat16", "16-bit arithmetic")])
def test_other_tokens_are_named_and_nothing_is_called_the_same_text(dtype: str, why: str) -> None:
    shown = view(drafted("abXdef", seconds=1.4), plain("abcdef"), dtype)
    assert (shown["identical"], shown["first_difference"]) == (False, 3)
    assert shown["verdict"].startswith("Identical tokens: no (first difference at token 3") and why in shown["verdict"]
    assert "the same text" not in shown["reading"]


def test_sixteen_bits_promise_no_more_than_this_output() -> None:
    assert "this output" in view(drafted(), plain(), "bfloat16")["verdict"]


def test_nothing_decoded_is_nothing_measured() -> None:
    nothing = Story().result()
    shown = view(nothing, nothing)
    assert shown["speedup"] is None and shown["break_even"] is None
    assert [arm["steps"] for arm in shown["arms"]] == [[], []]
    assert shown["reading"] == "There was nothing to decode, so nothing was measured."


def test_an_answer_of_one_token_has_no_round_to_compare() -> None:
    story = Story()
    story.first([END], seconds=0.1)
    shown = view(story.result("stop"), story.result("stop"))
    assert shown["reading"].endswith("The answer ended before there was a round and a plain step to compare.")
    assert shown["arms"][0]["steps"] == [[0.1, [["<|256|>", "plain", True]]]]
    assert shown["arms"][0]["tau"] is None and shown["break_even"] is None


def test_steps_without_any_time_are_shown_at_the_start() -> None:
    story = Story()
    story.first("a", seconds=0.0)
    shown = view(story.result(), story.result())
    assert [arm["steps"][0][0] for arm in shown["arms"]] == [0.0, 0.0]
    assert shown["speedup"] is None


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    shown = race_view(Comparison(drafted("ab"), plain("ab"), "float32"), None)
    assert shown["arms"][0]["steps"][1][1] == [["<98>", "plain", False]]
    assert reading(Comparison(drafted("ab"), plain("ab"), "float32")) == shown["reading"]
