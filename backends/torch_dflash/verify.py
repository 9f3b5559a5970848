"""Verification rules: who of a block's drafted tokens stands. One host synchronisation a verdict.

Terms: a drafted token is **accepted** where it equals the target's own choice for its slot; the choice at the first
slot where it does not is the **correction**; after a fully accepted block the last row's choice is the **bonus**.
``greedy`` chooses the argmax, ``match`` a sample, so both keep the target's distribution for any proposal. The seed's
uniform numbers belong to output positions, not to rounds: the same seed gives the same tokens with any drafter or none.

``rejection`` (arXiv 2211.17192, 2302.01318) accepts the drafted d where u·q(d) < p(d), for the target's distribution p
after temperature, top-k and top-p, and the q that d was drawn from; the correction is drawn from max(p − q, 0). It too
keeps the target's distribution, and accepts Σ min(p, q) of a drafter that samples, where ``match`` accepts Σ p·q. A
draft that chance had no part in has a q of one: then both accept p(d). The tokens of a seed depend on the drafter.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dflash.errors import not_numbers
from dflash.types import Proposal, SamplingParams, TargetOutput, Verdict
from dflash.uniforms import Uniforms
from torch_dflash.sampling import draw, shape_probabilities
from torch_dflash.stacks import use_cuda


class MatchVerifier:
    """Implements ``dflash.interfaces.Verifier`` for ``greedy`` and ``match``; greedy is the match with the argmax.

    ``verify`` raises ``BackendError`` where the target's logits are no numbers."""

    def __init__(self, sampling: SamplingParams, *, device: torch.device, detail: bool = False) -> None:
        self.sampling, self.detail = sampling, detail
        self._position, self._device = 0, device
        if not sampling.greedy:
            self._stream = Uniforms(sampling.seed)
            self._uniforms = torch.empty(0, dtype=torch.float64, device=device)

    @torch.inference_mode()
    def verify(self, proposal: Proposal, output: TargetOutput) -> Verdict:
        count, logits = proposal.count, output.logits
        parts = self._judge(proposal, logits)
        if self.detail:
            parts = [part.double() for part in parts]
            if proposal.probs is not None:
                parts.append(proposal.probs.double())
            chances = logits.float().softmax(-1) if self.sampling.greedy else shape_probabilities(logits, self.sampling)
            parts.append(chances[:count].gather(-1, proposal.tokens[:, None])[:, 0].double())
        accepted, chosen, numbers, *rest = torch.cat(parts).tolist()  # the round's one wait for the device
        if not numbers:
            raise not_numbers(str(logits.dtype).removeprefix("torch."))
        self._position += int(accepted) + 1
        drafted = tuple(int(token) for token in rest[:count])
        return Verdict(
            drafted=drafted,
            accepted=int(accepted),
            next_token=int(chosen),
            draft_probs=tuple(rest[count : 2 * count]) if self.detail and proposal.probs is not None else None,
            target_probs=tuple(rest[len(rest) - count :]) if self.detail and count else None,
        )

    def _judge(self, proposal: Proposal, logits: Tensor) -> list[Tensor]:
        """How many stand, the next token, 1 where the logits are numbers, and the drafted: int64, on the device."""
        if self.sampling.greedy and use_cuda(logits.device, logits.dtype):
            from triton_dflash import verify_greedy

            return [verify_greedy(logits, proposal.tokens)]
        choices = self._choices(logits)
        stands = (proposal.tokens == choices[: proposal.count]).long().cumprod(0).sum()
        next_token = choices.gather(0, stands[None])  # indexing by ``stands`` would wait for it on the host
        finite = logits.amax(-1).isfinite().all()  # a number that is none shows in its row's largest
        return [stands[None], next_token, finite[None].long(), proposal.tokens]

    def _choices(self, logits: Tensor) -> Tensor:
        """The target's own token for each row [n]."""
        if self.sampling.greedy:
            return logits.argmax(-1)
        return draw(
            shape_probabilities(logits, self.sampling), self._numbers(self._position, self._position + len(logits))
        )

    def _numbers(self, start: int, end: int) -> Tensor:
        """The uniform numbers of output positions start … end−1, along the last axis."""
        if end > self._uniforms.shape[-1]:  # many at once, so that most rounds copy nothing to the device
            self._uniforms = torch.from_numpy(self._drawn(end + 256)).to(self._device)
        return self._uniforms[..., start:end]

    def _drawn(self, end: int) -> np.ndarray:
        """The uniform numbers of output positions 0 … end−1, on the host."""
        return self._stream.range(0, end)


class RejectionVerifier(MatchVerifier):
    """Implements ``dflash.interfaces.Verifier`` for ``rejection``. At temperature 0 it is greedy, as the rule becomes
    when the temperature falls: p and q are certain then."""

    def __init__(self, sampling: SamplingParams, *, device: torch.device, detail: bool = False) -> None:
        super().__init__(sampling, device=device, detail=detail)
        self._accepting = Uniforms(sampling.seed, "accept")

    def _judge(self, proposal: Proposal, logits: Tensor) -> list[Tensor]:
        if self.sampling.greedy:
            return super()._judge(proposal, logits)
        from triton_dflash import verify_rejection  # its plain twin where no kernel can run

        numbers = self._numbers(self._position, self._position + len(logits)).contiguous()
        temperature = self.sampling.temperature
        if self.sampling.top_k or self.sampling.top_p < 1:  # which the kernel leaves to its caller
            logits, temperature = shape_probabilities(logits, self.sampling).log(), 1.0
        return [verify_rejection(logits, proposal.tokens, proposal.q, numbers, temperature)]

    def _drawn(self, end: int) -> np.ndarray:
        """Two rows: what decides, and what draws the next token."""
        return np.stack((self._accepting.range(0, end), self._stream.range(0, end)))


VERIFIERS: dict[str, type[MatchVerifier]] = {
    "greedy": MatchVerifier,
    "match": MatchVerifier,
    "rejection": RejectionVerifier,
}
RULES = tuple(VERIFIERS)
