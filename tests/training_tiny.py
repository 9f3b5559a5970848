"""Tiny models and records for the tests of training; no weights, all seeded."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch_dflash.training.features import FeatureStore
from torch_dflash.training.trainer import Trainer
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.recipe import Recipe
from dflash.records import ResponseRecord

VOCAB, TAPS, MASK, STOP = 97, (0, 2), 3, 1


def tiny_target(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": STOP,
        "initializer_range": 0.2,
    }
    return LlamaForCausalLM(LlamaConfig(**(config | changes))).float().eval().requires_grad_(False)


def tiny_records(count: int = 14, seed: int = 0) -> list[ResponseRecord]:
    """Rows of very different lengths, the shortest with a single anchor."""
    rng = np.random.default_rng(seed)
    records = []
    for row in range(count):
        prompt, response = rng.integers(4, VOCAB, rng.integers(2, 9)), rng.integers(4, VOCAB, 2 + row % 7 * 4)
        ids = tuple(map(int, prompt)), (*map(int, response[:-1]), STOP)
        records.append(ResponseRecord(*ids, domain=("math", "code")[row % 2]))
    return records


def tiny_recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "mask_token_id": MASK,
        "draft_layers": 2,
        "target_layer_ids": TAPS,
        "block_size": 4,
        "steps": 6,
        "batch_rows": 4,
        "anchors": 5,
        "heldout_rows": 2,
        "learning_rate": 3e-3,
        "loss_chunk": 16,
    }
    return Recipe(**(values | changes))


def tiny_trainer(folder: Path, recipe: Recipe, records: list[ResponseRecord] | None = None, **options: Any) -> Trainer:
    target = tiny_target()
    store = FeatureStore(target, records or tiny_records(), recipe.target_layer_ids)
    return Trainer(target, store, recipe, folder, **options)


def gradients(trainer: Trainer, step: int = 0) -> tuple[float, list[torch.Tensor]]:
    """The loss of a step and every gradient, cleared afterwards."""
    loss = trainer.accumulate(trainer.plan.step(step))
    found = [copy.deepcopy(weight.grad) for weight in trainer.model.parameters()]
    trainer.optimiser.zero_grad(set_to_none=True)
    assert all(gradient is not None for gradient in found)
    return loss, found  # type: ignore[return-value]


def rank_main(rank: int, ranks: int, folder: str, batch_sizes: tuple[int, ...]) -> None:
    """One process of a distributed step: its loss and gradients go to ``folder/RANK.pt``, one entry a batch size."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timedelta(seconds=240)
    )
    found = []
    for size in batch_sizes:
        run = Path(folder) / f"run-{rank}-{size}"
        found.append(gradients(tiny_trainer(run, tiny_recipe(batch_rows=size))))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
