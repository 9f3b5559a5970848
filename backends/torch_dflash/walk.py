"""Which path of a candidate tree the target's own tokens take, found where they are: on the device, without waiting.

A row's choice is the target's own token behind that row's prefix: its argmax (``greedy``), or a sample that the row
draws (``match``). A row **stands** where its token is its parent's choice and its parent stands; the anchor always
does. Siblings hold different tokens, so the rows that stand are one path; and since parents come before children, the
last of them is its end. The choice there is the correction, or behind a leaf the bonus.

Shapes: n rows of a tree, the anchor's first; height: slots on its longest path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash.errors import BackendError
from dflash.tree import CandidateTree


@dataclass(frozen=True)
class TreeRows:
    """A ``CandidateTree`` on the device, int64 [n] each. ``tokens`` are what a target pass takes. ``parents`` are rows;
    the anchor is its own. ``depths`` are 0 for the anchor."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    height: int

    @classmethod
    def of(cls, tree: CandidateTree, device: torch.device) -> TreeRows:
        """In one copy that waits for nothing."""
        rows = torch.from_numpy(np.stack((tree.tokens, tree.parents.clip(0), tree.depths)))
        tokens, parents, depths = rows.to(device, non_blocking=True)
        return cls(tokens, parents, depths, tree.height)

    def positions(self, start: int) -> Tensor:
        """The output position [n] of each row's choice, where the anchor's has position ``start``.

        A random number belongs to an output position, so rows of equal depth, of which one path holds one at most, draw
        with the same: a seed gives the same tokens with a tree, a chain or no draft."""
        return self.depths + start


class Walk(NamedTuple):
    """The accepted path, int64, on the device; ``torch.cat(walk)`` is what one copy to the host needs to take.

    ``length`` [1]: its rows, the anchor's included, so one more than the accepted tokens. ``next_token`` [1]: the
    target's own token at its end. ``path`` [height + 1]: its rows, of which the first ``length`` count; 0 behind."""

    length: Tensor
    next_token: Tensor
    path: Tensor


@torch.inference_mode()
def walk(tree: TreeRows, choices: Tensor) -> Walk:
    """The path that ``choices`` [n] take, the target's own token behind each row: int64, on the tree's device.

    Ancestors are looked at 1, 2, 4, … levels at a time, so ⌈log₂ height⌉ steps find who stands. Raises ``BackendError``
    where the choices are not one a row."""
    if choices.shape != tree.tokens.shape:
        raise BackendError(f"the tree has {len(tree.tokens)} rows and the choices are {list(choices.shape)}; one a row")
    stands = (tree.tokens == choices[tree.parents]) | (tree.depths == 0)
    above = tree.parents
    for _ in range(max(tree.height - 1, 0).bit_length()):
        stands, above = stands & stands[above], above[above]
    rows = torch.arange(len(choices), device=choices.device)
    levels = torch.arange(tree.height + 1, device=choices.device)
    standing = torch.where(stands, rows, 0)
    path = torch.where(tree.depths == levels[:, None], standing, 0).sum(-1)  # of a level one row stands at most
    return Walk(stands.sum()[None], choices.gather(0, standing.amax()[None]), path)
