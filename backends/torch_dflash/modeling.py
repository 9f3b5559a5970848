"""The drafter as a plain ``nn.Module`` with the native weight names, shared by training and decoding.

Shapes: b sequences, n block tokens, S context tokens, H hidden size, K taps, h heads, g key/value heads, d head size,
L draft layers. The forward is the paper's (arXiv 2602.06036): the context enters every layer only as keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dflash.checkpoint import DraftConfig
from torch_dflash.products import Product, product
from torch_dflash.rotary import rotate

Tables = tuple[Tensor, Tensor]  # cos and sin


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, the mean square in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """Qwen3 attention whose keys and values are the context's, followed by the block's own."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.q_proj = Product(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = Product(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = Product(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = Product(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def qkv(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, h, n, d], keys and values [b, g, n, d] of the block; queries and keys normed and rotated."""
        q, k, v = (
            rearrange(linear(x), "b n (h d) -> b h n d", d=self.head_dim)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(self.q_norm(q), *tables), rotate(self.k_norm(k), *tables), v

    def output(self, attended: Tensor) -> Tensor:
        return self.o_proj(rearrange(attended, "b h n d -> b n (h d)"))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Product(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Product(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Product(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class DraftModel(nn.Module):
    """All weights of a native DFlash drafter; embedding and head stay the target's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Product(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers: Any = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))  # of DraftLayer
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project(self, features: Tensor) -> Tensor:
        """The conditioning projection: features [..., K*H] to context [..., H]."""
        return self.hidden_norm(self.fc(features))

    def stacked_kv(self) -> tuple[Tensor, Tensor | None]:
        """W_k and W_v of all layers, one above the other [L*2*g*d, H], and their biases where there are any."""
        linears = [linear for layer in self.layers for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        weight = torch.cat([linear.weight for linear in linears])
        bias = torch.cat([linear.bias for linear in linears]) if self.config.attention_bias else None
        return weight, bias

    def context_kv(
        self, context: Tensor, tables: Tables, stacked: tuple[Tensor, Tensor | None] | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys (normed, rotated) and values of ``context`` [b, S, H] for every layer, each [b, g, S, d], from one
        matrix product. ``stacked`` is ``stacked_kv()``, kept by callers whose weights do not change."""
        weight, bias = stacked or self.stacked_kv()
        both = rearrange(
            product(context, weight, bias), "b s (l two g d) -> l two b g s d", two=2, l=len(self.layers),
            d=self.config.head_dim,
        )  # fmt: skip
        return [
            (rotate(layer.self_attn.k_norm(keys), *tables), values)
            for layer, (keys, values) in zip(self.layers, both, strict=True)
        ]


def residual_layer(layer: DraftLayer, x: Tensor, attended: Tensor) -> Tensor:
    """The rest of a layer once its attention [b, h, n, d] is known."""
    x = x + layer.self_attn.output(attended)
    return x + layer.mlp(layer.post_attention_layernorm(x))
