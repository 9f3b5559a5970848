"""Check a target and a drafter against each other from their files alone: every check, with its result."""

from __future__ import annotations

import argparse

from dflash.cli import common

HELP = "check a target and a drafter against each other without loading them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pair", nargs="?", help="a pair's name (default: the bundled one)")
    common.add_model_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON line: target, draft, ok and the checks")


def run(args: argparse.Namespace) -> int:
    import json

    from dflash.backends import preferred_backend
    from dflash.doctor import examine
    from dflash.loading import choose_pair

    backend = preferred_backend() if args.backend == "auto" else args.backend
    target, draft = choose_pair(args.pair, args.target, args.draft, backend)
    checks = examine(target, draft, args.backend)
    failed = [check for check in checks if check.status == "fail"]
    if args.json:
        from dataclasses import asdict

        rows = [asdict(check) for check in checks]
        print(json.dumps({"target": target, "draft": draft, "ok": not failed, "checks": rows}))
        return 1 if failed else 0

    from rich.console import Console
    from rich.text import Text

    console, width = Console(highlight=False), max(len(check.name) for check in checks)
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in checks:
        line = Text.assemble((f"{check.status:<5}", colours[check.status]), f"{check.name:<{width}}  {check.detail}")
        console.print(line, soft_wrap=True)
    warned = sum(check.status == "warn" for check in checks)
    console.print(f"{len(checks)} checks: {len(failed)} failed, {warned} warned", soft_wrap=True)
    return 1 if failed else 0
