"""``dflash doctor``: every check of a pair, with its result."""

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

    from dflash.doctor import examine

    target, draft = _sources(args)
    checks = examine(target, draft)
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


def _sources(args: argparse.Namespace) -> tuple[str, str]:
    """Target and draft sources, completed from the registry like ``dflash.load`` does."""
    from dflash.errors import ModelNotFoundError, UsageError
    from dflash.registry import BUNDLED, PAIRS, find_draft, resolve

    if args.pair and (args.target or args.draft):
        raise UsageError("give either the name of a pair, or --target and --draft")
    if args.draft and not args.target:
        raise UsageError(f"the draft {args.draft} needs a target to draft for; add --target")
    if args.target:
        draft = args.draft or find_draft(args.target)
        if draft is None:
            raise UsageError(f"no drafter is known for the target {args.target}; add --draft")
        return args.target, draft
    pair = resolve(args.pair or BUNDLED.name)
    if pair is None:
        known = ", ".join(pair.name for pair in PAIRS)
        raise ModelNotFoundError(
            f"there is no pair {args.pair!r}; known are {known}; models go into --target and --draft"
        )
    return pair.target, pair.draft
