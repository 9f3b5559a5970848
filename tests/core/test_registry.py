"""Names to targets and drafters, whichever way a target is called, and sources to folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from model_folders import write_draft, write_target

from dflash import bundled, hub
from dflash.errors import ModelNotFoundError, UsageError
from dflash.loading import choose_pair
from dflash.registry import BUNDLED, PAIRS, find_draft, find_local, find_pair, locate, resolve

QWEN = "z-lab/Qwen3-8B-DFlash-b16"
LLAMA = "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"
CODER = "z-lab/Qwen3-Coder-30B-A3B-DFlash"


def test_pairs_are_well_formed() -> None:
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)
    assert all(pair.name == pair.name.casefold() and not hub.split(pair.name) for pair in PAIRS)
    for pair in PAIRS[1:]:
        assert pair.mlx
        assert all(hub.split(source) for source in (pair.target, pair.draft, *pair.mlx, *pair.also))
        assert all(find_pair(target) is pair for target in pair.targets)
        assert find_pair(pair.draft) is None


def test_a_pair_has_a_target_for_each_backend() -> None:
    pair = resolve("Qwen3-8B")
    assert pair is not None
    assert pair.target_for("torch") == "Qwen/Qwen3-8B"
    assert pair.target_for("mlx") == "mlx-community/Qwen3-8B-bf16"
    assert pair.thinking is False
    assert BUNDLED.target_for("torch") == BUNDLED.target_for("mlx") == "smollm2-135m"
    assert resolve("no-such-pair") is None


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("Qwen3-8B", QWEN),
        ("Qwen/Qwen3-8B", QWEN),
        ("qwen/qwen3-8b", QWEN),
        ("Qwen/Qwen3-8B@main", QWEN),
        ("Qwen/Qwen3-8B-FP8", QWEN),
        ("mlx-community/Qwen3-8B-bf16", QWEN),
        ("mlx-community/Qwen3-8B-8bit", QWEN),
        ("mlx-community/Qwen3-8B-6bit", QWEN),
        ("mlx-community/Qwen3-8B-4bit-DWQ-053125", QWEN),
        ("lmstudio-community/Qwen3-8B-MLX-4bit", QWEN),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", CODER),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-8bit-DWQ-lr4e7", CODER),
        ("meta-llama/Llama-3.1-8B-Instruct", LLAMA),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", LLAMA),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", LLAMA),
        ("mlx-community/Llama-3.1-8B-Instruct", LLAMA),
        ("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q4", "z-lab/gpt-oss-20b-DFlash"),
        # other models, however like their names are
        ("Qwen/Qwen3-8B-Base", None),
        ("Qwen/Qwen3-4B-Instruct-2507", None),
        ("Qwen/Qwen3-4B-Thinking-2507-4bit", None),
        ("Qwen/Qwen3-14B", None),
        ("meta-llama/Llama-3.1-8B", None),
        ("openai/gpt-oss-120b", None),
        ("z-lab/Qwen3-8B-DFlash-b16", None),
        ("gpt2", None),
        ("", None),
    ],
)
def test_a_drafter_is_found_for_every_spelling_of_its_target(
    target: str, draft: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_draft(target) == draft


@pytest.mark.parametrize(
    ("place", "name_or_path", "draft"),
    [
        ("Qwen3-8B", None, QWEN),
        ("models/qwen3-8b-4bit", None, QWEN),
        ("lmstudio/models/mlx-community/Qwen3-8B-4bit", None, QWEN),
        ("hub/models--Qwen--Qwen3-8B/snapshots/0123abcd", None, QWEN),
        ("hub/models--mlx-community--Meta-Llama-3.1-8B-Instruct-bf16/snapshots/0123abcd", None, LLAMA),
        ("mine", "Qwen/Qwen3-8B", QWEN),
        ("mine", "/data/models/Qwen3-8B/", QWEN),
        ("mine", None, None),
        ("mine", "gpt2", None),
        ("hub/models--Qwen--Qwen3-14B/snapshots/0123abcd", None, None),
    ],
)
def test_a_folder_tells_what_it_holds(tmp_path: Path, place: str, name_or_path: str | None, draft: str | None) -> None:
    folder = write_target(tmp_path / place)
    (folder / "config.json").write_text(json.dumps({"_name_or_path": name_or_path} if name_or_path else {}))
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert find_draft(str(folder)) == find_draft(str(link)) == draft
    (folder / "config.json").write_text("not JSON")
    assert find_draft(str(folder)) == (None if name_or_path else draft)


def test_the_bundled_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    assert find_draft(str(write_target(bundled.SMOLLM2_135M.folder))) == "smollm2-135m"


def test_a_request_names_both_models_by_their_own_sources() -> None:
    qwen = ("Qwen/Qwen3-8B", QWEN)
    assert choose_pair(None, None, None) == ("smollm2-135m", "smollm2-135m")
    assert choose_pair("Qwen3-8B", None, None) == choose_pair(None, "Qwen/Qwen3-8B", None) == qwen
    assert choose_pair(None, Path("here"), "there") == ("here", "there")
    with pytest.raises(UsageError, match="give either"):
        choose_pair("qwen3-8b", "here", None)


def test_a_pairs_name_is_located_for_the_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Backend:
        name = "mlx"

    monkeypatch.setattr(hub, "cached", lambda source: tmp_path / source)
    backend: Any = Backend()
    assert locate("qwen3-8b", what="target", backend=None) == tmp_path / "Qwen/Qwen3-8B"
    assert locate("qwen3-8b", what="target", backend=backend) == tmp_path / "mlx-community/Qwen3-8B-bf16"
    assert locate("qwen3-8b", what="draft", backend=backend) == tmp_path / QWEN


def test_an_existing_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_draft(tmp_path / "owner" / "draft")
    assert locate(str(folder), what="draft", backend=None) == folder
    monkeypatch.chdir(tmp_path)  # a folder that reads like a hub id is a folder
    assert find_local("owner/draft", what="draft") == Path("owner/draft")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("qwen3-8", "did you mean .*qwen3-8b"),
        ("./nowhere", "'./nowhere' is no pair, local folder or hub id"),
        ("", "no pair, local folder or hub id"),
        ("a/b/c", "no pair, local folder or hub id"),
        ("a/b@", "no pair, local folder or hub id"),
    ],
)
def test_an_unknown_name_is_refused_with_near_matches(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if not source:
        source = str(tmp_path / "gone")
    with pytest.raises(ModelNotFoundError, match=message):
        locate(source, what="target", backend=None)


def test_a_file_and_a_folder_without_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        locate(str(tmp_path / "model.gguf"), what="target", backend=None)
    with pytest.raises(ModelNotFoundError, match=r"holds no config.json"):
        locate(str(tmp_path), what="target", backend=None)


def test_a_pair_that_cannot_be_fetched_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for source in ("nobody/nothing", "qwen3-8b"):
        with pytest.raises(ModelNotFoundError, match=r"HF_HUB_OFFLINE is set; give a local folder") as refusal:
            locate(source, what="target", backend=None)
        fetched = source if "/" in source else "Qwen/Qwen3-8B"
        assert re.search(rf"dflash models --fetch {fetched}$", str(refusal.value))
        assert len(str(refusal.value).splitlines()) == 1
        assert find_local(source, what="target") is None
