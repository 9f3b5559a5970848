"""What both workers speak: one JSON object a line in, one out. Needs numpy alone, so that either environment runs it.

``{"do": "load", "target": folder, "draft": folder, "threads": n}`` comes first. ``{"do": "trace", …}`` answers with the
tokens round by round, and every ``logit_stride``-th draft logit of the first ``logit_rounds``; ``{"do": "time", …}``
with the seconds and tokens of a run that nothing watches. Both carry ``prompt`` ids, ``max_new_tokens``, ``stop`` ids
or null, ``block_size`` or null.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
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


def serve(
    load: Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]],
    trace: Callable[[Any, dict[str, Any]], dict[str, Any]],
    generate: Callable[[Any, dict[str, Any]], list[int]],
) -> None:
    """Answer requests until the input ends: ``load`` gives the pair and its reply, ``trace`` and ``generate`` take the
    pair. Whatever the libraries print goes to stderr; replies own stdout."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pair: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "load":
                pair = None  # before the next one takes its memory
                pair, reply = load(request)
            elif request["do"] == "trace":
                reply = trace(pair, request)
            else:
                start = time.perf_counter()
                tokens = generate(pair, request)
                reply = {"seconds": time.perf_counter() - start, "output": tokens}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)
