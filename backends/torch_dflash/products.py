"""The matrix products of few rows, which are the cost of a round on a CPU.

MKL's path for ``x @ W.T`` with a few rows uses a fraction of the memory bandwidth that ``W @ x.T`` does, and a single
row gains from being computed twice, as two. Measured on two cores with AVX2, float32, 30 layers of each shape in turn
so that no weights come from the cache, milliseconds for all of them:

| W | 1 row | as two, turned | 8 rows | turned | 64 rows | turned |
| --- | --- | --- | --- | --- | --- | --- |
| [960, 576] | 11.1 | 6.7 | 14.7 | 10.5 | 27 | 23 |
| [3072, 576] | 31.5 | 19.4 | 67 | 39 | 133 | 76 |
| [576, 1536] | 9.1 | 8.2 | 20.8 | 12.1 | 49 | 34 |

Weights laid out anew by oneDNN gave about the same and take their memory twice (``experiments/LOG.md``).
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
    if plain or not 0 < rows <= FEW_ROWS or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
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
