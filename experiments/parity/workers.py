"""Worker processes, the official environment, and the facts that go beside every figure."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_CORE = ("torch==2.13.0", "transformers==5.15.0", "dflash==0.1.0")
OFFICIAL = {
    "torch": _CORE,
    "mlx": (
        *_CORE,
        "mlx[cpu]==0.32.4; sys_platform == 'linux'",
        "mlx==0.32.4; sys_platform == 'darwin'",
        "mlx-lm==0.32.2",
    ),
}
"""What the official environment holds for each backend. The package itself asks for MLX on Apple silicon only, and for
mlx 0.32.0 with mlx-lm 0.31.3 there; both sides of a comparison run on the versions named here."""
SCRIPTS = {"torch": "official.py", "mlx": "official_mlx.py"}


class WorkerError(RuntimeError):
    """A worker that could not start, died, or answered with a traceback."""


class Worker:
    """A long-lived process of ``script``, one of ``SCRIPTS`` or ``ours.py``, that answers one request at a time and
    waits idly in between. ``threads`` limits its libraries from their start."""

    def __init__(self, python: Path | str, script: str, threads: int) -> None:
        self.name, self.threads = script.removesuffix(".py"), threads
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # names would collide
        environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the worker)
        self._process = subprocess.Popen(
            [str(python), str(HERE / script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
        )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):  # it has died already
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its reply. Raises ``WorkerError``."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            raise WorkerError(f"the {self.name} worker ended:\n{self._log.read()[-2000:]}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"the {self.name} worker failed:\n{reply['error']}")
        return reply

    def load(self, target: Path, draft: Path, backend: str, *, mend: bool = False) -> dict[str, str]:
        """Load a pair; returns the versions of what loaded it. ``mend`` is for ``official_mlx.py``."""
        what = {"target": str(target), "draft": str(draft), "backend": backend, "mend": mend}
        versions: dict[str, str] = self.ask("load", **what, threads=self.threads)["versions"]
        return versions


def make_official(folder: Path, backend: str) -> Path:
    """The Python of an environment in ``folder`` with the official package, made there where it is missing. torch goes
    first, so that pip takes the build its configuration prefers and not whatever a dependency pulls."""
    needed = OFFICIAL[backend]
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for group in (needed[:1], needed[1:]):
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *group]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return python


def facts(threads: int) -> dict[str, Any]:
    """Machine and revision."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "preloaded": os.environ.get("LD_PRELOAD", ""),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _git("rev-parse", "HEAD") or "none",
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def fingerprint(folder: Path) -> str:
    """Twelve hex digits of a model folder's configuration and weights."""
    digest = hashlib.sha256()
    for file in sorted((*folder.glob("config.json"), *folder.glob("*.safetensors"))):
        with file.open("rb") as stream:
            digest.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """JSON lines, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    partial.replace(path)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
