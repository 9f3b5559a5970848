"""The official implementation's side. Runs only in an environment that holds the PyPI package ``dflash`` 0.1.0, whose
import name is the same as ours: never import this file, start it with that environment's Python.

It calls the package's own generate function unchanged and watches from outside: a forward hook on the target sees
every verified block, a wrapper around one instance's ``compute_logits`` sees every proposal's logits.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from protocol import official_trace, serve, timed
from transformers import AutoModelForCausalLM


def load(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    torch.set_num_threads(request["threads"])
    target = AutoModelForCausalLM.from_pretrained(request["target"], dtype=torch.float32).eval()
    draft = DFlashDraftModel.from_pretrained(request["draft"], dtype=torch.float32, attn_implementation="sdpa").eval()
    return (target, draft), {"versions": {name: version(name) for name in ("dflash", "torch", "transformers")}}


def generate(pair: Any, request: dict[str, Any]) -> list[int]:
    target, draft = pair
    prompt = torch.tensor([request["prompt"]])
    output = dflash_generate(
        draft,
        target=target,
        input_ids=prompt,
        max_new_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop"],
        block_size=request["block_size"],
    )
    return output[0, prompt.shape[1] :].tolist()


def trace(pair: Any, request: dict[str, Any]) -> dict[str, Any]:
    target, draft = pair
    passes: list[tuple[int, list[int], np.ndarray]] = []
    drafts: list[np.ndarray] = []

    def watch(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
        passes.append((int(kwargs["position_ids"][0, 0]), args[0][0].tolist(), output.logits[0].numpy()))

    compute_logits = draft.compute_logits

    def watched(*args: Any) -> torch.Tensor:
        logits = compute_logits(*args)
        drafts.append(logits[0].numpy())
        return logits

    hook = target.register_forward_hook(watch, with_kwargs=True)
    draft.compute_logits = watched
    try:
        output = generate(pair, request)
    finally:
        hook.remove()
        del draft.compute_logits
    return official_trace(request, output, passes, drafts)


if __name__ == "__main__":
    serve(load, trace=trace, time=timed(generate))
