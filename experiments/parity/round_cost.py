"""A round of ours on MLX, and the same round without the engine, one at a time, so that they can be run in turn.

A *real* round is the engine's own, seen from its caller: its seconds hold the engine, its thread, events and text, and
a wait for what the round leaves running. A *bare* round is written by hand: propose, the target's forward, its argmax,
one evaluation, rewind, observe; nothing judges on the device, nothing tells. Nothing of it runs before all of it is
built, so that its time parts into

    kernels     the evaluation: what the device needs for the model and nothing else
    bare        building the same on the host, the evaluation, the rewind

and ``1 − kernels ÷ real`` is the share of a round that is not the model: host time that nothing hides, extra kernels,
thread switches, events, text. ``1 − bare ÷ real`` is the part of it that the engine adds to a loop written by hand; it
is negative where the engine hides more host time than it adds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from protocol import Request

from dflash.engine import Engine
from dflash.generation import Generation
from dflash.types import SamplingParams


def real_rounds(engine: Engine, generation: Generation) -> Iterator[dict[str, Any]]:
    """The tokens of each step of ``generation``; the first is the prefill."""
    for step in generation:
        engine.backend.run(mx.synchronize)
        yield {"tokens": list(step.committed)}


def bare_rounds(engine: Engine, request: Request) -> Iterator[dict[str, Any]]:
    """The same steps by hand, greedy, each with its seconds ``bare`` and ``kernels``; they go on until nobody asks."""
    run, block = engine.backend.run, request["block_size"] or engine.drafter.config.block_size
    output = run(partial(_prefill, engine, request["prompt"]))
    yield {"tokens": output}
    while (left := request["max_new_tokens"] - len(output)) > 0:
        step = run(partial(_bare_round, engine, output[-1], min(block - 1, left), left))
        output += step["tokens"]
        yield step


def _prefill(engine: Engine, prompt: list[int]) -> list[int]:
    target, drafter = engine.target, engine.drafter
    target.reset()
    drafter.reset()
    target.tapping = True
    output = target.forward(prompt, last_only=True)
    target.keep(range(len(prompt)))
    drafter.observe(output.features, len(prompt))
    mx.synchronize()
    return [int(mx.argmax(output.logits[-1]).item())]


def _bare_round(engine: Engine, anchor: int, count: int, left: int) -> dict[str, Any]:
    target, drafter = engine.target, engine.drafter
    with patch.object(mx, "async_eval", lambda *_: None):  # the drafter's: nothing runs while the host builds
        begun = time.perf_counter()
        proposal = drafter.propose(anchor, count, SamplingParams())
        output = target.forward(proposal.block)
        choices = mx.argmax(output.logits, axis=-1)
        built = time.perf_counter()
        mx.eval(proposal.tokens, choices)
        evaluated = time.perf_counter()
        drafted, chosen = proposal.tokens.tolist(), choices.tolist()
        accepted = next((slot for slot in range(count) if drafted[slot] != chosen[slot]), count)
        tokens = [*drafted[:accepted], chosen[accepted]][:left]
        target.keep(range(len(tokens)))
        drafter.observe(output.features, len(tokens))  # built here; its kernels run with the next round's
    return {"tokens": tokens, "bare": time.perf_counter() - begun, "kernels": evaluated - built}
