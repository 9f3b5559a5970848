"""Cross-entropy over a large vocabulary in chunks, so that its logits are never in memory all at once.

The head is frozen, so the only gradient is the hidden states', and it is known as soon as a chunk's logits are: it is
computed in the forward pass and the logits are dropped. Shapes: n slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        chunk: int,
        teacher: Tensor | None,
        soft: float,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ head.T).float()
            weight, label = weights[rows, None], labels[rows, None]
            log_normaliser = logits.logsumexp(-1, keepdim=True)
            loss = log_normaliser - (1 - soft) * logits.gather(1, label)
            if teacher is not None:
                aim = (teacher[rows] @ head.T).float().softmax(-1).mul_(soft)
                loss -= (aim * logits).sum(-1, keepdim=True)
            total += (weight * loss).sum()
            slope = logits.sub_(log_normaliser).exp_()
            slope.scatter_add_(1, label, torch.full_like(loss, soft - 1))
            if teacher is not None:
                slope -= aim
            gradient[rows] = slope.mul_(weight).to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[0].to(gradient.dtype), *(None,) * 6)


def chunked_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    chunk: int = 256,
    teacher: Tensor | None = None,
    soft: float = 0.0,
) -> Tensor:
    """Σ w·CE, a scalar in float32, of ``hidden`` [n, H] against ``labels`` [n] under the frozen ``head`` [V, H].

    ``teacher`` [n, H], the target's final hidden states, turns the share ``soft`` of each label into the target's
    own distribution. Products run in the head's precision; divide by Σ w yourself, over all ranks and micro-batches."""
    args = (hidden.to(head.dtype), head, labels, weights, chunk, teacher if soft else None, soft if soft else 0.0)
    result: Tensor = _ChunkedCrossEntropy.apply(*args)
    return result
