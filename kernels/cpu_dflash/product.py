"""``x W.T`` for few rows, the weights read once at the memory's speed.

Shapes: n rows (1 to 64), K inputs, N outputs.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from cpu_dflash.build import library
from cpu_dflash.structures import Linear, linear, sized


def naive(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [n, K] times ``weight`` [N, K] transposed, plus ``bias`` [N]: [n, N]."""
    return F.linear(x, weight.to(x.dtype), bias)


def compiled(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``naive`` for float32 ``x`` on a CPU; ``weight`` is float32 or bfloat16, and contiguous.
    Raises ``ValueError`` for what does not fit: the compiled code would read on."""
    if (
        x.dtype != torch.float32
        or x.dim() != 2
        or x.shape[1] != weight.shape[1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        raise ValueError(
            f"x {list(x.shape)} in {x.dtype} does not fit {list(weight.shape)}; float32 [n, {weight.shape[1]}] would"
        )
    x = x.contiguous()
    y = torch.empty(len(x), len(weight))
    call = sized(library()).few_rows_product
    described: Linear = linear(weight, bias)
    call(
        ctypes.byref(described), ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)), ctypes.c_void_p(y.data_ptr()),
        ctypes.c_int64(torch.get_num_threads()),
    )  # fmt: skip
    return y
