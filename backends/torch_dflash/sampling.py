"""From logits to tokens: small pure functions that compose. Shapes: n rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.types import SamplingParams


def shape_probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The distribution [n, V] in float32 of logits after temperature, top-k and top-p, in this order.

    Top-p keeps the smallest set of likeliest tokens whose probability reaches it. Temperature must be above 0."""
    scores, limits = logits.float(), torch.finfo(torch.float32)
    temperature = min(max(sampling.temperature, limits.tiny), limits.max)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature  # from 0 down: nothing overflows near 0
    if 0 < sampling.top_k < scores.shape[-1]:
        best, places = scores.topk(sampling.top_k, dim=-1)
        scores = torch.full_like(scores, float("-inf")).scatter_(-1, places, best)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, places = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0)
        probs = torch.zeros_like(probs).scatter_(-1, places, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draft_samples(logits: Tensor, sampling: SamplingParams, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each slot [count] from its uniform number [count], and the distributions [count, V] that they are
    drawn from: the draft logits', shaped as the target's are.

    A drafter may be wrong but must not break the law: where a logit is not a number it counts as 0, so that what is
    drawn from is known all the same."""
    q = shape_probabilities(logits.float().nan_to_num(), sampling)
    return draw(q, uniforms), q


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token [n] of each row of ``probs`` [n, V] from its uniform number [n] in [0, 1), by inverting the cumulative
    distribution. A token of probability zero is never drawn, not even by 0."""
    cumulative = probs.double().cumsum(-1)
    aim = uniforms.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, aim, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)
