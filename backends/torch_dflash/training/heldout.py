"""Held-out evaluation over all anchors: the leading run of correct slots plus one, without a decode loop.

It is cheap and deterministic, and it is never called τ: that name belongs to the served figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash.anchors import valid_anchors
from torch_dflash.modeling import DraftModel
from torch_dflash.rotary import Rotary
from torch_dflash.training.features import FeatureStore
from torch_dflash.training.forward import training_forward


@dataclass(frozen=True)
class HeldOut:
    """``acceptance_length``: mean leading run + 1 over all anchors. ``slot_accuracy`` [B−1]: correct, given that the
    slot exists. ``by_domain``: acceptance length of each domain's anchors."""

    acceptance_length: float
    slot_accuracy: tuple[float, ...]
    by_domain: dict[str, float]
    anchors: int


@torch.no_grad()
def evaluate_heldout(
    model: DraftModel,
    embedding: Tensor,
    head: Tensor,
    rotary: Rotary,
    store: FeatureStore,
    rows: Sequence[int],
    *,
    precision: str = "float32",
    anchors_at_once: int = 64,
) -> HeldOut:
    """Draft from every valid anchor of ``rows`` and compare with the target's own tokens, over the full vocabulary."""
    block = model.config.block_size
    lengths: list[float] = []
    domains: list[str] = []
    correct, present = np.zeros(block - 1), np.zeros(block - 1)
    was_training = model.training
    model.eval()
    for row in rows:
        record = store.records[row]
        tokens, features, _ = store.batch([row])
        features = features.to(embedding.dtype)
        anchors = valid_anchors(record.loss_mask)
        for start in range(0, len(anchors), anchors_at_once):
            some = anchors[start : start + anchors_at_once]
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                places = torch.from_numpy(some[None]).to(tokens.device)
                hidden = training_forward(model, embedding, rotary, features, tokens, places)[0, :, 1:]
                logits = hidden.flatten(0, 1).to(head.dtype) @ head.T
                drafted = logits.argmax(-1).view(len(some), -1).cpu().numpy()  # [anchors, B-1]
            positions = some[:, None] + np.arange(1, block)
            inside = positions < len(record)
            right = inside & (record.tokens[np.minimum(positions, len(record) - 1)] == drafted)
            lengths += list(1.0 + np.cumprod(right, axis=1).sum(1))
            domains += [record.domain] * len(some)
            correct, present = correct + right.sum(0), present + inside.sum(0)
    model.train(was_training)
    names = np.array(domains)
    return HeldOut(
        acceptance_length=float(np.mean(lengths)),
        slot_accuracy=tuple((correct / np.maximum(present, 1)).round(4).tolist()),
        by_domain={name: float(np.mean(np.array(lengths)[names == name])) for name in sorted(set(domains))},
        anchors=len(lengths),
    )
