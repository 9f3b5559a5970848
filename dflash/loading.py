"""``dflash.load``: from names to a ready engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash.backends import find_backend
from dflash.checkpoint import DraftConfig, check_weights
from dflash.engine import Engine
from dflash.errors import UsageError
from dflash.interfaces import Backend, Drafter, Target
from dflash.model_folder import read_target_config
from dflash.registry import BUNDLED, MLX_QUANTISED_BLOCK, find_draft, find_local, find_pair, locate, resolve
from dflash.tokenizer import Tokenizer


def choose_pair(
    pair: str | None,
    target: str | os.PathLike[str] | None,
    draft: str | os.PathLike[str] | None,
    backend: str = "torch",
) -> tuple[str, str]:
    """The sources of target and drafter that these mean for the backend of that name, completed from the registry.
    Raises ``UsageError`` or ``ModelNotFoundError``."""
    if pair is not None and (target or draft):
        raise UsageError("give either the name of a pair, or a target and a draft")
    if target is None and draft is None:
        name = pair or BUNDLED.name
        if known := resolve(name):
            return known.target_for(backend), known.draft
        target = name  # a target alone
    if target is None:
        raise UsageError(f"the draft {draft} needs a target to draft for; name it as target")
    source = os.fspath(target)
    if draft is not None:
        return source, os.fspath(draft)
    if found := find_draft(source):
        return source, found
    find_local(source, what="target")  # a name that means nothing is the likelier mistake
    raise UsageError(f"no drafter is known for the target {source}; name one as draft")


def load(
    pair: str | None = None,
    *,
    target: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    backend: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    draft_bits: int | None = None,
    thinking: bool | None = None,
    **options: Any,
) -> Engine:
    """Load a pair and return its engine.

    ``pair`` names both models (default: the bundled one); or ``target`` and ``draft`` name one each: a local folder, a
    hub id or a registry name. ``device`` is the backend's word for one (``auto``: the best there is), ``dtype``
    ``float32``, ``float16`` or ``bfloat16`` (``auto``: float32 on a CPU, else the target's own). ``draft_bits`` 4 or 8
    quantises the drafter, on MLX; the output stays the target's. ``thinking`` is what the chat template is told
    (default: what it was told when the drafter was trained). ``options`` go to ``Engine``. Raises a ``DFlashError``
    that says what is wrong and what would be right."""
    chosen = find_backend(backend)
    if draft_bits is not None and draft_bits not in chosen.draft_bits:
        offered = ", ".join(map(str, chosen.draft_bits)) or "none; mlx quantises drafters"
        raise UsageError(f"draft_bits is {draft_bits!r}; the {chosen.name} backend has {offered}")
    target_source, draft_source = choose_pair(pair, target, draft, chosen.name)
    target_folder = locate(target_source, what="target", backend=chosen)
    draft_folder = locate(draft_source, what="draft", backend=chosen)
    config = DraftConfig.load(draft_folder)
    check_weights(draft_folder, config)
    model, drafter = chosen.run(
        lambda: _load_models(chosen, target_folder, draft_folder, config, device, dtype, draft_bits)
    )
    trained = _trained_thinking(config, target_source)
    tokenizer = Tokenizer.load(target_folder, thinking=trained if thinking is None else thinking)
    facts = {
        "target": target_source,
        "draft": draft_source,
        "target_folder": str(target_folder),
        "draft_folder": str(draft_folder),
        "backend": chosen.name,
        "device": model.info.device,
        "dtype": model.info.dtype,
    }
    engine = Engine(chosen, model, drafter, tokenizer, facts=facts, **options)
    quantised = chosen.name == "mlx" and "quantization" in read_target_config(target_folder)
    engine.notes += _notes(config, tokenizer, trained, quantised)
    return engine


def _notes(config: DraftConfig, tokenizer: Tokenizer | None, trained: bool | None, quantised: bool) -> Iterator[str]:
    """What a user should know of this pair before wondering."""
    if quantised and config.block_size > MLX_QUANTISED_BLOCK:
        yield (
            f"the target is quantised, which makes every row of a block cost more on MLX; a block_size of "
            f"{MLX_QUANTISED_BLOCK} or less is advised, and it is {config.block_size}"
        )
    if tokenizer is None:
        return
    recorded = config.extra.get("dflash_lab", {}).get("template_sha256")
    if recorded and tokenizer.template_sha256 != recorded:
        yield "the chat template is not the one this drafter was trained with; expect less acceptance"
    if trained is not None and tokenizer.thinking != trained:
        yield f"this drafter was trained {'with' if trained else 'without'} thinking; expect less acceptance"
    if text := tokenizer.decode([config.mask_token_id]):
        yield f"mask_token_id is {config.mask_token_id}, which this tokenizer can emit ({text!r})"


def _trained_thinking(config: DraftConfig, target: str) -> bool | None:
    """What the chat template was told when the drafter was trained, by its own record or by the registry."""
    recorded = config.extra.get("dflash_lab", {}).get("thinking")
    pair = find_pair(target)
    return recorded if recorded is not None else pair.thinking if pair else None


def _load_models(
    backend: Backend, target: Path, draft: Path, config: DraftConfig, device: str, dtype: str, bits: int | None
) -> tuple[Target, Drafter]:
    model = backend.load_target(target, device=device, dtype=dtype, layer_ids=config.target_layer_ids)
    return model, backend.load_drafter(draft, config, model, bits=bits)
