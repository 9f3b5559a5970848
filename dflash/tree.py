"""Candidate trees: many blocks from one draft pass, for the target to verify in one pass.

A draft pass gives a distribution q_s for each slot s after the anchor, each on its own: what slot 2 holds does not
depend on slot 1. So the drafter's probability of a prefix t_1 … t_m of the block is the product

    log q(t_1 … t_m) = Σ_s log q_s(t_s),  s = 1 … m

and, with the budget of nodes a target pass has room for, the tree to verify is the one of the most likely prefixes:
among all trees of that size it has the longest expected walk (``CandidateTree.expected_length``), as far as the drafter
is right about the target. A prefix is never likelier than what it continues, so the most likely ones are a tree by
themselves. ``best_first`` finds them in order. This is the tree of DDTree (Ringel et al., "Accelerating Speculative
Decoding with Block Diffusion Draft Trees", arXiv 2604.12989).

Shapes: n rows of a tree, the anchor's first; k candidates a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike

from dflash.errors import UsageError

MOST_NODES = 256
ROUNDING = 1e-3  # a log-probability this little above 0 is a rounded 0


@dataclass(frozen=True, eq=False)
class CandidateTree:
    """A tree of drafted tokens below the anchor; its arrays [n] cannot be written to.

    ``tokens``: row 0 holds the anchor. ``parents``: the row of each one's parent, always an earlier one; −1 for the
    anchor. ``depths``: 0 for the anchor; a row's slot otherwise. ``log_probs`` float64: the drafter's log-probability
    of the prefix that ends in a row, 0 for the anchor; NaN where it is not known. ``ranks``: a row's place among the
    candidates of its slot, 0 the likeliest; 0 for the anchor. All but ``log_probs`` are int64.
    Raises ``UsageError`` for arrays that are no such tree, and for siblings with the same token, of which a walk could
    not choose one.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    log_probs: np.ndarray
    ranks: np.ndarray

    def __post_init__(self) -> None:
        for name in ("tokens", "parents", "depths", "ranks"):
            self._freeze(name, _whole(getattr(self, name), name))
        self._freeze("log_probs", np.array(self.log_probs, dtype=np.float64))
        n = len(self)
        if not n or any(array.shape != (n,) for array in vars(self).values()):
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in vars(self).items())
            raise UsageError(f"a tree's arrays are [n], the anchor's row first; these are {shapes}")
        parents, above = self.parents, self.parents[1:]
        if parents[0] != -1 or (above < 0).any() or (above >= np.arange(1, n)).any():
            raise UsageError("a tree's parents are -1 for row 0, the anchor, and an earlier row for every other")
        if self.depths[0] or (self.depths[1:] != self.depths[above] + 1).any():
            raise UsageError("a tree's depths are 0 for the anchor and one more than the parent's for every other row")
        if self.tokens.min() < 0 or self.ranks.min() < 0:
            raise UsageError("a tree's tokens and ranks are 0 or above")
        if self.log_probs[0] or (self.log_probs[1:] > self.log_probs[above]).any():
            raise UsageError("a tree's log_probs are 0 for the anchor and nowhere above the parent's")
        if _repeats(np.sort(self.tokens[1:] * n + above)):
            raise UsageError("two rows of a tree have the same parent and the same token")

    def _freeze(self, name: str, array: np.ndarray) -> None:
        array.setflags(write=False)
        object.__setattr__(self, name, array)

    def __len__(self) -> int:
        """n: the nodes and the anchor."""
        return len(self.tokens)

    @property
    def height(self) -> int:
        """Slots on the longest path; 0 for the anchor alone."""
        return int(self.depths.max())

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The rows below each row, in order."""
        rows: list[list[int]] = [[] for _ in self.tokens]
        for row, parent in enumerate(self.parents.tolist()[1:], start=1):
            rows[parent].append(row)
        return tuple(map(tuple, rows))

    @property
    def is_chain(self) -> bool:
        """Whether it has one branch: what a target can verify as a plain block."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def path_to(self, row: int) -> tuple[int, ...]:
        """The rows from the anchor's to ``row``, both included. Raises ``UsageError`` where there is no such row."""
        if not 0 <= row < len(self):
            raise UsageError(f"the tree has no row {row}; its rows are 0 to {len(self) - 1}")
        path = []
        while row >= 0:
            path.append(row)
            row = int(self.parents[row])
        return tuple(reversed(path))

    def expected_length(self) -> float:
        """Tokens a round with this tree commits on average, if the target's were drawn from the drafter's marginals.

        A node adds one where its whole prefix is drawn, and the correction or bonus is always one: 1 + Σ exp(log_prob)
        over the nodes. Raises ``UsageError`` where log-probabilities are not known."""
        if np.isnan(self.log_probs).any():
            raise UsageError("this tree was made without log-probabilities; its expected length is not known")
        return float(np.exp(self.log_probs).sum())  # the anchor's own 1 counts the correction or bonus


