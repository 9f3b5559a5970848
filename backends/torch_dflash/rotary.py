"""RoPE in PyTorch: the tables come from the core's one function.

Shapes: n positions, d head size, r ≤ d rotated channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.rope import RopeConfig


class Rotary:
    """Cosine and sine tables [positions, r/2] in float32, made once and grown on demand."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> None:
        frequencies, self.factor = config.frequencies(head_dim)
        self.frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)
        self._grow(1024)

    def _grow(self, positions: int) -> None:
        angles = torch.outer(torch.arange(positions, device=self.frequencies.device).float(), self.frequencies)
        self.cos, self.sin = angles.cos() * self.factor, angles.sin() * self.factor

    def range(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Tables of positions start … end−1, each [n, r/2]; no host synchronisation."""
        if end > len(self.cos):
            self._grow(max(end, 2 * len(self.cos)))
        return self.cos[start:end], self.sin[start:end]

    def at(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Tables at ``positions`` [...], all below ``longest``: each [..., r/2]."""
        cos, sin = self.range(0, longest)
        return cos[positions], sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r channels of ``x`` [..., d]; ``cos`` and ``sin`` broadcast to [..., r/2]."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)
