"""What the page's events do, each with the docstring that its endpoint shows. Values go in as the controls hold them
and come out as the panels take them; a ``DFlashError`` becomes a message on the page."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr

from dflash.backends import installed_backends
from dflash.errors import DFlashError, StorageError, UsageError
from dflash.trace import Trace
from gradio_dflash.page import page
from gradio_dflash.studio import STOPPED_RACE, Request, Studio
from gradio_dflash.view import json_text, page_lines, sentence

TRACE_FILE, PAGE_FILE = "dflash-trace.jsonl", "dflash-page.html"


class Endpoints:
    """The events of one app; files for download lie in a folder that goes with it."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._folder = tempfile.TemporaryDirectory(prefix="dflash-demo-")

    def generate(
        self,
        prompt: str,
        pair: str,
        backend: str,
        block_size: str,
        rule: str,
        temperature: float,
        top_p: float,
        seed: float | None,
        budget: float,
        request: gr.Request,
    ) -> Iterator[str]:
        """Generate with a drafter, every round told. The answer is JSON lines that grow as it goes on: "head", a "step"
        for each prefill, round or plain step with its slots, fates and committed tokens, "figures" now and then, and
        "end" or "error"."""
        with _messages():
            wanted = _request(prompt, pair, backend, block_size, rule, temperature, top_p, seed, budget)
            yield from self._studio.generate(wanted, _visitor(request))

    def race(
        self,
        prompt: str,
        pair: str,
        backend: str,
        block_size: str,
        rule: str,
        temperature: float,
        top_p: float,
        seed: float | None,
        budget: float,
        request: gr.Request,
    ) -> Iterator[str]:
        """Decode the same prompt and seed plainly and with a drafter, one after the other. The answer is JSON: the
        state of the race, and at its end both arms with the time of each step, the speedup, and whether the tokens are
        the same."""
        with _messages():
            wanted = _request(prompt, pair, backend, block_size, rule, temperature, top_p, seed, budget)
            yield from self._studio.race(wanted, _visitor(request))

    def conditioning(self, index: float, request: gr.Request) -> Iterator[str]:
        """Look into a round of this session's last answer. The answer is JSON: for each draft layer and slot the
        attention to context tokens and to the block, and what is drafted and accepted with the target's features and
        with zeros in their place."""
        with _messages():
            yield from self._studio.conditioning(_whole(index, "the round"), _visitor(request))

    def stop(self, request: gr.Request) -> str:
        """End this session's generation at its next round; the answer is its JSON lines."""
        return self._studio.stop(_visitor(request))

    def raced(self, request: gr.Request) -> Any:
        """The page of the last answer, which knows its speedup where the race was of the same request."""
        answer = self._studio.answer(_visitor(request))
        return answer.log.text if answer else gr.skip()

    def stop_race(self, request: gr.Request) -> str:
        self._studio.stop(_visitor(request))
        return json_text({"state": "error", "text": STOPPED_RACE})

    def stop_looking(self, request: gr.Request) -> str:
        self._studio.stop(_visitor(request))
        return ""

    def replay(self, file: str | None) -> tuple[str, Any]:
        """Read a trace that was saved by dflash generate --trace or by this page; no model is needed. The answer is the
        JSON lines of "generate", and the trace as one self-contained HTML file."""
        if not file:
            return "", gr.DownloadButton(value=None, interactive=False)
        with _messages():
            lines = page_lines(_trace(file))
        return lines, self._button(PAGE_FILE, page(lines, title="A DFlash generation"))

    def files(self, request: gr.Request) -> tuple[Any, Any, Any]:
        """The last answer as files to save, and a round of it that is worth a look: the one with most accepted."""
        answer = self._studio.answer(_visitor(request))
        if answer is None:
            return gr.skip(), gr.skip(), gr.skip()
        rounds = [step for step in answer.trace.steps if step.kind == "round"]
        best = max(rounds, key=lambda step: (step.next_kind == "correction", step.accepted), default=None)
        folder = self._new_folder()
        answer.trace.save(folder / TRACE_FILE)
        return (
            gr.DownloadButton(value=str(folder / TRACE_FILE), interactive=True),
            self._button(PAGE_FILE, page(answer.log.text, title="A DFlash generation"), folder),
            gr.Number(value=best.index if best else 1, maximum=rounds[-1].index if rounds else 1),
        )

    def models(self) -> dict[str, list[str]]:
        """What can be asked for: pairs on this machine, installed backends, verification rules."""
        return {"pairs": self._studio.pairs(), "backends": installed_backends(), "rules": self._studio.rules()}

    def leave(self, request: gr.Request) -> None:
        self._studio.leave(_visitor(request))

    def _button(self, name: str, text: str, folder: Path | None = None) -> Any:
        file = (folder or self._new_folder()) / name
        file.write_text(text, encoding="utf-8")
        return gr.DownloadButton(value=str(file), interactive=True)

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder.name))


def _request(*asked: Any) -> Request:
    """What the controls hold, in the order of ``Endpoints.generate``."""
    prompt, pair, backend, block_size, rule, temperature, top_p, seed, budget = asked
    return Request(
        prompt=prompt,
        pair=pair,
        backend=backend,
        block_size=0 if block_size == "auto" else _whole(block_size, "the block size"),
        rule=rule,
        temperature=temperature,
        top_p=top_p,
        seed=None if seed is None else _whole(seed, "the seed"),
        max_new_tokens=_whole(budget, "the budget"),
    )


def _whole(value: Any, what: str) -> int:
    try:
        number = float(value)
        if number == int(number):
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(f"{what} is {value!r}; it must be a whole number")


def _trace(file: str) -> Trace:
    try:
        return Trace.load(file)
    except StorageError as error:  # a visitor knows its name, and not the folder that it came to lie in
        raise StorageError(str(error).replace(file, Path(file).name)) from None


def _visitor(request: gr.Request) -> str:
    return request.session_hash or ""


@contextmanager
def _messages() -> Iterator[None]:
    """A ``DFlashError`` as one sentence on the page; the server's log is for what nobody meant to happen."""
    try:
        yield
    except DFlashError as error:
        raise gr.Error(sentence(error), print_exception=False, title="That did not work") from None
