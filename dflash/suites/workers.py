"""Arms in processes of their own: how one is started, asked and ended.

A worker is a script of ``torch_dflash/arms`` under an interpreter of its own environment, which may hold other
versions of a library, or another package of the name ``dflash``. It answers one JSON line with one, and waits in
between. It lives until its arms are closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from dflash.suites.end_to_end import Answer, ArmError


def script(name: str) -> Path:
    """A worker script of the torch backend's package, which is found without importing it."""
    spec = find_spec("torch_dflash")
    assert spec is not None and spec.origin is not None  # every installation has it, with torch or without
    return Path(spec.origin).parent / "arms" / name


class Worker:
    """A process of ``python`` that runs ``file``; ``threads`` limits its libraries from their start.

    It has a session of its own: Ctrl-C in a terminal is ours to answer. Raises ``ArmError``."""

    def __init__(self, python: str | Path, file: Path, threads: int) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        if str(python) != sys.executable:
            environment.pop("PYTHONPATH", None)  # it would lead an environment of other packages to ours
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the worker)
        try:
            self._process = subprocess.Popen(
                [str(python), str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise ArmError(f"{python} cannot be started: {error.strerror}") from None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has died already
            self._process.stdin.close()
        if kind is not None:  # it may be in mid-answer
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send one request and wait for the reply. Raises ``ArmError`` with the worker's own words."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        try:
            reply: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise ArmError(f"its process ended: {self._last_words()}") from None
        if "error" in reply:
            raise ArmError(reply["error"])
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"it said nothing (exit status {self._process.wait()})"


class WorkerArm:
    """One arm of a worker, which may have several: they are told apart by ``do``."""

    def __init__(self, worker: Worker, name: str, stop: Sequence[int], about: Mapping[str, Any]) -> None:
        self.name, self.about = name, dict(about)
        self._worker, self._stop = worker, list(stop)

    def run(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        reply = self._worker.ask(self.name, prompt=list(ids), max_new_tokens=max_new_tokens, stop=self._stop)
        return Answer(reply["tokens"], reply["seconds"])
