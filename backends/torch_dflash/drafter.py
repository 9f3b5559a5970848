"""The drafter at work: its context's keys and values cached, its proposals on the device.

Shapes: n tokens, K taps, H hidden size, L draft layers, h heads, g key/value heads, d head size, r rotated channels,
``count`` drafted tokens.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.checkpoint import DraftConfig
from dflash.errors import PairError
from dflash.types import Proposal, SamplingParams
from torch_dflash.modeling import DraftModel
from torch_dflash.products import product
from torch_dflash.rotary import Rotary
from torch_dflash.sampling import draft_samples
from torch_dflash.stack import Attend, LayerWeights, Sight, StackSize, attention, attention_weights
from torch_dflash.stacks import make_chooser, make_context_writer, make_cuda_writer, make_stack

HALF_LARGEST = 256  # of a feature that enters a float16 product


class TorchDrafter:
    """Implements ``dflash.interfaces.Drafter`` around a ``DraftModel``; ``embedding`` and ``head`` [V, H] are the
    target's. ``projection`` is the model's own: features [n, K*H] → context [n, H]."""

    def __init__(self, model: DraftModel, embedding: Tensor, head: Tensor) -> None:
        self.model, self.config = model.eval().requires_grad_(False), model.config
        self.embedding, self.head = embedding, head
        self.device, self.dtype = model.fc.weight.device, model.fc.weight.dtype
        self.projection = model.project
        config = self.config
        size = StackSize(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps)
        layers = [LayerWeights.of(layer) for layer in model.layers]
        self.stack = make_stack(layers, size, draft_sights(config), Rotary(config.rope, config.head_dim, self.device))
        self._stacked = model.stacked_kv()
        self._writer = make_cuda_writer(model, self._stacked, self.stack) or make_context_writer(
            model, self._stacked, size, self.stack.rotary
        )
        self._choose = make_chooser(head, model.norm.weight, size.eps)
        self._masks = torch.full((config.block_size,), config.mask_token_id, device=self.device)
        self.length = 0

    @torch.inference_mode()
    def observe(self, features: Tensor, token_count: int) -> None:
        """Project the first ``token_count`` rows of ``features`` [n, K*H] and cache their keys and values."""
        end = self.length + token_count
        self.stack.cache.room(end, self.length)
        rows = features[:token_count]
        if self.dtype == torch.float16:
            rows = scaled_for_half(rows)
        rows, tables, cache = rows.to(self.dtype), self.stack.rotary.range(self.length, end), self.stack.cache.tensor
        if self._writer is not None:
            self._writer.write(rows, tables, cache, self.length)
        else:
            both = self.model.context_kv(self.projection(rows)[None], tables, self._stacked)
            for layer, (keys, values) in zip(cache, both, strict=True):
                layer[0, :, self.length : end], layer[1, :, self.length : end] = keys[0], values[0]
        self.length = end

    def layer_states(self, anchor: int, count: int) -> list[Tensor]:
        """Hidden states [1 + count, H] of a block after ``anchor``, behind each draft layer."""
        states = self._pass(anchor, count, range(self.config.num_hidden_layers))
        return [states[index] for index in sorted(states)]

    def attention(self, anchor: int, count: int) -> list[Tensor]:
        """Attention weights [1 + count, length + 1 + count] of a block after ``anchor``, float32, of each draft layer:
        over the context and then the block itself, averaged over the heads."""
        seen: list[Tensor] = []

        def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
            seen.append(attention_weights(q, keys, mask))
            return attention(q, keys, values, mask)

        self._pass(anchor, count, (), attend)
        return seen

    @torch.inference_mode()
    def _pass(
        self, anchor: int, count: int, wanted: Collection[int], attend: Attend | None = None
    ) -> dict[int, Tensor]:
        """A block after ``anchor`` through all layers: the hidden states [1 + count, H] behind the ``wanted`` ones."""
        return self.stack.run(self._embed(self._block(anchor, count)), self.length, wanted, attend=attend)

    def _block(self, anchor: int, count: int) -> Tensor:
        """``anchor`` and ``count`` masks, ids [1 + count], for which there is room."""
        rows = 1 + count
        self.stack.cache.room(self.length + rows, self.length)
        if rows > len(self._masks):
            self._masks = self._masks[:1].expand(rows)
        ids = self._masks[:rows].clone()
        ids[0] = anchor
        return ids

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding).to(self.dtype)

    def _slots(self, states: dict[int, Tensor]) -> Tensor:
        """What the last layer leaves in the slots after the anchor, [count, H]; slot 0 predicts nothing."""
        return states[self.config.num_hidden_layers - 1][1:]

    def _logits(self, states: dict[int, Tensor]) -> Tensor:
        return product(self.model.norm(self._slots(states)).to(self.head.dtype), self.head)

    def _tokens(self, states: dict[int, Tensor]) -> tuple[Tensor]:
        return (self._logits(states).argmax(-1) if self._choose is None else self._choose(self._slots(states)),)

    def _only_logits(self, states: dict[int, Tensor]) -> tuple[Tensor]:
        return (self._logits(states),)

    def _tokens_probs(self, states: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self._logits(states)
        tokens = logits.argmax(-1)
        return tokens, logits.float().softmax(-1).gather(-1, tokens[:, None])[:, 0]

    @torch.inference_mode()
    def logits(self, anchor: int, count: int) -> Tensor:
        """Draft logits [count, V] of the slots after ``anchor``."""
        return self._logits(self._pass(anchor, count, (self.config.num_hidden_layers - 1,)))

    @torch.inference_mode()
    def propose(
        self,
        anchor: int,
        count: int,
        sampling: SamplingParams,
        *,
        detail: bool = False,
        uniforms: np.ndarray | None = None,
    ) -> Proposal:
        """The likeliest token of each slot, or its sample by ``uniforms``."""
        ids, wanted = self._block(anchor, count), (self.config.num_hidden_layers - 1,)
        if uniforms is not None:
            (logits,) = self.stack.through("logits", ids, self.length, wanted, self._embed, self._only_logits)
            tokens, q = draft_samples(logits, sampling, torch.from_numpy(uniforms).to(self.device, non_blocking=True))
            probs = q.gather(-1, tokens[:, None])[:, 0] if detail else None
            return Proposal(tokens, torch.cat((ids[:1], tokens)), count, probs, q)
        after = self._tokens_probs if detail else self._tokens
        tokens, *rest = self.stack.through(("propose", detail), ids, self.length, wanted, self._embed, after)
        return Proposal(tokens, torch.cat((ids[:1], tokens)), count, rest[0] if rest else None)

    def reset(self) -> None:
        self.length = 0


def draft_sights(config: DraftConfig) -> list[Sight]:
    """What a block's rows see, for each draft layer."""
    return [Sight(causal, window) for causal, window in zip(config.causal, config.windows(), strict=True)]


def scaled_for_half(features: Tensor) -> Tensor:
    """Rows of ``features`` [n, K*H] scaled down to where no float16 product overflows at 65,504: some targets' residual
    streams come near it. The projection's norm takes the scale out again."""
    wide = features.float()
    return wide / (wide.abs().amax(-1, keepdim=True) / HALF_LARGEST).clamp_(min=1)


def check_fits(model: DraftModel, embedding: Tensor, head: Tensor) -> None:
    """Raise ``PairError`` where embedding and head are not the drafter's size."""
    for name, weight in (("embedding", embedding), ("head", head)):
        if weight.shape[1] != model.config.hidden_size or weight.shape[0] < model.config.vocab_size:
            raise PairError(
                f"the target's {name} is {list(weight.shape)}; the drafter's vocabulary is {model.config.vocab_size} "
                f"and its hidden size {model.config.hidden_size}"
            )
