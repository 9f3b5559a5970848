"""What a record says of where it was measured: models, software, hardware, commit. Cheap, and never an error."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash import __version__
from dflash.checkpoint import CONFIG_FILE
from dflash.engine import Engine

_SAMPLES, _SAMPLE_BYTES = 256, 4096


def environment(engine: Engine) -> dict[str, Any]:
    """Models with fingerprints, template, versions, hardware, commit and date."""
    facts = dict(engine.facts)
    models = {}
    for role in ("target", "draft"):
        folder = facts.pop(f"{role}_folder", None)
        models[role] = {"name": facts.pop(role, None), "fingerprint": fingerprint(Path(folder)) if folder else None}
    tokenizer = engine.tokenizer
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "models": models,
        **facts,  # backend, device, dtype
        "template_sha256": tokenizer.template_sha256 if tokenizer else None,
        "thinking": "the template's default" if tokenizer is None or tokenizer.thinking is None else tokenizer.thinking,
        "versions": {"dflash-lab": __version__, "python": platform.python_version(), **engine.backend.versions()},
        "hardware": hardware(),
        "git": git_state(),
    }


def fingerprint(folder: Path) -> str:
    """A SHA-256 that tells one model from another without reading gigabytes: its config, and of each weights file the
    name, the size, and 256 samples of 4 KiB spread evenly (all of it where it is no larger)."""
    digest = hashlib.sha256()
    for file in (folder / CONFIG_FILE, *sorted(folder.glob("*.safetensors"))):
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as stream:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(stream.read())
                continue
            for sample in range(_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, threads it was told to use, memory in bytes, names of NVIDIA GPUs."""
    usable = getattr(os, "sched_getaffinity", None)
    return {
        "platform": platform.platform(terse=True),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(usable(0)) if usable else os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory": _memory(),
        "gpus": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
    }


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout this package runs from, and whether it was changed since; None outside of one."""
    package = Path(__file__).parent
    inside = ("git", "-C", str(package))
    if not _output(*inside, "ls-files", "--", Path(__file__).name):  # some other repository around an installation
        return None
    changed = bool(_output(*inside, "status", "--porcelain", "--untracked-files=no"))
    return {"commit": _output(*inside, "rev-parse", "HEAD"), "changed": changed}


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _output(*command: str) -> str:
    """What a program prints; empty where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
