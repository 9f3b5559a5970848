"""The training forward: many blocks of a sequence at once, each seeing exactly what it would see when served.

Shapes: b sequences, S tokens, N anchors a sequence, B block size, H hidden size, K taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from torch_dflash.modeling import DraftModel, residual_layer
from torch_dflash.rotary import Rotary


def block_mask(anchors: Tensor, length: int, block_size: int, *, causal: bool, window: int | None) -> Tensor:
    """What each block token may see: bool [b, 1, N*B, S + N*B], context keys first, then all blocks' own.

    A query of the block at anchor a sees context key j iff j < a, strictly: the anchor's own target state does not
    exist when served. Block keys are visible within the same block, which padding blocks keep, so that no row is
    empty."""
    count, device = anchors.shape[1], anchors.device
    slots = torch.arange(block_size, device=device)
    positions = (anchors[:, :, None] + slots).flatten(1)  # [b, N*B]
    context = torch.arange(length, device=device)
    sees_context = (context < anchors[:, :, None]).repeat_interleave(block_size, dim=1)  # [b, N*B, S]
    owner, slot = torch.arange(count, device=device).repeat_interleave(block_size), slots.repeat(count)
    sees_block = (owner[:, None] == owner).expand(len(anchors), -1, -1)
    if causal:
        sees_block = sees_block & (slot[None, :] <= slot[:, None])
    if window is not None:
        sees_context = sees_context & (positions[:, :, None] - context < window)
        sees_block = sees_block & ((slot[None, :] - slot[:, None]).abs() < window)
    return torch.cat((sees_context, sees_block), dim=-1)[:, None]


def training_forward(
    model: DraftModel, embedding: Tensor, rotary: Rotary, features: Tensor, tokens: Tensor, anchors: Tensor
) -> Tensor:
    """Final hidden states [b, N, B, H] of the blocks at ``anchors`` [b, N].

    ``features`` [b, S, K*H] and ``tokens`` [b, S] are the sequence's, ``embedding`` [V, H] is the target's."""
    config = model.config
    length, block_size = tokens.shape[1], config.block_size
    ids = torch.full((*anchors.shape, block_size), config.mask_token_id, device=tokens.device)
    ids[:, :, 0] = tokens.gather(1, anchors)
    x = F.embedding(ids.flatten(1), embedding)
    positions = (anchors[:, :, None] + torch.arange(block_size, device=tokens.device)).flatten(1)
    cos, sin = rotary.at(positions, length + block_size)
    tables = cos[:, None], sin[:, None]
    context = model.context_kv(model.project(features), rotary.range(0, length))
    masks = {
        kind: block_mask(anchors, length, block_size, causal=kind[0], window=kind[1])
        for kind in set(zip(config.causal, config.windows(), strict=True))
    }
    for index, layer in enumerate(model.layers):
        q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), tables)
        context_keys, context_values = context[index]
        attended = F.scaled_dot_product_attention(
            q,
            torch.cat((context_keys, k), dim=2),
            torch.cat((context_values, v), dim=2),
            attn_mask=masks[config.causal[index], config.windows()[index]],
            enable_gqa=True,
        )
        x = residual_layer(layer, x, attended)
    return rearrange(model.norm(x), "b (n k) h -> b n k h", k=block_size)
