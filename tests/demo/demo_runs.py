"""Driving a studio in tests: answers to their end, failures, engines that are counted or changed, other threads."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from demo_events import checked, records, running_text
from demo_pairs import STORY
from gradio_dflash import studio as studio_module
from gradio_dflash.studio import Request, Studio

import dflash
from dflash.engine import Engine
from dflash.errors import DFlashError

Making = Callable[..., Studio]
ASK = Request("What will Tom say?", "reciting", max_new_tokens=200)  # all of the story
QUICK = Request("What will Tom say?", "reciting", max_new_tokens=16)


def answered(studio: Studio, request: Request = QUICK, visitor: str = "v") -> str:
    """The log of a generation to its end; every update must go on from the one before it."""
    text = ""
    for update in studio.generate(request, visitor):
        assert update.startswith(text)
        text = update
    checked(text)
    return text


def begins_well(lines: str) -> bool:
    """Whether the log of ``QUICK`` tells the beginning of the story."""
    return len(running_text(lines)) > 30 and STORY.startswith(running_text(lines))


def failed(updates: Iterator[str]) -> tuple[list[str], DFlashError]:
    """What was shown until it failed, and the error; no frame of the failure is kept."""
    shown: list[str] = []
    try:
        shown.extend(updates)
    except DFlashError as error:
        return shown, error.with_traceback(None)
    raise AssertionError("nothing failed")


class Loads:
    """Stands in for ``dflash.load``: counts, remembers, and changes what it loads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Callable[[Engine], Any] = lambda engine: None) -> None:
        self.engines, self.options, self.change = list[Any](), list[dict[str, Any]](), change
        monkeypatch.setattr(studio_module, "load", self)

    def __call__(self, *names: Any, **options: Any) -> Engine:
        engine = dflash.load(*names, **options)
        self.change(engine)
        self.engines.append(weakref.ref(engine))
        self.options.append(options)
        return engine


class Background(threading.Thread):
    """A generator driven on a thread of its own, as a server does."""

    def __init__(self, updates: Iterator[str]) -> None:
        super().__init__(daemon=True)
        self.updates, self.shown, self.error = updates, list[str](), list[BaseException]()
        self.start()

    def run(self) -> None:
        try:
            for update in self.updates:
                self.shown.append(update)
        except BaseException as error:
            self.error.append(error)

    def wait(self, ready: Callable[[], Any]) -> None:
        until = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < until and (self.is_alive() or ready()), self.error
            time.sleep(0.002)

    @property
    def steps(self) -> int:
        return len(records(self.shown[-1], "step")) if self.shown else 0
