"""What a training run is: one dataclass, written beside every checkpoint and into the drafter's card."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dflash.anchors import default_gamma
from dflash.errors import TrainingError


@dataclass(frozen=True)
class Recipe:
    """A drafter's shape and how it is trained. Raises ``TrainingError`` for a value that cannot work.

    Shape: ``draft_layers``, ``taps`` (how many target layers, chosen by the paper's rule, unless ``target_layer_ids``
    names them), ``block_size``, ``mask_token_id``. Data: ``batch_rows`` sequences a step of at most ``max_length``
    tokens, ``anchors`` blocks each, ``heldout_rows`` never trained on. ``gamma`` 0 takes the paper's decay.
    ``loss_vocab``: ``"full"``, or ``"seen"`` for a softmax over the tokens that occur in the data alone.
    ``soft_labels``: the share of the loss whose labels are the target's own distribution instead of the data's token.
    ``init``: ``"target"`` for copies of the target's last layers, or ``"normal"`` (std 0.02).
    ``precision``: ``"float32"``, or ``"bfloat16"`` products with float32 masters.
    """

    mask_token_id: int
    draft_layers: int = 3
    taps: int = 5
    target_layer_ids: tuple[int, ...] = ()
    block_size: int = 8
    steps: int = 2000
    batch_rows: int = 8
    anchors: int = 32
    max_length: int = 1024
    heldout_rows: int = 48
    learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    gamma: float = 0.0
    loss_vocab: str = "full"
    soft_labels: float = 0.0
    loss_chunk: int = 256
    init: str = "target"
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        for name in ("draft_layers", "taps", "steps", "batch_rows", "anchors", "heldout_rows", "loss_chunk"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.block_size < 2:
            raise TrainingError(f"block_size is {self.block_size}; it must be at least 2")
        if not self.learning_rate > 0:
            raise TrainingError(f"learning_rate is {self.learning_rate}; it must be positive")
        for name in ("mask_token_id", "gamma", "weight_decay"):
            if getattr(self, name) < 0:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be 0 or above")
        if not self.clip > 0:
            raise TrainingError(f"clip is {self.clip}; it must be positive")
        if not 0 <= self.warmup < 1:
            raise TrainingError(f"warmup is {self.warmup}; it is a share of the steps, from 0 to below 1")
        if not 0 <= self.soft_labels <= 1:
            raise TrainingError(f"soft_labels is {self.soft_labels}; it is a share of the loss, from 0 to 1")
        for name, known in (
            ("loss_vocab", ("full", "seen")),
            ("init", ("normal", "target")),
            ("precision", ("float32", "bfloat16")),
        ):
            if getattr(self, name) not in known:
                raise TrainingError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")

    @property
    def decay(self) -> float:
        return self.gamma or default_gamma(self.block_size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"target_layer_ids": list(self.target_layer_ids)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Recipe:
        """Read a parsed recipe; unknown keys are refused."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(raw) - known):
            raise TrainingError(f"the recipe has the unknown key {', '.join(unknown)}")
        try:
            return cls(**raw)
        except TypeError as error:
            raise TrainingError(f"the recipe lacks a value or has one of the wrong kind: {error}") from None

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with any value of the recipe."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]
