"""RoPE in MLX: the frequencies come from the core's one function.

Shapes: h heads, n positions, d head size, r ≤ d rotated channels.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from dflash.rope import RopeConfig


class Rope:
    """Rotates [..., h, n, d] at consecutive positions; takes the place of mlx-lm's own modules too."""

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        frequencies, self.factor = config.frequencies(head_dim)
        self.dims = config.rotated(head_dim)
        self.periods = mx.array((1 / frequencies).astype(np.float32))  # what mx.fast.rope calls freqs: r/2 of them

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if self.factor != 1:
            x = mx.concatenate([x[..., : self.dims] * self.factor, x[..., self.dims :]], axis=-1)
        return mx.fast.rope(x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self.periods)