def best_first(anchor: int, ids: ArrayLike, log_probs: ArrayLike, budget: int) -> CandidateTree:
    """The tree of the ``budget`` most likely prefixes (1 to 256), fewer where there are no more.

    ``ids`` [slots, k] and ``log_probs`` [slots, k] are candidates of each slot, in any order, and the drafter's
    log-probability of each. A candidate of −inf never enters. Rows come likeliest first, so a smaller budget's tree is
    the first rows of a larger one's. Equally likely candidates of a slot are ordered by id, equally likely prefixes by
    when they became reachable. Raises ``UsageError`` for a budget outside its range, shapes that differ or are empty,
    log-probabilities above 0 or NaN, and a candidate that is twice in its slot.

    A heap holds the prefixes that could come next. Taking the likeliest of them makes two others reachable, neither
    likelier: the same with the next candidate of its slot, and its continuation by the next slot's likeliest. So each
    prefix is reached in one way only, before any less likely one, and a node adds at most one entry to the heap.
    """
    if not isinstance(budget, Integral) or not 1 <= budget <= MOST_NODES:
        raise UsageError(f"budget is {budget!r}; a tree has 1 to {MOST_NODES} nodes after the anchor")
    slot_ids, slot_costs = _candidates(_whole(ids, "ids"), np.asarray(log_probs, dtype=np.float64), int(budget))
    tokens, parents, depths, ranks, costs = [anchor], [-1], [0], [0], [0.0]
    heap = [(slot_costs[0][0], 0, 0, 0)] if slot_costs else []  # cost, when it became reachable, parent, rank
    while heap and len(tokens) <= budget:
        cost, _, parent, rank = heap[0]
        row, slot = len(tokens), depths[parent]
        tokens.append(slot_ids[slot][rank])
        parents.append(parent)
        depths.append(slot + 1)
        ranks.append(rank)
        costs.append(cost)
        rank, of_slot = rank + 1, slot_costs[slot]
        if rank < len(of_slot):
            heapreplace(heap, (costs[parent] + of_slot[rank], 2 * row, parent, rank))
        else:
            heappop(heap)
        if slot + 1 < len(slot_costs):
            heappush(heap, (cost + slot_costs[slot + 1][0], 2 * row + 1, row, 0))
    return CandidateTree(np.array(tokens), np.array(parents), np.array(depths), 0.0 - np.array(costs), np.array(ranks))


def chain(anchor: int, tokens: Sequence[int], log_probs: ArrayLike | None = None) -> CandidateTree:
    """The tree with one branch: ``tokens`` [count] after the anchor, and the drafter's log-probability [count] of each
    where it is known. Raises ``UsageError`` where these do not fit each other."""
    count = len(tokens)
    total = np.full(count + 1, np.nan)
    total[0] = 0
    if log_probs is not None:
        each = _below_zero(np.asarray(log_probs, dtype=np.float64))
        if each.shape != (count,):
            raise UsageError(f"a chain of {count} tokens has log_probs [{count}]; these are {list(each.shape)}")
        total[1:] = each.cumsum()
    rows = np.arange(count + 1)
    return CandidateTree(np.array([anchor, *tokens]), rows - 1, rows, total, np.zeros_like(rows))


def _candidates(ids: np.ndarray, log_probs: np.ndarray, most: int) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and costs (−log-probability) of each slot's ``most`` likeliest candidates, likeliest first; up to the first
    slot that has none."""
    if ids.ndim != 2 or not ids.size or ids.shape != log_probs.shape:
        shapes = f"{list(ids.shape)} and {list(log_probs.shape)}"
        raise UsageError(f"ids and log_probs are both [slots, k] with at least one of each; these are {shapes}")
    costs = -_below_zero(log_probs)
    order = np.lexsort((ids, costs), axis=-1)
    slots = np.arange(len(ids))[:, None]
    ids, costs = ids[slots, order], costs[slots, order]
    can = np.isfinite(costs)
    by_id = np.sort(np.where(can, ids, -1 - np.arange(ids.shape[1])), axis=-1)  # what cannot enter differs from all
    if _repeats(by_id):
        slot, at = np.argwhere(by_id[:, 1:] == by_id[:, :-1])[0]
        raise UsageError(f"slot {slot + 1} has the candidate {by_id[slot, at]} twice; each may be there once")
    counts = np.minimum(can.sum(-1), most)
    reached = int((counts > 0).cumprod().sum())
    ids_of, costs_of = ids[:reached, :most].tolist(), costs[:reached, :most].tolist()
    if counts[:reached].min(initial=most) < most:
        for slot, count in enumerate(counts[:reached].tolist()):
            del ids_of[slot][count:], costs_of[slot][count:]
    return ids_of, costs_of


def _whole(values: ArrayLike, name: str) -> np.ndarray:
    """``values`` as int64, copied."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise UsageError(f"{name} are whole numbers; these are {array.dtype}")
    return array.astype(np.int64)


def _below_zero(log_probs: np.ndarray) -> np.ndarray:
    """Log-probabilities without what rounding has put above 0."""
    if not (log_probs <= ROUNDING).all():
        raise UsageError(f"a log-probability is at most 0; these hold {log_probs[~(log_probs <= ROUNDING)][0]}")
    return np.minimum(log_probs, 0)


def _repeats(ordered: np.ndarray) -> bool:
    """Whether neighbours along the last axis are equal."""
    return bool((ordered[..., 1:] == ordered[..., :-1]).any())
