"""Progress of a long preparation, on stderr: a bar in a terminal, one line a stage elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Meter:
    """``stage`` names what happens now; calling the meter says which share of that stage is done. Nothing is shown
    before the first stage."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, text: str) -> None:
        if not sys.stderr.isatty():
            print(f"dflash: {text}", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = _bar()
            self._bar.start()
        else:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(text, total=1.0)

    def __call__(self, fraction: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=fraction)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    # The stream is bound now, and left in place: a backend may send sys.stderr elsewhere while a library chatters.
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
    )
