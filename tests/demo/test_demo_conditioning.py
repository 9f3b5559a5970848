"""A round looked into: the figures of a real pair in the form a page draws, and what it is told in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from demo_pairs import TEXTS
from gradio_dflash import conditioning
from gradio_dflash.conditioning import look_inside, reading
from gradio_dflash.view import json_text, slot_fates

from dflash.engine import Engine
from dflash.errors import UsageError
from dflash.probe import RoundProbe
from dflash.trace import Trace


@pytest.fixture(scope="module")
def trace(engine: Engine) -> Trace:
    options = {"max_new_tokens": 200, "detail": True}
    return Trace.of_request(engine, options, engine.generate("What will Tom say?", **options))


def look(engine: Engine, trace: Trace, index: int, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """What a page gets, through its JSON."""
    found: dict[str, Any] = json.loads(json_text(look_inside(engine, trace, index, stop)))
    return found


def rounds_of(trace: Trace) -> list[Any]:
    return [step for step in trace.steps if step.kind == "round"]


def test_every_round_drafted_again_is_the_round_that_was(engine: Engine, trace: Trace) -> None:
    rounds = rounds_of(trace)
    assert len({step.accepted for step in rounds}) > 3, "the drafter is right in some rounds and wrong in others"
    for event in (rounds[0], rounds[1], rounds[len(rounds) // 2], rounds[-1]):
        found = look(engine, trace, event.index)
        assert (found["state"], found["index"], found["rounds"]) == ("done", event.index, len(rounds))
        assert found["with"]["accepted"] == event.accepted
        assert found["slots"] == [text for text, _, _ in found["with"]["slots"]]
        assert found["slots"] == [trace.texts.of(token) for token in event.drafted]
        assert found["anchor"] == trace.texts.of(event.anchor)
        chances = [chance for _, _, chance in found["with"]["slots"]]
        np.testing.assert_allclose(chances, event.draft_probs, atol=1e-4)
        if event.next_kind == "correction":
            assert [fate for _, fate, _ in found["with"]["slots"]] == slot_fates(event)
            assert found["with"]["next"] == [trace.texts.of(event.committed[-1]), "correction"]
        assert found["wanted"][: len(event.committed)] == [trace.texts.of(token) for token in event.committed][:7]


def test_every_row_of_every_layer_is_one_whole(engine: Engine, trace: Trace) -> None:
    found = look(engine, trace, 3)
    count, context = len(found["slots"]), len(found["context"])
    assert len(found["layers"]) == 2 and found["earlier"] == 0
    for layer in found["layers"]:
        assert np.shape(layer["context"]) == (1 + count, context) and np.shape(layer["block"]) == (1 + count, 1 + count)
        whole = np.sum(layer["context"], axis=1) + layer["earlier"] + np.sum(layer["block"], axis=1)
        np.testing.assert_allclose(whole, 1, atol=1e-5 * (context + count + 2))
    assert np.max(found["layers"][0]["block"]) > 0.1 and np.max(found["layers"][0]["context"]) > 0.1


def test_the_context_is_the_text_before_the_anchor(engine: Engine, trace: Trace) -> None:
    event = rounds_of(trace)[2]
    ids = [*trace.prompt_ids, *trace.tail["token_ids"]]
    found = look(engine, trace, event.index)
    assert found["context"] == [trace.texts.of(token) for token in ids[: event.position]]
    assert found["context"][0] == "<|user|>" and "".join(found["context"]).startswith("<|user|>What will Tom say?")


def test_of_a_long_context_the_newest_tokens_are_shown(
    engine: Engine, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = look(engine, trace, 9)
    monkeypatch.setattr(conditioning, "SHOWN", 10)
    found = look(engine, trace, 9)
    assert found["context"] == whole["context"][-10:]
    assert found["earlier"] == len(whole["context"]) - 10 > 0
    for layer, full in zip(found["layers"], whole["layers"], strict=True):
        assert np.shape(layer["context"])[1] == 10
        np.testing.assert_allclose(
            layer["earlier"], np.sum(full["context"], axis=1) - np.sum(layer["context"], axis=1), atol=1e-3
        )
        np.testing.assert_allclose(layer["context"], np.array(full["context"])[:, -10:], atol=1e-6)


def test_without_its_conditioning_the_drafter_knows_no_text(engine: Engine, trace: Trace) -> None:
    found = look(engine, trace, 5)
    assert len(found["without"]["slots"]) == len(found["with"]["slots"])
    others = found["others"]
    assert [index for index, _, _ in others["rounds"]] == [step.index for step in rounds_of(trace)]
    assert [accepted for _, accepted, _ in others["rounds"]] == [step.accepted for step in rounds_of(trace)]
    assert others["mean_with"] == pytest.approx(1 + np.mean([one for _, one, _ in others["rounds"]]), abs=1e-3)
    assert others["mean_without"] == pytest.approx(1 + np.mean([one for _, _, one in others["rounds"]]), abs=1e-3)
    assert others["mean_without"] < others["mean_with"]
    assert f"{others['mean_with']:.2f} tokens with it and {others['mean_without']:.2f} without" in found["reading"]


def test_of_many_rounds_some_are_drafted_again(engine: Engine, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "OTHERS", 5)
    every = [step.index for step in rounds_of(trace)]
    indices = [index for index, _, _ in look(engine, trace, 2)["others"]["rounds"]]
    assert len(indices) == 5 and indices[0] == every[0] and indices[-1] == every[-1] and indices == sorted(set(indices))
    assert set(indices) <= set(every)


def test_stop_breaks_the_other_rounds_off_and_the_round_itself_stands(engine: Engine, trace: Trace) -> None:
    none = look(engine, trace, 2, stop=lambda: True)
    assert none["others"] == {"rounds": [], "mean_with": None, "mean_without": None}
    assert none["with"] == look(engine, trace, 2)["with"] and "rounds below" not in none["reading"]
    left = iter(range(18))
    some = look(engine, trace, 2, stop=lambda: next(left, None) is None)["others"]["rounds"]
    assert 0 < len(some) < len(rounds_of(trace))


@pytest.mark.parametrize("index", [0, -1, 10_000])
def test_a_round_that_is_none_is_refused_with_those_that_are(engine: Engine, trace: Trace, index: int) -> None:
    last = rounds_of(trace)[-1].index
    with pytest.raises(UsageError, match=rf"there is no round {index}; there are 1 to {last}$"):
        look(engine, trace, index)


@pytest.mark.parametrize("options", [{"max_new_tokens": 1}, {"max_new_tokens": 20, "speculate": False}], ids=str)
def test_an_answer_without_rounds_is_refused(engine: Engine, options: dict[str, Any]) -> None:
    short = Trace.of_request(engine, options, engine.generate("Hi?", **options))
    with pytest.raises(UsageError, match="this answer has no rounds to look into; ask for more than one token"):
        look(engine, short, 1)


@pytest.mark.parametrize("prompt", ["Shout!", "Sample?"])
def test_control_tokens_halves_of_characters_and_samples_are_looked_into(engine: Engine, prompt: str) -> None:
    from dflash.types import SamplingParams

    sampling = SamplingParams(1.0, seed=2) if prompt == "Sample?" else SamplingParams()
    options = {"max_new_tokens": 40, "detail": True, "sampling": sampling}
    other = Trace.of_request(engine, options, engine.generate(prompt, **options))
    for event in rounds_of(other)[::6]:
        found = look(engine, other, event.index)
        assert found["with"]["accepted"] == event.accepted
        assert all(text for text in (*found["context"], *found["slots"], *found["wanted"]))
    assert TEXTS["!"].startswith("Before <img") and "<img" not in json_text(found)


def probed(accepted: int, blind: int, count: int = 4) -> RoundProbe:
    tokens, chances = tuple(range(count)), (0.5,) * count
    return RoundProbe(1, 1, np.zeros((1, 5, 6)), tokens, chances, accepted, tokens, chances, blind, tokens)


def test_the_reading_counts_what_is_there() -> None:
    words = reading(probed(3, 1), [(3, 1), (2, 0), (0, 0)])
    assert "has 3 of 4 guesses accepted in this round" in words and "replaced by zeros it has 1:" in words
    assert words.endswith("Over the 3 rounds below, a round brings 2.67 tokens with it and 1.33 without.")
    assert "rounds below" not in reading(probed(3, 1), [(3, 1)]) and "rounds below" not in reading(probed(0, 0), [])
