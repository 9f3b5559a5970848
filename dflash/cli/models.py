"""List the pairs known by name and where they live."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from dflash.registry import Pair

HELP = "list the pairs known by name and where they live; fetch or verify them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fetch", metavar="NAME", help="fetch the pair of that name now, so that later runs start")
    parser.add_argument("--backend", default="auto", help="the backend that converts what is fetched (default: auto)")
    parser.add_argument("--verify", action="store_true", help="check the files of the bundled pair by their hashes")
    parser.add_argument("--json", action="store_true", help="one JSON line: name, target, draft and ready of each pair")


def run(args: argparse.Namespace) -> int:
    import json

    from dflash.registry import PAIRS

    if args.fetch:
        _fetch(args.fetch, args.backend)
    faults = _verify() if args.verify else []
    rows = [_row(pair) for pair in PAIRS]
    if args.json:
        print(json.dumps([{key: row[key] for key in ("name", "target", "draft", "ready")} for row in rows]))
    else:
        for row in rows:
            state = f"ready, {row['bytes'] / 1e6:,.0f} MB" if row["ready"] else "not on this machine yet"
            print(f"{row['name']}  ({state})")
            print(f"    {row['description']}" + (f"; {row['notes']}" if row["notes"] else ""))
            print(f"    target  {row['target']}\n    draft   {row['draft']}")
    return 1 if faults else 0


def _fetch(name: str, backend: str) -> None:
    from dflash import bundled
    from dflash.errors import ModelNotFoundError
    from dflash.loading import find_backend
    from dflash.registry import BUNDLED, PAIRS, locate, resolve

    pair = resolve(name)
    if pair is None:
        known = ", ".join(known.name for known in PAIRS)
        raise ModelNotFoundError(f"there is no pair {name!r} to fetch; known are {known}")
    if pair is BUNDLED:  # asked for by name, so worth reading every byte
        bundled.prepare(bundled.SMOLLM2_135M, find_backend(backend), thorough=True)
    else:
        locate(pair.target, what="target", backend=None)
    locate(pair.draft, what="draft", backend=None)


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
    from dflash.errors import ModelNotFoundError
    from dflash.registry import find_local

    places: dict[str, Path | None] = {}
    for what, source in (("target", pair.target), ("draft", pair.draft)):
        try:
            places[what] = find_local(source, what=what)
        except ModelNotFoundError:  # the bundled drafter is missing from the installation; doctor says so
            places[what] = None
    found = [folder for folder in places.values() if folder is not None]
    return {
        "name": pair.name,
        "target": str(places["target"] or _future(pair, "target")),
        "draft": str(places["draft"] or _future(pair, "draft")),
        "ready": len(found) == 2,
        "bytes": sum(file.stat().st_size for folder in found for file in folder.rglob("*") if file.is_file()),
        "description": pair.description,
        "notes": pair.notes,
    }


def _future(pair: Pair, what: str) -> str:
    """Where an absent model will be: a folder for the bundled pair, else its hub id."""
    from dflash.bundled import SMOLLM2_135M
    from dflash.registry import BUNDLED, bundled_draft_folder

    if pair is not BUNDLED:
        return pair.target if what == "target" else pair.draft
    return str(SMOLLM2_135M.folder if what == "target" else bundled_draft_folder())
