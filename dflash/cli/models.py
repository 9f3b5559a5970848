"""List the pairs known by name and where they live."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from dflash.registry import Pair

HELP = "list the pairs known by name and where they live; fetch or verify them"
BACKENDS = ("torch", "mlx")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fetch", metavar="MODEL", help="fetch a pair by its name, or a target by its hub id with its drafter, now"
    )
    parser.add_argument("--backend", default="auto", help="the backend to fetch a pair's target for (default: auto)")
    parser.add_argument("--verify", action="store_true", help="check the files of the bundled pair by their hashes")
    parser.add_argument(
        "--json", action="store_true", help="one JSON line: name, draft, and target and ready by backend, of each pair"
    )


def run(args: argparse.Namespace) -> int:
    import json

    from dflash.registry import MLX_QUANTISED_BLOCK, PAIRS

    if args.fetch:
        _fetch(args.fetch, args.backend)
    faults = _verify() if args.verify else []
    rows = [_row(pair) for pair in PAIRS]
    if args.json:
        print(json.dumps([{key: row[key] for key in ("name", "target", "draft", "ready")} for row in rows]))
        return 1 if faults else 0
    for pair, row in zip(PAIRS, rows, strict=True):
        print(f"{pair.name}  ({_state(row)})")
        print(f"    {pair.description}" + (f"; {pair.notes}" if pair.notes else ""))
        print(f"    target  {row['target']['torch']}")
        if pair.mlx:
            print(f"    on MLX  {row['target']['mlx']}{_others(pair)}")
        print(f"    draft   {row['draft']}")
    print(f"A target quantised to 4 or 8 bits is best served with --block-size {MLX_QUANTISED_BLOCK} or less on MLX.")
    return 1 if faults else 0


def _state(row: dict[str, Any]) -> str:
    ready = [backend for backend in BACKENDS if row["ready"][backend]]
    if not ready:
        return "not on this machine yet"
    return f"ready{'' if len(ready) == len(BACKENDS) else f' on {ready[0]}'}, {row['bytes'] / 1e6:,.0f} MB"


def _others(pair: Pair) -> str:
    """The formats of the MLX targets after the first."""
    return f" (or …-{', …-'.join(source.rsplit('-', 1)[1] for source in pair.mlx[1:])})" if pair.mlx[1:] else ""


def _fetch(name: str, backend: str) -> None:
    from dflash import bundled, hub
    from dflash.backends import find_backend
    from dflash.errors import ModelNotFoundError
    from dflash.registry import BUNDLED, bundled_draft, find_pair, near, resolve

    pair = resolve(name)
    if pair is BUNDLED:  # asked for by name, so worth reading every byte
        bundled.prepare(bundled.SMOLLM2_135M, thorough=True)
        bundled_draft()
        return
    if pair:
        sources = [pair.target_for(find_backend(backend).name), pair.draft]
    elif hub.split(name):
        found = find_pair(name)
        sources = [name] + ([found.draft] if found and hub.split(found.draft) else [])
    else:
        raise ModelNotFoundError(f"{name!r} is no pair or hub id (owner/name) to fetch; {near(name)}")
    for source in sources:
        hub.fetch(source, near(source))


def _verify() -> list[str]:
    import sys

    from dflash import bundled
    from dflash.checkpoint import DraftConfig, check_weights
    from dflash.errors import DFlashError
    from dflash.registry import BUNDLED, bundled_draft

    model = bundled.SMOLLM2_135M
    faults = bundled.damage(model) if model.folder.exists() else []
    try:
        draft = bundled_draft()
        check_weights(draft, DraftConfig.load(draft))
    except DFlashError as error:
        faults.append(str(error))
    for fault in faults:
        print(f"dflash: {fault}", file=sys.stderr)
    if faults:
        print(f"dflash: `dflash models --fetch {BUNDLED.name}` prepares the target anew", file=sys.stderr)
    else:
        state = "every hash is right" if model.folder.exists() else "the target is not on this machine yet"
        print(f"dflash: {BUNDLED.name}: {state}", file=sys.stderr)
    return faults


def _row(pair: Pair) -> dict[str, Any]:
    targets = {backend: _place(pair.target_for(backend), "target") for backend in BACKENDS}
    draft = _place(pair.draft, "draft")
    found = {folder for folder in (*targets.values(), draft) if folder is not None}
    return {
        "name": pair.name,
        "target": {backend: str(folder or _future(pair, backend)) for backend, folder in targets.items()},
        "draft": str(draft or _future(pair, "draft")),
        "ready": {backend: bool(folder and draft) for backend, folder in targets.items()},
        "bytes": sum(file.stat().st_size for folder in found for file in folder.rglob("*") if file.is_file()),
    }


def _place(source: str, what: str) -> Path | None:
    from dflash.errors import ModelNotFoundError
    from dflash.registry import find_local

    try:
        return find_local(source, what=what)
    except ModelNotFoundError:  # the bundled drafter is missing from the installation; doctor says so
        return None


def _future(pair: Pair, part: str) -> str:
    """Where an absent drafter or backend's target will be: a folder for the bundled pair, else its hub id."""
    from dflash.bundled import SMOLLM2_135M
    from dflash.registry import BUNDLED, bundled_draft_folder

    if pair is not BUNDLED:
        return pair.draft if part == "draft" else pair.target_for(part)
    return str(bundled_draft_folder() if part == "draft" else SMOLLM2_135M.folder)
