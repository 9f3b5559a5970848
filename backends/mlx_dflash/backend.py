"""The backend object that ``dflash.load`` finds: Apple MLX, on Metal and on MLX's CPU build."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from dflash.checkpoint import DraftConfig, weight_files
from dflash.errors import WeightsError
from dflash.types import Proposal, SamplingParams
from mlx_dflash.drafter import MlxDrafter
from mlx_dflash.target import MlxTarget, load_target, refuse_overflow
from mlx_dflash.thread import on_device_thread
from mlx_dflash.verify import RULES, VERIFIERS, MatchVerifier

T = TypeVar("T")


class MlxBackend:
    """Implements ``dflash.interfaces.Backend``."""

    name = "mlx"
    rules = RULES
    draft_bits = (4, 8)

    def run(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, called on the one thread that uses MLX."""
        return on_device_thread(call)

    def load_target(self, folder: Path, *, device: str, dtype: str, layer_ids: Sequence[int]) -> MlxTarget:
        return load_target(folder, device=device, dtype=dtype, layer_ids=layer_ids)

    def load_drafter(
        self, folder: Path, config: DraftConfig, target: MlxTarget, *, bits: int | None = None
    ) -> MlxDrafter:
        config.check_target(target.info)
        weights: dict[str, mx.array] = {}
        for file in weight_files(folder):
            try:
                weights |= mx.load(str(file))  # type: ignore[arg-type]
            except (RuntimeError, OSError) as error:
                raise WeightsError(f"{file} cannot be read: {error}") from None
        weights = {name: weight.astype(target.float_type) for name, weight in weights.items()}
        if target.float_type == mx.float16:
            refuse_overflow(weights.items(), f"the drafter in {folder}")
        return MlxDrafter(config, weights, target.embed, target.head, bits=bits)

    def verifier(
        self, rule: str, sampling: SamplingParams, target: MlxTarget, *, detail: bool = False
    ) -> MatchVerifier:
        return VERIFIERS[rule](sampling, detail=detail)

    def proposal(self, block: Sequence[int], target: MlxTarget) -> Proposal:
        tokens = mx.array(list(block), dtype=mx.int32)
        return Proposal(tokens[1:], tokens, len(block) - 1)

    def numpy(self, array: mx.array) -> np.ndarray:
        return np.array(array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)

    def clock(self, target: MlxTarget, *, exact: bool = False) -> MlxClock:
        return MlxClock(exact)

    def peak_memory(self, target: MlxTarget) -> int:
        return mx.get_peak_memory()

    def reset_peak_memory(self, target: MlxTarget) -> None:
        mx.reset_peak_memory()

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("mlx", "mlx-lm", "transformers")}


class MlxClock:
    """Wall time. Work is put off and runs behind the host's back, so what lies between two marks shows only where
    ``exact`` ones wait for the device, a wait more for each."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> Any:
        if self.exact:
            mx.synchronize()
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start) if self.exact else 0.0
