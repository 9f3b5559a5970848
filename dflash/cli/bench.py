"""Measure plain and speculative decoding of a set of prompts, interleaved and repeated.

Speeds are medians over the repeats with their smallest and largest. Ctrl-C ends at the round's end and reports what was
measured until then.

  dflash bench --limit 6 --max-new-tokens 64
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.cli import common

if TYPE_CHECKING:
    from rich.table import Table

    from dflash.bench import Benchmark

HELP = "measure speed and acceptance against plain decoding"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        default="mini",
        metavar="SET",
        help="mini, a JSON-lines file (prompt or messages; id and domain), or hf:OWNER/NAME[/CONFIG][:SPLIT[:COLUMN]]"
        " (default: mini)",
    )
    parser.add_argument("--domains", metavar="NAME,…", help="only prompts of these domains")
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, taken from the domains in turn")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the record to FILE as one JSON line")
    parser.add_argument("--json", action="store_true", help="end with the record as one JSON line on stdout")
    common.add_model_flags(parser)
    common.add_sampling_flags(parser)
    common.add_decoding_flags(parser, max_new_tokens=128)


def run(args: argparse.Namespace) -> int:
    import json
    import warnings

    from dflash.bench import request_facts, run_benchmark, seeded
    from dflash.cli.progress import Bar
    from dflash.environment import environment
    from dflash.errors import UsageError
    from dflash.prompts import load_prompts

    options = common.decoding_of(args)
    options["sampling"] = seeded(options["sampling"])
    if args.repeats < 1:
        raise UsageError(f"--repeats is {args.repeats}; it must be at least 1")
    if options["max_new_tokens"] < 1:
        raise UsageError("--max-new-tokens is 0; there is nothing to measure without a token")
    if args.output:
        common.check_writable(args.output)
    domains = [name.strip() for name in args.domains.split(",")] if args.domains else []
    prompts = load_prompts(args.prompts, limit=args.limit).take(args.limit, domains)

    engine = common.load_engine(args)
    facts = environment(engine)
    total = len(prompts.prompts) * args.repeats
    with warnings.catch_warnings(), common.Interruption() as interruption, Bar("prompts") as bar:
        warnings.simplefilter("ignore", RuntimeWarning)  # the notes say it too
        benchmark = run_benchmark(
            engine,
            prompts,
            options,
            repeats=args.repeats,
            report=lambda so_far: bar.update(len(so_far.twins), total, _so_far(so_far)),
            stopped=lambda: bool(interruption),
        )
    if not benchmark.twins:
        common.say("dflash: interrupted before the first prompt was measured")
        return 130
    record = {
        "kind": "bench",
        **benchmark.to_dict(),
        "prompt_set": {"name": prompts.name, "prompts": len(prompts.prompts), "sha256": prompts.sha256},
        **request_facts(engine, options),
        **facts,
    }
    _show(record)
    if args.output:
        _append(args.output, record)
    if args.json:
        print(json.dumps(record))
    return 130 if benchmark.partial else 0


def _so_far(benchmark: Benchmark) -> str:
    from dflash.cli.render import acceptance_length
    from dflash.metrics import Metrics

    ours = Metrics.merge(twin.dflash.metrics for twin in benchmark.twins)
    plain = Metrics.merge(twin.plain.metrics for twin in benchmark.twins)
    return f"{acceptance_length(ours)} · speedup {plain.total_seconds / ours.total_seconds:.2f} ×"


def _show(record: dict[str, Any]) -> None:
    """The tables, on stderr: figures are no text."""
    import sys

    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, width=None if sys.stderr.isatty() else 100)
    rows = {"all": record, **record["domains"]}
    whole = "" if not record["partial"] else ", partial: interrupted"
    console.print(_acceptance_table(rows, f"acceptance{whole}"))
    console.print(_speed_table(rows, f"speed, median [min–max] of {record['repeats']} repeats{whole}"))
    rates = "  ".join(f"{slot}: {rate:.2f}" for slot, rate in enumerate(record["acceptance_rate_per_position"], 1))
    counts = "  ".join(f"{accepted}: {rounds}" for accepted, rounds in enumerate(record["acceptance_histogram"]))
    lines = [
        f"by slot      {rates} (rounds that accepted it ÷ rounds that drafted it)",
        f"by round     {counts} (drafted tokens accepted: in how many rounds)",
        f"decode       {_arms(record, 'decode_tokens_per_second', 1, 'tok/s')}",
        f"first token  {_arms(record, 'ttft', 3, 's')}",
    ]
    speedup = record["speedup"]
    if speedup and speedup["median"] < 1:
        lines.append(
            "speculation is slower than plain decoding here: it brings "
            f"{_figure(record['mean_acceptance_length'])} tokens a round "
            f"and needs {_median(record['break_even_acceptance_length'])} to break even"
        )
    common.say(*lines, *(f"note: {note}" for note in record["notes"]))


def _acceptance_table(rows: dict[str, dict[str, Any]], title: str) -> Table:
    from dflash.cli.render import share

    table = _table(title, "", "prompts", "tokens", "rounds", "τ", "τ a prompt, mean ± sd", "accepted/drafted")
    for name, part in rows.items():
        spread = part["per_prompt"]["mean_acceptance_length"]
        table.add_row(
            name,
            str(part["prompts"]),
            str(part["num_tokens"]),
            str(part["num_spec_steps"]),
            _figure(part["mean_acceptance_length"], 3),
            f"{spread['mean']:.3f} ± {spread['stdev']:.3f}" if spread else _figure(None),
            share(part["num_accepted_draft_tokens"], part["num_draft_tokens"]),
        )
    return table


def _speed_table(rows: dict[str, dict[str, Any]], title: str) -> Table:
    table = _table(title, "", "plain tok/s", "dflash tok/s", "speedup", "break-even τ", "same tokens")
    for name, part in rows.items():
        table.add_row(
            name,
            *(_range(part[arm]["end_to_end_tokens_per_second"], 1) for arm in ("plain", "dflash")),
            _range(part["speedup"], 2),
            _median(part["break_even_acceptance_length"]),
            f"{part['identical_prompts']}/{part['prompts']}",
        )
    table.caption = "end to end: prefill and first token included"
    return table


def _arms(record: dict[str, Any], name: str, digits: int, unit: str) -> str:
    return " · ".join(f"{arm} {_range(record[arm][name], digits)} {unit}" for arm in ("plain", "dflash"))


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _figure(value: float | None, digits: int = 2) -> str:
    from dflash.cli.render import number

    return number(value, digits)


def _median(spread: dict[str, float] | None, digits: int = 2) -> str:
    return _figure(spread["median"] if spread else None, digits)


def _range(spread: dict[str, float] | None, digits: int) -> str:
    if spread is None:
        return _figure(None)
    return f"{spread['median']:.{digits}f} [{spread['min']:.{digits}f}–{spread['max']:.{digits}f}]"


def _append(path: Path, record: dict[str, Any]) -> None:
    """One more line, whole or not at all."""
    import json

    from dflash.errors import StorageError

    try:
        with path.open("ab") as stream:
            end = stream.tell()
            try:
                stream.write(json.dumps(record).encode() + b"\n")
                stream.flush()
            except OSError:
                stream.truncate(end)
                raise
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
