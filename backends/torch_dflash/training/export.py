"""A trained drafter as a native 16-bit folder, with its card."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash.checkpoint import CONFIG_FILE, WEIGHTS_FILE, DraftConfig, check_weights
from dflash.errors import UsageError
from dflash.storage import new_folder, storage_errors
from torch_dflash.modeling import DraftModel

CARD_FILE = "README.md"


def export_drafter(model: DraftModel, folder: Path, facts: Mapping[str, Any]) -> DraftConfig:
    """Write ``model`` to ``folder`` in bfloat16 under the native names; the folder is there whole or not at all.

    ``facts`` go into the config under ``dflash_lab`` (recipe, step, ``template_sha256``, ``thinking``). An earlier
    export is replaced; any other folder that holds something is refused with ``UsageError``. Raises ``StorageError``
    where nothing can be written."""
    refuse_foreign(folder)
    config = dataclasses.replace(model.config, extra={"dflash_lab": dict(facts)})
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in model.state_dict().items()
    }
    with storage_errors(folder, "give a folder with enough room that you may write to"), new_folder(folder) as partial:
        save_file(weights, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        (partial / WEIGHTS_FILE).chmod(0o644)  # safetensors makes it private
        (partial / CONFIG_FILE).write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
        check_weights(partial, DraftConfig.load(partial))
    return config


def refuse_foreign(folder: Path) -> None:
    """Raise ``UsageError`` where ``folder`` holds something that no export of ours has written."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        ours = "dflash_lab" in json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise UsageError(f"{folder} holds something else than an exported drafter; give a new folder to write to")


def write_card(folder: Path, text: str) -> None:
    """The card beside the weights, whole or not at all."""
    partial = folder / (CARD_FILE + ".partial")
    with storage_errors(folder, "give a folder with enough room that you may write to"):
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / CARD_FILE)


def card_text(facts: Mapping[str, Any]) -> str:
    """A drafter's card from the figures of ``run.run``: data, recipe, seed, hours, held-out curve, served τ."""
    recipe, data, heldout, served = (facts[key] for key in ("recipe", "data", "heldout", "served"))
    lines = [
        f"# A DFlash drafter for {facts['target']}",
        "",
        f"{facts['parameters'] / 1e6:.1f} M parameters, {recipe['draft_layers']} layers, block {recipe['block_size']}, "
        f"taps {facts['target_layer_ids']}, mask token {recipe['mask_token_id']}. Native DFlash dialect, bfloat16; "
        "embedding and head are the target's.",
        "",
        "## Data",
        "",
        f"{data['rows']:,} prompts answered by the target itself, {data['response_tokens']:,} response tokens "
        f"({', '.join(f'{_named(name)} {count:,}' for name, count in data['domains'].items())}); "
        f"{data['sampled']:,} rows sampled, the others greedy. {facts['train_rows']:,} rows trained on, "
        f"{facts['heldout_rows']} held out.",
        "",
        *(f"- `{file['name']}`, SHA-256 `{file['sha256']}`" for file in data["files"]),
        "",
        "## Training",
        "",
        f"Step {facts['step']:,} of {recipe['steps']:,}, {facts['epochs']:.1f} epochs, {facts['hours']:.2f} hours on "
        f"{facts['hardware']}; seed {recipe['seed']}. To train it again:",
        "",
        f"    {facts['command']}",
        "",
        "```json",
        json.dumps(recipe, indent=2),
        "```",
        "",
        "## Held-out, all anchors",
        "",
        f"Every valid anchor of the {facts['heldout_rows']} held-out rows ({heldout['anchors']:,}), the exported "
        f"weights in {facts['dtype']}: acceptance length **{heldout['acceptance_length']:.3f}**"
        + "".join(f", {_named(name)} {value:.3f}" for name, value in heldout["by_domain"].items())
        + "; slots correct "
        + " ".join(f"{value:.2f}" for value in heldout["slot_accuracy"])
        + ".",
        "",
        "| step | hours | acceptance length |",
        "| --- | --- | --- |",
        *(f"| {step:,} | {hours:.2f} | {length:.3f} |" for step, hours, length in facts["curve"]),
        "",
        "## Served",
        "",
        f"The real decode loop, greedy, {facts['max_new_tokens']} new tokens, {facts['dtype']} on {facts['device']}. "
        "τ: committed tokens ÷ rounds.",
        "",
    ]
    for title, figures in served.items():
        lines += [f"{title}:", "", "| | prompts | τ | τ per prompt, mean ± sd | accepted ÷ drafted |"]
        lines += ["| --- | --- | --- | --- | --- |", _served_row("all", figures)]
        lines += [_served_row(name, part) for name, part in figures["domains"].items()]
        by_position = " ".join(f"{rate:.2f}" for rate in figures["acceptance_rate_per_position"])
        lines += ["", f"Accepted by position: {by_position}", ""]
    return "\n".join(lines)


def _named(domain: str) -> str:
    return domain or "no domain"


def _served_row(name: str, figures: Mapping[str, Any]) -> str:
    def show(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    spread = figures["per_prompt"]["mean_acceptance_length"]
    own = f"{spread['mean']:.2f} ± {spread['stdev']:.2f}" if spread else "–"
    tau, rate = show(figures["mean_acceptance_length"], 2), show(figures["draft_acceptance_rate"], 3)
    return f"| {name} | {figures['prompts']} | {tau} | {own} | {rate} |"
