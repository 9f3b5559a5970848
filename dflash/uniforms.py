"""The random numbers that sampling uses up: one for each output position, the same on every backend.

They belong to positions and not to rounds, so a seed gives the same tokens with any drafter or none. The raw 64-bit
stream of PCG64 is used because numpy keeps it from release to release, which it does not promise of its generators.
"""

from __future__ import annotations

import secrets

import numpy as np


class Uniforms:
    """Numbers in [0, 1) of a seed's output positions, drawn as far as asked for. ``seed`` None draws a fresh one."""

    def __init__(self, seed: int | None) -> None:
        self._stream = np.random.PCG64(secrets.randbits(63) if seed is None else seed)
        self._drawn = np.empty(0)

    def range(self, start: int, end: int) -> np.ndarray:
        """The numbers of positions start … end−1, float64."""
        if (missing := end - len(self._drawn)) > 0:
            raw = self._stream.random_raw(max(missing, 256))
            self._drawn = np.concatenate((self._drawn, (raw >> 11) * 2.0**-53))
        return self._drawn[start:end]
