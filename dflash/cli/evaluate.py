"""Measure a pair's served acceptance on a set of prompts, by domain."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dflash.cli.common import add_decoding_flags, add_model_flags, add_sampling_flags, decoding_of, load_engine

HELP = "measure a pair's acceptance: the real decode loop on a set of prompts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_decoding_flags(parser, max_new_tokens=128)
    add_sampling_flags(parser)
    parser.add_argument(
        "--prompts", default="mini", metavar="SET", help="mini, a JSON-lines file, or hf:OWNER/NAME (default: mini)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, taken from the domains in turn")
    parser.add_argument("--heldout", type=Path, metavar="FILE", help="response records for the all-anchor figure too")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")


def run(args: argparse.Namespace) -> int:
    import json
    import warnings
    from dataclasses import asdict

    from dflash.backends import find_backend
    from dflash.cli.progress import Bar
    from dflash.errors import UsageError
    from dflash.prompts import load_prompts
    from dflash.records import read_records
    from dflash.served import Served, evaluate

    chosen = load_prompts(args.prompts, limit=args.limit).take(args.limit)
    records = read_records([args.heldout]) if args.heldout else []
    if records and find_backend(args.backend).name != "torch":
        raise UsageError("--heldout is measured with the torch backend; add --backend torch")
    options = decoding_of(args)
    engine = load_engine(args)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning), Bar("prompts") as bar:  # the notes say it

        def report(part: Served) -> None:
            tau = part.overall.mean_acceptance_length
            bar.update(len(part.metrics), len(chosen.prompts), f"τ {'–' if tau is None else f'{tau:.3f}'}")

        served = evaluate(engine, chosen.prompts, report=report, **options)
    figures = served.to_dict()
    _show(figures)
    if records:
        from torch_dflash.training.run import heldout_of, side_by_side

        heldout = heldout_of(engine, records)
        figures["heldout"] = asdict(heldout)
        print(side_by_side(heldout.acceptance_length, chosen.name, figures["mean_acceptance_length"]), file=sys.stderr)
    for note in figures["notes"]:
        print(f"dflash: {note}", file=sys.stderr)
    if args.json:
        facts = {"set": chosen.name, "set_sha256": chosen.sha256, "max_new_tokens": args.max_new_tokens, **engine.facts}
        print(json.dumps(facts | figures))
    return 0


def _show(figures: dict[str, Any]) -> None:
    """The table, on stderr: figures are no text."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="served acceptance")
    columns = ("", "prompts", "tokens", "rounds", "τ", "τ a prompt, mean ± sd", "accepted ÷ drafted", "by position")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place in (0, 7) else "right")
    for name, part in {"all": figures, **figures["domains"]}.items():
        spread = part["per_prompt"]["mean_acceptance_length"]
        table.add_row(
            name,
            str(part["prompts"]),
            str(part["num_tokens"]),
            str(part["num_spec_steps"]),
            "–" if part["mean_acceptance_length"] is None else f"{part['mean_acceptance_length']:.3f}",
            f"{spread['mean']:.3f} ± {spread['stdev']:.3f}" if spread else "–",
            "–" if part["draft_acceptance_rate"] is None else f"{part['draft_acceptance_rate']:.3f}",
            " ".join(f"{rate:.2f}" for rate in part["acceptance_rate_per_position"]),
        )
    Console(file=sys.stderr, width=None if sys.stderr.isatty() else 140).print(table)
