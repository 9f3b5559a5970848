"""Engines and runs behind the page: what visitors get, and how a run is stopped."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from demo_events import checked, records, running_text
from demo_pairs import MARKUP, STORY, slow
from demo_runs import ASK, QUICK, Background, Loads, Making, answered, begins_well, failed
from gradio_dflash import studio as studio_module
from gradio_dflash import view
from gradio_dflash.studio import LONGEST, Request, Studio
from gradio_dflash.view import page_lines, sentence

from dflash.engine import Engine
from dflash.errors import BackendError, DFlashError, ModelNotFoundError, UsageError
from dflash.trace import Trace

# A generation -------------------------------------------------------------------------------------------------------


def test_a_generation_to_its_end(make_studio: Making, engine: Engine) -> None:
    studio = make_studio()
    lines = answered(studio, ASK)
    alone = engine.generate(ASK.prompt, max_new_tokens=200, detail=True)
    assert running_text(lines) == alone.text == STORY
    steps = records(lines, "step")
    assert [len(step["tokens"]) for step in steps] == [len(step.committed) for step in alone.steps]
    assert all(slot[2] is not None for step in steps for slot in step["slots"])
    read = records(lines)
    assert [read[0]["type"], read[1]["type"]] == ["status", "head"] and read[0]["text"] == "loading reciting on torch"
    assert read[1]["prompt"] == ASK.prompt and read[1]["block_size"] == 8 and len(read[1]["run"]) == 8
    assert ["rule", "greedy"] in read[1]["settings"] and ["budget", "200"] in read[1]["settings"]
    assert (read[-1]["type"], read[-1]["finish"], read[-2]["type"]) == ("end", "stop", "figures")
    figures, metrics = read[-2]["values"], alone.metrics.to_dict()
    for name in ("mean_acceptance_length", "draft_acceptance_rate", "num_spec_steps", "num_tokens", "num_prompt_tokens",
                 "acceptance_rate_per_position", "acceptance_histogram"):  # fmt: skip
        assert figures[name] == metrics[name]
    assert figures["ttft"] > 0 and figures["total_seconds"] > figures["ttft"]


def test_a_saved_answer_shows_the_very_steps_that_were_shown_live(make_studio: Making, tmp_path: Path) -> None:
    studio = make_studio()
    for prompt, budget in (("Shout!", 200), ("Hm?", 50), ("Shout!", 7)):
        lines = answered(studio, Request(prompt, "reciting", max_new_tokens=budget))
        answer = studio.answer("v")
        assert answer is not None and answer.log.text == lines
        answer.trace.save(tmp_path / "trace.jsonl")
        again = page_lines(Trace.load(tmp_path / "trace.jsonl"))
        assert records(again, "step") == records(lines, "step")
        assert records(again, "figures")[-1] == records(lines, "figures")[-1]
        assert records(again)[-1] == records(lines)[-1]
        assert records(again)[0]["settings"] == records(lines, "head")[0]["settings"]


@pytest.mark.parametrize("budget", (30, 37, 44))
def test_an_answer_cut_anywhere_is_the_engines_text(make_studio: Making, engine: Engine, budget: int) -> None:
    lines = answered(make_studio(), Request("Shout!", "reciting", max_new_tokens=budget))
    assert running_text(lines) == engine.generate("Shout!", max_new_tokens=budget).text
    assert records(lines)[-1]["finish"] == "length"


def test_control_tokens_and_markup_come_as_data(make_studio: Making) -> None:
    lines = answered(make_studio(), Request("Shout!", "reciting", max_new_tokens=200))
    assert running_text(lines) == MARKUP.replace("<|system|>", "")
    special = [text for step in records(lines, "step") for text, _, control in step["tokens"] if control]
    assert special == ["<|system|>", "<eos>"]


def test_the_same_seed_gives_the_same_tokens(make_studio: Making) -> None:
    studio = make_studio()
    sampled = Request("Hi?", "reciting", temperature=1.2, top_p=0.95, seed=4, max_new_tokens=40, block_size=4)
    texts = [running_text(answered(studio, sampled)) for _ in range(2)]
    assert texts[0] == texts[1] != STORY[: len(texts[0])]
    head = records(answered(studio, sampled), "head")[0]
    assert head["block_size"] == 4 and {("rule", "match"), ("temperature", "1.2"), ("seed", "4")} <= set(
        map(tuple, head["settings"])
    )


def test_the_first_request_loads_and_the_next_one_does_not(
    make_studio: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, studio = Loads(monkeypatch), make_studio()
    assert records(answered(studio))[0]["type"] == "status"
    assert records(answered(studio))[0]["type"] == "head"
    assert len(loads.engines) == 1 and loads.options[0]["device"] == "cpu" and loads.options[0]["backend"] == "torch"


def test_updates_are_throttled_and_at_most_one_a_round(make_studio: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    studio, now = make_studio(), [0.0]
    studio.load("reciting")
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(studio_module, "time", clock)
    monkeypatch.setattr(view, "time", clock)

    def updates(seconds_a_pass: float) -> list[int]:
        forward = studio.load("reciting").target.forward

        def timed(*inputs: Any, **options: Any) -> Any:
            now[0] += seconds_a_pass
            return forward(*inputs, **options)

        with monkeypatch.context() as patch:
            patch.setattr(studio.load("reciting").target, "forward", timed)
            return [len(records(text, "step")) for text in studio.generate(replace(ASK, max_new_tokens=100), "v")]

    still, slowly, quickly = updates(0.0), updates(1.0), updates(0.03)
    steps = still[-1]
    assert still == [0, 1, steps], "the head, the prefill, the end"
    assert slowly == [*range(steps + 1), steps], "one a round"
    assert 4 < len(quickly) < steps / 2 and quickly[-1] == steps
    assert all(after - before <= 4 for before, after in pairwise(quickly))


# What cannot be done ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (Request("", "reciting"), UsageError, "the prompt is empty; give at least one token"),
        (Request(" \n", "reciting"), UsageError, "the prompt is empty"),
        (Request("x" * 2000, "reciting"), UsageError, "the target's context holds 1024"),
        (Request("Hi?", "reciting", max_new_tokens=0), UsageError, "the budget is 0; it must be between 1 and 4096"),
        (Request("Hi?", "reciting", max_new_tokens=LONGEST + 1), UsageError, "the budget is 4097"),
        (Request("Hi?", "reciting", block_size=1), UsageError, "block_size is 1; a block is"),
        (Request("Hi?", "reciting", block_size=-4), UsageError, "block_size is -4"),
        (Request("Hi?", "reciting", rule="tree"), UsageError, "verify is 'tree'; the torch backend has greedy, match"),
        (Request("Hi?", "reciting", rule="greedy", temperature=1.0), UsageError, "needs temperature 0"),
        (Request("Hi?", "reciting", temperature=-1.0), UsageError, "temperature is -1.0"),
        (Request("Hi?", "reciting", temperature=None), UsageError, "temperature is None"),  # type: ignore[arg-type]
        (Request("Hi?", "reciting", top_p=0.0), UsageError, "top_p is 0.0"),
        (Request("Hi?", "reciting", seed=-1), UsageError, "seed is -1"),
        (Request("Hi?", "nobody"), ModelNotFoundError, "no pair 'nobody' here; there are reciting, smollm2-135m"),
        (Request("Hi?", "qwen3-8b"), ModelNotFoundError, "`dflash models --fetch qwen3-8b --backend torch` brings it"),
        (Request("Hi?", "reciting", backend="jax"), BackendError, "there is no backend 'jax'"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_cannot_be_done_is_one_sentence_in_the_log_and_as_an_error(
    make_studio: Making, request_: Request, error: type[DFlashError], words: str
) -> None:
    studio = make_studio()
    for kind, begin in (("generate", studio.generate), ("race", studio.race)):
        shown, raised = failed(begin(request_, "v"))
        assert isinstance(raised, error) and words in str(raised) and len(str(raised).splitlines()) == 1
        if kind == "generate":
            assert records(shown[-1])[-1] == {"type": "error", "text": sentence(raised)}
        else:
            assert json.loads(shown[-1]) == {"state": "error", "text": sentence(raised)}
    assert answered(studio, replace(QUICK, max_new_tokens=3)), "and the next request works"


def test_a_backend_that_is_missing_is_named_with_what_brings_it(
    make_studio: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str = "auto") -> Any:
        raise BackendError(f"the {name} backend needs torch, which is not installed; pip install 'dflash-lab[torch]'")

    studio = make_studio()
    monkeypatch.setattr(studio_module, "find_backend", missing)
    _, error = failed(studio.generate(Request("Hi?", "reciting", backend="torch"), "v"))
    assert "pip install 'dflash-lab[torch]'" in str(error)
    assert studio.rules() == [], "a page can be made all the same, for replaying"


def test_pairs_on_this_machine_are_offered_and_the_named_one_first(make_studio: Making, tmp_path: Path) -> None:
    assert make_studio().pairs() == ["reciting", "smollm2-135m"]
    assert make_studio(other={"pair": str(tmp_path)}).pairs() == ["reciting", "other", "smollm2-135m"]
    assert Studio().pairs() == ["smollm2-135m"]
    assert make_studio().rules() == ["greedy", "match", "rejection"]


# Stopping -----------------------------------------------------------------------------------------------------------


def test_stop_in_mid_generation_ends_at_the_next_round(make_studio: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    Loads(monkeypatch, lambda engine: slow(engine, 0.05))
    studio = make_studio()
    run = Background(studio.generate(ASK, "v"))
    run.wait(lambda: run.steps >= 3)
    before = run.steps
    begun = time.monotonic()
    log = studio.stop("v")
    assert time.monotonic() - begun < 5
    run.join(10)
    assert not run.is_alive() and not run.error
    checked(log)
    assert records(log)[-1]["finish"] == "cancelled" and log == run.shown[-1]
    assert before <= len(records(log, "step")) <= before + 4
    assert STORY.startswith(running_text(log)) and running_text(log)
    answer = studio.answer("v")
    assert answer is not None and answer.trace.tail["finish_reason"] == "cancelled" and answer.log.text == log
    assert studio.stop("v") == log, "stopping twice changes nothing"
    assert STORY.startswith(running_text(answered(studio, Request("Hi?", "reciting", max_new_tokens=9))))


def test_a_run_whose_page_was_cut_off_in_mid_round_is_summed_up_by_stop(
    make_studio: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that cancels closes the generator wherever it stands. The run is slow enough to be cut off at all."""
    Loads(monkeypatch, lambda engine: slow(engine, 0.05))
    studio = make_studio()
    for updates in range(1, 4):
        generating = studio.generate(ASK, "v")
        for _ in range(updates):
            next(generating)
        generating.close()
        assert studio._runs["v"].watch is None, "nothing but the studio holds the engine"
        log = studio.stop("v")
        assert records(log)[-1]["type"] == "end" and records(log)[-1]["finish"] == "cancelled"
        assert studio.stop("v") == log
    answer = studio.answer("v")
    assert answer is not None and answer.log.text == log
    assert begins_well(answered(studio))


