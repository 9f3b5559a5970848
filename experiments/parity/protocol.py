"""What both workers speak: one JSON object a line in, one out. Needs numpy alone, so that either environment runs it.

``{"do": "load", "target": folder, "draft": folder, "threads": n, "backend": name, "mend": bool}`` comes first.
``{"do": "trace", …}`` answers with the tokens round by round, and every ``logit_stride``-th draft logit of the first
``logit_rounds``; ``{"do": "time", …}`` with the seconds and tokens of a run that nothing watches. On MLX
``{"do": "begin", "kind": kind, …}`` makes a run's prefill and each ``{"do": "round", "kind": kind}`` its next round,
answered with its tokens (none at the end) and seconds. All but the last carry ``prompt`` ids, ``max_new_tokens``,
``stop`` ids or null, ``block_size`` or null.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def pack(array: np.ndarray) -> dict[str, Any]:
    """A float32 array for JSON."""
    array = np.ascontiguousarray(array, dtype="<f4")
    return {"shape": list(array.shape), "float32": base64.b64encode(array.tobytes()).decode()}


def unpack(packed: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["float32"]), "<f4").reshape(packed["shape"])


def margin(logits: np.ndarray) -> float:
    """How far from a tie the rows of ``logits`` [n, V] are: the smallest lead of a first over a second place, relative
    to the largest logit."""
    top = np.sort(logits, axis=-1)[:, -2:]
    return float((top[:, 1] - top[:, 0]).min() / np.abs(logits).max())


def official_trace(
    request: dict[str, Any],
    output: list[int],
    passes: list[tuple[int, list[int], np.ndarray]],
    drafts: list[np.ndarray],
) -> dict[str, Any]:
    """The trace of an official run that was watched from outside: ``passes`` of the target, each its first position,
    its tokens and its logits [n, V] in float32, prefill first; ``drafts`` the logits [count, V] of each proposal."""
    prompt_length = len(request["prompt"])
    prefill = [logits for start, _, logits in passes if start < prompt_length]
    verified = [one for one in passes if one[0] >= prompt_length]
    final = prompt_length + len(output) - 1  # position of the newest token, had there been another round
    ends = [*(start for start, _, _ in verified[1:]), final][: len(verified)]
    rounds, margins = [], [margin(prefill[-1])]
    for (start, block, logits), end, drafted in zip(verified, ends, drafts, strict=True):
        choice = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(block) - 1 and block[accepted + 1] == choice[accepted]:
            accepted += 1
        first = start - prompt_length + 1
        rounds.append(
            {
                "position": start,
                "drafted": block[1:],
                "accepted": min(accepted, end - start),  # tokens behind a stop or the budget do not count
                "committed": output[first : first + end - start],
            }
        )
        margins += [margin(logits[: accepted + 1]), margin(drafted)]
    stored = drafts[: request["logit_rounds"]]
    return {
        "output": output,
        "rounds": rounds,
        "logits": [pack(logits[:, :: request["logit_stride"]]) for logits in stored],
        "margin": min(margins),
    }


Request = dict[str, Any]
Answer = Callable[[Any, Request], dict[str, Any]]


def timed(generate: Callable[[Any, Request], list[int]]) -> Answer:
    """The answer to ``time``: the tokens that ``generate`` returns, and the seconds it takes."""

    def answer(pair: Any, request: Request) -> dict[str, Any]:
        start = time.perf_counter()
        output = generate(pair, request)
        return {"seconds": time.perf_counter() - start, "output": output}

    return answer


def stepwise(**kinds: Callable[[Any, Request], Iterator[dict[str, Any]]]) -> dict[str, Answer]:
    """The answers to ``begin`` and ``round``: for each kind an iterator over a run's steps, the prefill first, which
    gives each step's ``tokens`` and may give more."""
    running: dict[str, Iterator[dict[str, Any]]] = {}

    def begin(pair: Any, request: Request) -> dict[str, Any]:
        running[request["kind"]] = kinds[request["kind"]](pair, request)
        return advance(pair, request)

    def advance(_pair: Any, request: Request) -> dict[str, Any]:
        start = time.perf_counter()
        step = next(running[request["kind"]], {"tokens": []})
        return {"seconds": time.perf_counter() - start, **step}

    return {"begin": begin, "round": advance}


def serve(load: Callable[[Request], tuple[Any, dict[str, Any]]], **answers: Answer) -> None:
    """Answer requests until the input ends: ``load`` gives the pair and its reply, the others take the pair. Whatever
    the libraries print goes to stderr; replies own stdout."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pair: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "load":
                pair = None  # before the next one takes its memory
                pair, reply = load(request)
            else:
                reply = answers[request["do"]](pair, request)
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)
