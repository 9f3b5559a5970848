"""Compiles ``passes.cpp`` for this processor, once: the library is kept in the user's cache directory.

It takes a C++ compiler of the machine about two seconds. The OpenMP runtime is the one that PyTorch has loaded: a
second one would have threads of its own, which wait busily while the first one's work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from dflash.storage import cache_dir

SOURCE = Path(__file__).with_name("passes.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-c")
NEEDED = {"avx2", "fma"}
PATIENCE = 300  # seconds for a compiler on a busy machine


class Unavailable(RuntimeError):
    """Why there is no library here, in one sentence."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled passes, from the cache where an earlier process has left them. Raises ``Unavailable``."""
    import torch  # noqa: F401 (brings the OpenMP runtime)

    flags = processor_flags()
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not flags >= NEEDED:
        raise Unavailable("they are written for Linux on x86-64 with AVX2")
    compiler = _compiler()
    key = hashlib.sha256()
    for part in (SOURCE.read_text(), _version(compiler), " ".join(FLAGS), " ".join(sorted(flags))):
        key.update(part.encode() + b"\0")
    path = cache_dir() / "kernels" / f"passes-{key.hexdigest()[:16]}.so"
    if not path.exists():
        _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}") from None


def processor_flags() -> set[str]:
    """What this processor can do, in Linux' words; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        if found := shutil.which(name):
            return found
    raise Unavailable("there is no C++ compiler; g++ 12 or newer is one")


def _version(compiler: str) -> str:
    return _run([compiler, "--version"]).stdout


def _compile(compiler: str, path: Path) -> None:
    """Write the library under a name of its own first, so that nobody loads half of one."""
    stem = path.with_name(f".{path.stem}-{os.getpid()}-{secrets.token_hex(4)}")
    unlinked, linked = stem.with_suffix(".o"), stem.with_suffix(".so")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _run([compiler, *FLAGS, str(SOURCE), "-o", str(unlinked)])
        _run([compiler, "-shared", str(unlinked), "-o", str(linked)])  # without OpenMP: PyTorch's is found at load
        linked.replace(path)
    except OSError as error:
        raise Unavailable(f"{path.parent} cannot be written: {error.strerror}") from None
    finally:
        for left in (unlinked, linked):
            with suppress(OSError):
                left.unlink(missing_ok=True)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or [""]
        raise Unavailable(f"{command[0]} cannot compile them: {lines[0].strip()}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} cannot compile them: {error}") from None
