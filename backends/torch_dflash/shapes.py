"""Engines of random weights in a full-size pair's shape. What they say is noise; what they cost is the pair's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dflash.engine import Engine
from dflash.errors import BackendError
from dflash.suites.shapes import PairShape
from dflash.targets import check_dtype
from torch_dflash.backend import TorchBackend, serve_target
from torch_dflash.drafter import TorchDrafter
from torch_dflash.memory import free_bytes
from torch_dflash.modeling import DraftModel
from torch_dflash.target import choose_device

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROOM = 1 << 30  # bytes beside weights and caches: activations, logits, the libraries
TILE = (1 << 20) + 7  # no multiple of a row's length, so that no two rows are the same


def shape_engine(
    shape: PairShape, *, layers: int | None = None, longest: int = 4096, device: str = "auto", dtype: str = "auto"
) -> Engine:
    """An engine of ``shape``, of whose target the first ``layers`` are made; ``auto`` is bfloat16. Contexts of
    ``longest`` tokens are counted in when memory is checked. Raises ``BackendError`` where it does not suffice."""
    check_dtype(dtype, DTYPES)
    where, chosen = choose_device(device), DTYPES.get(dtype, torch.bfloat16)
    count = shape.layers(layers)
    draft_config = shape.draft_config(count)
    settings = dict(shape.target) | {"num_hidden_layers": count, "bos_token_id": None, "eos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, rope_parameters=rope)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=chosen)
        draft = DraftModel(draft_config).to(chosen)
    weights = sum(weight.numel() for module in (model, draft) for weight in module.parameters())
    cached = 2 * config.head_dim * (
        count * config.num_key_value_heads + draft_config.num_hidden_layers * draft_config.num_key_value_heads
    )  # fmt: skip
    needed = (weights + 2 * longest * cached) * chosen.itemsize + ROOM  # a cache that grows is in memory twice
    if chosen == torch.float32:  # a CPU reads a drafter from a bfloat16 copy
        needed += 2 * sum(weight.numel() for weight in draft.parameters())
    free = free_bytes(where)
    if free is not None and needed > free:
        raise BackendError(
            f"random weights in {shape.name}'s shape with {count} layers need {needed / 1e9:.1f} GB with their caches, "
            f"and {free / 1e9:.1f} GB are free on {where}; fewer --layers, shorter --contexts or 16 bits need less"
        )
    tile = torch.rand(TILE, generator=torch.Generator().manual_seed(0)).sub_(0.5).bfloat16().to(where, chosen)
    for module in (model, draft):
        module.to_empty(device=where)
        for weight in module.parameters():
            fill(weight.data, tile)
    model.tie_weights()
    decoder = model.get_decoder()
    with where:
        decoder.rotary_emb = type(decoder.rotary_emb)(config)  # its tables are no parameters
    backend: Any = TorchBackend()
    target: Any = serve_target(model, draft_config.target_layer_ids)
    head = model.get_output_embeddings().weight.detach()
    drafter = TorchDrafter(draft, model.get_input_embeddings().weight.detach(), head)
    whole = shape.target["num_hidden_layers"]
    facts = {
        "target": f"random weights in {shape.name}'s shape, {count} of {whole} layers",
        "draft": f"random weights in its drafter's shape, {draft_config.num_hidden_layers} layers",
        "backend": "torch",
        "device": target.info.device,
        "dtype": target.info.dtype,
    }
    return Engine(backend, target, drafter, facts=facts)


def fill(weight: Tensor, tile: Tensor) -> None:
    """Matrices from ``tile``, uniform around 0 and scaled so that a normed input of any width comes out about as large;
    norms of 1. The scale is a power of two: bfloat16 holds the weights exactly, as it does most checkpoints'. Copied,
    not drawn: of an 8B target that takes a minute, most of which the system needs to hand out the memory."""
    if weight.dim() == 1:
        weight.fill_(1)
        return
    scaled = tile * 2.0 ** round(math.log2(12 / weight.shape[1]) / 2)  # numbers in [-0.5, 0.5) have the variance 1/12
    for part in weight.view(-1).split(len(tile)):
        part.copy_(scaled[: len(part)])
