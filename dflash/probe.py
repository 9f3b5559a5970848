"""A finished text looked into round by round: where a block looked, and what the drafter says without its conditioning.

The text is prompt and output of a generation. The target reads it once more and its features are kept; from them any
round can be drafted again, as it was and **blind**: with the context's features all zero, so that the drafter knows how
long the context is and nothing of what is in it.

Shapes: n tokens of the text, L draft layers, ``count`` drafted tokens, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from dflash.engine import Engine
from dflash.errors import UsageError
from dflash.types import Array, SamplingParams

FIRST_BATCH = 8  # rounds


@dataclass(frozen=True, eq=False)  # arrays are not equal or unequal as a whole
class RoundProbe:
    """One round, drafted again. ``attention`` [L, 1 + count, position + 1 + count], float32: of each draft layer, how
    much each row of the block (row 0 is the anchor's) looks at each context token, and behind those at each row of the
    block; a row sums to 1. ``wanted`` are the text's own tokens behind the anchor, fewer than ``count`` at its end, and
    ``accepted`` is how many of ``drafted`` agree with them before the first that does not; ``blind_`` says the same of
    the round without conditioning."""

    position: int
    anchor: int
    attention: np.ndarray
    drafted: tuple[int, ...]
    draft_probs: tuple[float, ...]
    accepted: int
    blind_drafted: tuple[int, ...]
    blind_probs: tuple[float, ...]
    blind_accepted: int
    wanted: tuple[int, ...]


class Probe:
    """``ids``, prompt and output of a generation, ready to be looked into with ``engine``'s models.

    Every committed token is the target's own choice, greedy or by the request's seed, so comparing a draft with the
    text says what verifying said, as far as the text reaches. The target reads the text in chunks and not in blocks:
    where two tokens are almost equally likely, rounding may tell them apart in another way than it did then.

    The engine's caches serve one at a time: making a probe and asking it ends a generation of the engine that is still
    running, and the engine can be used again after every call, also after one that failed. Like an engine, a probe is
    for one thread at a time. It keeps the features of the whole text, [n − 1, K*H] in the target's own number format,
    on the device. Raises ``UsageError`` for a text that is empty, too long or not the target's."""

    def __init__(self, engine: Engine, ids: Sequence[int]) -> None:
        self.ids = tuple(int(token) for token in ids)
        self._engine, self._chunk = engine, engine.prefill_chunk
        self._features: list[Array] = []  # [n, K*H] of ``_chunk`` tokens each, the last of fewer
        vocabulary, self._most = engine.target.info.vocab_size, engine.target.info.max_positions
        if not self.ids:
            raise UsageError("the text is empty; give at least one token")
        if wrong := [token for token in self.ids if not 0 <= token < vocabulary]:
            raise UsageError(f"the text holds the id {wrong[0]}; the target's ids are 0 to {vocabulary - 1}")
        if len(self.ids) > self._most:
            raise UsageError(f"the text has {len(self.ids)} tokens; the target's context holds {self._most}")
        self._engine.end_running()
        engine.backend.run(self._read)

    def round(self, position: int, count: int) -> RoundProbe:
        """The round whose anchor is ``ids[position]`` and that drafts ``count`` tokens. At position 0 there is no
        context, and nothing to be blind to. Raises ``UsageError`` where there is no such round."""
        self._check(position, count)
        self._engine.end_running()
        return self._engine.backend.run(partial(self._round, position, count))

    def acceptance(
        self, rounds: Sequence[tuple[int, int]], stop: Callable[[], bool] = lambda: False
    ) -> list[tuple[int, int]]:
        """``accepted`` and ``blind_accepted`` of several rounds, each a position and a count, in the text's
        order: one round's context goes on where the last one's ended. ``stop``, asked before every draft on the
        caller's thread, breaks off: the answer is then that of the first rounds. Raises ``UsageError``."""
        for position, count in rounds:
            self._check(position, count)
        if any(after[0] < before[0] for before, after in pairwise(rounds)):
            raise UsageError("the positions of the rounds must not go down")
        self._engine.end_running()
        # There is one context, so with and without take turns, and each turn builds it anew. Batches that double do
        # that about once more than a single one would, and leave an answer when they are broken off.
        found: list[tuple[int, int]] = []
        start, size = 0, FIRST_BATCH
        while start < len(rounds):
            batch = rounds[start : start + size]
            seeing = self._accepted(batch, stop, blind=False)
            blind = self._accepted(batch[: len(seeing)], stop, blind=True)
            found += zip(seeing, blind, strict=False)
            if len(blind) < len(batch):
                break
            start, size = start + size, 2 * size
        return found

    # On the engine's models ------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Features of the whole text but its last token, which is in no round's context."""
        target, context = self._engine.target, self.ids[:-1]
        target.reset()
        target.tapping = True
        try:
            for start in range(0, len(context), self._chunk):
                part = context[start : start + self._chunk]
                output = target.forward(part, last_only=True)
                target.keep(range(len(part)))
                self._features.append(output.features)
        finally:
            target.reset()

    def _observe(self, end: int, *, blind: bool) -> None:
        """Go on from where the drafter's context ends, up to the first ``end`` tokens. Of features only what NumPy's,
        PyTorch's and MLX's arrays share is used: rows are sliced, and multiplied by 0."""
        drafter = self._engine.drafter
        while drafter.length < end:
            index, first = divmod(drafter.length, self._chunk)
            last = min(end - index * self._chunk, self._chunk)
            rows = self._features[index][first:last]
            drafter.observe(rows * 0 if blind else rows, last - first)

    def _draft(self, position: int, count: int, *, blind: bool) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Drafted tokens and their probabilities, from a context that ends at ``position`` or before."""
        numpy = self._engine.backend.numpy
        self._observe(position, blind=blind)
        proposal = self._engine.drafter.propose(self.ids[position], count, SamplingParams(), detail=True)
        return tuple(numpy(proposal.tokens).tolist()), tuple(numpy(proposal.probs).tolist())

    def _round(self, position: int, count: int) -> RoundProbe:
        drafter, anchor = self._engine.drafter, self.ids[position]
        drafter.reset()
        drafted, probs = self._draft(position, count, blind=False)
        attention = np.stack([self._engine.backend.numpy(layer) for layer in drafter.attention(anchor, count)])
        drafter.reset()
        blind_drafted, blind_probs = self._draft(position, count, blind=True)
        return RoundProbe(
            position=position,
            anchor=anchor,
            attention=attention,
            drafted=drafted,
            draft_probs=probs,
            accepted=self._agreed(position, drafted),
            blind_drafted=blind_drafted,
            blind_probs=blind_probs,
            blind_accepted=self._agreed(position, blind_drafted),
            wanted=self.ids[position + 1 : position + 1 + count],
        )

    def _accepted(self, rounds: Sequence[tuple[int, int]], stop: Callable[[], bool], *, blind: bool) -> list[int]:
        """Of as many rounds as ``stop`` allows, how many drafted tokens agree with the text."""
        run, found = self._engine.backend.run, []
        run(self._engine.drafter.reset)
        for position, count in rounds:
            if stop():
                break
            drafted, _ = run(partial(self._draft, position, count, blind=blind))
            found.append(self._agreed(position, drafted))
        return found

    def _agreed(self, position: int, drafted: Sequence[int]) -> int:
        wanted = self.ids[position + 1 :][: len(drafted)]
        agrees = [one == other for one, other in zip(drafted, wanted, strict=False)]
        return [*agrees, False].index(False)

    def _check(self, position: int, count: int) -> None:
        if not 0 <= position < len(self.ids):
            raise UsageError(f"position is {position}; the text's tokens are 0 to {len(self.ids) - 1}")
        if not 1 <= count < self._most - position:
            raise UsageError(
                f"count is {count} at position {position}; a round drafts at least 1 token, "
                f"and the target's context holds {self._most}"
            )
