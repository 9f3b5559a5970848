"""The official MLX implementation's side, ``model_mlx.py`` of the PyPI package ``dflash`` 0.1.0. Like ``official.py``,
it runs in the other environment only and watches from outside: for the length of a trace the target is of a subclass
that keeps what goes through it, and a wrapper around one instance's ``compute_logits`` sees every proposal's logits.

Three things are done for the package so that it runs these pairs at all, none of them in a round: drafter folders are
taken as they are, where it would ask a hub for them; the target's RoPE base is handed to mlx-lm in the flat spelling,
the only one its Llama and Qwen3 classes read; and a target without a tokenizer gets one that knows its stop ids alone.

One fault of it is mended where ``mend`` asks for that. Keys of a sliding draft layer lie in a rotating cache. A round
that commits a single token overwrites the oldest key once the window is full, so that the keys are out of the order of
time; the mask takes them to be in it, and hides the wrong ones until a round commits more. The PyTorch side of the same
package does not do so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dflash.model_mlx as official
import mlx.core as mx
import mlx_lm.tokenizer_utils
import numpy as np
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.utils import load_model
from protocol import official_trace, serve, stepwise, timed

official.snapshot_download = lambda folder, **_: folder


class InTimeOrder(RotatingKVCache):
    """One token goes the way that several go: behind the others."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._update_concat(keys, values)


class IdsAlone(mlx_lm.tokenizer_utils.TokenizerWrapper):
    """Where there is no text: stop ids, and itself as a detokenizer that makes none."""

    last_segment = ""

    def __init__(self) -> None:
        self.eos_token_ids = ()

    @property
    def detokenizer(self) -> IdsAlone:
        return self

    def add_token(self, _token: int) -> None: ...

    def finalize(self) -> None: ...


@dataclass
class Pair:
    target: Any
    draft: Any
    tokenizer: Any


def load(request: dict[str, Any]) -> tuple[Pair, dict[str, Any]]:
    folder = Path(request["target"])
    config = json.loads((folder / "config.json").read_text())
    nested = config.get("rope_parameters") or {}
    if nested.get("rope_type", "default") != "default" and "rope_scaling" not in config:
        raise ValueError(
            f"{folder} scales its RoPE in a spelling that mlx-lm passes over; add rope_scaling to its config"
        )
    flat = {key: nested[key] for key in ("rope_theta",) if key in nested and key not in config}
    target, _ = load_model(folder, model_config=flat)
    official.RotatingKVCache = InTimeOrder if request["mend"] else RotatingKVCache
    draft = official.load_draft(request["draft"])
    for model in (target, draft):
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    has_text = (folder / "tokenizer.json").exists()
    tokenizer = mlx_lm.tokenizer_utils.load(folder) if has_text else IdsAlone()
    return Pair(target, draft, tokenizer), {"versions": {name: version(name) for name in ("dflash", "mlx", "mlx-lm")}}


def steps(pair: Pair, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tokens that each step adds to the output; the first is the prefill."""
    pair.tokenizer.eos_token_ids = request["stop"]
    stream = official.stream_generate(
        pair.target,
        pair.draft,
        pair.tokenizer,
        request["prompt"],
        block_size=request["block_size"],
        max_tokens=request["max_new_tokens"],
    )
    for response in stream:
        if response.tokens:  # the last one of a full budget only says so
            yield {"tokens": response.tokens}


def generate(pair: Pair, request: dict[str, Any]) -> list[int]:
    return [token for step in steps(pair, request) for token in step["tokens"]]


def trace(pair: Pair, request: dict[str, Any]) -> dict[str, Any]:
    passes: list[tuple[int, list[int], np.ndarray]] = []
    drafts: list[np.ndarray] = []
    plain = type(pair.target)

    def watched_pass(self: Any, tokens: Any, cache: Any) -> Any:
        start = cache[0].offset
        logits = plain.__call__(self, tokens, cache)
        passes.append((start, tokens[0].tolist(), np.array(logits[0])))
        return logits

    compute_logits: Callable[[Any], Any] = pair.draft.compute_logits

    def watched(hidden: Any) -> Any:
        logits = compute_logits(hidden)
        drafts.append(np.array(logits[0]))
        return logits

    pair.target.__class__ = type(plain.__name__, (plain,), {"__call__": watched_pass})
    pair.draft.compute_logits = watched
    try:
        output = generate(pair, request)
    finally:
        pair.target.__class__ = plain
        del pair.draft.compute_logits
    return official_trace(request, output, passes, drafts)


if __name__ == "__main__":
    serve(load, trace=trace, time=timed(generate), **stepwise(real=steps))
