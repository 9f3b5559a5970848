"""Both backends on the same prompts, greedy in float32: the same tokens, rounds and accepted lengths?

    python experiments/agreement.py --prompts FILE [--limit N] [--max-new-tokens 64] [--target T --draft D]

A difference is followed by what the PyTorch target says of the two tokens there: a near-tie is one whose logits lie
within ``NEAR`` of each other, relative to the largest. Writes one record a prompt as it goes and a summary to
experiments/results/agreement.jsonl; started again with the same prompts and options it goes on where it stopped. Exit
code 1 where a difference is no near-tie.

MLX's CPU build brings a plain BLAS. Another one can be put before it (``LD_PRELOAD=libopenblas.so.0``), which makes
it about five times as fast; the records say which was in use.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from parity.workers import write_lines

import dflash
from dflash.engine import Engine
from dflash.environment import environment
from dflash.prompts import EvalPrompt, load_prompts

RESULTS = Path(__file__).parent / "results" / "agreement.jsonl"
BACKENDS = ("torch", "mlx")
NEAR = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default="mini", help="mini, or a JSON-lines file (default: mini)")
    parser.add_argument("--limit", type=int, help="this many prompts, the domains in turn")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()

    chosen = load_prompts(args.prompts).take(args.limit)
    engines = {
        name: dflash.load(target=args.target, draft=args.draft, backend=name, device="cpu", dtype="float32")
        for name in BACKENDS
    }
    head = {
        "kind": "agreement-run",
        "prompts": chosen.name,
        "prompts_sha256": chosen.sha256,
        "max_new_tokens": args.max_new_tokens,
        "blas": os.environ.get("LD_PRELOAD", "").rpartition("/")[2] or "as installed",
        "environments": {name: environment(engine) for name, engine in engines.items()},
    }
    done = _resume(args.out, head)
    for number, prompt in enumerate(chosen.prompts, 1):
        if prompt.id not in done:
            done[prompt.id] = _compare(engines, prompt, args.max_new_tokens)
            _append(args.out, done[prompt.id])
        record = done[prompt.id]
        state = "same" if record["same_tokens"] else f"differs at {record['difference']['position']}"
        print(f"{number}/{len(chosen.prompts)} {prompt.id}: {record['tokens']} tokens, {state}", file=sys.stderr)
    summary = _summary(list(done.values()))
    _append(args.out, summary)
    print(json.dumps(summary, indent=2))
    return 0 if summary["same_tokens"] + summary["near_ties"] == summary["prompts"] else 1


def _compare(engines: dict[str, Engine], prompt: EvalPrompt, max_new_tokens: int) -> dict[str, Any]:
    results = {name: engine.generate(prompt.prompt, max_new_tokens=max_new_tokens) for name, engine in engines.items()}
    ours, theirs = (results[name] for name in BACKENDS)
    rounds = {
        name: [(step.position, step.drafted, step.accepted, step.committed) for step in result.steps]
        for name, result in results.items()
    }
    same = ours.token_ids == theirs.token_ids
    return {
        "kind": "agreement",
        "id": prompt.id,
        "domain": prompt.domain,
        "tokens": len(ours.token_ids),
        "rounds": ours.metrics.num_spec_steps,
        "mean_acceptance_length": {name: result.metrics.mean_acceptance_length for name, result in results.items()},
        "same_tokens": same,
        "same_rounds": rounds["torch"] == rounds["mlx"],
        "difference": None
        if same
        else _difference(engines["torch"], ours.prompt_ids, ours.token_ids, theirs.token_ids),
    }


def _difference(engine: Engine, prompt: list[int], one: list[int], other: list[int]) -> dict[str, Any]:
    """Where two outputs part, and how near the two tokens are to a tie by the target's logits."""
    at = next(index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    target = engine.target
    target.reset()
    target.tapping = False
    logits: torch.Tensor = target.forward([*prompt, *one[:at]], last_only=True).logits[0]
    target.keep(range(len(prompt) + at))
    gap = float((logits[one[at]] - logits[other[at]]).abs() / logits.abs().max())
    return {"position": at, "torch": one[at], "mlx": other[at], "relative_gap": gap}


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    differing = [record for record in records if not record["same_tokens"]]
    return {
        "kind": "agreement-summary",
        "prompts": len(records),
        "tokens": sum(record["tokens"] for record in records),
        "rounds": sum(record["rounds"] for record in records),
        "same_tokens": len(records) - len(differing),
        "same_rounds": sum(record["same_rounds"] for record in records),
        "near_ties": sum(record["difference"]["relative_gap"] <= NEAR for record in differing),
        "near_tie_gap": NEAR,
        "differences": [{"id": record["id"], **record["difference"]} for record in differing],
    }


def _resume(path: Path, head: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The records of a run with the same head that is in ``path`` already; else ``path`` begins anew."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines]
    keys = ("prompts_sha256", "max_new_tokens")
    if records and all(records[0].get(key) == head[key] for key in keys):
        kept = [record for record in records if record["kind"] == "agreement"]
        write_lines(path, [records[0], *kept])
        return {record["id"]: record for record in kept}
    write_lines(path, [head])
    return {}


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
