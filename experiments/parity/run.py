"""Parity with the official ``dflash`` 0.1.0: the same draft logits, proposals, accepted lengths and tokens.

    python experiments/parity/run.py --official-python PATH      an environment that holds what workers.py names
    python experiments/parity/run.py --make-official FOLDER      or make one there first, with pip
      --backend mlx       our MLX backend against the package's MLX code (default: torch against its PyTorch code)
      --update-goldens    store the official PyTorch traces under tests/golden
      --speed             measure the speed of both instead

Runs every tiny case of ``cases.py``, then the bundled pair where it is on this machine (or ``--pair TARGET DRAFT``).
Writes experiments/results/parity.jsonl, parity_speed.jsonl, parity_mlx.jsonl or parity_mlx_speed.jsonl; exit code 1
where anything differs.

On MLX two things of the package stand in the way of a few cases, and the results name them: its drafter has no biases,
and with sliding layers its drafts go wrong (``official_mlx.py`` tells how). Those cases run twice, as it is, for the
record, and mended, to be compared.

On Linux MLX brings a plain BLAS; ``LD_PRELOAD=libopenblas.so.0`` before the command puts a faster one before it, for
both sides.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import goldens
import ours
import speed
import torch
from compare import Agreement
from transformers.utils.logging import disable_progress_bar
from workers import ROOT, SCRIPTS, Worker, WorkerError, facts, fingerprint, make_official, write_lines

import dflash
from dflash.backends import find_backend
from dflash.checkpoint import DraftConfig
from dflash.errors import DFlashError
from dflash.registry import BUNDLED, find_local
from dflash.tokenizer import Tokenizer

RESULTS = ROOT / "experiments" / "results"
ALL = 10**6
NAMES = {"torch": "parity", "mlx": "parity_mlx"}  # of result files
STORED = {"requests": 3, "logit_rounds": 3, "tried": 12}  # of each golden


@dataclass
class Pair:
    """One pair on disk, ready for both. ``make_requests(first, count)`` gives as many requests as asked for, or fewer
    where there are no more. ``weights`` are a fitted drafter's, to be stored. ``sliding`` and ``biased`` tell of its
    draft layers. Of a large vocabulary a golden keeps every ``golden_stride``-th logit, and a run only the first
    ``logit_rounds`` of each request."""

    name: str
    target: Path
    draft: Path
    make_requests: Any
    requests: int
    case: dict[str, Any]
    weights: str | None = None
    sliding: bool = False
    biased: bool = False
    logit_rounds: int = ALL
    golden_stride: int = 1


def tiny_pairs(folder: Path) -> Iterator[Pair]:
    for case in cases.CASES:
        place = folder / case.name
        model, drafter = cases.write_pair(case, place, goldens.stored_weights(case))
        yield Pair(
            case.name,
            place / "target",
            place / "draft",
            lambda first, count, case=case, model=model: cases.requests(case, model, first, count),
            case.prompts,
            case.to_dict(),
            cases.pack_weights(drafter) if case.fit_steps else None,
            sliding="sliding_attention" in case.layer_types,
            biased=case.bias,
        )


def real_pair(arguments: argparse.Namespace) -> Pair | None:
    """The pair that was named, or the bundled one, with its requests cut as asked for; None where that pair is not on
    this machine."""
    folders = arguments.pair
    target: Path | None
    draft: Path | None
    if folders:
        target, draft = map(Path, folders)
        name = draft.name
    else:
        name = BUNDLED.name
        try:
            target, draft = find_local(name, what="target"), find_local(name, what="draft")
        except DFlashError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            return None
    if target is None or draft is None:
        print(f"{name} is left out: its target is not prepared on this machine yet", file=sys.stderr)
        return None
    tokenizer = Tokenizer.load(target)
    made = cases.text_requests(tokenizer, target) if tokenizer else cases.id_requests(target)
    count = min(arguments.prompts or len(made), len(made))
    made = made[:: len(made) // count][:count]
    most = arguments.max_new_tokens or ALL
    made = [request | {"max_new_tokens": min(request["max_new_tokens"], most)} for request in made]
    config = DraftConfig.load(draft)
    return Pair(
        name, target, draft, lambda first, count: made[first : first + count], len(made),
        {"pair": name, "target": fingerprint(target), "draft": fingerprint(draft)},
        sliding="sliding_attention" in config.layer_types, biased=config.attention_bias,
        logit_rounds=4, golden_stride=32,
    )  # fmt: skip


def compare_pair(
    official: Worker, pair: Pair, first: int, backend: str, mend: bool = False
) -> tuple[Agreement, dict[str, str]]:
    """Both implementations on the pair's requests from number ``first`` on."""
    versions = official.load(pair.target, pair.draft, backend, mend=mend)
    engine = ours.open_pair(pair.target, pair.draft, backend)
    agreement = Agreement()
    for request in pair.make_requests(first, pair.requests):
        request = request | {"logit_rounds": pair.logit_rounds, "logit_stride": 1}
        agreement.add(official.ask("trace", **request), ours.trace(engine, request))
    return agreement, versions


