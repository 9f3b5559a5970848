"""Verification rules on MLX; what they mean is told in ``torch_dflash.verify`` and holds here word for word.

Shapes: n rows, V vocabulary, ``count`` drafted tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from dflash.errors import not_numbers
from dflash.types import Proposal, SamplingParams, TargetOutput, Verdict
from dflash.uniforms import Uniforms
from mlx_dflash.sampling import draw, shape_probabilities


class MatchVerifier:
    """Implements ``dflash.interfaces.Verifier`` for ``greedy`` and ``match``; greedy is the match with the argmax.

    ``verify`` evaluates everything a round has put off, and is the one place of it that waits. Raises ``BackendError``
    where the target's logits are no numbers."""

    def __init__(self, sampling: SamplingParams, *, detail: bool = False) -> None:
        self.sampling, self.detail = sampling, detail
        self._position = 0
        self._stream = None if sampling.greedy else Uniforms(sampling.seed)

    def verify(self, proposal: Proposal, output: TargetOutput) -> Verdict:
        logits = output.logits
        stands, next_token = self._judge(proposal, logits)
        numbers = mx.isfinite(logits.max(-1)).all()  # a number that is none shows in its row's largest
        parts = [stands[None], next_token[None], numbers[None], proposal.tokens]
        decided = mx.concatenate([part.astype(mx.int32) for part in parts])
        chances = self._chances(proposal, logits) if self.detail else []
        mx.eval(decided, *chances)  # the round's one wait for the device
        host: Any = decided.tolist()
        accepted, chosen, finite, *tokens = host
        if not finite:
            raise not_numbers(str(logits.dtype).removeprefix("mlx.core."))
        self._position += accepted + 1
        probabilities: Any = [tuple(part.tolist()) or None for part in chances] or (None, None)  # type: ignore[arg-type]
        return Verdict(tuple(tokens), accepted, chosen, *probabilities)

    def _chances(self, proposal: Proposal, logits: mx.array) -> list[mx.array]:
        """The drafter's and the target's probability of each drafted token, [count] each."""
        count = proposal.count
        probs = (
            mx.softmax(logits.astype(mx.float32), axis=-1)
            if self.sampling.greedy
            else shape_probabilities(logits, self.sampling)
        )
        ours = mx.take_along_axis(probs[:count], proposal.tokens[:, None], axis=-1)[:, 0] if count else mx.array([])
        return [proposal.probs if proposal.probs is not None else mx.array([]), ours]

    def _judge(self, proposal: Proposal, logits: mx.array) -> tuple[mx.array, mx.array]:
        """How many drafted tokens stand, and the next token."""
        choices = self._choices(logits)
        stands = _in_a_row(proposal.tokens.astype(mx.int32) == choices[: proposal.count])
        return stands, choices[stands]

    def _choices(self, logits: mx.array) -> mx.array:
        """The target's own token for each row, int32 [n]."""
        if self._stream is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        uniforms = self._stream.range(self._position, self._position + len(logits))
        return draw(shape_probabilities(logits, self.sampling), mx.array(uniforms, dtype=mx.float32)).astype(mx.int32)


class RejectionVerifier(MatchVerifier):
    """Implements ``dflash.interfaces.Verifier`` for ``rejection``; at temperature 0 it is greedy."""

    def __init__(self, sampling: SamplingParams, *, detail: bool = False) -> None:
        super().__init__(sampling, detail=detail)
        self._accepting = Uniforms(sampling.seed, "accept")

    def _judge(self, proposal: Proposal, logits: mx.array) -> tuple[mx.array, mx.array]:
        if self._stream is None:
            return super()._judge(proposal, logits)
        count, start, tokens = proposal.count, self._position, proposal.tokens[:, None]
        probs = shape_probabilities(logits, self.sampling)
        drawing = mx.array(self._stream.range(start, start + count + 1), dtype=mx.float32)
        if not count:
            return mx.array(0), draw(probs, drawing)[0]
        own = mx.take_along_axis(probs[:count], tokens, axis=-1)[:, 0]
        given = mx.ones_like(own) if proposal.q is None else mx.take_along_axis(proposal.q, tokens, axis=-1)[:, 0]
        limits = mx.array(_rounded_down(self._accepting.range(start, start + count)))
        stands = _in_a_row(limits * given < own)  # strictly: what cannot be is not accepted by a 0 either
        chances, row = probs[stands], mx.minimum(stands, count - 1)
        taken = mx.arange(probs.shape[-1]) == proposal.tokens[row] if proposal.q is None else proposal.q[row]
        residual = mx.maximum(chances - mx.where(stands < count, taken, 0), 0)  # of the bonus nothing is taken
        mass = mx.where(residual.sum() > 0, residual, chances)  # only rounding leaves nothing
        return stands, draw(mass[None], drawing[stands][None])[0]


VERIFIERS: dict[str, type[MatchVerifier]] = {
    "greedy": MatchVerifier,
    "match": MatchVerifier,
    "rejection": RejectionVerifier,
}
RULES = tuple(VERIFIERS)


def _in_a_row(agree: mx.array) -> mx.array:
    """How many of the first are true, one after the other; ``agree`` bool [count]."""
    return mx.cumprod(agree.astype(mx.int32)).sum() if len(agree) else mx.array(0)


def _rounded_down(uniforms: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) in float32, which would round some of them to 1."""
    return (np.floor(uniforms * 2**24) / 2**24).astype(np.float32)
