"""Our side, through the public API alone: ``dflash.load`` and ``engine.generate``. Either imported, or started as a
worker of its own. For a trace, a wrapper around one drafter's ``propose`` keeps the logits of every proposal."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from protocol import pack, serve, stepwise, timed

import dflash
from dflash.engine import Engine
from dflash.generation import Generation

BARE: dict[Engine, Engine] = {}


def open_pair(target: str | Path, draft: str | Path, backend: str) -> Engine:
    return dflash.load(target=target, draft=draft, backend=backend, device="cpu", dtype="float32")


def load(request: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    if request["backend"] == "torch":  # the other one goes by the environment that the worker was started with
        import torch

        torch.set_num_threads(request["threads"])
    engine = open_pair(request["target"], request["draft"], request["backend"])
    return engine, {"versions": {"dflash-lab": dflash.__version__} | engine.backend.versions()}


def start(engine: Engine, request: dict[str, Any]) -> Generation:
    """The request's generation, to be iterated over."""
    return engine.stream(
        request["prompt"],
        max_new_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop"],
        ignore_eos=True,
        block_size=request["block_size"],
    )


def trace(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    drafts: list[np.ndarray] = []
    drafter: Any = engine.drafter
    propose = drafter.propose

    def watched(anchor: int, count: int, *args: Any, **options: Any) -> Any:
        drafts.append(engine.backend.numpy(drafter.logits(anchor, count)))  # here, on the thread of the device
        return propose(anchor, count, *args, **options)

    drafter.propose, checked = watched, engine.check
    engine.check = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a random drafter never gets a token accepted: no news
            result = start(engine, request).result()
    finally:
        del drafter.propose
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
        "logits": [pack(logits[:, :: request["logit_stride"]]) for logits in drafts[: request["logit_rounds"]]],
    }


def real_rounds(engine: Engine, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import round_cost

    return round_cost.real_rounds(engine, start(engine, request))


def bare_rounds(engine: Engine, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """On a second engine of the same pair, so that a real run may stand between two rounds meanwhile."""
    import round_cost

    if engine not in BARE:
        BARE.clear()
        BARE[engine] = open_pair(engine.facts["target_folder"], engine.facts["draft_folder"], engine.backend.name)
    return round_cost.bare_rounds(BARE[engine], request)


if __name__ == "__main__":
    serve(
        load,
        trace=trace,
        time=timed(lambda engine, request: start(engine, request).result().token_ids),
        **stepwise(real=real_rounds, bare=bare_rounds),
    )
