"""From logits to tokens: small pure functions that compose. Shapes: n rows, V vocabulary.

Metal has no 64-bit floats, so sums over a vocabulary are taken in blocks, which keeps float32 accurate.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from dflash.types import SamplingParams

_BLOCK = 512
_LIMITS = np.finfo(np.float32)


def shape_probabilities(logits: mx.array, sampling: SamplingParams) -> mx.array:
    """The distribution [n, V] in float32 of logits after temperature, top-k and top-p, in this order.

    Top-p keeps the smallest set of likeliest tokens whose probability reaches it. Temperature must be above 0."""
    scores = logits.astype(mx.float32)
    temperature = min(max(sampling.temperature, float(_LIMITS.tiny)), float(_LIMITS.max))
    scores = (scores - scores.max(-1, keepdims=True)) / temperature  # from 0 down: nothing overflows near 0
    if 0 < sampling.top_k < scores.shape[-1]:
        best = mx.argpartition(-scores, sampling.top_k - 1, axis=-1)[:, : sampling.top_k]
        kept = mx.take_along_axis(scores, best, axis=-1)
        scores = mx.put_along_axis(mx.full(scores.shape, -mx.inf), best, kept, axis=-1)
    probs = mx.softmax(scores, axis=-1, precise=True)
    if sampling.top_p < 1:
        places = mx.argsort(-probs, axis=-1)
        ordered = mx.take_along_axis(probs, places, axis=-1)
        before = cumulative(ordered) - ordered
        ordered = mx.where(before >= sampling.top_p, 0.0, ordered)
        probs = mx.put_along_axis(mx.zeros_like(probs), places, ordered, axis=-1)
        probs = probs / probs.sum(-1, keepdims=True)
    return probs


def draft_samples(logits: mx.array, sampling: SamplingParams, uniforms: mx.array) -> tuple[mx.array, mx.array]:
    """A token of each slot, int32 [count], from its uniform number [count], and the distributions [count, V] that they
    are drawn from: the draft logits', shaped as the target's are.

    A drafter may be wrong but must not break the law: where a logit is not a number it counts as 0, so that what is
    drawn from is known all the same."""
    q = shape_probabilities(mx.nan_to_num(logits.astype(mx.float32)), sampling)
    return draw(q, uniforms).astype(mx.int32), q


def draw(probs: mx.array, uniforms: mx.array) -> mx.array:
    """One token [n] of each row of ``probs`` [n, V] from its uniform number [n] in [0, 1), by inverting the cumulative
    distribution. A token of probability zero is never drawn, whatever rounding does to the sums."""
    sums = cumulative(probs)
    aim = uniforms.astype(mx.float32)[:, None] * sums[:, -1:]
    possible = probs > 0
    reached = mx.argmax((sums > aim) & possible, axis=-1)
    last = probs.shape[-1] - 1 - mx.argmax(possible[:, ::-1], axis=-1)  # where rounding put the aim behind every sum
    found = ((sums > aim) & possible).any(-1)
    return mx.where(found, reached, last)


def cumulative(values: mx.array) -> mx.array:
    """Running sums along the last axis [n, V], block by block."""
    rows, length = values.shape
    padded = mx.pad(values, [(0, 0), (0, -length % _BLOCK)]).reshape(rows, -1, _BLOCK)
    inner = mx.cumsum(padded, axis=-1)
    sums = inner + mx.cumsum(inner[..., -1], axis=-1, inclusive=False)[..., None]
    return sums.reshape(rows, -1)[:, :length]
