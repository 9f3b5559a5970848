"""The layout keeps out of other packages' way: containers are no packages, and no name of theirs is taken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ("backends", "kernels", "demos")
TAKEN = {"torch", "mlx", "triton", "gradio", "transformers", "kernels", "dflash_mlx"}
IMPORTS = (
    "from transformers import Qwen3ForCausalLM; import dflash, torch_dflash.backend; print(Qwen3ForCausalLM.__name__)"
)


@pytest.mark.parametrize("name", [*CONTAINERS, "tests", "experiments"])
def test_containers_are_no_packages(name: str) -> None:
    assert not (ROOT / name / "__init__.py").exists()


def test_no_package_anywhere_under_tests() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_test_files_have_unique_names() -> None:
    names = Counter(file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_package_takes_the_name_of_another_library() -> None:
    packages = [file.parent for file in ROOT.glob("*/__init__.py")]
    packages += [file.parent for name in CONTAINERS for file in ROOT.glob(f"{name}/*/__init__.py")]
    assert {"dflash", "torch_dflash"} <= {package.name for package in packages}
    assert not {package.name for package in packages} & TAKEN


def test_transformers_imports_a_model_from_the_repository_root(tmp_path: Path) -> None:
    """``transformers`` imports a package called ``kernels`` where there is one; a container of that name on the path,
    ours or one like it, must not be taken for it."""
    for container in CONTAINERS:
        (tmp_path / container / "some_dflash").mkdir(parents=True)
        (tmp_path / container / "some_dflash" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Qwen3ForCausalLM"


@pytest.mark.slow
def test_the_real_kernels_package_lives_beside_ours(tmp_path: Path) -> None:
    from transformers.dependency_versions_table import deps

    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        deps["kernels"],
    ]
    if subprocess.run(install, capture_output=True, stdin=subprocess.DEVNULL).returncode:
        pytest.skip(f"{deps['kernels']} cannot be had here")
    assert (tmp_path / "kernels" / "__init__.py").exists()
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {IMPORTS}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Qwen3ForCausalLM"
