"""Text over the engine's ids: whole characters, stop strings across rounds, what each way of ending shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine_cases import BLOCK, ignore_silent_rounds, scripted_pair
from tiny_models import TinyPair

pytestmark = ignore_silent_rounds

TEXT = "Olá — 東京 🙂! one, two, three; naïve fim."


@pytest.mark.parametrize("right", [0, 2, BLOCK], ids=["wrong", "two right", "right"])
@pytest.mark.parametrize("block", [2, 5, 9])
def test_text_streams_in_whole_characters_and_joins_to_the_whole(pair: TinyPair, block: int, right: int) -> None:
    engine = scripted_pair(pair, TEXT, block=block, right=right)
    stream = engine.stream("?", max_new_tokens=len(TEXT.encode()))
    pieces = [step.text for step in stream]
    assert "".join(pieces) == stream.text == stream.result().text == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_output_that_ends_inside_a_character_shows_it_as_unfinished(pair: TinyPair) -> None:
    result = scripted_pair(pair, "a🙂").generate("?", max_new_tokens=3)
    assert result.text == "a\ufffd"
    assert "".join(step.text for step in result.steps) == result.text


@pytest.mark.parametrize("right", [0, 1, BLOCK], ids=["wrong", "one right", "right"])
@pytest.mark.parametrize("before", range(BLOCK + 2))
def test_a_stop_string_is_found_across_tokens_and_rounds(pair: TinyPair, before: int, right: int) -> None:
    shown = "abcdefgh"[:before]
    engine = scripted_pair(pair, shown + "STOP" + "more text", right=right)
    stream = engine.stream("?", max_new_tokens=30, stop="STOP")
    pieces = [step.text for step in stream]
    result = stream.result()
    assert result.text == "".join(pieces) == shown
    assert bytes(result.token_ids).decode() == shown + "STOP"
    assert result.finish_reason == "stop"
    plain = engine.generate("?", max_new_tokens=30, stop="STOP", speculate=False)
    assert (plain.text, plain.token_ids) == (result.text, result.token_ids)


def test_the_beginning_of_a_stop_string_that_never_ends_is_shown_at_last(pair: TinyPair) -> None:
    for budget, expected in ((5, "abcST"), (6, "abcSTO"), (12, "abcSTOx SToS")):
        result = scripted_pair(pair, "abcSTOx SToSTxx").generate("?", max_new_tokens=budget, stop=["STOP"])
        assert (result.text, result.finish_reason) == (expected, "length")


def test_cancelling_shows_what_was_held_back(pair: TinyPair) -> None:
    stream = scripted_pair(pair, "abSTOPxyz", right=2).stream("?", stop="STOP")
    assert [next(stream).text, next(stream).text] == ["a", "b"]
    stream.close()
    assert bytes(stream.result().token_ids).decode() == stream.result().text == "abST"


def test_the_stop_id_leaves_no_text_wherever_it_comes_from(pair: TinyPair) -> None:
    engine = scripted_pair(pair, "abc.def")
    assert engine.generate("?", stop_token_ids=[ord(".")]).text == "abc"
    engine.target.info = replace(engine.target.info, stop_token_ids=(ord("c"),))
    result = engine.generate("?")
    assert (result.text, result.token_ids) == ("ab", list(b"abc"))
    assert engine.generate("?", max_new_tokens=7, ignore_eos=True).text == "abc.def"


def test_stop_strings_stop_ids_and_budget_compete_and_the_first_wins(pair: TinyPair) -> None:
    engine = scripted_pair(pair, "abcdefghij")
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"stop": "de", "stop_token_ids": [ord("h")]}, "abc", "stop"),
        ({"stop": "gh", "stop_token_ids": [ord("d")]}, "abc", "stop"),
        ({"stop": "gh", "stop_token_ids": [ord("h")], "max_new_tokens": 4}, "abcd", "length"),
        ({"stop": ["zz", "fg", "ef"]}, "abcd", "stop"),
    ]
    for options, text, reason in cases:
        result = engine.generate("?", **{"max_new_tokens": 10, **options})
        assert (result.text, result.finish_reason) == (text, reason)


def test_text_ids_and_messages_are_the_same_prompt(pair: TinyPair) -> None:
    engine = scripted_pair(pair, "answer", prompt="question")
    prompts: list[Any] = ["question", list(b"question"), [{"role": "user", "content": "question"}]]
    results = [engine.generate(prompt, max_new_tokens=6) for prompt in prompts]
    assert [result.text for result in results] == ["answer"] * 3
    assert all(result.prompt_ids == list(b"question") for result in results)
