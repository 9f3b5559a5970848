"""The tables of ``dflash bench``, on stderr: figures are no text."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash.cli import common
from dflash.cli.render import number, share


def _console(width: int = 100) -> Console:
    return Console(stderr=True, highlight=False, markup=False, width=None if sys.stderr.isatty() else width)


def show_acceptance(record: dict[str, Any]) -> None:
    console = _console()
    rows = {"all": record, **record["domains"]}
    whole = _whole(record)
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
    table = Table(title=title)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _figure(value: float | None, digits: int = 2) -> str:
    return number(value, digits)


def _median(spread: dict[str, float] | None, digits: int = 2) -> str:
    return _figure(spread["median"] if spread else None, digits)


def _range(spread: dict[str, float] | None, digits: int) -> str:
    if spread is None:
        return _figure(None)
    return f"{spread['median']:.{digits}f} [{spread['min']:.{digits}f}–{spread['max']:.{digits}f}]"


def show_rounds(record: dict[str, Any]) -> None:
    """A row for each context length and block size, and what is asked of them in a sentence each."""
    console = _console(120)
    repeats = f"median [min–max] of {record['repeats']} repeats × {record['rounds']} rounds{_whole(record)}"
    table = _table(
        f"a round in ms, {repeats}", "context", "block", "draft", "verify", "rest", "round", "÷ shortest context"
    )
    for cell in record["cells"]:
        table.add_row(
            f"{cell['context']:,}",
            str(cell["block_size"]) if cell["block_size"] > 1 else "plain",
            *(_milliseconds(cell[name]) for name in ("draft_seconds", "verify_seconds", "overhead_seconds")),
            _milliseconds(cell["seconds"]),
            _range(cell["over_shortest_context"], 2),
        )
    console.print(table)
    shares = _table(f"shares, {repeats}", "context", "block", "verify ÷ one row", "draft ÷ verify", "rest of a round")
    for cell in record["cells"]:
        if cell["block_size"] > 1:
            shares.add_row(
                f"{cell['context']:,}",
                str(cell["block_size"]),
                _range(cell["verify_over_one_row"], 2),
                _range(cell["draft_over_verify"], 3),
                _percent(cell["overhead_share"]),
            )
    console.print(shares)
    lines = [
        f"streamed     context {real['context']:,}, block {real['block_size']}: {_milliseconds(real['seconds'])} ms a "
        f"round, {_percent(real['overhead_share'])} of it neither drafting nor verifying"
        for real in record["real"]
    ]
    common.say(*lines, f"context      {record['context_tokens']}", *(f"note: {note}" for note in record["notes"]))


def show_end_to_end(record: dict[str, Any]) -> None:
    """A row for each arm, and why the others did not run."""
    title = f"end to end, median [min–max] of {record['repeats']} repeats{_whole(record)}"
    bases = list(dict.fromkeys(base for arm in record["arms"].values() for base in arm["over"]))
    table = _table(title, "", "tok/s", *(f"÷ {base}" for base in bases), "tokens of plain")
    for name, arm in record["arms"].items():
        table.add_row(
            name,
            _range(arm["tokens_per_second"], 1),
            *(_range(arm["over"].get(base), 2) for base in bases),
            f"{arm['identical_prompts']}/{record['prompts']}",
        )
    table.caption = "prefill and first token included; greedy"
    _console(120).print(table)
    for name, arm in record["arms"].items():
        if weights := arm.get("weights"):
            common.say(f"{name} computes on {weights} weights, the others on the same values as {record['dtype']}")
    common.say(*(f"not measured: {name}: {reason}" for name, reason in record["not_measured"].items()))


def show_products(record: dict[str, Any]) -> None:
    """A row for each model's pass, and one for each product."""
    console, fastest = _console(120), record["roofline"]["bytes_per_second"]
    columns = ("rows", "F.linear ms", "ours ms", "F.linear ÷ ours", "ours of roofline")
    passes = _table(
        f"products of a pass, ours by {record['backend_products']}, roofline {fastest / 1e9:.1f} GB/s{_whole(record)}",
        "",
        *columns,
    )
    each = _table(f"one product{_whole(record)}", "", "shape", *columns)
    for table, rows in ((passes, record["passes"]), (each, record["products"])):
        for row in rows:
            table.add_row(
                row["model"] if table is passes else row["name"],
                *(() if table is passes else (f"{row['outputs']} × {row['columns']}",)),
                str(row["rows"]),
                *(_milliseconds(row[way]["seconds"]) for way in ("linear", "backend")),
                _range(row["linear_over_backend"], 2),
                _percent(row["backend"]["of_roofline"]),
            )
        console.print(table)


def _whole(record: dict[str, Any]) -> str:
    return ", partial: interrupted" if record["partial"] else ""


def _milliseconds(spread: dict[str, float] | None) -> str:
    if spread is None:
        return _figure(None)
    return _range({name: value * 1000 for name, value in spread.items()}, 2 if spread["max"] < 0.1 else 0)


def _percent(spread: dict[str, float] | None) -> str:
    if spread is None:
        return _figure(None)
    return f"{spread['median']:.1%} [{spread['min']:.1%}–{spread['max']:.1%}]"
