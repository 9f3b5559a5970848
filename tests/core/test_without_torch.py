"""An installation without torch: what an Apple user has. A process in which torch cannot be found, not even by
packages that would take it where it is, runs the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("mlx", "mlx_lm", "gguf"):
    pytest.importorskip(package)

import tiny_gguf  # noqa: E402

from dflash.records import ResponseRecord  # noqa: E402

HIDING = """
import sys

class WithoutTorch:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "torch" else self.finder.find_spec(name, path, target)

    def find_distributions(self, *context):
        found = getattr(self.finder, "find_distributions", lambda *context: ())(*context)
        return (one for one in found if one.metadata["Name"] != "torch")

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [WithoutTorch(finder) for finder in sys.meta_path]
"""
COMMAND = HIDING + "from dflash.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"


def run(*words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DFLASH_CACHE": str(cache), "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a converted target and a random drafter for it, both made without a tensor library."""
    target, draft = tiny_gguf.write_pair(tmp_path_factory.mktemp("pair"))
    return ["--target", str(target), "--draft", str(draft)]


def test_auto_serves_a_converted_pair_on_mlx_and_never_looks_for_torch(pair: list[str], tmp_path: Path) -> None:
    done = run("generate", "a 12", *pair, "--max-new-tokens", "9", "--show", "json", "--compare", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stderr.casefold()  # transformers would advise to install it
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["facts"]["backend"] == "mlx"
    assert record["compare"]["identical"] is True
    assert record["metrics"]["num_draft_tokens"] > 0


def test_the_doctor_needs_one_backend_only(pair: list[str], tmp_path: Path) -> None:
    done = run("doctor", *pair, "--json", cache=tmp_path)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["backend mlx"]["status"] == checks["backend torch"]["status"] == "ok"
    assert checks["backend torch"]["detail"].startswith("not needed beside mlx: missing: torch; pip install ")
    assert "backend" not in checks
    wanted = run("doctor", *pair, "--backend", "torch", "--json", cache=tmp_path)
    checks = {check["name"]: check for check in json.loads(wanted.stdout)["checks"]}
    assert checks["backend"]["detail"] == "the backend torch cannot be used; mlx can"
    assert wanted.returncode == 1


@pytest.mark.parametrize(
    "words",
    [
        ["train", "data", "--target", "smollm2-135m", "--rows", "2", "--out", "{tmp}/rows.jsonl"],
        ["train", "run", "--target", "smollm2-135m", "--data", "{tmp}/rows.jsonl", "--out", "{tmp}/run"],
        ["train", "export", "--target", "smollm2-135m", "--data", "{tmp}/rows.jsonl", "--run", "{tmp}", "--out", "d"],
        ["generate", "hello", "--backend", "torch"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_needs_torch_says_so_in_one_sentence(words: list[str], tmp_path: Path) -> None:
    done = run(*(word.format(tmp=tmp_path) for word in words), cache=tmp_path / "cache")
    wanted = "the torch backend needs torch, which is not installed; pip install 'dflash-lab[torch]'"
    assert done.stderr == f"dflash: error: {wanted}\n"
    assert (done.returncode, done.stdout) == (1, "")
    assert list(tmp_path.iterdir()) == []  # and fetches nothing before


def test_listing_helping_and_converting_do_without(tmp_path: Path) -> None:
    assert run("--help", cache=tmp_path).returncode == 0
    assert "smollm2-135m" in run("models", cache=tmp_path).stdout
    done = run("convert", "smollm2-135m", str(tmp_path / "again"), cache=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "again"))


def test_the_held_out_figure_says_which_backend_it_needs(pair: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ResponseRecord((5, 6), (7, 2)).to_json() + "\n")
    done = run("evaluate", *pair, "--heldout", str(tmp_path / "rows.jsonl"), cache=tmp_path)
    assert done.stderr == "dflash: error: --heldout is measured with the torch backend; add --backend torch\n"
    assert (done.returncode, done.stdout) == (2, "")
