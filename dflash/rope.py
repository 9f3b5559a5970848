"""Rotary position embeddings as numbers: one function for training, PyTorch and MLX.

The drafter's own configuration decides, never the target's. Formulas: RoFormer (arXiv 2104.09864), YaRN
(arXiv 2309.00071), and the frequency bands of Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash.errors import ConfigError

SUPPORTED = ("default", "linear", "yarn", "llama3")
_KEYS: dict[str, dict[str, set[str]]] = {
    "default": {"required": set(), "optional": set()},
    "linear": {"required": {"factor"}, "optional": set()},
    "yarn": {
        "required": {"factor"},
        "optional": {
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    },
    "llama3": {
        "required": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        "optional": set(),
    },
}


@dataclass(frozen=True)
class RopeConfig:
    """``theta`` the base, ``kind`` the scaling, ``partial`` the share of each head that is rotated, ``scaling`` the
    kind's own numbers, ``max_positions`` the drafter's longest position (YaRN's original length where none is given).
    Raises ``ConfigError`` for an unknown kind, or numbers it lacks or does not know."""

    theta: float
    kind: str = "default"
    partial: float = 1.0
    scaling: tuple[tuple[str, Any], ...] = ()
    max_positions: int = 32768

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _KEYS:
            raise ConfigError(f"rope_type is {self.kind!r}; supported are {', '.join(SUPPORTED)}")
        if not self.theta > 1:
            raise ConfigError(f"rope_theta is {self.theta}; it must be above 1")
        if not 0 < self.partial <= 1:
            raise ConfigError(f"partial_rotary_factor is {self.partial}; it must be above 0 and at most 1")
        given, allowed = {key for key, _ in self.scaling}, _KEYS[self.kind]
        if missing := allowed["required"] - given:
            raise ConfigError(f"rope_type {self.kind!r} needs {', '.join(sorted(missing))}, which the config lacks")
        if unknown := given - allowed["required"] - allowed["optional"]:
            raise ConfigError(f"rope_type {self.kind!r} has no key {', '.join(sorted(unknown))}")
        for key, value in self.scaling:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            least = 0 if key.startswith("mscale") else math.ulp(0.0)  # YaRN reads an mscale of 0 as none
            if not (isinstance(value, bool) if key == "truncate" else number and least <= value < math.inf):
                wanted = "true or false" if key == "truncate" else "a positive number"
                raise ConfigError(f"{key} is {value!r} in the drafter's RoPE; it must be {wanted}")

    def rotated(self, head_dim: int) -> int:
        """How many of ``head_dim`` channels are rotated."""
        return int(head_dim * self.partial) // 2 * 2

    def frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """Inverse frequencies [rotated/2] in float64, and the factor that multiplies cos and sin."""
        dim = self.rotated(head_dim)
        base = self.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        numbers = dict(self.scaling)
        if self.kind == "linear":
            return base / numbers["factor"], 1.0
        if self.kind == "yarn":
            return _yarn(base, dim, self.theta, numbers, self.max_positions)
        if self.kind == "llama3":
            return _llama3(base, numbers), 1.0
        return base, 1.0


def _yarn(
    base: np.ndarray, dim: int, theta: float, numbers: dict[str, Any], max_positions: int
) -> tuple[np.ndarray, float]:
    factor = numbers["factor"]
    original = numbers.get("original_max_position_embeddings") or max_positions

    def turns_at(rotations: float) -> float:  # the dimension whose wave turns this often within the original length
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns_at(numbers.get("beta_fast") or 32), turns_at(numbers.get("beta_slow") or 1)
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    frequencies = base / factor * ramp + base * (1 - ramp)

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention = numbers.get("attention_factor")
    if attention is None:
        one, every = numbers.get("mscale"), numbers.get("mscale_all_dim")
        attention = mscale(one) / mscale(every) if one and every else mscale(1.0)
    return frequencies, float(attention)


def _llama3(base: np.ndarray, numbers: dict[str, Any]) -> np.ndarray:
    original, factor = numbers["original_max_position_embeddings"], numbers["factor"]
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    waves = 2 * math.pi / base
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    return base / factor * (1 - smooth) + base * smooth
