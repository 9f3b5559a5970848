"""Verification rules on MLX; what they mean is told in ``torch_dflash.verify`` and holds here word for word.

Shapes: n rows, V vocabulary, ``count`` drafted tokens.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dflash.errors import not_numbers
from dflash.types import Proposal, SamplingParams, TargetOutput, Verdict
from dflash.uniforms import Uniforms
from mlx_dflash.sampling import draw, shape_probabilities

RULES = ("greedy", "match")


class MatchVerifier:
    """Implements ``dflash.interfaces.Verifier`` for both rules; greedy is the match with the argmax.

    ``verify`` evaluates everything a round has put off, and is the one place of it that waits. Raises ``BackendError``
    where the target's logits are no numbers."""

    def __init__(self, sampling: SamplingParams, *, detail: bool = False) -> None:
        self.sampling, self.detail = sampling, detail
        self._position = 0
        self._stream = None if sampling.greedy else Uniforms(sampling.seed)

    def verify(self, proposal: Proposal, output: TargetOutput) -> Verdict:
        count, logits = proposal.count, output.logits
        choices = self._choices(logits)
        drafted = proposal.tokens.astype(mx.int32)
        stands = mx.cumprod((drafted == choices[:count]).astype(mx.int32)).sum() if count else mx.array(0)
        numbers = mx.isfinite(logits.max(-1)).all()  # a number that is none shows in its row's largest
        parts = [stands[None].astype(mx.int32), choices[stands][None], numbers[None].astype(mx.int32), drafted]
        decided = mx.concatenate(parts)
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

    def _choices(self, logits: mx.array) -> mx.array:
        """The target's own token for each row, int32 [n]."""
        if self._stream is None:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        uniforms = self._stream.range(self._position, self._position + len(logits))
        return draw(shape_probabilities(logits, self.sampling), mx.array(uniforms, dtype=mx.float32)).astype(mx.int32)
