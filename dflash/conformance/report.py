"""A run of the suite as one record, and that record as a table to look at or to paste into a report."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash import __version__
from dflash.conformance.cases import TOLERANCES
from dflash.conformance.run import Result
from dflash.environment import git_state, hardware
from dflash.interfaces import Backend

WIDTH = 132  # columns where no terminal says how many


def record_of(backend: Backend, results: Sequence[Result]) -> dict[str, Any]:
    """What was run where, and what came of every case; as JSON, a drift that is no finite number is null."""
    return {
        "ok": bool(results) and all(result.ok for result in results),
        "backend": backend.name,
        "device": next((result.device for result in results if result.device), None),
        "versions": {"dflash-lab": __version__, "python": platform.python_version(), **backend.versions()},
        "hardware": hardware(),
        "git": git_state(),
        "tolerances": dict(TOLERANCES),
        "seconds": round(sum(result.seconds for result in results), 3),
        "cases": [_row(result) for result in results],
    }


def _row(result: Result) -> dict[str, Any]:
    tallies = {what: asdict(getattr(result, what)) for what in ("proposals", "verdicts", "output")}
    return {
        "name": result.case.name,
        "what": result.case.what,
        "dtype": result.case.dtype,
        "ok": result.ok,
        "fault": result.fault,
        "worst": _finite(result.worst),
        "drift": {what: _finite(drift) for what, drift in result.drift.items()},
        **tallies,
        "seconds": round(result.seconds, 3),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def show(record: dict[str, Any], results: Sequence[Result]) -> None:
    """The table on stdout: where it ran, every case, each failure layer by layer, and a line that sums up."""
    import sys

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    machine = record["hardware"]
    console.print(" · ".join(f"{name} {version}" for name, version in record["versions"].items()), soft_wrap=True)
    place = [machine["platform"], machine["machine"], machine["cpu"], *machine["gpus"], f"device {record['device']}"]
    console.print(" · ".join(place), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("case", no_wrap=True)
    table.add_column("what")
    for name in ("worst drift", "proposals", "verdicts", "output"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for result in results:
        table.add_row(
            result.case.name,
            result.case.what,
            f"{result.worst:.1e}",
            *(f"{tally.agreed}/{tally.compared}" for tally in (result.proposals, result.verdicts, result.output)),
            Text("ok", "green") if result.ok else Text("FAIL", "bold red"),
        )
    console.print(table)
    for result in results:
        if not result.ok:
            console.print("\n".join(result.report()), "", sep="\n", soft_wrap=True)
    console.print(_summary(record, results), soft_wrap=True)


def _summary(record: dict[str, Any], results: Sequence[Result]) -> str:
    failed = sum(not result.ok for result in results)
    worst = []
    for dtype, tolerance in TOLERANCES.items():
        if drifts := [result.worst for result in results if result.case.dtype == dtype and result.drift]:
            worst.append(f"{dtype} {max(drifts):.1e} (at most {tolerance:g})")
    unclear = sum(tally.unclear for result in results for tally in (result.proposals, result.verdicts, result.output))
    return (
        f"{record['backend']}: {len(results)} cases, {failed} failed · worst drift {', '.join(worst)} · "
        f"{unclear} choices too close to compare · {record['seconds']:.0f} s"
    )
