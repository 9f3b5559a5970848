"""Tokens per second of both implementations, prompt by prompt in turn, each in a process of its own that is idle while
the other runs. Both run the same pair in float32 with the same number of threads; the clock is around one whole
generation, prefill included, and nothing watches it."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from workers import Worker, facts, fingerprint

SIDES = ("official", "ours")


def measure(
    official_python: Path, target: Path, draft: Path, requests: list[dict[str, Any]], *, threads: int, repeats: int
) -> list[dict[str, Any]]:
    """One record a run, then the summary: tokens per second of each repeat (all prompts), median, least and most."""
    records: list[dict[str, Any]] = []
    with (
        Worker(official_python, "official.py", threads) as official,
        Worker(sys.executable, "ours.py", threads) as ours,
    ):
        workers = {"official": official, "ours": ours}
        versions = {side: worker.load(target, draft) for side, worker in workers.items()}
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
    return [*records, _summary(records, versions, target, draft, requests, threads, repeats)]


def _summary(
    records: list[dict[str, Any]],
    versions: dict[str, Any],
    target: Path,
    draft: Path,
    requests: list[dict[str, Any]],
    threads: int,
    repeats: int,
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {}
    for side in SIDES:
        for repeat in range(repeats):
            runs = [record for record in records if record["side"] == side and record["repeat"] == repeat]
            rates.setdefault(side, []).append(sum(r["tokens"] for r in runs) / sum(r["seconds"] for r in runs))
    ratios = [ours / official for ours, official in zip(rates["ours"], rates["official"], strict=True)]
    return {
        "kind": "summary",
        "tokens_per_second": {side: spread(values) for side, values in rates.items()},
        "ours_over_official": spread(ratios),
        "same_tokens": all(record["same_tokens"] for record in records),
        "prompts": len(requests),
        "repeats": repeats,
        "max_new_tokens": max(request["max_new_tokens"] for request in requests),
        "dtype": "float32",
        "target": fingerprint(target),
        "draft": fingerprint(draft),
        "versions": versions,
        **facts(threads),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
