"""Check a target and a drafter against each other from their files alone, or a backend against the golden traces."""

from __future__ import annotations

import argparse
import json

from dflash.cli import common

HELP = "check a target and a drafter against each other without loading them, or a backend on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pair", nargs="?", help="a pair's name (default: the bundled one)")
    common.add_model_flags(parser)
    parser.add_argument(
        "--conformance",
        action="store_true",
        help="instead: run the backend on tiny models of its own and compare every layer with stored traces",
    )
    parser.add_argument("--json", action="store_true", help="one JSON line: what was checked, ok, and every result")


def run(args: argparse.Namespace) -> int:
    return _conformance(args) if args.conformance else _pair(args)


def _pair(args: argparse.Namespace) -> int:
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


def _conformance(args: argparse.Namespace) -> int:
    from dflash.backends import find_backend
    from dflash.cli.progress import Bar
    from dflash.conformance.cases import CASES
    from dflash.conformance.report import record_of, show
    from dflash.conformance.run import run
    from dflash.errors import UsageError

    given = {"a pair": args.pair, "--target": args.target, "--draft": args.draft, "--draft-bits": args.draft_bits}
    given["--dtype"] = None if args.dtype == "auto" else args.dtype
    if unwanted := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"--conformance brings its own models and number formats; leave {unwanted[0]} out")
    backend, results = find_backend(args.backend), []
    with Bar(f"conformance of {backend.name}") as bar:
        for result in run(backend, CASES, device=args.device):
            results.append(result)
            bar.update(len(results), len(CASES), result.case.name)
    record = record_of(backend, results)
    if args.json:
        print(json.dumps(record))
    else:
        show(record, results)
    return 0 if record["ok"] else 1
