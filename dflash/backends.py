"""Which backends there are, which one ``auto`` is on this machine, and why one cannot be used.

Backends announce themselves through the entry-point group ``dflash.backends``, so anyone can add one. Ours are always
announced; whether one can be used shows when it is imported.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from dflash.errors import BackendError
from dflash.interfaces import Backend

_OURS = ("torch", "mlx")
_MLX_PARTS = {"mlx-metal": "Metal", "mlx-cuda-13": "CUDA", "mlx-cuda-12": "CUDA", "mlx-cpu": "CPU"}


def announced_backends() -> list[str]:
    """Names of the backends that announce themselves, sorted; not all of them need be usable."""
    return sorted(_points())


def installed_backends() -> list[str]:
    """Names of the announced backends whose library is installed, the preferred one first. None is imported for it."""
    here = [name for name in _points() if name not in _OURS or (find_spec(name) and (name != "mlx" or mlx_runs_here()))]
    return sorted(here, key=_preferred_first)


def preferred_backend() -> str:
    """MLX on Apple silicon, PyTorch elsewhere."""
    return "mlx" if _apple_silicon() else "torch"


def install_command(backend: str | None = None) -> str:
    """What installs a backend (default: the preferred one)."""
    return f"pip install 'dflash-lab[{backend or preferred_backend()}]'"


def find_backend(name: str = "auto") -> Backend:
    """The backend of that name. ``auto``: the preferred one where it can be imported, else another that can. Raises
    ``BackendError`` with the reason and the remedy."""
    points = _points()
    if name == "auto":
        return _first_usable(sorted(points, key=_preferred_first), points)
    if name not in points:
        raise BackendError(f"there is no backend {name!r}; there is {', '.join(('auto', *sorted(points)))}")
    return _load(points[name])


def mlx_runs_here() -> bool:
    """Whether this project's MLX backend is meant for this platform."""
    return _apple_silicon() or platform.system() == "Linux"


def mlx_part() -> str | None:
    """``Metal``, ``CUDA`` or ``CPU``: the part of MLX that does the work, a package of its own; None where there is
    none, and ``import mlx.core`` fails."""
    return next((kind for package, kind in _MLX_PARTS.items() if versions_of([package])), None)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Package → version of those that are installed. None is imported."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def this_platform() -> str:
    return f"{platform.system().replace('Darwin', 'macOS')} {platform.machine()}"


class _NotInstalled(BackendError):
    """A backend without the package it is made for, as opposed to one that is there and broken."""


def _apple_silicon() -> bool:
    return (platform.system(), platform.machine()) == ("Darwin", "arm64")


def _preferred_first(name: str) -> tuple[bool, str]:
    return name != preferred_backend(), name


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group="dflash.backends")}


def _first_usable(names: Iterable[str], points: dict[str, EntryPoint]) -> Backend:
    broken: BackendError | None = None
    for name in names:
        try:
            return _load(points[name])
        except _NotInstalled:
            continue
        except BackendError as error:
            broken = broken or error
    raise broken or BackendError(f"no backend is installed; {install_command()}")


def _load(point: EntryPoint) -> Backend:
    try:
        backend: Backend = point.load()()
    except (ImportError, OSError) as error:  # OSError: a shared library that cannot be loaded
        raise _reason(point.name, error) from None
    return backend


def _reason(name: str, error: ImportError | OSError) -> BackendError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if name == "mlx" and not mlx_runs_here():
        kind = _NotInstalled if missing else BackendError
        return kind(
            f"the mlx backend is for Apple silicon and Linux, not for {this_platform()}; "
            f"use the torch backend: {install_command('torch')}"
        )
    if name not in _OURS:
        return BackendError(f"the {name} backend cannot be imported: {_first_line(error)}")
    if missing:
        return _NotInstalled(f"the {name} backend needs {missing}, which is not installed; {install_command(name)}")
    if name == "mlx" and mlx_part() is None:
        return BackendError(
            f"mlx is installed without the part that does its work on this machine ({_first_line(error)}); "
            f"{install_command('mlx')}"
        )
    return BackendError(
        f"the {name} backend cannot be imported ({_first_line(error)}); its packages may be too old or damaged: "
        f"pip install --upgrade 'dflash-lab[{name}]'"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
