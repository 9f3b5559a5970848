"""What one training step sees, derived from the recipe and the step number alone, so that a resumed run continues it.

Shapes: b rows, N anchors a row, B block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash.anchors import draw_anchors, label_blocks, valid_anchors
from dflash.recipe import Recipe
from dflash.records import ResponseRecord


@dataclass(frozen=True)
class Blocks:
    """The blocks of some rows: ``anchors`` [b, N], ``labels`` [b, N, B] (token ids), ``weights`` [b, N, B]."""

    rows: tuple[int, ...]
    anchors: np.ndarray
    labels: np.ndarray
    weights: np.ndarray

    def split(self, parts: int) -> list[Blocks]:
        """The same blocks in up to ``parts`` micro-batches."""
        return [
            Blocks(tuple(np.take(self.rows, places)), self.anchors[places], self.labels[places], self.weights[places])
            for places in np.array_split(np.arange(len(self.rows)), min(parts, len(self.rows)))
        ]


class BatchPlan:
    """Rows and anchors of every step. Rows without a valid anchor are dropped; the held-out ones are set aside."""

    def __init__(self, records: Sequence[ResponseRecord], recipe: Recipe) -> None:
        self.records, self.recipe = records, recipe
        usable = [
            row
            for row, record in enumerate(records)
            if len(record) <= recipe.max_length and len(valid_anchors(record.loss_mask))
        ]
        order = np.random.default_rng([recipe.seed, 0]).permutation(usable)
        self.heldout = sorted(int(row) for row in order[: recipe.heldout_rows])
        self.train = np.sort(order[recipe.heldout_rows :])
        self.steps_per_epoch = len(self.train) // recipe.batch_rows

    def step(self, step: int) -> Blocks:
        """The blocks of step ``step``, which depend on nothing but the recipe and the records."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.recipe.seed, 1, epoch]).permutation(self.train)
        rows = order[place * self.recipe.batch_rows : (place + 1) * self.recipe.batch_rows]
        return self.draw(rows, [self.recipe.seed, 2, epoch])

    def draw(self, rows: Sequence[int] | np.ndarray, seed: Sequence[int]) -> Blocks:
        """Fresh anchors for ``rows``; each row's draw depends on ``seed`` and the row alone."""
        drawn = []
        for row in rows:
            record = self.records[row]
            rng = np.random.default_rng([*seed, int(row)])
            anchors, keep = draw_anchors(record.loss_mask, self.recipe.anchors, rng)
            labels, weights = label_blocks(
                record.tokens, record.loss_mask, anchors, keep, self.recipe.block_size, self.recipe.decay
            )
            drawn.append((anchors, labels, weights))
        anchors, labels, weights = (np.stack(part) for part in zip(*drawn, strict=True))
        return Blocks(tuple(int(row) for row in rows), anchors, labels, weights)

    def longest(self) -> Blocks:
        """A step of the longest rows, to find out before the run starts whether one fits into memory."""
        by_length = sorted(self.train, key=lambda row: -len(self.records[row]))
        return self.draw(by_length[: self.recipe.batch_rows], [self.recipe.seed, 3])

    def supervised_share(self) -> float:
        """Expected share of the valid anchors that one visit of a row draws."""
        counts = np.array([len(valid_anchors(self.records[row].loss_mask)) for row in self.train])
        return float(np.minimum(counts, self.recipe.anchors).sum() / counts.sum())
