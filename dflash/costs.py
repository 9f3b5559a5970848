"""What a step is believed to cost on this machine, by its rows and by the context before it, learned from the steps.

Model. The logarithm of a pass's seconds is a surface over the kind of pass, its rows and its context, held at nodes and
linear between them. A Kalman filter learns it. All nodes share a pace (a busy machine slows every pass), neighbours in
rows and in context share how they deviate from it, and each node keeps a little of its own: so one measured pass tells
of those never run, what was measured long ago moves with the machine, and doubt returns slowly where nothing is
measured. A sample far outside its doubt is cut to the edge of it (Huber's rule): a stalled pass hardly counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash.errors import UsageError
from dflash.types import StepEvent

ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXTS = (0, 1024, 4096, 16384, 65536)  # tokens; beyond the last a pass costs what it does there
CLIP = 1.5  # standard deviations by which a sample may lie off
FORGET = 1 / 4000  # of what was learned wears off with each sample
NOISE = (0.02, 0.08, 0.5)  # standard deviation of a sample's logarithm: at least, at first, at most
WARM, FIRST = 4, 0.25  # a node's first samples may hold a compilation or a cold cache: more variance for them

# What is believed before anything is measured: only how passes compare matters, and one sample sets the pace.
PLAIN_SECONDS, DRAFT_SECONDS = 0.02, 0.004
ROW_SHARE, DRAFT_ROW_SHARE, CONTEXT_SHARE = 0.04, 0.01, 0.06  # what a row, and 1,024 tokens of context, add to a pass
PACE, KIND, ROW, CONTEXT, BOTH, OWN = 4.0, 0.06, 0.1, 0.08, 0.03, 0.01  # variances of what nodes share


@dataclass(frozen=True)
class Passes:
    """Seconds believed at one context. ``draft`` and ``asked`` [1 + most] by drafted slots, the latter with the
    drafter's probabilities brought to the host; ``chain`` [1 + most] by verified slots; ``tree`` [1 + nodes] by nodes.
    The last two hold everything after the draft: the target's pass, the verdict, the rewind, the drafter's context."""

    plain: float
    draft: list[float]
    asked: list[float]
    chain: list[float]
    tree: list[float]


class Costs:
    """Learned over all requests of one engine. ``most`` slots are drafted in a round at most, and trees have ``nodes``
    at most. Raises ``UsageError`` where these cannot be."""

    def __init__(self, most: int, nodes: int = 0) -> None:
        if most < 1 or not 0 <= nodes < ROWS[-1]:
            raise UsageError(
                f"costs of {most} slots and trees of {nodes} nodes; slots are 1 or more, nodes 0 to {ROWS[-1] - 1}"
            )
        self.most, self.nodes = most, nodes
        chain, tree = _rows_to(1 + most), _rows_to(1 + nodes)
        verify = [(PLAIN_SECONDS, (1,)), (PLAIN_SECONDS, chain), *([(PLAIN_SECONDS, tree)] if nodes else [])]
        self._verify = Surface(verify, ROW_SHARE)
        self._draft = Surface([(DRAFT_SECONDS, chain)] * 2, DRAFT_ROW_SHARE)
        self._draft_is_told = True
        self._chain_rows, self._tree_rows = np.arange(1.0, 2 + most), np.arange(1.0, 2 + nodes)
        self._nothing = [0.0] * (1 + most)

    def at(self, context: int) -> Passes:
        """What passes cost after ``context`` tokens."""
        plain, chain, *tree = self._verify.seconds(context)
        draft, asked = self._draft.seconds(context)
        rows, shown = self._chain_rows, self._draft_is_told
        chains = np.interp(rows, self._verify.rows[1], chain).tolist()
        return Passes(
            plain=float(min(plain[0], chain[0])),
            draft=np.interp(rows, self._draft.rows[0], draft).tolist() if shown else self._nothing,
            asked=np.interp(rows, self._draft.rows[1], asked).tolist() if shown else self._nothing,
            chain=chains,
            tree=np.interp(self._tree_rows, self._verify.rows[2], tree[0]).tolist() if tree else [],
        )

    def doubt(self, slots: int, other: int, context: int) -> float:
        """Standard deviation of the logarithm of how verifying ``slots`` compares with verifying ``other``; 0 slots is
        a plain step."""
        a, b = ((1, 1 + n) if n else (0, 1) for n in (slots, other))
        return self._verify.doubt(a, b, context)

    def tree_doubt(self, slots: int, context: int) -> np.ndarray:
        """[1 + nodes]: the same, of verifying each number of nodes compared with a chain of ``slots``."""
        return np.interp(self._tree_rows, self._verify.rows[2], self._verify.doubts(2, (1, 1 + slots), context))

    def learn(self, event: StepEvent, *, drafted: int = 0, nodes: int = 0, asked: bool = False) -> None:
        """Take in a step. ``drafted`` slots where more were drafted than verified; ``nodes`` of a tree that was
        verified; ``asked`` where the drafter's confidence was brought to the host. A prefill tells nothing of steps."""
        context, rest = event.position, event.verify_seconds + event.overhead_seconds
        if event.kind == "plain":
            self._verify.learn(0, 1, context, event.seconds)
        elif event.kind == "round":
            slots = len(event.drafted)
            self._draft_is_told = event.draft_seconds > 0  # else it is part of ``rest``, as ``dflash.types`` says
            if self._draft_is_told:
                self._draft.learn(int(asked), 1 + (drafted or slots), context, event.draft_seconds)
            self._verify.learn(2 if nodes else 1, 1 + (nodes or slots), context, rest)


