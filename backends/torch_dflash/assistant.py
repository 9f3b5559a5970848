"""A native drafter as an assistant of transformers: ``target.generate(..., assistant_model=as_assistant(drafter),
speculation_type="dflash")``.

Transformers drives the rounds, keeps the assistant's cache, and hands in the block's embeddings and the target's
hidden states; this adapter runs our drafter in between. Shapes: n block tokens, S new context tokens, K taps, H hidden
size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.modeling_outputs import BaseModelOutputWithPast

from dflash.errors import BackendError
from torch_dflash.drafter import TorchDrafter, draft_sights
from torch_dflash.modeling import DraftModel, residual_layer
from torch_dflash.rotary import Rotary
from torch_dflash.stack import attention

MINIMUM = "5.15"


class Assistant(nn.Module):
    """What transformers' ``DFlashTokenCandidateGenerator`` calls. ``config`` is a ``Qwen3Config`` with
    ``target_layer_ids``, ``block_size`` and ``mask_token_id``."""

    def __init__(self, model: DraftModel, block_size: int | None = None) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.rotary = Rotary(config.rope, config.head_dim, model.fc.weight.device)
        self._stacked, self._sights = model.stacked_kv(), draft_sights(config)
        self.config = Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            layer_types=["full_attention"] * config.num_hidden_layers,  # windows are masks here, so the cache keeps all
        )
        self.config.target_layer_ids = list(config.target_layer_ids)
        self.config.block_size = block_size or config.block_size
        self.config.mask_token_id = config.mask_token_id

    @property
    def device(self) -> torch.device:
        return self.model.fc.weight.device

    @torch.inference_mode()
    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> BaseModelOutputWithPast:
        """``noise_embeds`` [1, n, H], ``context_hidden_states`` [1, S, K*H], ``position_ids`` [1, S + n]: the context's
        keys and values, then the block's, go into ``cache``. Returns the block's final hidden states [1, n, H]."""
        cache = past_key_values if cache is None else cache  # newer and older transformers
        model, dtype = self.model, self.model.fc.weight.dtype
        rows, fresh = noise_embeds.shape[1], context_hidden_states.shape[1]
        cos, sin = self.rotary.range(0, cache.get_seq_length() + fresh + rows)
        cos, sin = cos[position_ids[0]], sin[position_ids[0]]
        context = model.context_kv(
            model.project(context_hidden_states.to(dtype)), (cos[:fresh], sin[:fresh]), self._stacked
        )
        x = noise_embeds.to(dtype)
        for index, layer in enumerate(model.layers):
            q, k, v = layer.self_attn.qkv(layer.input_layernorm(x), (cos[fresh:], sin[fresh:]))
            context_keys, context_values = context[index]
            keys, values = cache.update(
                torch.cat((context_keys, k), dim=2), torch.cat((context_values, v), dim=2), index
            )
            mask = self._sights[index].mask(rows, keys.shape[2], keys.device)
            x = residual_layer(layer, x, attention(q[0], keys[0], values[0], mask)[None])
        return BaseModelOutputWithPast(last_hidden_state=model.norm(x))


def as_assistant(drafter: TorchDrafter | DraftModel, *, block_size: int | None = None) -> Assistant:
    """A native drafter (``engine.drafter``, or the module itself) as transformers' ``assistant_model``.

    Raises ``BackendError`` where the installed transformers has no DFlash assistants."""
    from transformers.generation import candidate_generator

    if not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"):
        import transformers

        raise BackendError(f"transformers {transformers.__version__} has no DFlash assistants; {MINIMUM} is the first")
    return Assistant(drafter if isinstance(drafter, DraftModel) else drafter.model, block_size)
