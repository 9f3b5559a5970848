"""Which code runs a stack of decoder layers, and what else has a compiled twin: decided here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import cpu_dflash
import torch
from cpu_dflash import MOST_ROWS, use_compiled
from torch import Tensor

from torch_dflash.cpu_stack import Chooser, ContextWriter, CpuStack, narrow_copy
from torch_dflash.memory import free_bytes
from torch_dflash.modeling import DraftModel
from torch_dflash.products import product
from torch_dflash.rotary import Rotary
from torch_dflash.stack import LayerWeights, PlainStack, Sight, StackSize

if TYPE_CHECKING:
    from torch_dflash import cuda_stack


def make_stack(layers: Sequence[LayerWeights], size: StackSize, sights: Sequence[Sight], rotary: Rotary) -> PlainStack:
    """The fastest stack for these weights."""
    weight = layers[0].qkv
    if use_cuda(weight.device, weight.dtype):
        from torch_dflash.cuda_stack import CudaStack

        return CudaStack(layers, size, sights, rotary)
    if use_compiled(weight.device, weight.dtype):
        weights = [part for layer in layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return CpuStack(layers, size, sights, rotary, narrow=reads_narrow(*weights))
    return PlainStack(layers, size, sights, rotary)


def use_cuda(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether passes of few rows go through Triton kernels and CUDA graphs."""
    if device.type != "cuda":
        return False
    from triton_dflash import use_kernels

    return use_kernels(device, dtype)


def reads_narrow(*weights: Tensor) -> bool:
    """Whether passes of few rows read copies in bfloat16, half the bytes: where those lose nothing, as in checkpoints
    stored so, and take no more than half of the memory that is left."""
    left = free_bytes(weights[0].device)
    if left is not None and 2 * sum(weight.numel() * 2 for weight in weights) > left:
        return False
    return all(bool((weight == weight.bfloat16()).all()) for weight in weights)


def make_head(head: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Normed states [n, H] to logits [n, V]."""
    if not use_compiled(head.device, head.dtype) or not reads_narrow(head):
        return lambda x: product(x, head, bias)
    narrow = narrow_copy(head)
    return lambda x: cpu_dflash.product(x, narrow, bias) if len(x) <= MOST_ROWS else product(x, head, bias)


def make_context_writer(
    model: DraftModel, stacked: tuple[Tensor, Tensor | None], size: StackSize, rotary: Rotary
) -> ContextWriter | None:
    """What writes features into the drafter's cache; None where the model's own modules do."""
    fc, (kv, kv_bias) = model.fc.weight, stacked
    if not use_compiled(fc.device, fc.dtype):
        return None
    if reads_narrow(fc, kv):
        fc, kv = fc.bfloat16(), kv.bfloat16()
    k_norms = [layer.self_attn.k_norm.weight for layer in model.layers]
    return ContextWriter(fc, model.hidden_norm.weight, kv, kv_bias, k_norms, size, 2 * len(rotary.frequencies))


def make_cuda_writer(
    model: DraftModel, stacked: tuple[Tensor, Tensor | None], stack: PlainStack
) -> cuda_stack.ContextWriter | None:
    """``make_context_writer`` for a drafter whose ``stack`` is the one for CUDA; None for others."""
    fc = model.fc.weight
    if not use_cuda(fc.device, fc.dtype):
        return None
    from torch_dflash.cuda_stack import ContextWriter, CudaStack

    assert isinstance(stack, CudaStack)
    k_norms = torch.stack([layer.self_attn.k_norm.weight for layer in model.layers])
    return ContextWriter(fc, model.hidden_norm.weight, *stacked, k_norms, stack)


def make_chooser(head: Tensor, norm: Tensor, eps: float) -> Callable[[Tensor], Tensor] | None:
    """What chooses the likeliest token of each state [n, H] in fewer bytes than its logits take; None where the logits
    have to do."""
    return Chooser(head, norm, eps).choose if use_compiled(head.device, head.dtype) else None