def test_stop_before_anything_was_asked_is_nothing(make_studio: Making) -> None:
    assert make_studio().stop("stranger") == ""


def test_stop_after_a_race_still_shows_the_answer(make_studio: Making) -> None:
    studio = make_studio()
    lines = answered(studio, Request("Hi?", "reciting", max_new_tokens=9))
    list(studio.race(Request("Hi?", "reciting", max_new_tokens=5), "v"))
    assert studio.stop("v") == lines
    list(studio.conditioning(1, "v"))
    assert studio.stop("v") == lines


def test_leaving_ends_the_run_and_forgets_it(make_studio: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    Loads(monkeypatch, lambda engine: slow(engine, 0.05))
    studio = make_studio()
    run = Background(studio.generate(ASK, "v"))
    run.wait(lambda: run.steps >= 2)
    studio.leave("v")
    run.join(10)
    assert not run.is_alive() and not run.error and run.steps < 10
    assert studio.answer("v") is None and studio.stop("v") == ""
    assert not studio._runs and not studio._answers, "nothing is kept of a visitor who has gone"
    studio.leave("v")
    with pytest.raises(UsageError, match="there is no answer yet to look into; generate one first"):
        list(studio.conditioning(1, "v"))


def test_a_second_request_of_the_same_visitor_ends_the_first(make_studio: Making) -> None:
    studio = make_studio()
    first = studio.generate(ASK, "v")
    while not records(next(first), "step"):
        pass
    second = answered(studio, Request("Shout!", "reciting", max_new_tokens=30))
    last = list(first)[-1]
    assert records(last)[-1]["finish"] == "cancelled" and STORY.startswith(running_text(last))
    assert records(second)[-1]["finish"] == "length"
    assert studio.stop("v") == second


def test_stopping_a_race_says_that_there_is_nothing_to_compare(
    make_studio: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    Loads(monkeypatch, lambda engine: slow(engine, 0.02))
    studio = make_studio()
    run = Background(studio.race(ASK, "v"))
    run.wait(lambda: run.shown and "Plain decoding:" in run.shown[-1])
    studio.stop("v")
    run.join(10)
    assert json.loads(run.shown[-1]) == {"state": "error", "text": studio_module.STOPPED_RACE} and not run.error


# Several visitors ---------------------------------------------------------------------------------------------------


def test_two_visitors_in_turn_have_their_own_answers(make_studio: Making, engine: Engine) -> None:
    studio = make_studio()
    one, other = Request("One?", "reciting", max_new_tokens=60), Request("Other!", "reciting", max_new_tokens=60)
    for _ in range(2):
        for request, visitor in ((one, "a"), (other, "b")):
            lines = answered(studio, request, visitor)
            assert running_text(lines) == engine.generate(request.prompt, max_new_tokens=60).text
    for request, visitor in ((one, "a"), (other, "b")):
        answer = studio.answer(visitor)
        assert answer is not None and answer.request == request
        assert answer.trace.tail["token_ids"] == engine.generate(request.prompt, max_new_tokens=60).token_ids
    found = json.loads(list(studio.conditioning(1, "a"))[-1])
    assert "".join(found["context"]).endswith("One?") and found["anchor"] == "To"
    studio.leave("a")
    assert studio.answer("b") is not None


def test_a_visitor_whose_page_was_cut_off_and_the_next_one_never_meet_on_the_device(
    make_studio: Making, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    inside, meetings = [0], list[int]()

    def watch(loaded: Engine) -> None:
        forward = loaded.target.forward

        def watched(*inputs: Any, **options: Any) -> Any:
            inside[0] += 1
            meetings.append(inside[0])
            time.sleep(0.005)
            try:
                return forward(*inputs, **options)
            finally:
                inside[0] -= 1

        monkeypatch.setattr(loaded.target, "forward", watched)

    Loads(monkeypatch, watch)
    studio = make_studio()
    cut = Background(studio.generate(ASK, "a"))
    cut.wait(lambda: cut.steps >= 2)
    other = Background(studio.generate(Request("Other!", "reciting", max_new_tokens=40), "b"))
    log = studio.stop("a")
    for thread in (cut, other):
        thread.join(30)
        assert not thread.is_alive() and not thread.error
    assert set(meetings) == {1}
    assert records(log)[-1]["finish"] == "cancelled" and STORY.startswith(running_text(log))
    assert running_text(other.shown[-1]) == engine.generate("Other!", max_new_tokens=40).text


# Races and looking inside -------------------------------------------------------------------------------------------


def test_a_race_runs_both_arms_one_after_the_other(make_studio: Making) -> None:
    states = [json.loads(text) for text in make_studio().race(Request("Hi?", "reciting", max_new_tokens=60), "v")]
    assert [state["state"] for state in states] == ["running"] * (len(states) - 1) + ["done"]
    assert states[0]["text"] == "loading reciting on torch" and states[1]["text"].startswith("warming up")
    arms = [state["arm"] for state in states if "arm" in state]
    assert set(arms) == {"plain", "dflash"} and arms == sorted(arms, reverse=True)
    done = states[-1]
    assert done["identical"] and [arm["tokens"] for arm in done["arms"]] == [60, 60]
    assert done["arms"][0]["tau"] is None and done["arms"][1]["tau"] > 2
    assert done["speedup"] == pytest.approx(done["arms"][0]["seconds"] / done["arms"][1]["seconds"])


def test_a_race_without_a_seed_gives_both_arms_the_same_one(make_studio: Making) -> None:
    request = Request("Hi?", "reciting", temperature=1.0, seed=None, max_new_tokens=30)
    assert json.loads(list(make_studio().race(request, "v"))[-1])["identical"] is True


def test_looking_inside_is_about_the_last_answer(make_studio: Making) -> None:
    studio = make_studio()
    _, error = failed(studio.conditioning(1, "v"))
    assert str(error) == "there is no answer yet to look into; generate one first"
    answered(studio)
    states = [json.loads(text) for text in studio.conditioning(4, "v")]
    assert [state["state"] for state in states] == ["running", "done"] and states[-1]["index"] == 4
    shown, error = failed(studio.conditioning(1000, "v"))
    assert json.loads(shown[-1]) == {"state": "error", "text": sentence(error)} and "there is no round 1000" in str(
        error
    )
