"""``dflash.load``: from names to a ready engine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from dflash.checkpoint import DraftConfig, check_weights
from dflash.engine import Engine
from dflash.errors import BackendError, UsageError
from dflash.interfaces import Backend, Drafter, Target
from dflash.registry import BUNDLED, find_draft, find_local, locate, resolve
from dflash.tokenizer import Tokenizer


def installed_backends() -> list[str]:
    """Names of the backends that announce themselves, sorted."""
    return sorted({point.name for point in entry_points(group="dflash.backends")})


def find_backend(name: str = "auto") -> Backend:
    """The backend of that name; ``auto``: MLX on Apple silicon where installed, else PyTorch. Raises
    ``BackendError``."""
    names = installed_backends()
    if name == "auto":
        apple = platform.system() == "Darwin" and platform.machine() == "arm64"
        name = "mlx" if apple and "mlx" in names else "torch"
    if name not in names:
        raise BackendError(f"backend {name!r} is not installed; there is {', '.join(names) or 'none'}")
    (point, *_) = entry_points(group="dflash.backends", name=name)
    try:
        backend: Backend = point.load()()
    except ImportError as error:
        raise BackendError(
            f"backend {name!r} needs a package that is missing ({error}); pip install 'dflash-lab[{name}]'"
        ) from None
    return backend


def choose_pair(
    pair: str | None, target: str | os.PathLike[str] | None, draft: str | os.PathLike[str] | None
) -> tuple[str, str]:
    """The sources of target and drafter that these mean, completed from the registry. Raises ``UsageError`` or
    ``ModelNotFoundError``."""
    if pair is not None and (target or draft):
        raise UsageError("give either the name of a pair, or a target and a draft")
    if target is None and draft is None:
        name = pair or BUNDLED.name
        if known := resolve(name):
            return known.target, known.draft
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
    **options: Any,
) -> Engine:
    """Load a pair and return its engine.

    ``pair`` names both models (default: the bundled one); or ``target`` and ``draft`` name one each: a local folder, a
    hub id or a registry name. ``device`` is the backend's word for one (``auto``: the best there is), ``dtype``
    ``float32``, ``float16`` or ``bfloat16`` (``auto``: float32 on a CPU, else the target's own). ``draft_bits`` 4 or 8
    quantises the drafter, on MLX; the output stays the target's. ``options`` go to ``Engine``. Raises a
    ``DFlashError`` that says what is wrong and what would be right."""
    chosen = find_backend(backend)
    target_source, draft_source = choose_pair(pair, target, draft)
    target_folder = locate(target_source, what="target", backend=chosen)
    draft_folder = locate(draft_source, what="draft", backend=chosen)
    config = DraftConfig.load(draft_folder)
    check_weights(draft_folder, config)
    model, drafter = chosen.run(
        lambda: _load_models(chosen, target_folder, draft_folder, config, device, dtype, draft_bits)
    )
    tokenizer = Tokenizer.load(target_folder)
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
    recorded = config.extra.get("dflash_lab", {}).get("template_sha256")
    if recorded and tokenizer and tokenizer.template_sha256 != recorded:
        engine.notes.append("the chat template is not the one this drafter was trained with; expect less acceptance")
    if tokenizer and (text := tokenizer.decode([config.mask_token_id])):
        engine.notes.append(f"mask_token_id is {config.mask_token_id}, which this tokenizer can emit ({text!r})")
    return engine


def _load_models(
    backend: Backend, target: Path, draft: Path, config: DraftConfig, device: str, dtype: str, bits: int | None
) -> tuple[Target, Drafter]:
    model = backend.load_target(target, device=device, dtype=dtype, layer_ids=config.target_layer_ids)
    return model, backend.load_drafter(draft, config, model, bits=bits)