def store_golden(official: Worker, pair: Pair) -> None:
    """The official traces of the pair's first requests that stay clear of ties."""
    versions = official.load(pair.target, pair.draft, "torch")
    requests: list[dict[str, Any]] = []
    traces: list[dict[str, Any]] = []
    for request in pair.make_requests(0, STORED["tried"]):
        request = request | {"logit_rounds": STORED["logit_rounds"], "logit_stride": pair.golden_stride}
        trace = official.ask("trace", **request)
        if trace["margin"] >= goldens.CLEAR:
            requests.append(request)
            traces.append(trace)
        if len(traces) == STORED["requests"]:
            break
    if not traces:
        raise WorkerError(f"no request of {pair.name} stays clear of ties; change its seed")
    goldens.write(
        pair.name,
        {"case": pair.case, "official": versions, "weights": pair.weights, "requests": requests, "traces": traces},
    )


def find_faults(official: Worker, pairs: list[Pair]) -> tuple[list[Pair], list[dict[str, Any]]]:
    """The pairs that the package's MLX code can be compared on, and one record for each that it refuses or, as it is,
    drafts wrongly for."""
    able, faults = [], []
    for pair in pairs:
        what: dict[str, Any] = {"kind": "official-fault", "name": pair.name}
        if pair.biased:
            try:
                official.load(pair.target, pair.draft, "mlx")
            except WorkerError as error:
                faults.append(what | {"refused": str(error).strip().splitlines()[-1]})
                print(f"{pair.name:34} cannot be loaded by the package's MLX code", file=sys.stderr)
                continue
        elif pair.sliding:
            agreement, _ = compare_pair(official, pair, 0, "mlx")
            faults.append(what | agreement.to_dict())
            print(f"{pair.name:34} as it is: {(agreement.differences or ['no difference'])[0]}", file=sys.stderr)
        able.append(pair)
    return able, faults


