"""Which backend a name means on which machine, and one sentence for each way in which it cannot be used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from dflash import backends
from dflash.backends import (
    announced_backends,
    find_backend,
    install_command,
    installed_backends,
    mlx_part,
    preferred_backend,
)
from dflash.errors import BackendError

APPLE, INTEL_MAC = ("Darwin", "arm64"), ("Darwin", "x86_64")
LINUX, LINUX_ARM, WINDOWS = ("Linux", "x86_64"), ("Linux", "aarch64"), ("Windows", "AMD64")
MODULE = """
class Torch:
    name = "torch"

class Mlx:
    name = "mlx"
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Become a machine: its platform, its packages, and what importing each backend brings (an error, or nothing)."""
    (tmp_path / "some_backends.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def become(platform: tuple[str, str], packages: dict[str, str] | None = None, **errors: Exception | None) -> None:
        class Point(EntryPoint):
            def load(self) -> Any:
                if error := errors.get(self.name):
                    raise error
                return super().load()

        points = [Point(name, f"some_backends:{name.title()}", "dflash.backends") for name in errors]

        def version(package: str) -> str:
            if package not in (packages or {}):
                raise PackageNotFoundError(package)
            return (packages or {})[package]

        monkeypatch.setattr("platform.system", lambda: platform[0])
        monkeypatch.setattr("platform.machine", lambda: platform[1])
        monkeypatch.setattr(backends, "entry_points", lambda group: points)
        monkeypatch.setattr(backends, "version", version)

    return become


def missing(package: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {package!r}", name=package)


def sentence(name: str = "auto") -> str:
    with pytest.raises(BackendError) as refusal:
        find_backend(name)
    assert len(str(refusal.value).splitlines()) == 1
    return str(refusal.value)


def test_both_backends_announce_themselves() -> None:
    assert {"mlx", "torch"} <= set(announced_backends())


@pytest.mark.parametrize(
    ("platform", "name"),
    [(APPLE, "mlx"), (INTEL_MAC, "torch"), (LINUX, "torch"), (LINUX_ARM, "torch"), (WINDOWS, "torch")],
)
def test_auto_is_mlx_on_apple_silicon_and_torch_elsewhere(
    platform: tuple[str, str], name: str, machine: Callable[..., None]
) -> None:
    machine(platform, torch=None, mlx=None)
    assert preferred_backend() == find_backend().name == find_backend("auto").name == name
    assert find_backend("torch").name == "torch"
    assert find_backend("mlx").name == "mlx"
    assert install_command() == f"pip install 'dflash-lab[{name}]'"


@pytest.mark.parametrize(
    ("platform", "errors", "name"),
    [
        (APPLE, {"torch": None, "mlx": missing("mlx")}, "torch"),
        (LINUX, {"torch": missing("torch"), "mlx": None}, "mlx"),
        (APPLE, {"torch": None, "mlx": ImportError("a damaged file")}, "torch"),
        (LINUX, {"torch": OSError("libcudart.so.12: cannot open shared object file"), "mlx": None}, "mlx"),
    ],
)
def test_auto_falls_back_to_the_backend_that_can_be_imported(
    platform: tuple[str, str], errors: dict[str, Any], name: str, machine: Callable[..., None]
) -> None:
    machine(platform, **errors)
    assert find_backend().name == name
    broken = next(other for other, error in errors.items() if error)
    assert f"dflash-lab[{broken}]" in sentence(broken)  # who names one gets that one, or the reason


@pytest.mark.parametrize(("platform", "name"), [(APPLE, "mlx"), (LINUX, "torch"), (WINDOWS, "torch")])
def test_without_any_backend_the_one_for_the_platform_is_named(
    platform: tuple[str, str], name: str, machine: Callable[..., None]
) -> None:
    machine(platform, torch=missing("torch"), mlx=missing("mlx"))
    assert sentence() == f"no backend is installed; pip install 'dflash-lab[{name}]'"
    machine(platform)
    assert sentence() == f"no backend is installed; pip install 'dflash-lab[{name}]'"


@pytest.mark.parametrize(
    ("platform", "libraries", "names"),
    [
        (APPLE, ("torch", "mlx"), ["mlx", "torch"]),
        (LINUX, ("torch", "mlx"), ["torch", "mlx"]),
        (LINUX, ("mlx",), ["mlx"]),
        (APPLE, ("torch",), ["torch"]),
        (WINDOWS, ("torch", "mlx"), ["torch"]),  # MLX may lie there, and is not meant to run
        (INTEL_MAC, ("mlx",), []),
        (LINUX, (), []),
    ],
)
def test_installed_backends_are_listed_the_preferred_one_first_and_none_is_imported(
    platform: tuple[str, str],
    libraries: tuple[str, ...],
    names: list[str],
    machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(platform, torch=AssertionError("imported"), mlx=AssertionError("imported"))
    monkeypatch.setattr(backends, "find_spec", lambda name: object() if name in libraries else None)
    assert installed_backends() == names


def test_a_backend_of_another_project_counts_as_installed(machine: Callable[..., None]) -> None:
    machine(LINUX, other=AssertionError("imported"))
    assert installed_backends() == ["other"]


def test_an_unknown_name_is_told_the_known_ones(machine: Callable[..., None]) -> None:
    machine(LINUX, torch=None, mlx=None)
    assert sentence("jax") == "there is no backend 'jax'; there is auto, mlx, torch"


@pytest.mark.parametrize(
    ("name", "package"), [("torch", "torch"), ("torch", "transformers"), ("mlx", "mlx"), ("mlx", "mlx_lm")]
)
def test_a_package_that_is_missing_is_named(name: str, package: str, machine: Callable[..., None]) -> None:
    machine(LINUX, **{name: missing(package)})
    wanted = f"the {name} backend needs {package}, which is not installed; pip install 'dflash-lab[{name}]'"
    assert sentence(name) == wanted


def test_mlx_without_the_part_that_does_its_work_is_told_what_brings_it(machine: Callable[..., None]) -> None:
    error = ImportError("libmlx.so: cannot open shared object file: No such file or directory\nmore")
    machine(LINUX, {"mlx": "0.32.4", "mlx-lm": "0.32.2"}, mlx=error, torch=missing("torch"))
    assert mlx_part() is None
    for name in ("mlx", "auto"):  # auto: what is there and broken, before what was never installed
        assert sentence(name) == (
            "mlx is installed without the part that does its work on this machine (libmlx.so: cannot open shared "
            "object file: No such file or directory); pip install 'dflash-lab[mlx]'"
        )


@pytest.mark.parametrize(
    ("packages", "part"),
    [
        ({"mlx-metal": "1"}, "Metal"),
        ({"mlx-cpu": "1"}, "CPU"),
        ({"mlx-cpu": "1", "mlx-cuda-13": "1"}, "CUDA"),
        ({}, None),
    ],
)
def test_the_part_of_mlx_is_told_by_its_package(
    packages: dict[str, str], part: str | None, machine: Callable[..., None]
) -> None:
    machine(LINUX, packages)
    assert mlx_part() == part


def test_a_damaged_or_too_old_installation_is_quoted(machine: Callable[..., None]) -> None:
    error = ImportError("cannot import name 'load_model' from 'mlx_lm.utils'")
    machine(LINUX, {"mlx-cpu": "0.32.4"}, mlx=error)
    assert sentence("mlx") == (
        "the mlx backend cannot be imported (cannot import name 'load_model' from 'mlx_lm.utils'); its packages may be "
        "too old or damaged: pip install --upgrade 'dflash-lab[mlx]'"
    )


@pytest.mark.parametrize(("platform", "shown"), [(WINDOWS, "Windows AMD64"), (INTEL_MAC, "macOS x86_64")])
@pytest.mark.parametrize("error", [missing("mlx"), ImportError("DLL load failed")], ids=["missing", "broken"])
def test_where_mlx_is_not_meant_to_run_the_other_backend_is_named(
    platform: tuple[str, str], shown: str, error: ImportError, machine: Callable[..., None]
) -> None:
    machine(platform, mlx=error, torch=None)
    assert sentence("mlx") == (
        f"the mlx backend is for Apple silicon and Linux, not for {shown}; "
        "use the torch backend: pip install 'dflash-lab[torch]'"
    )
    assert find_backend().name == "torch"


def test_another_projects_backend_is_not_promised_a_command_of_ours(machine: Callable[..., None]) -> None:
    machine(LINUX, other=missing("jax"))
    assert sentence("other") == "the other backend cannot be imported: No module named 'jax'"


def test_the_torch_backend_does_not_bring_mlx() -> None:
    pytest.importorskip("torch")
    code = (
        "import sys; from dflash.backends import find_backend; find_backend('torch'); "
        "assert 'torch' in sys.modules and not {'mlx', 'mlx_lm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
