"""What a studio keeps in memory, what a failure leaves behind, and what a long answer costs."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from demo_events import Bytes, Story, records, running_text
from demo_runs import ASK, Loads, Making, answered, begins_well, failed
from gradio_dflash import studio as studio_module
from gradio_dflash import view
from gradio_dflash.studio import UPDATE_EVERY, Request, Studio
from gradio_dflash.view import sentence

import dflash
from dflash.engine import Engine
from dflash.errors import BackendError
from dflash.generation import Generation
from dflash.types import StepEvent

# Engines ------------------------------------------------------------------------------------------------------------


def test_another_pair_takes_the_place_of_the_one_before(
    make_studio: Making, other_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, studio = Loads(monkeypatch), make_studio(other=other_models)
    answered(studio, Request("Hi?", "reciting", max_new_tokens=9), "a")
    lines = answered(studio, Request("Hi?", "other", max_new_tokens=90), "b")
    assert running_text(lines) == "Another pair, another text."
    assert records(lines)[0]["text"] == "loading other on torch" and records(lines, "head")[0]["block_size"] == 4
    gc.collect()
    assert [reference() is None for reference in loads.engines] == [True, False]
    found = json.loads(list(studio.conditioning(1, "a"))[-1])
    assert found["state"] == "done", "an answer of the pair before can still be looked into"
    assert len(loads.engines) == 3


def test_the_engine_before_is_gone_when_the_next_one_is_loaded(
    make_studio: Making, other_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Loads(monkeypatch)
    studio, alive = make_studio(other=other_models), list[bool]()
    answered(studio, Request("Hi?", "reciting", max_new_tokens=9), "a")
    old = weakref.ref(studio.load("reciting").target.model)

    def load(**options: Any) -> Engine:
        alive.append(old() is not None)
        return dflash.load(**options)

    monkeypatch.setattr(studio_module, "load", load)
    answered(studio, Request("Hi?", "other", max_new_tokens=9), "b")
    assert alive == [False]


def test_a_pair_that_cannot_be_loaded_leaves_none(make_studio: Making, tmp_path: Path) -> None:
    studio = make_studio(broken={"target": str(tmp_path), "draft": str(tmp_path)})
    answered(studio, Request("Hi?", "reciting", max_new_tokens=5))
    _, error = failed(studio.generate(Request("Hi?", "broken"), "v"))
    assert len(str(error).splitlines()) == 1
    assert begins_well(answered(studio))


OUT_OF_MEMORY = {
    "generate": MemoryError(),
    "race": RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "conditioning": RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"),
}


@pytest.mark.parametrize(("doing", "error"), OUT_OF_MEMORY.items(), ids=OUT_OF_MEMORY)
def test_full_memory_lets_the_models_go_and_the_next_request_works(
    make_studio: Making, monkeypatch: pytest.MonkeyPatch, doing: str, error: Exception
) -> None:
    left = [10_000]

    def full_once(engine: Engine) -> None:
        forward = engine.target.forward

        def fails(*inputs: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise type(error)(*error.args)
            return forward(*inputs, **options)

        engine.target.forward = fails  # type: ignore[method-assign]

    loads, studio = Loads(monkeypatch, full_once), make_studio()
    answered(studio, Request("Hi?", "reciting", max_new_tokens=9))
    model = weakref.ref(studio.load("reciting").target.model)
    request = Request("Hi?", "reciting", max_new_tokens=30)
    left[0] = {"generate": 4, "race": 12, "conditioning": 1}[doing]
    begin = {"generate": studio.generate, "race": studio.race}
    shown, told = failed(begin[doing](request, "v") if doing in begin else studio.conditioning(1, "v"))
    assert isinstance(told, BackendError) and str(told).startswith("the memory is full; the request was given up")
    assert sentence(told) in json.loads(shown[-1].splitlines()[-1])["text"]
    assert (loads.engines[0](), model()) == (None, None), "nothing holds the models any more, before the next request"
    assert begins_well(answered(studio)) and len(loads.engines) == 2


def test_a_processor_that_has_no_memory_says_so_in_words_of_its_own() -> None:
    error = RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried")
    assert str(Studio()._told(error)).startswith("the memory is full")
    assert not str(Studio()._told(RuntimeError("out of range"))).startswith("the memory is full")


def test_what_nobody_meant_is_told_and_logged_and_the_engine_kept(
    make_studio: Making, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads, studio = Loads(monkeypatch), make_studio()
    drafter = studio.load("reciting").drafter
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "propose", lambda *_, **__: 1 / 0)
        shown, told = failed(studio.generate(ASK, "v"))
    assert str(told) == ("something went wrong (ZeroDivisionError: division by zero); the server's log has the details")
    assert records(shown[-1])[-1] == {"type": "error", "text": sentence(told)}
    assert len(records(shown[-1], "step")) <= 1
    assert [record.exc_info is not None for record in caplog.records if record.name == "gradio_dflash"] == [True]
    assert records(studio.stop("v"))[-1]["type"] == "error" and studio.answer("v") is None
    assert begins_well(answered(studio)) and len(loads.engines) == 1


# A long answer ------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine without models: its generations are prepared steps."""

    def __init__(self, steps: list[StepEvent]) -> None:
        self._steps, self.tokenizer = steps, Bytes()
        self.facts = {"target": "T", "draft": "D", "backend": "none", "dtype": "float32"}
        self.drafter = SimpleNamespace(config=SimpleNamespace(block_size=16))

    def stream(self, prompt: str, **options: Any) -> Generation:
        stopper: Any = SimpleNamespace(reason=None)

        def steps() -> Iterator[StepEvent]:
            yield from self._steps[:-1]
            stopper.reason = "length"
            yield self._steps[-1]

        return Generation(
            steps(), prompt_ids=list(prompt.encode()), stopper=stopper, text=None, notes=[], peak_memory=lambda: 0
        )