def run_parity(
    official: Worker, pairs: list[Pair], rounds: int, backend: str
) -> tuple[Agreement, list[dict[str, Any]]]:
    """All pairs, in passes with new prompts until ``rounds`` rounds have been compared."""
    total, passes = Agreement(), 0
    records: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    if backend == "mlx":
        pairs, records = find_faults(official, pairs)
    while passes == 0 or total.rounds < rounds:
        before = total.rounds
        for pair in pairs:
            mend = backend == "mlx" and pair.sliding
            agreement, versions = compare_pair(official, pair, passes * pair.requests, backend, mend)
            total.merge(agreement)
            what = {"kind": "case", "name": pair.name, "pass": passes, **({"mended": True} if mend else {})}
            records.append(what | agreement.to_dict() | {"case": pair.case})
            histogram = " ".join(f"{count}:{times}" for count, times in sorted(agreement.accepted.items()))
            print(
                f"{pair.name:34} {agreement.rounds:4} rounds, logits within {agreement.worst:.1e}, accepted {histogram}"
                f"{'' if not agreement.differences else '; DIFFERS: ' + agreement.differences[0]}",
                file=sys.stderr,
            )
        passes += 1
        if total.rounds == before:
            break
    summary = {
        "kind": "summary",
        "backend": backend,
        **total.to_dict(),
        "official": versions,
        "ours": {"dflash-lab": dflash.__version__} | find_backend(backend).versions(),
        **facts(official.threads),
    }
    return total, [*records, summary]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--official-python", type=Path, metavar="PATH", help="Python of the official environment")
    where.add_argument("--make-official", type=Path, metavar="FOLDER", help="make that environment in FOLDER")
    parser.add_argument("--backend", choices=list(SCRIPTS), default="torch", help="which of both (default: torch)")
    parser.add_argument("--rounds", type=int, default=200, help="compare at least this many rounds (default: 200)")
    parser.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, instead of the bundled pair")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each side")
    parser.add_argument("--update-goldens", action="store_true", help="store the official traces under tests/golden")
    parser.add_argument("--speed", action="store_true", help="measure tokens per second of both instead")
    parser.add_argument("--repeats", type=int, default=3, help="with --speed (default: 3)")
    parser.add_argument("--prompts", type=int, help="of the real pair: this many, spread over all (default: all)")
    parser.add_argument(
        "--max-new-tokens", type=int, help="of the real pair: at most this many (default: each prompt's own)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if arguments.update_goldens and (arguments.pair or arguments.prompts or arguments.max_new_tokens):
        parser.error("--update-goldens stores the bundled pair as it is; leave out what changes it")
    if arguments.update_goldens and arguments.backend != "torch":
        parser.error("goldens are traces of the package's PyTorch code; every backend of ours is held to them")
    python = arguments.official_python or make_official(arguments.make_official, arguments.backend)
    if not python.exists():
        parser.error(f"{python} does not exist")
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    try:
        return _speed(python, arguments) if arguments.speed else _parity(python, arguments)
    except (WorkerError, DFlashError) as error:
        print(error, file=sys.stderr)
        return 1


def _parity(python: Path, arguments: argparse.Namespace) -> int:
    script = SCRIPTS[arguments.backend]
    with tempfile.TemporaryDirectory() as folder, Worker(python, script, arguments.threads) as official:
        print("making the tiny pairs; those without a golden are fitted first", file=sys.stderr)
        real = real_pair(arguments)
        pairs = [*tiny_pairs(Path(folder)), *([real] if real else [])]
        if arguments.update_goldens:
            for pair in pairs:
                store_golden(official, pair)
        total, records = run_parity(official, pairs, arguments.rounds, arguments.backend)
    write_lines(arguments.results / f"{NAMES[arguments.backend]}.jsonl", records)
    histogram = ", ".join(f"{count}: {times}" for count, times in sorted(total.accepted.items()))
    print(
        f"{total.rounds} rounds of {total.requests} requests, {total.drafted} drafted tokens\n"
        f"rounds by accepted tokens: {histogram}\n"
        f"draft logits of {total.logit_rounds} rounds differ by {total.worst:.1e} of the largest at most\n"
        f"the same proposals, accepted lengths and tokens: {'no' if total.differences else 'yes'}"
    )
    for difference in total.differences:
        print(difference)
    if total.rounds < arguments.rounds:
        print(f"only {total.rounds} of {arguments.rounds} rounds could be compared", file=sys.stderr)
        return 1
    return 1 if total.differences else 0


def _speed(python: Path, arguments: argparse.Namespace) -> int:
    pair = real_pair(arguments)
    if pair is None:
        return 1
    with (
        Worker(python, SCRIPTS[arguments.backend], arguments.threads) as official,
        Worker(sys.executable, "ours.py", arguments.threads) as mine,
    ):
        records = speed.run(
            {"official": official, "ours": mine}, pair.target, pair.draft, pair.make_requests(0, pair.requests),
            backend=arguments.backend, repeats=arguments.repeats,
        )  # fmt: skip
    write_lines(arguments.results / f"{NAMES[arguments.backend]}_speed.jsonl", records)
    summary = records[-1]
    for side, rate in summary["tokens_per_second"].items():
        print(f"{side:9} {rate['median']:.2f} tokens/s ({rate['min']:.2f} to {rate['max']:.2f})")
    ratio = summary["ours_over_official"]
    print(f"ours / official: {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")
    if "round" in summary:
        taken = summary["round"]
        seconds, ratio = taken["seconds"], taken["ours_over_official"]
        shares = (taken[what] for what in ("not_the_model", "beyond_a_bare_loop"))
        beside, beyond = (f"{s['median']:.1%} ({s['min']:.1%} to {s['max']:.1%})" for s in shares)
        print(
            f"a round: official {seconds['official']['median']:.3f} s, ours {seconds['ours']['median']:.3f} s, "
            f"ours / official {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})\n"
            f"of our round, {beside} is not the model; {beyond} is more than a bare loop takes"
        )
    print(f"same tokens: {'yes' if summary['same_tokens'] else 'no'}")
    return 0 if summary["same_tokens"] else 1


if __name__ == "__main__":
    sys.exit(main())
