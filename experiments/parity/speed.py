"""Speed of both implementations, each in a process of its own that is idle while the other runs, with the same pair in
float32 and the same number of threads. ``measure`` clocks whole generations in turn, prefill included, and nothing
watches them. ``measure_rounds``, on MLX, clocks the same round of both and of ``round_cost.py``'s bare loop right
after one another."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from workers import Worker, facts, fingerprint

SIDES = ("official", "ours")
ROUNDS = ("official", "real", "bare")


def measure(workers: dict[str, Worker], requests: list[dict[str, Any]], repeats: int) -> list[dict[str, Any]]:
    """One record a run."""
    records: list[dict[str, Any]] = []
    for worker in workers.values():  # warm-up
        worker.ask("time", **requests[0])
    for repeat in range(repeats):
        for number, request in enumerate(requests):
            order = SIDES if (repeat + number) % 2 == 0 else SIDES[::-1]
            replies = {side: workers[side].ask("time", **request) for side in order}
            same = replies["official"]["output"] == replies["ours"]["output"]
            for side in order:
                tokens, seconds = len(replies[side]["output"]), replies[side]["seconds"]
                run = {"side": side, "repeat": repeat, "prompt": number, "tokens": tokens, "seconds": seconds}
                records.append({"kind": "run", **run, "same_tokens": same})
            rates = {side: len(replies[side]["output"]) / replies[side]["seconds"] for side in SIDES}
            print(
                f"repeat {repeat + 1}/{repeats}, prompt {number + 1}/{len(requests)}: official "
                f"{rates['official']:.1f}, ours {rates['ours']:.1f} tokens/s{'' if same else '; TOKENS DIFFER'}",
                file=sys.stderr,
            )
    return records


def measure_rounds(workers: dict[str, Worker], requests: list[dict[str, Any]], repeats: int) -> list[dict[str, Any]]:
    """One record a round: its seconds in the official run, in ours and in the bare loop, and there of the kernels."""
    places = {"official": ("official", "real"), "real": ("ours", "real"), "bare": ("ours", "bare")}

    def ask(do: str, name: str, **request: Any) -> dict[str, Any]:
        side, kind = places[name]
        return workers[side].ask(do, kind=kind, **request)

    records: list[dict[str, Any]] = []
    for repeat in range(repeats):
        for number, request in enumerate(requests):
            replies = {name: ask("begin", name, **request) for name in ROUNDS}
            index = 0
            while True:
                shift = (index + repeat) % len(ROUNDS)
                replies = {name: ask("round", name) for name in (*ROUNDS[shift:], *ROUNDS[:shift])}
                if not replies["official"]["tokens"]:
                    break
                same = all(reply["tokens"] == replies["official"]["tokens"] for reply in replies.values())
                what = {"kind": "round", "repeat": repeat, "prompt": number, "index": index, "same_tokens": same}
                seconds = {"official": replies["official"]["seconds"], "ours": replies["real"]["seconds"]}
                bare = {kind: replies["bare"][kind] for kind in ("bare", "kernels")}
                records.append(what | seconds | bare)
                index += 1
            print(
                f"rounds, repeat {repeat + 1}/{repeats}, prompt {number + 1}/{len(requests)}: {index} of each kind",
                file=sys.stderr,
            )
    return records


def summarise_runs(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per second of each repeat, over all prompts: median, least and most."""
    repeats = range(1 + max(record["repeat"] for record in records))
    rates: dict[str, list[float]] = {}
    for side in SIDES:
        for repeat in repeats:
            runs = [record for record in records if record["side"] == side and record["repeat"] == repeat]
            rates.setdefault(side, []).append(sum(r["tokens"] for r in runs) / sum(r["seconds"] for r in runs))
    ratios = [ours / official for ours, official in zip(rates["ours"], rates["official"], strict=True)]
    return {
        "tokens_per_second": {side: spread(values) for side, values in rates.items()},
        "ours_over_official": spread(ratios),
    }


def summarise_rounds(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each repeat the median round, which a machine with other work to do disturbs less than the mean; then their
    median, least and most. Ratios are of the same round run right after one another."""
    repeats = [
        [record for record in records if record["repeat"] == repeat]
        for repeat in range(1 + max(record["repeat"] for record in records))
    ]

    def median(value: Any) -> dict[str, float]:
        return spread([statistics.median(value(record) for record in repeat) for repeat in repeats])

    return {
        "rounds": len(repeats[0]),
        "seconds": {kind: median(lambda r, kind=kind: r[kind]) for kind in (*SIDES, "bare", "kernels")},
        "ours_over_official": median(lambda r: r["ours"] / r["official"]),
        "not_the_model": median(lambda r: 1 - r["kernels"] / r["ours"]),
        "beyond_a_bare_loop": median(lambda r: 1 - r["bare"] / r["ours"]),
    }


def run(
    workers: dict[str, Worker],
    target: Path,
    draft: Path,
    requests: list[dict[str, Any]],
    *,
    backend: str,
    repeats: int,
) -> list[dict[str, Any]]:
    """All records, the summary last."""
    versions = {side: worker.load(target, draft, backend) for side, worker in workers.items()}
    runs = measure(workers, requests, repeats)
    rounds = measure_rounds(workers, requests, repeats) if backend == "mlx" else []
    summary = {
        "kind": "summary",
        "backend": backend,
        **summarise_runs(runs),
        **({"round": summarise_rounds(rounds)} if rounds else {}),
        "same_tokens": all(record["same_tokens"] for record in (*runs, *rounds)),
        "prompts": len(requests),
        "repeats": repeats,
        "max_new_tokens": max(request["max_new_tokens"] for request in requests),
        "dtype": "float32",
        "target": fingerprint(target),
        "draft": fingerprint(draft),
        "versions": versions,
        **facts(workers["ours"].threads),
    }
    return [*runs, *rounds, summary]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
