"""Names → target, drafter, and where they are.

A source is a registry name, a local folder, or a hub id (``owner/name``, ``owner/name@revision``); everything that
takes a model takes any of them, and ``locate`` makes it a local folder.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash import bundled, hub
from dflash.checkpoint import CONFIG_FILE, read_json
from dflash.errors import DFlashError, ModelNotFoundError
from dflash.interfaces import Backend

# The README of the official package (dflash 0.1.0) advises this for quantised targets and drafters on MLX, whose
# product of a quantised matrix grows with every row. Nothing here has been timed on Metal.
MLX_QUANTISED_BLOCK = 5

# What is added to a model's name when its weights are stored in another format; the drafter stays the same.
_FORMAT = re.compile(
    r"[-_](mlx|bf16|fp16|fp32|fp8|int[48]|[2-8]-?bit|mxfp[48]|nvfp4|q[2-8]|dwq(-\w+)*|awq|gptq)$", re.IGNORECASE
)


@dataclass(frozen=True)
class Pair:
    """A target and the drafter made for it. ``target`` (for PyTorch), ``mlx`` (the same target for MLX, the default
    first; none: ``target`` serves both) and ``draft`` are sources: hub ids, or for the bundled pair its own name.
    ``also`` are other names of the target. ``thinking`` is what the drafter's training told the chat template (None:
    nothing). ``notes`` say what a user must know to get the published acceptance."""

    name: str
    target: str
    draft: str
    description: str
    notes: str = ""
    mlx: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    thinking: bool | None = None

    def target_for(self, backend: str) -> str:
        """The source of the target for the backend of that name."""
        return self.mlx[0] if backend == "mlx" and self.mlx else self.target

    @property
    def targets(self) -> tuple[str, ...]:
        """Every name of the target."""
        return (self.name, self.target, *self.mlx, *self.also)


def _mlx(name: str, *formats: str) -> tuple[str, ...]:
    return tuple(f"mlx-community/{name}-{form}" for form in formats)


BUNDLED = Pair(
    name="smollm2-135m",
    target="smollm2-135m",
    draft="smollm2-135m",
    description="SmolLM2-135M-Instruct and the drafter that ships with dflash-lab",
    notes="needs a package registry once; 640 MB in the cache directory while it is prepared, 542 MB after",
    also=("HuggingFaceTB/SmolLM2-135M-Instruct",),
)

# Where this was confirmed; none of it by running a pair, which takes the hub and a large machine:
# - targets with their drafters, and which of these were trained without thinking: the README of z-lab/dflash;
# - mlx-community's ids: their cards on the hub (Qwen3-4B-8bit, Qwen3-8B-4bit, Meta-Llama-3.1-8B-Instruct-bf16 and
#   -8bit); the others by public code that loads them under these ids;
# - that Qwen3-Coder never thinks, and gpt-oss's block: the model card and the drafter's config, as others quote them.
# Tiny random models of every family are served exactly (tests/*/test_*families.py).
# Left out: drafters of targets with recurrent layers, which are refused (Qwen3.5, Qwen3.6, Qwen3-Coder-Next); DFlash 2
# (Qwen3.8, Muse-Glimmer); targets not tried here (Gemma 4, MiniMax, Kimi, GLM) or too large (gpt-oss-120b).
PAIRS = (
    BUNDLED,
    Pair(
        "qwen3-4b",
        "Qwen/Qwen3-4B",
        "z-lab/Qwen3-4B-DFlash-b16",
        "Qwen3-4B, block 16",
        "trained without thinking",
        mlx=_mlx("Qwen3-4B", "bf16", "8bit", "4bit"),
        thinking=False,
    ),
    Pair(
        "qwen3-8b",
        "Qwen/Qwen3-8B",
        "z-lab/Qwen3-8B-DFlash-b16",
        "Qwen3-8B, block 16",
        "trained without thinking",
        mlx=_mlx("Qwen3-8B", "bf16", "8bit", "4bit"),
        thinking=False,
    ),
    Pair(
        "qwen3-coder-30b-a3b",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        "Qwen3-Coder-30B-A3B-Instruct, mixture of experts",
        "a model that never thinks",
        mlx=_mlx("Qwen3-Coder-30B-A3B-Instruct", "bf16", "8bit", "4bit"),
    ),
    Pair(
        "llama-3.1-8b-instruct",
        "meta-llama/Llama-3.1-8B-Instruct",
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        "Llama-3.1-8B-Instruct",
        "the target's owner asks for an agreement on the hub (Llama 3.1 licence)",
        mlx=_mlx("Meta-Llama-3.1-8B-Instruct", "bf16", "8bit", "4bit"),
    ),
    Pair(
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        "z-lab/gpt-oss-20b-DFlash",
        "gpt-oss-20b, block 8, mixture of experts with sliding windows",
        "weights in MXFP4 on both backends",
        mlx=("mlx-community/gpt-oss-20b-MXFP4-Q8",),
    ),
)


def resolve(name: str) -> Pair | None:
    """The pair of that name; None where there is none. Case does not matter."""
    return next((pair for pair in PAIRS if pair.name == name.casefold()), None)


def find_pair(target: str) -> Pair | None:
    """The pair of a target, whichever way it is named: a registry name, a hub id of any owner and storage format, or a
    folder whose path, place in the hub's cache, or config says what it holds. None where no drafter is known for it.
    A drafter is only ever a matter of speed, so a name may be believed."""
    if pair := resolve(target):
        return pair
    names = set(map(_bare, _names(target)))
    return next((pair for pair in PAIRS if names & set(map(_bare, pair.targets))), None)


def find_draft(target: str) -> str | None:
    """The drafter known for a target; see ``find_pair``."""
    pair = find_pair(target)
    return pair.draft if pair else None


def _names(target: str) -> Iterator[str]:
    """What a target may be called, as far as ``target``, a hub id or a folder, tells."""
    folder = Path(target).expanduser()
    if not folder.is_dir():
        yield parts[0] if (parts := hub.split(target)) else target
        return
    for path in (folder.absolute(), folder.resolve()):
        yield path.name
        yield from (part.replace("--", "/") for part in path.parts if part.startswith("models--"))
    try:
        yield str(read_json(folder / CONFIG_FILE).get("_name_or_path", ""))
    except DFlashError:
        return


def _bare(name: str) -> str:
    """A name without owner and storage format."""
    name = name.rstrip("/").rsplit("/", 1)[-1].casefold()
    while (shorter := _FORMAT.sub("", name)) != name:
        name = shorter
    return name


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
    return _find(source, what=what, backend="torch", absent=lambda hub_id: None)


def locate(source: str, *, what: str, backend: Backend | None) -> Path:
    """The local folder of ``source`` for ``backend``, fetched (hub) or fetched and converted (bundled target) where it
    is not on this machine yet; what is there is taken as it is (``hub.fetch`` updates). Raises ``ModelNotFoundError``,
    ``StorageError`` or ``BackendError``."""
    if resolve(source) is BUNDLED and what == "target":
        return bundled.prepare(bundled.SMOLLM2_135M)
    name = "torch" if backend is None else backend.name
    folder = _find(source, what=what, backend=name, absent=lambda hub_id: hub.fetch(hub_id, near(hub_id)))
    assert folder is not None  # only the bundled target and a local-only search can come back empty
    return folder


def _find(source: str, *, what: str, backend: str, absent: Callable[[str], Path | None]) -> Path | None:
    if pair := resolve(source):
        if pair is BUNDLED:
            if what == "draft":
                return bundled_draft()
            model = bundled.SMOLLM2_135M
            return model.folder if bundled.is_ready(model) else None
        hub_id = pair.target_for(backend) if what == "target" else pair.draft
        return hub.cached(hub_id) or absent(hub_id)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / CONFIG_FILE).exists():
            raise ModelNotFoundError(f"{folder} holds no {CONFIG_FILE}, so it is no model folder; give one as {what}")
        return folder
    if folder.exists():
        raise ModelNotFoundError(f"{folder} is a file; give the folder that holds {CONFIG_FILE} as {what}")
    if hub.split(source):
        return hub.cached(source) or absent(source)
    raise ModelNotFoundError(f"{source!r} is no pair, local folder or hub id (owner/name); {near(source)}")


def near(source: str) -> str:
    """The end of a sentence about a name that means nothing: the known names that are like it, else the pairs."""
    by_folded = {name.casefold(): name for pair in PAIRS for name in (*pair.targets, pair.draft)}
    matches = difflib.get_close_matches(source.casefold(), by_folded, n=3, cutoff=0.6)
    if matches:
        return f"did you mean {' or '.join(by_folded[match] for match in matches)}?"
    return f"pairs are {', '.join(pair.name for pair in PAIRS)}"
