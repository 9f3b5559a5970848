"""The drafter at work: its context's keys and values cached, its proposals on the device.

Shapes: n tokens, K taps, H hidden size, L draft layers, h heads, g key/value heads, d head size, ``count`` drafted
tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dflash.checkpoint import DraftConfig
from dflash.errors import PairError
from dflash.types import Proposal, SamplingParams
from torch_dflash.modeling import DraftModel, residual_layer
from torch_dflash.products import product
from torch_dflash.rotary import Rotary

FIRST_CAPACITY = 512
HALF_LARGEST = 256  # of a feature that enters a float16 product
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # queries, keys, values and mask to what is attended


class TorchDrafter:
    """Implements ``dflash.interfaces.Drafter`` around a ``DraftModel``; ``embedding`` and ``head`` [V, H] are the
    target's. ``projection`` is the model's own: features [n, K*H] → context [n, H]."""

    def __init__(self, model: DraftModel, embedding: Tensor, head: Tensor) -> None:
        self.model, self.config = model.eval().requires_grad_(False), model.config
        self.embedding, self.head = embedding, head
        self.device, self.dtype = model.fc.weight.device, model.fc.weight.dtype
        self.rotary = Rotary(self.config.rope, self.config.head_dim, self.device)
        self.projection = model.project
        self._stacked = model.stacked_kv()
        self._masks = torch.full((self.config.block_size,), self.config.mask_token_id, device=self.device)
        self.length = 0
        self._cache: Tensor
        self._make_room(FIRST_CAPACITY)

    def _make_room(self, capacity: int) -> None:
        """Grow the cache [L, 2, g, capacity, d]; what is in it stays."""
        config = self.config
        grown = torch.empty(
            config.num_hidden_layers, 2, config.num_key_value_heads, capacity, config.head_dim,
            device=self.device, dtype=self.dtype,
        )  # fmt: skip
        if self.length:
            grown[..., : self.length, :] = self._cache[..., : self.length, :]
        self._cache = grown

    @torch.inference_mode()
    def observe(self, features: Tensor, token_count: int) -> None:
        """Project the first ``token_count`` rows of ``features`` [n, K*H] and cache their keys and values."""
        end = self.length + token_count
        if end > self._cache.shape[-2]:
            self._make_room(2 * end)
        rows = features[:token_count]
        if self.dtype == torch.float16:
            rows = scaled_for_half(rows)
        context = self.projection(rows.to(self.dtype))
        both = self.model.context_kv(context[None], self.rotary.range(self.length, end), self._stacked)
        for cache, (keys, values) in zip(self._cache, both, strict=True):
            cache[0, :, self.length : end], cache[1, :, self.length : end] = keys[0], values[0]
        self.length = end

    def layer_states(self, anchor: int, count: int) -> list[Tensor]:
        """Hidden states [1 + count, H] of a block after ``anchor``, behind each draft layer."""
        return self._pass(anchor, count, grouped_attention)

    def attention(self, anchor: int, count: int) -> list[Tensor]:
        """Attention weights [1 + count, length + 1 + count] of a block after ``anchor``, float32, of each draft layer:
        over the context and then the block itself, averaged over the heads."""
        seen: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            seen.append(attention_weights(q, k, mask))
            return grouped_attention(q, k, v, mask)

        self._pass(anchor, count, attend)
        return seen

    @torch.inference_mode()
    def _pass(self, anchor: int, count: int, attend: Attend) -> list[Tensor]:
        """A block after ``anchor`` through all layers: the hidden states [1 + count, H] behind each."""
        rows, end = 1 + count, self.length + 1 + count
        if end > self._cache.shape[-2]:
            self._make_room(2 * end)
        if rows > len(self._masks):
            self._masks = self._masks[:1].expand(rows)
        ids = self._masks[:rows].clone()
        ids[0] = anchor
        x = F.embedding(ids, self.embedding).to(self.dtype)[None]
        tables = self.rotary.range(self.length, end)
        masks = attention_masks(self.config, rows, end, self.device)
        states = []
        for index, layer in enumerate(self.model.layers):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), tables)
            cache = self._cache[index]
            cache[0, :, self.length : end], cache[1, :, self.length : end] = k[0], v[0]
            attended = attend(q, cache[:1, :, :end], cache[1:, :, :end], masks[index])
            x = residual_layer(layer, x, attended)
            states.append(x[0])
        return states

    @torch.inference_mode()
    def logits(self, anchor: int, count: int) -> Tensor:
        """Draft logits [count, V] of the slots after ``anchor``; slot 0 predicts nothing."""
        slots = self.model.norm(self.layer_states(anchor, count)[-1][1:])
        return product(slots.to(self.head.dtype), self.head)

    def propose(self, anchor: int, count: int, sampling: SamplingParams, *, detail: bool = False) -> Proposal:
        """The likeliest token of each slot. At temperature > 0 too: ``match`` is exact for any proposal, and the argmax
        is accepted most."""
        with torch.inference_mode():
            logits = self.logits(anchor, count)
            tokens = logits.argmax(-1)
            block = torch.cat((torch.full_like(tokens[:1], anchor), tokens))
            probs = logits.float().softmax(-1).gather(-1, tokens[:, None])[:, 0] if detail else None
        return Proposal(tokens, block, count, probs)

    def reset(self) -> None:
        self.length = 0


def attention_masks(config: DraftConfig, rows: int, end: int, device: torch.device) -> list[Tensor | None]:
    """For each layer what the block, the last ``rows`` of ``end`` positions, may see: bool [rows, end], or None for
    everything."""
    made: dict[tuple[bool, int | None], Tensor | None] = {(False, None): None}
    kinds = list(zip(config.causal, config.windows(), strict=True))
    for causal, window in kinds:
        if (causal, window) in made:
            continue
        queries = torch.arange(end - rows, end, device=device)[:, None]
        keys = torch.arange(end, device=device)
        sees = torch.ones(rows, end, dtype=torch.bool, device=device)
        if causal:
            sees &= keys <= queries
        if window is not None:
            sees &= (queries - keys).abs() < window
        made[causal, window] = sees
    return [made[kind] for kind in kinds]


def scaled_for_half(features: Tensor) -> Tensor:
    """Rows of ``features`` [n, K*H] scaled down to where no float16 product overflows at 65,504: some targets' residual
    streams come near it. The projection's norm takes the scale out again."""
    wide = features.float()
    return wide / (wide.abs().amax(-1, keepdim=True) / HALF_LARGEST).clamp_(min=1)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of ``q`` [1, h, n, d] over ``k``, ``v`` [1, g, S, d] without copying keys for each query head:
    the heads of a group become rows of one product."""
    groups, rows = k.shape[1], q.shape[2]
    if mask is not None:
        mask = mask.repeat(q.shape[1] // groups, 1)
    folded = rearrange(q, "b (g r) n d -> b g (r n) d", g=groups)
    attended = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
    return rearrange(attended, "b g (r n) d -> b (g r) n d", n=rows)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The weights [n, S] by which ``grouped_attention`` of the same arguments mixes values, averaged over the heads;
    float32, also where products are in 16 bits."""
    groups, rows = k.shape[1], q.shape[2]
    folded = rearrange(q.float(), "b (g r) n d -> b g (r n) d", g=groups)
    scores = rearrange(folded @ k.float().mT, "1 g (r n) s -> (g r) n s", n=rows) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).mean(0)


def check_fits(model: DraftModel, embedding: Tensor, head: Tensor) -> None:
    """Raise ``PairError`` where embedding and head are not the drafter's size."""
    for name, weight in (("embedding", embedding), ("head", head)):
        if weight.shape[1] != model.config.hidden_size or weight.shape[0] < model.config.vocab_size:
            raise PairError(
                f"the target's {name} is {list(weight.shape)}; the drafter's vocabulary is {model.config.vocab_size} "
                f"and its hidden size {model.config.hidden_size}"
            )
