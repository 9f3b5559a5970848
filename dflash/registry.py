"""Names → target, drafter, and where they are.

A source is a registry name, a local folder, or a hub id (``owner/name``); everything that takes a model takes any of
them, and ``locate`` makes it a local folder.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import bundled
from dflash.checkpoint import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, read_json
from dflash.errors import BackendError, DFlashError, ModelNotFoundError, StorageError
from dflash.interfaces import Backend

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True)
class Pair:
    """A target and the drafter made for it. ``target`` and ``draft`` are sources: hub ids, or for the bundled pair its
    own name. ``notes`` say what a user must know to get the published acceptance."""

    name: str
    target: str
    draft: str
    description: str
    notes: str = ""


BUNDLED = Pair(
    name="smollm2-135m",
    target="smollm2-135m",
    draft="smollm2-135m",
    description="SmolLM2-135M-Instruct and the drafter that ships with dflash-lab",
    notes="needs a package registry once; 640 MB in the cache directory while it is prepared, 542 MB after",
)
PAIRS = (
    BUNDLED,
    Pair("qwen3-4b", "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", "Qwen3-4B, block 16", "trained without thinking"),
    Pair("qwen3-8b", "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", "Qwen3-8B, block 16", "trained without thinking"),
    Pair(
        "qwen3-coder-30b-a3b",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        "Qwen3-Coder-30B-A3B-Instruct, mixture of experts",
    ),
    Pair(
        "llama-3.1-8b-instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        "Llama-3.1-8B-Instruct",
        "the target's owner asks for an agreement on the hub",
    ),
)


def resolve(name: str) -> Pair | None:
    """The pair of that name; None where there is none. Case does not matter."""
    return next((pair for pair in PAIRS if pair.name == name.casefold()), None)


def find_draft(target: str) -> str | None:
    """The drafter known for a target given as a registry name, a hub id, or the bundled target's folder."""
    if Path(target).absolute() == bundled.SMOLLM2_135M.folder:
        return BUNDLED.draft
    wanted = target.casefold()
    return next((pair.draft for pair in PAIRS if wanted in (pair.name, pair.target.casefold())), None)


def bundled_draft_folder() -> Path:
    """Where the shipped drafter belongs, inside this package."""
    return Path(__file__).parent / "pretrained" / BUNDLED.name


def bundled_draft() -> Path:
    """The shipped drafter's folder. Raises ``ModelNotFoundError`` where an installation lacks it."""
    folder = bundled_draft_folder()
    if not (folder / CONFIG_FILE).exists():
        raise ModelNotFoundError(
            f"the drafter of {BUNDLED.name} is missing from this installation ({folder}); reinstall dflash-lab"
        )
    return folder


def find_local(source: str, *, what: str) -> Path | None:
    """The folder where ``source`` lies; None where it is known but not on this machine yet. Fetches nothing.
    ``what`` is ``"target"`` or ``"draft"``. Raises ``ModelNotFoundError`` for what can be nothing of the kind."""
    return _find(source, what=what, absent=lambda hub_id: _hub_folder(hub_id, local_only=True))


def locate(source: str, *, what: str, backend: Backend | None) -> Path:
    """The local folder of ``source``, fetched (hub) or fetched and converted (bundled target) where it is not on this
    machine yet. Raises ``ModelNotFoundError``, ``StorageError`` or ``BackendError``."""
    if resolve(source) is BUNDLED and what == "target":
        return bundled.prepare(bundled.SMOLLM2_135M, backend)
    folder = _find(source, what=what, absent=_hub_folder)
    assert folder is not None  # only the bundled target and a local-only search can come back empty
    return folder


def _find(source: str, *, what: str, absent: Callable[[str], Path | None]) -> Path | None:
    if pair := resolve(source):
        if pair is BUNDLED:
            if what == "draft":
                return bundled_draft()
            model = bundled.SMOLLM2_135M
            return model.folder if bundled.is_ready(model) else None
        return absent(pair.target if what == "target" else pair.draft)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG_FILE).exists():
            raise ModelNotFoundError(f"{folder} holds no {CONFIG_FILE}, so it is no model folder; give one as {what}")
        return folder
    if folder.exists():
        raise ModelNotFoundError(f"{folder} is a file; give the folder that holds {CONFIG_FILE} as {what}")
    if _HUB_ID.fullmatch(source):
        return absent(source)
    raise ModelNotFoundError(f"{source!r} is no pair, local folder or hub id (owner/name); {_near(source)}")


def _near(source: str) -> str:
    known = [name for pair in PAIRS for name in dict.fromkeys((pair.name, pair.target, pair.draft))]
    by_folded = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(source.casefold(), by_folded, n=3, cutoff=0.6)
    if matches:
        return f"did you mean {' or '.join(by_folded[match] for match in matches)}?"
    return f"pairs are {', '.join(pair.name for pair in PAIRS)}"


def _hub_folder(hub_id: str, local_only: bool = False) -> Path | None:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        if local_only:
            return None
        raise BackendError(
            f"{hub_id} is on the hub, which needs huggingface_hub; pip install 'dflash-lab[torch]'"
        ) from None
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), local_files_only=local_only))
    except Exception as error:  # the hub client lets several libraries' errors through
        if local_only:
            return None
        raise _hub_error(hub_id, error, errors) from error
    if local_only and not _complete(folder):
        return None
    return folder


def _complete(folder: Path) -> bool:
    """A snapshot folder exists before its download has ended: look for what it must hold."""
    try:
        names = set(read_json(folder / INDEX_FILE)["weight_map"].values()) if (folder / INDEX_FILE).exists() else set()
    except (DFlashError, KeyError, AttributeError):
        return False
    return all((folder / name).exists() for name in {CONFIG_FILE, *(names or {WEIGHTS_FILE})})


def _hub_error(hub_id: str, error: Exception, errors: Any) -> DFlashError:
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(
            f"{hub_id} is gated on the hub; accept its terms there and log in with: hf auth login"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(f"the hub has no model {hub_id} that you may see; {_near(hub_id)}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT):
        return StorageError(f"{hub_id} cannot be stored ({error.strerror}); set HF_HOME to a folder with enough room")
    return ModelNotFoundError(
        f"{hub_id} is no local folder and the hub cannot be reached ({type(error).__name__}); "
        f"check the network and HF_HUB_OFFLINE, or give a local folder"
    )
