"""The context's keys and values of all draft layers: norm, rotation and cache write in one launch.

Shapes: n tokens, L draft layers, g key/value heads, d head size, r ≤ d rotated channels, C the cache's capacity, P
positions.

For every token i, layer and head, with ``k`` and ``v`` from the one matrix product of all layers:

    k' = RoPE(k / rms(k) · weight)        rms(k)² = mean(k²) + eps; position start + depth_i, or start + i
    cache[layer, 0, head, start + i] = k'
    cache[layer, 1, head, start + i] = v

It is ``block_kv`` without queries, over many layers, and its kernel.
"""

from __future__ import annotations

from torch import Tensor

from triton_dflash.block_kv import launch, positions, turned
from triton_dflash.choose import either


def naive(
    mixed: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, start: Tensor, eps: float,
    depth: Tensor | None = None,
) -> None:  # fmt: skip
    """Write keys and values of n tokens into ``cache`` [L, 2, g, C, d] at start … start+n−1.

    ``mixed`` [n, L*2*g*d] is the stacked product's output, ``weights`` [L, d] are the key norms', ``cos`` and ``sin``
    [P, r/2] float32 hold every position. ``start`` is int32 [1] and ``depth`` int32 [n], both on the device; start + n
    ≤ C, and positions below P, are the caller's promise. All n rows are written: who keeps fewer overwrites the rest
    later."""
    _check(mixed, cache)
    layers, _, groups, _, d = cache.shape
    both = mixed.view(-1, layers, 2, groups, d).permute(1, 2, 3, 0, 4)  # [L, 2, g, n, d]
    at, places = positions(len(mixed), start, depth), positions(len(mixed), start, None)
    cache[:, 0].index_copy_(2, places, turned(both[:, 0], weights[:, None, None, :], cos[at], sin[at], eps))
    cache[:, 1].index_copy_(2, places, both[:, 1])


def _check(mixed: Tensor, cache: Tensor) -> None:
    layers, _, groups, capacity, d = cache.shape
    if mixed.shape[1] != layers * 2 * groups * d or len(mixed) > capacity:
        raise ValueError(f"a product {list(mixed.shape)} does not fit a cache {list(cache.shape)}: [L, 2, g, C, d]")


def fused(
    mixed: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, start: Tensor, eps: float,
    depth: Tensor | None = None,
) -> None:  # fmt: skip
    """``naive`` in one launch. Innermost axes are contiguous, and both tables have the same strides."""
    _check(mixed, cache)
    launch(mixed, None, weights, cos, sin, None, cache, start, depth, eps)


context_kv = either("context_kv", naive, fused)
