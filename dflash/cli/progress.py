"""A long job's progress on stderr: a bar in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_EVERY = 30.0  # seconds between plain lines


class Bar:
    """``update`` says how much of ``total`` is done and what else to show; the bar appears with the first one. ``say``
    prints a sentence above it. Silent where not ``shown``."""

    def __init__(self, title: str, *, shown: bool = True) -> None:
        self.title, self.shown = title, shown
        self._rich: Any = None
        self._task: Any = None
        self._last: float | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich is not None:
            self._rich.stop()

    def update(self, done: int, total: int, text: str) -> None:
        if not self.shown:
            return
        if sys.stderr.isatty():
            if self._rich is None:
                self._start()
            self._rich.update(self._task, description=self.title, completed=done, total=total, text=text)
            return
        now = time.monotonic()
        if self._last is None or now - self._last >= LINE_EVERY or done == total:
            self._last = now
            print(f"{self.title}: {done} of {total} · {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        if self._rich is not None:
            self._rich.console.print(text, markup=False, highlight=False)
        elif self.shown:
            print(text, file=sys.stderr, flush=True)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._rich = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=sys.stderr),
            redirect_stdout=False,
        )
        self._task = self._rich.add_task(self.title, total=None, text="")
        self._rich.start()


def duration(seconds: float) -> str:
    """``75`` → ``1:15``; hours where there are any."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
