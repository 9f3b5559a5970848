"""``import dflash`` is cheap and brings no tensor library."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dflash

CORE = Path(dflash.__file__).parent
TENSOR_LIBRARIES = {"torch", "mlx", "jax", "tensorflow", "torch_dflash", "mlx_dflash"}
LAZY = {"transformers", "datasets", "huggingface_hub", "safetensors", "gguf", "tokenizers"}

PROBE = """
import json, sys, time
begun = time.perf_counter()
import dflash
seconds = time.perf_counter() - begun
print(json.dumps({"seconds": seconds, "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""


def probe(code: str = PROBE) -> dict:
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)


def test_import_is_fast_and_brings_no_tensor_library() -> None:
    runs = [probe() for _ in range(4)]
    assert min(run["seconds"] for run in runs) < 0.3
    assert not (TENSOR_LIBRARIES | LAZY) & set(runs[0]["modules"])


def test_engine_and_load_bring_no_tensor_library_either() -> None:
    modules = probe(PROBE.replace("import dflash\n", "import dflash; dflash.load, dflash.Engine\n"))["modules"]
    assert not (TENSOR_LIBRARIES | LAZY) & set(modules)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = dflash.nothing_like_it


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


def module_level(tree: ast.Module) -> set[str]:
    """What importing the module imports: everything outside functions and ``if TYPE_CHECKING``."""
    found, waiting = set(), list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= imported(node)
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.stmt, ast.ExceptHandler))]
    return found


@pytest.mark.parametrize("file", sorted(CORE.glob("*.py")), ids=lambda file: file.stem)
def test_core_modules_import_no_tensor_library_anywhere(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert not imported(tree) & TENSOR_LIBRARIES
    assert not module_level(tree) & LAZY


@pytest.mark.parametrize(("backend", "other"), [("torch_dflash", "mlx"), ("mlx_dflash", "torch")])
def test_no_backend_imports_the_other_ones_library_anywhere(backend: str, other: str) -> None:
    files = sorted((CORE.parent / "backends" / backend).rglob("*.py"))
    assert len(files) > 5
    forbidden = {other, f"{other}_lm", f"{other}_dflash"}
    assert [file.name for file in files if imported(ast.parse(file.read_text())) & forbidden] == []