class Surface:
    """Log-seconds at nodes: each kind's ``rows`` times ``CONTEXTS``."""

    def __init__(self, kinds: Sequence[tuple[float, Sequence[int]]], row_share: float) -> None:
        """``kinds``: the seconds first believed of each one's single row, and the rows of its nodes."""
        self.rows = [tuple(rows) for _, rows in kinds]
        self._starts = [sum(map(len, self.rows[:kind])) for kind in range(len(kinds) + 1)]
        width, lines = len(CONTEXTS), self._starts[-1]
        kind = np.repeat([kind for kind, rows in enumerate(self.rows) for _ in rows], width)
        rows = np.repeat([float(n) for each in self.rows for n in each], width)
        context = np.tile(np.arange(width), lines)
        near_rows, near_context = _near(np.log2(rows), 3.0), _near(context, 2.0)
        self._prior = PACE + KIND * (kind[:, None] == kind) + ROW * near_rows + CONTEXT * near_context
        self._prior += BOTH * near_rows * near_context + OWN * np.eye(width * lines)
        self._doubt = self._prior.copy()
        first = np.array([seconds for seconds, _ in kinds])[kind] * (1 + row_share * (rows - 1))
        self._mean = np.log(first * (1 + CONTEXT_SHARE * np.array(CONTEXTS)[context] / 1024))
        self._seen = [0] * (width * lines)
        self._noise, self._samples = NOISE[1], 0

    def seconds(self, context: int) -> list[np.ndarray]:
        """Of each kind, by the rows of its nodes; never less than of fewer rows."""
        low, share = _between(CONTEXTS, context)
        grid = self._mean.reshape(-1, len(CONTEXTS))
        here = np.exp(grid[:, low] * (1 - share) + grid[:, low + 1] * share)
        return [np.maximum.accumulate(here[a:b]) for a, b in zip(self._starts, self._starts[1:], strict=False)]

    def doubt(self, one: tuple[int, int], other: tuple[int, int], context: int) -> float:
        """Standard deviation of the logarithm of how the passes (kind, rows) compare, at the nodes nearest to them."""
        doubt, a, b = self._doubt, self._nearest(*one, context), self._nearest(*other, context)
        return math.sqrt(max(0.0, float(doubt[a, a] + doubt[b, b] - 2 * doubt[a, b])))

    def doubts(self, kind: int, other: tuple[int, int], context: int) -> np.ndarray:
        """[rows of ``kind``'s nodes]: the same, of each of them."""
        doubt, b = self._doubt, self._nearest(*other, context)
        first, width = self._nearest(kind, self.rows[kind][0], context), len(CONTEXTS)
        a = np.arange(first, first + len(self.rows[kind]) * width, width)
        return np.sqrt(np.maximum(0.0, doubt[a, a] + doubt[b, b] - 2 * doubt[a, b]))

    def learn(self, kind: int, rows: int, context: int, seconds: float) -> None:
        """Take in that such a pass took ``seconds``."""
        nodes, weights = self._around(kind, rows, context)
        nearest = nodes[int(weights.argmax())]
        seen = self._seen[nearest]
        self._seen[nearest] = seen + 1
        spread = self._doubt[:, nodes] @ weights
        variance = float(spread[nodes] @ weights) + self._noise**2 + (FIRST / (1 + seen) ** 2 if seen < WARM else 0)
        surprise = math.log(max(seconds, 1e-9)) - float(self._mean[nodes] @ weights)
        limit = CLIP * math.sqrt(variance)
        self._mean += spread * (max(-limit, min(limit, surprise)) / variance)
        self._doubt -= np.multiply.outer(spread, spread / variance)
        if seen >= WARM:
            noise = self._noise + 0.05 * (1.25 * min(abs(surprise), 2 * limit) - self._noise)
            self._noise = max(NOISE[0], min(NOISE[2], noise))
        self._samples += 1
        if self._samples % 8 == 0:
            self._doubt += 8 * FORGET * (self._prior - self._doubt)

    def _around(self, kind: int, rows: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        """The four nodes around a pass, and how much each counts."""
        row, up = _between(self.rows[kind], rows)
        low, right = _between(CONTEXTS, context)
        node, width = (self._starts[kind] + row) * len(CONTEXTS) + low, len(CONTEXTS) if up else 0
        weights = ((1 - up) * (1 - right), (1 - up) * right, up * (1 - right), up * right)
        return np.array((node, node + 1, node + width, node + width + 1)), np.array(weights)

    def _nearest(self, kind: int, rows: int, context: int) -> int:
        nodes, weights = self._around(kind, rows, context)
        return int(nodes[int(weights.argmax())])


def _rows_to(most: int) -> tuple[int, ...]:
    """Rows of the nodes that reach from 2 to ``most`` rows."""
    return (*(n for n in ROWS if n < most), max(2, most))


def _near(places: np.ndarray, reach: float) -> np.ndarray:
    """How much two places share, falling with their distance."""
    return np.exp(-np.abs(places[:, None] - places) / reach)


def _between(nodes: Sequence[int], value: int) -> tuple[int, float]:
    """The node below ``value`` that has one above, and the share of the way to that."""
    if len(nodes) == 1:
        return 0, 0.0
    low = min(max(bisect_right(nodes, value) - 1, 0), len(nodes) - 2)
    return low, min(1.0, max(0.0, (value - nodes[low]) / (nodes[low + 1] - nodes[low])))
