"""Which code runs a stack of decoder layers, and what else has a compiled twin: decided here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpu_dflash import MOST_ROWS, use_compiled
from torch import Tensor

from torch_dflash.cpu_stack import Chooser, ContextWriter, CpuStack
from torch_dflash.modeling import DraftModel
from torch_dflash.rotary import Rotary
from torch_dflash.stack import LayerWeights, PlainStack, Sight, StackSize


def make_stack(
    layers: Sequence[LayerWeights], size: StackSize, sights: Sequence[Sight], rotary: Rotary, *, narrow: bool = False
) -> PlainStack:
    """The fastest stack for these weights. ``narrow``: where it pays, weights that bfloat16 holds exactly are read from
    such copies."""
    weight = layers[0].qkv
    if use_compiled(weight.device, weight.dtype):
        narrow = narrow and all(is_narrow(part.qkv, part.output, part.gate_up, part.down) for part in layers)
        return CpuStack(layers, size, sights, rotary, narrow=narrow)
    return PlainStack(layers, size, sights, rotary)


def is_narrow(*weights: Tensor) -> bool:
    """Whether bfloat16 holds all of these exactly, as it does those of checkpoints stored in it."""
    return all(bool((weight == weight.bfloat16()).all()) for weight in weights)


def make_context_writer(
    model: DraftModel, stacked: tuple[Tensor, Tensor | None], size: StackSize, rotary: Rotary
) -> Callable[[Tensor, tuple[Tensor, Tensor], Tensor, int], bool] | None:
    """What writes features into the drafter's cache, and says whether it did; None where the model's own modules do."""
    fc, (kv, kv_bias) = model.fc.weight, stacked
    if not use_compiled(fc.device, fc.dtype):
        return None
    if is_narrow(fc, kv):
        fc, kv = fc.bfloat16(), kv.bfloat16()
    writer = ContextWriter(
        fc, model.hidden_norm.weight, kv, kv_bias, [layer.self_attn.k_norm.weight for layer in model.layers],
        size, 2 * len(rotary.frequencies),
    )  # fmt: skip

    def write(features: Tensor, tables: tuple[Tensor, Tensor], cache: Tensor, start: int) -> bool:
        if len(features) <= MOST_ROWS:
            writer.write(features, tables, cache, start)
        return len(features) <= MOST_ROWS

    return write


def make_chooser(head: Tensor, norm: Tensor, eps: float) -> Callable[[Tensor], Tensor] | None:
    """What chooses the likeliest token of each state [n, H] in fewer bytes than its logits take; None where the logits
    have to do."""
    return Chooser(head, norm, eps).choose if use_compiled(head.device, head.dtype) else None
