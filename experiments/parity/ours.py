"""Our side, through the public API alone: ``dflash.load`` and ``engine.generate``. Either imported, or started as a
worker of its own. For a trace, a wrapper around one drafter's ``logits`` keeps what every proposal was made from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from protocol import pack, serve

import dflash
from dflash.engine import Engine


def open_pair(target: str | Path, draft: str | Path) -> Engine:
    return dflash.load(target=target, draft=draft, backend="torch", device="cpu", dtype="float32")


def load(request: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    torch.set_num_threads(request["threads"])
    engine = open_pair(request["target"], request["draft"])
    return engine, {"versions": {"dflash-lab": dflash.__version__} | engine.backend.versions()}


def _run(engine: Engine, request: dict[str, Any]) -> dflash.GenerationResult:
    return engine.generate(
        request["prompt"],
        max_new_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop"],
        ignore_eos=True,
        block_size=request["block_size"],
    )


def generate(engine: Engine, request: dict[str, Any]) -> list[int]:
    return _run(engine, request).token_ids


def trace(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    drafts: list[torch.Tensor] = []
    drafter: Any = engine.drafter
    logits_of = drafter.logits

    def watched(*args: Any) -> torch.Tensor:
        logits: torch.Tensor = logits_of(*args)
        drafts.append(logits)
        return logits

    drafter.logits, checked = watched, engine.check
    engine.check = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a random drafter never gets a token accepted: no news
            result = _run(engine, request)
    finally:
        del drafter.logits
        engine.check = checked
    rounds = [step for step in result.steps if step.kind != "prefill"]
    return {
        "output": result.token_ids,
        "rounds": [
            {
                "position": step.position,
                "drafted": list(step.drafted),
                "accepted": step.accepted,
                "committed": list(step.committed),
            }
            for step in rounds
        ],
        "logits": [pack(logits[:, :: request["logit_stride"]].numpy()) for logits in drafts[: request["logit_rounds"]]],
    }


if __name__ == "__main__":
    serve(load, trace, generate)
