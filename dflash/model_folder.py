"""What a target's folder says of itself, read without any tensor library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash.checkpoint import CONFIG_FILE, read_json


def read_target_config(folder: Path) -> dict[str, Any]:
    """The language model's part of the target's config, over what the whole says. Raises ``CheckpointError``."""
    raw = read_json(folder / CONFIG_FILE)
    text = raw.get("text_config")
    return {**raw, **text} if isinstance(text, dict) else raw


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """The model's own stop ids, sorted, from its config and its generation config; there may be several, or none."""
    raw = read_json(folder / CONFIG_FILE)
    values = [part.get("eos_token_id") for part in (raw, raw.get("text_config")) if isinstance(part, dict)]
    if (generation := folder / "generation_config.json").exists():
        values.append(read_json(generation).get("eos_token_id"))
    found = {index for value in values for index in (value if isinstance(value, list) else [value])}
    return tuple(sorted(index for index in found if isinstance(index, int)))


def spans(layers: Sequence[int]) -> str:
    """``0, 2-5``: what a message can hold of many layers."""
    found: list[list[int]] = []
    for layer in layers:
        if found and found[-1][-1] == layer - 1:
            found[-1] = [found[-1][0], layer]
        else:
            found.append([layer])
    return ", ".join("-".join(map(str, span)) for span in found)
