"""An old native drafter folder into a current one: every spelling in its config, its weights byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dflash.checkpoint import CONFIG_FILE, INDEX_FILE, DraftConfig, check_weights, weight_files
from dflash.errors import UsageError
from dflash.storage import new_folder, storage_errors

_DOCUMENTS = ("README.md", "LICENSE", "LICENSE.txt", "NOTICE")


def convert(source: Path, destination: Path) -> DraftConfig:
    """Write the drafter in ``source`` to the new folder ``destination``; it is there whole or not at all. Weights keep
    their files and dtype, so no tensor library is needed.

    Raises ``UsageError`` where ``destination`` is taken, ``CheckpointError`` where ``source`` is no native drafter
    (other dialects by name) and ``StorageError`` where ``destination`` cannot be written."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UsageError(f"{destination} exists and is not an empty folder; give a new name to write the drafter to")
    config = DraftConfig.load(source)
    check_weights(source, config)
    files = weight_files(source)
    files += [source / name for name in (INDEX_FILE, *_DOCUMENTS) if (source / name).exists()]
    with (
        storage_errors(destination, "give a folder with enough room that you may write to"),
        new_folder(destination) as folder,
    ):
        for file in files:
            shutil.copyfile(file, folder / file.name)
        text = json.dumps(config.to_dict(), indent=2) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
        written = DraftConfig.load(folder)
        check_weights(folder, written)
        assert written == config  # what was written reads back as what was read
    return config
