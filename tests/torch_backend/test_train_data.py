"""Responses that a drafter learns from end where the engine's texts end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch")

import tiny_gguf
from torch_dflash.training import regenerate

import dflash
from dflash.cli import main as cli


@pytest.mark.parametrize("stated", [True, False], ids=["by the model too", "by the tokenizer alone"])
def test_training_data_and_the_engine_stop_at_the_same_ids(
    stated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = tiny_gguf.write_pair(tmp_path)
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(raw | {"eos_token_id": [1, 5] if stated else None}))
    asked: list[tuple[int, ...]] = []

    def answer(model: Any, prompts: Any, path: Path, stop_ids: tuple[int, ...], *_: Any) -> int:
        asked.append(stop_ids)
        return 0

    monkeypatch.setattr(regenerate, "regenerate", answer)
    words = ["--target", str(target), "--rows", "1", "--out", str(tmp_path / "rows.jsonl")]
    assert cli.main(["train", "data", *words]) == 0
    engine = dflash.load(target=target, draft=draft, backend="torch")
    assert asked == [engine.stop_token_ids] == [(1, 2, 5) if stated else (2,)]
