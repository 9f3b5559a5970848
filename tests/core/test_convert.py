"""A drafter rewritten in every spelling, or nothing written at all."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import command
from model_folders import draft_dict, write_draft

from dflash.cli import convert as convert_command
from dflash.convert import convert
from dflash.errors import DialectError, StorageError, UsageError, WeightsError


def test_convert_rewrites_every_spelling_and_keeps_the_weights(tmp_path: Path, capsys: Any) -> None:
    old = draft_dict(
        block_size=None,
        dtype="bfloat16",
        rope_scaling={"type": "linear", "factor": 2.0},
        auto_map={"AutoModel": "modeling.Draft"},
        dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 3], "block_size": 4},
        dflash_lab={"template_sha256": "ab"},
    )
    source = write_draft(tmp_path / "old", old, dtype="BF16")
    (source / "README.md").write_text("card")
    (source / "modeling.py").write_text("raise SystemExit")
    assert command(convert_command, str(source), str(tmp_path / "new" / "draft")) == 0
    new = tmp_path / "new" / "draft"
    assert capsys.readouterr().out.strip() == str(new)
    assert sorted(file.name for file in new.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert (new / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    raw = json.loads((new / "config.json").read_text())
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    assert raw["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert raw["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert raw["dflash_lab"] == {"template_sha256": "ab"}
    assert "auto_map" not in raw
    assert [file.name for file in new.parent.iterdir()] == ["draft"]


def test_convert_refuses_a_taken_place_and_keeps_it(tmp_path: Path) -> None:
    source, taken = write_draft(tmp_path / "old"), tmp_path / "taken"
    taken.mkdir()
    assert convert(source, taken).block_size == 4  # an empty folder is free
    before = (taken / "config.json").read_bytes()
    with pytest.raises(UsageError, match="exists and is not an empty folder"):
        convert(source, taken)
    assert (taken / "config.json").read_bytes() == before
    with pytest.raises(UsageError, match="exists and is not an empty folder"):
        convert(source, source / "config.json")


def test_convert_refuses_other_dialects_and_bad_weights_and_writes_nothing(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "old")
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-4])
    with pytest.raises(WeightsError, match="promises"):
        convert(source, tmp_path / "new")
    (source / "config.json").write_text(json.dumps(draft_dict(architectures=["DFlash2DraftModel"])))
    with pytest.raises(DialectError, match="DFlash 2"):
        convert(source, tmp_path / "new")
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_convert_to_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_draft(tmp_path / "old")

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(StorageError, match="No space left on device"):
        convert(source, tmp_path / "new")
    assert [file.name for file in tmp_path.iterdir()] == ["old"]