def long_story(tokens: int = 4000) -> list[StepEvent]:
    """Rounds of 15 guesses, of which none to two are accepted: 2,000 rounds for 4,000 tokens."""
    story, text = Story(), "So it goes on and on — naïve, <b>bold</b> and 東京.\n".encode()
    story.first(text[:1])
    at, chances = 1, tuple(1 / (2 + slot) for slot in range(15))
    written = 1
    while written < tokens:
        right = [0, 1, 2, 1][len(story.steps) % 4]
        guesses = [*(text[(at + slot) % len(text)] for slot in range(right)), *(7 for _ in range(15 - right))]
        own = text[(at + right) % len(text)]
        event = StepEvent(
            "round", len(story.steps), written + 2, text[(at - 1) % len(text)], tuple(guesses), right,
            (*guesses[:right], own), "correction", 0.002, 0.02, 0.001, chances, chances,
        )  # fmt: skip
        story.steps.append(event)
        at, written = at + right + 1, written + right + 1
    return story.steps


def test_a_long_answer_costs_little_at_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server does for an update, Gradio's search for what is new in it included."""
    from gradio.utils import diff

    steps = long_story()
    assert len(steps) >= 2000
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * UPDATE_EVERY / 4)  # an update for every few rounds
    monkeypatch.setattr(studio_module, "time", clock)
    monkeypatch.setattr(view, "time", clock)
    studio = Studio()
    monkeypatch.setattr(studio, "load", lambda pair, backend: Scripted(steps))
    monkeypatch.setattr(studio, "_announce", lambda request: ())

    def measure() -> tuple[list[float], str]:
        times, before, sent = [], "", 0
        with closing(studio.generate(Request("Hi?", max_new_tokens=4096), "v")) as generating:
            entered = time.thread_time()  # what others do on the machine meanwhile is not the server's time
            for text in generating:
                edits = diff([before], [text])
                times.append(time.thread_time() - entered)
                assert len(edits) <= 1 and (not edits or edits[0][0] == "append"), "an update sends only what is new"
                sent += sum(len(edit[2]) for edit in edits)
                before, entered = text, time.thread_time()
        assert sent == len(before)
        return times[:-1], before  # the last one sums up, once

    times, text = measure()
    if max(times) >= 0.05:  # once more: a busy machine may take its time for something else
        times, text = measure()
    assert len(times) > 400 and len(records(text, "step")) == len(steps)
    median = sorted(times)[len(times) // 2]
    print(f"median {1e3 * median:.2f} ms, longest {1e3 * max(times):.1f} ms, {len(text) / 1e6:.1f} MB")
    assert median < 0.02 and max(times) < 0.05
