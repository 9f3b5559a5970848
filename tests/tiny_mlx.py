"""The tiny pair on MLX: the weights of ``tiny_models.TinyPair`` in ``mlx_dflash``, beside the same oracle."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_dflash.backend import MlxBackend
from mlx_dflash.drafter import MlxDrafter
from mlx_dflash.target import MlxTarget
from tiny_models import DraftModel, TinyPair, make_config, make_drafter
from transformers import PreTrainedModel


def mlx_weights(model: DraftModel) -> dict[str, mx.array]:
    """A drafter's weights by their native names."""
    return {name: mx.array(weight.numpy()) for name, weight in model.state_dict().items()}


class MlxPair(TinyPair):
    backend = MlxBackend()

    def serve(self, model: PreTrainedModel) -> MlxTarget:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            taps = make_config().target_layer_ids
            return self.backend.run(
                lambda: self.backend.load_target(Path(folder), device="cpu", dtype=self.dtype, layer_ids=taps)
            )

    def array(self, values: np.ndarray) -> mx.array:
        return mx.array(values)

    @property
    def cached(self) -> int:
        (length,) = {layer.offset for layer in self.target.cache.layers}
        return length

    @property
    def held_features(self) -> dict[int, mx.array]:
        return self.target.taps.seen

    @contextmanager
    def failing_layer(self, index: int, error: type[Exception]) -> Iterator[None]:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        layer = self.target.model.layers[index]
        kind = type(layer)
        layer.__class__ = type("Failing", (kind,), {"__call__": fail})
        try:
            yield
        finally:
            layer.__class__ = kind

    def drafter(self, seed: int = 0, **changes: Any) -> MlxDrafter:
        config, target = make_config(**changes), self.target
        weights = mlx_weights(make_drafter(config, seed))

        def make() -> MlxDrafter:
            cast = {name: weight.astype(target.float_type) for name, weight in weights.items()}
            return MlxDrafter(config, cast, target.embed, target.head)

        return self.backend.run(make)
