"""A pair straight from a hub: the target by its id, the drafter found by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from fake_hub import FakeHub, Files, serve_client
from tiny_models import TinyPair, make_config, make_drafter, save_pair

import dflash


def files(folder: Path) -> Files:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_pair_is_loaded_from_the_hub_and_then_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, prompt = TinyPair("qwen3"), [3, 17, 200]
    target, draft = save_pair(tmp_path / "local", tiny.model, make_config(), make_drafter(make_config()))
    with FakeHub() as hub:
        hub.add("Qwen/Qwen3-8B", files(target))
        hub.add("z-lab/Qwen3-8B-DFlash-b16", files(draft))
        serve_client(hub.url, tmp_path / "hub", monkeypatch)
        engine = dflash.load(target="Qwen/Qwen3-8B", backend="torch", device="cpu")
        assert engine.facts["draft"] == "z-lab/Qwen3-8B-DFlash-b16"
        assert Path(engine.facts["target_folder"]).is_relative_to(tmp_path / "hub" / "models--Qwen--Qwen3-8B")
        oracle = tiny.oracle(prompt, 12)
        assert 1 not in oracle  # the end token
        assert list(engine.generate(prompt, max_new_tokens=12).token_ids) == oracle
    again = dflash.load(engine.facts["target_folder"], backend="torch", device="cpu")
    assert again.facts["draft_folder"] == engine.facts["draft_folder"]
    assert list(again.generate(prompt, max_new_tokens=12).token_ids) == oracle
