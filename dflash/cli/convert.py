"""Rewrite a native drafter of any old spelling into the current one. Its weights are copied byte for byte."""

from __future__ import annotations

import argparse
import sys

HELP = "rewrite a native drafter of any old spelling into the current one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="the drafter: a folder, a hub id or a pair's name")
    parser.add_argument("destination", help="the new folder to write")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")


def run(args: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from dflash.convert import convert
    from dflash.registry import locate

    source = locate(args.source, what="draft", backend=None)
    destination = Path(args.destination).expanduser()
    config = convert(source, destination)
    print(
        f"{config.num_hidden_layers} layers, block {config.block_size}, taps {list(config.target_layer_ids)}: "
        f"{source} → {destination}",
        file=sys.stderr,
    )
    print(json.dumps({"source": str(source), "destination": str(destination)}) if args.json else destination)
    return 0
