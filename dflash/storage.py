"""Folders on disk that are either whole or not there, the cache directory, and hashes.

A folder is written under a hidden temporary name beside its destination and renamed when it is complete, so a process
killed in between leaves nothing that could be taken for a finished one; the next writer sweeps what it left.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash.errors import StorageError

try:
    import fcntl
except ImportError:  # Windows: no advisory locks; concurrent writers both work and the first to finish wins
    fcntl = None  # type: ignore[assignment]

CACHE_VARIABLE = "DFLASH_CACHE"
_PARTIAL = ".partial"


def cache_dir() -> Path:
    """The user's cache directory: ``$DFLASH_CACHE``, or what the platform prescribes. It may not exist yet."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dflash"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "dflash" / "cache"
    base = os.environ.get("XDG_CACHE_HOME", "")  # the specification says to ignore a relative one
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "dflash"


def sha256(path: Path, progress: Callable[[float], None] = lambda fraction: None) -> str:
    """Hexadecimal SHA-256 of a file. Raises ``OSError``."""
    digest, size, done = hashlib.sha256(), max(path.stat().st_size, 1), 0
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            progress(done / size)
    return digest.hexdigest()


@contextmanager
def storage_errors(folder: Path, advice: str) -> Iterator[None]:
    """Turn an ``OSError`` of the body into one ``StorageError`` sentence about ``folder``, ending in ``advice``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{folder} cannot be written ({reason}); {advice}") from error


@contextmanager
def partial_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder beside ``destination``, gone afterwards. Raises ``OSError``."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = destination.parent / f".{destination.name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Fill the folder this yields and it becomes ``destination``, in one rename, when the body ends without an error.
    A folder already there is replaced. Raises ``OSError``."""
    with partial_folder(destination) as folder:
        yield folder
        if destination.exists():
            with partial_folder(destination) as old:
                os.rename(destination, old / destination.name)
                os.rename(folder, destination)
        else:
            os.rename(folder, destination)


@contextmanager
def sole_writer(destination: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of ``destination``; ``waiting`` is called once when another process has it. What killed writers
    left beside it is swept. The kernel frees the lock of a process that dies. Raises ``OSError``."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with (destination.parent / f".{destination.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in destination.parent.glob(f".{destination.name}.*{_PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        yield
