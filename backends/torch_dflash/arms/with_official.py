"""Worker: the official implementation, in an environment that holds the PyPI package ``dflash`` 0.1.0, whose import
name is the same as ours. Its generate function runs unchanged and unwatched."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from answering import Generate, Request, serve  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM

official: Any = import_module("dflash.model")  # by name: to a type checker it would be a module of ours


def load(request: Request) -> tuple[dict[str, Generate], dict[str, Any]]:
    torch.set_num_threads(request["threads"])
    dtype, device = getattr(torch, request["dtype"]), request["device"]
    target: Any = AutoModelForCausalLM.from_pretrained(request["target"], dtype=dtype, local_files_only=True)
    target = target.to(device).eval()
    draft = official.DFlashDraftModel.from_pretrained(request["draft"], dtype=dtype, attn_implementation="sdpa")
    draft = draft.to(device).eval()

    def generate(asked: Request) -> list[int]:
        prompt = torch.tensor([asked["prompt"]], device=device)
        output = official.dflash_generate(
            draft,
            target=target,
            input_ids=prompt,
            max_new_tokens=asked["max_new_tokens"],
            stop_token_ids=asked["stop"] or None,
            block_size=request["block_size"],
        )
        tokens: list[int] = output[0, prompt.shape[1] :].tolist()
        return tokens

    versions = {name: version(name) for name in ("dflash", "torch", "transformers")}
    return {"official": generate}, {"versions": versions, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    serve(load)
