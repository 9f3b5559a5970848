"""Which blocks a training step draws from a sequence, and what each slot must predict. Plain numpy, for every backend.

Shapes: S tokens in a sequence, N anchors, B block size. ``loss_mask`` [S] is 1 on the target's own response, its end
token included. Slot k of the block at anchor a predicts token a+k; slot 0 holds the anchor and predicts nothing.
"""

from __future__ import annotations

import numpy as np


def valid_anchors(loss_mask: np.ndarray) -> np.ndarray:
    """Positions a with ``loss_mask[a]`` and ``loss_mask[a+1]``: a real token to start from and one to predict."""
    mask = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:])


def draw_anchors(loss_mask: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Up to ``count`` valid anchors without replacement, sorted: ``anchors`` [count] and ``keep`` [count].

    Where the sequence has fewer, the rest repeats position 0 with ``keep`` False."""
    valid = valid_anchors(loss_mask)
    drawn = np.sort(rng.choice(valid, size=min(count, len(valid)), replace=False))
    anchors, keep = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
    anchors[: len(drawn)], keep[: len(drawn)] = drawn, True
    return anchors, keep


def slot_weights(block_size: int, gamma: float) -> np.ndarray:
    """exp(−(k−1)/γ) for slots k = 1 … B−1, and 0 for the anchor's slot: [B]."""
    weights = np.exp(-(np.arange(block_size) - 1) / gamma)
    weights[0] = 0.0
    return weights


def default_gamma(block_size: int) -> float:
    """The paper's decay, 4, 5 and 7 for blocks of 8, 10 and 16, and the line through them in between; half the block
    below 8."""
    return float(np.interp(block_size, (2, 8, 10, 16), (1, 4, 5, 7)))


def label_blocks(
    tokens: np.ndarray, loss_mask: np.ndarray, anchors: np.ndarray, keep: np.ndarray, block_size: int, gamma: float
) -> tuple[np.ndarray, np.ndarray]:
    """``labels`` [N, B] (slot k: token a+k) and ``weights`` [N, B]: keep · in bounds · loss_mask[a+k] · decay."""
    positions = anchors[:, None] + np.arange(block_size)
    inside = positions < len(tokens)
    positions = np.minimum(positions, len(tokens) - 1)
    weights = keep[:, None] * inside * np.asarray(loss_mask, dtype=bool)[positions] * slot_weights(block_size, gamma)
    return np.asarray(tokens)[positions], weights.astype(np.float32)
