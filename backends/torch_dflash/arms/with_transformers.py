"""Worker: ``transformers``' own ``generate`` on the target, with its cache; the same with its prompt lookup; and the
same with its DFlash generation and our drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from answering import Generate, Request, serve  # type: ignore[import-not-found]
from torch_dflash import as_assistant
from torch_dflash.backend import load_draft_model
from transformers import AutoModelForCausalLM, GenerationConfig

from dflash.checkpoint import DraftConfig
from dflash.errors import DFlashError

LOOKED_UP = 10  # tokens that prompt lookup proposes at most, as in the code it comes from


def load(request: Request) -> tuple[dict[str, Generate], dict[str, Any]]:
    torch.set_num_threads(request["threads"])
    dtype = getattr(torch, request["dtype"])
    model: Any = AutoModelForCausalLM.from_pretrained(request["target"], dtype=dtype, local_files_only=True)
    model = model.to(request["device"]).eval()
    model.generation_config = GenerationConfig()  # greedy and nothing else, whatever the model's own file asks for
    arms = {
        "transformers": generating(model),
        "prompt-lookup": generating(model, prompt_lookup_num_tokens=LOOKED_UP),
    }
    unable = {}
    try:
        drafter = load_draft_model(Path(request["draft"]), DraftConfig.load(Path(request["draft"])))
        assistant = as_assistant(drafter.to(request["device"], dtype).eval(), block_size=request["block_size"])
        arms["transformers-dflash"] = generating(model, assistant_model=assistant, speculation_type="dflash")
    except DFlashError as error:
        unable["transformers-dflash"] = str(error)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return arms, {"versions": versions, "threads": torch.get_num_threads(), "unable": unable}


def generating(model: Any, **how: Any) -> Callable[[Request], list[int]]:
    @torch.inference_mode()
    def generate(request: Request) -> list[int]:
        ids = torch.tensor([request["prompt"]], device=model.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            max_new_tokens=request["max_new_tokens"],
            eos_token_id=request["stop"] or None,
            pad_token_id=(request["stop"] or [0])[0],
            **how,
        )
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return tokens

    return generate


if __name__ == "__main__":
    serve(load)
