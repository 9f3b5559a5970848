"""The native target: a dense decoder of the Llama, Qwen2 and Qwen3 families with a cache whose rewind is an integer.

It computes what transformers' own model computes, from the same weights (its fused products share their memory), with
less in between: one product for queries, keys and values, one for gate and up, a preallocated cache, no masks for
single rows. ``reason_against`` says why a model cannot be served this way.

Shapes: n tokens in a pass, h heads, g key/value heads, d head size, H hidden size, K taps, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.errors import BackendError, ConfigError
from dflash.rope import RopeConfig
from dflash.targets import leading, refuse_tree
from dflash.types import TargetOutput
from torch_dflash.products import product
from torch_dflash.rotary import Rotary, rotate
from torch_dflash.target import target_info

FAMILIES = ("llama", "qwen2", "qwen3")
FIRST_CAPACITY = 512


def reason_against(model: Any) -> str | None:
    """Why ``model`` needs transformers' own forward; None where the native one computes the same."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"model_type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act!r}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some of its layers have sliding attention"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1:
        return "its config has a partial rotary factor"
    try:
        _rope(config)
    except ConfigError as error:
        return str(error)
    if any(type(module) is not nn.Linear for name, module in model.named_modules() if name.endswith("_proj")):
        return "its projections are quantised or wrapped"
    return None


@dataclass(frozen=True)
class _Layer:
    """One decoder layer's weights; queries, keys and values [(h+2g)*d, H] and gate and up [2*I, H] are fused."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class NativeTarget:
    """Implements ``dflash.interfaces.Target``. Raises ``BackendError`` where ``reason_against`` has one."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        if reason := reason_against(model):
            raise BackendError(f"this target cannot be served natively: {reason}")
        config: Any = self.model.config
        self.info = target_info(self.model, layer_ids)
        self.layer_ids, self.tapping = tuple(layer_ids), True
        self.heads: int = config.num_attention_heads
        self.groups: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps: float = config.rms_norm_eps
        decoder = self.model.get_decoder()
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.head: Tensor = self.model.get_output_embeddings().weight
        self.head_bias: Tensor | None = self.model.get_output_embeddings().bias
        self.norm: Tensor = decoder.norm.weight
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.layers = [_collect(layer) for layer in decoder.layers]
        self.rotary = Rotary(_rope(config), self.head_dim, self.device)
        self.length = self._last = 0
        self._cache: Tensor
        self._make_room(FIRST_CAPACITY)

    def _make_room(self, capacity: int) -> None:
        """Grow the cache [L, 2, g, capacity, d]; what is in it stays."""
        grown = torch.empty(
            len(self.layers), 2, self.groups, capacity, self.head_dim, device=self.device, dtype=self.dtype
        )
        if self.length:
            grown[..., : self.length, :] = self._cache[..., : self.length, :]
        self._cache = grown

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor | Sequence[int], *, parents: Sequence[int] | None = None, last_only: bool = False
    ) -> TargetOutput:
        refuse_tree(parents)
        assert not self._last, "keep() must follow every forward()"
        ids = torch.as_tensor(tokens, device=self.device)
        rows, end = len(ids), self.length + len(ids)
        if end > self._cache.shape[-2]:
            self._make_room(min(max(2 * end, FIRST_CAPACITY), max(self.info.max_positions, end)))
        self._last = rows
        x = F.embedding(ids, self.embedding)  # [n, H]
        tables = self.rotary.range(self.length, end)
        mask = self._mask(rows, end)
        seen: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = self._layer(layer, self._cache[index], x, tables, mask)
            if self.tapping and index in self.layer_ids:
                seen[index] = x
        last = self._rms(x[-1:] if last_only else x, self.norm)
        logits = product(last, self.head, self.head_bias)
        features = torch.cat([seen[index] for index in self.layer_ids], dim=-1) if self.tapping else None
        return TargetOutput(logits, features)

    def _layer(
        self, layer: _Layer, cache: Tensor, x: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        rows, start, end = len(x), self.length, self.length + len(x)
        heads, groups, d = self.heads, self.groups, self.head_dim
        mixed = product(self._rms(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(rows, heads + 2 * groups, d)
        queries_keys, values = mixed[:, : heads + groups], mixed[:, heads + groups :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._rms(queries_keys[:, :heads], layer.q_norm)
            queries_keys = torch.cat((q, self._rms(queries_keys[:, heads:], layer.k_norm)), dim=1)
        turned = rotate(queries_keys.transpose(0, 1), *tables)  # [h + g, n, d]
        cache[0, :, start:end] = turned[heads:]
        cache[1, :, start:end] = values.transpose(0, 1)
        q = turned[:heads].reshape(1, groups, heads // groups * rows, d)  # the heads of a group as rows of one product
        attended = F.scaled_dot_product_attention(q, cache[:1, :, :end], cache[1:, :, :end], attn_mask=mask)
        attended = attended.view(heads, rows, d).transpose(0, 1).reshape(rows, heads * d)
        x = x + product(attended, layer.output, layer.output_bias)
        gate, up = product(self._rms(x, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return x + product(F.silu(gate) * up, layer.down, layer.down_bias)

    def _mask(self, rows: int, end: int) -> Tensor | None:
        """Causal mask of the new rows over the cache, bool [(h/g)*n, end]; one row sees everything."""
        if rows == 1:
            return None
        new = torch.arange(end - rows, end, device=self.device)[:, None]
        return (torch.arange(end, device=self.device) <= new).repeat(self.heads // self.groups, 1)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return weight * F.rms_norm(x.float(), weight.shape, None, self.eps).to(x.dtype)

    def keep(self, path: Sequence[int]) -> None:
        self.length += leading(path, self._last)
        self._last = 0

    def reset(self) -> None:
        self.length = self._last = 0

    def close(self) -> None:
        """Nothing was changed in the model but where its weights lie."""


def _collect(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        output=attention.o_proj.weight,
        output_bias=attention.o_proj.bias,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
    )


def _fuse(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The parts' weights, one above the other. Each module keeps a view, so nothing is in memory twice."""
    weight = torch.cat([part.weight for part in parts])
    start = 0
    for part in parts:
        part.weight.data = weight[start : start + part.out_features]
        start += part.out_features
    if parts[0].bias is None:
        return weight, None
    return weight, torch.cat([part.bias for part in parts])


def _rope(config: Any) -> RopeConfig:
    numbers = dict(config.rope_parameters or {})
    theta, kind = numbers.pop("rope_theta", 10_000.0), numbers.pop("rope_type", "default")
    numbers.pop("partial_rotary_factor", None)
    scaling = tuple(sorted((key, value) for key, value in numbers.items() if value is not None))
    return RopeConfig(float(theta), kind, 1.0, scaling, config.max_position_embeddings)
