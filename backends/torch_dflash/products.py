"""The matrix products of few rows, which are the cost of a round on a CPU.

Compiled code reads the weights once at the memory's speed (``cpu_dflash``). Where there is none, ``W @ x.T`` takes the
place of ``x @ W.T``, for which MKL uses a fraction of the memory's bandwidth, and a single row is computed as two.
Measured on two cores with AVX-512, float32, all products of SmolLM2-135M (30 layers and the head), milliseconds:

| | 1 row | 2 | 4 | 8 | 16 |
| --- | --- | --- | --- | --- | --- |
| ``F.linear`` | 31.6 | 52 | 48 | 46 | 56 |
| turned | 13.7 | 13.3 | 15.8 | 32 | 46 |
| compiled | 10.4 | 11.0 | 12.0 | 12.3 | 18.5 |
"""

from __future__ import annotations

import cpu_dflash
import torch
import torch.nn.functional as F
from cpu_dflash import use_compiled
from torch import Tensor, nn

FEW_ROWS = 64


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [..., in] times ``weight`` [out, in] transposed, plus ``bias``: [..., out]."""
    rows, plain = x.numel() // x.shape[-1], weight.device.type != "cpu" or weight.dtype != torch.float32
    if (
        plain
        or x.dtype != weight.dtype
        or x.shape[-1] != weight.shape[1]
        or not 0 < rows <= FEW_ROWS
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
    ):
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    if use_compiled(weight.device, weight.dtype) and weight.is_contiguous():
        return cpu_dflash.product(flat, weight, bias).view(*x.shape[:-1], len(weight))
    columns = (flat if rows > 1 else torch.cat((flat, flat))).T  # expanded, it would be laid out the slow way first
    turned = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return turned.T[:rows].contiguous().view(*x.shape[:-1], len(weight))


class Product(nn.Linear):
    """A linear layer that computes few rows the fast way where it does not learn."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)
