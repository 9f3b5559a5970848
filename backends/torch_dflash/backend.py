"""The backend object that ``dflash.load`` finds: PyTorch on CUDA or the CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cpu_dflash
import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dflash.checkpoint import DraftConfig, weight_files
from dflash.errors import WeightsError
from dflash.types import Proposal, SamplingParams
from torch_dflash.drafter import TorchDrafter, check_fits
from torch_dflash.memory import align, peak_memory, reset_peak_memory
from torch_dflash.modeling import DraftModel
from torch_dflash.native import NativeTarget, reason_against
from torch_dflash.target import TorchTarget, load_model
from torch_dflash.verify import RULES, VERIFIERS, MatchVerifier

ServedTarget = TorchTarget | NativeTarget
T = TypeVar("T")
_log = logging.getLogger("torch_dflash")


class TorchBackend:
    """Implements ``dflash.interfaces.Backend``."""

    name = "torch"
    rules = RULES
    draft_bits = ()
    native = True
    """Whether targets that can be served natively are."""

    def load_target(self, folder: Path, *, device: str, dtype: str, layer_ids: Sequence[int]) -> ServedTarget:
        return serve_target(load_model(folder, device=device, dtype=dtype), layer_ids, native=self.native)

    def load_drafter(
        self, folder: Path, config: DraftConfig, target: ServedTarget, *, bits: int | None = None
    ) -> TorchDrafter:
        config.check_target(target.info)
        assert bits is None, "this backend does not quantise drafters"
        embedding = target.model.get_input_embeddings().weight.detach()
        head = target.model.get_output_embeddings().weight.detach()
        model = load_draft_model(folder, config).to(device=target.device, dtype=head.dtype)
        align(model)
        check_fits(model, embedding, head)
        return TorchDrafter(model, embedding, head)

    def run(self, call: Callable[[], T]) -> T:
        """PyTorch can be used from any thread."""
        return call()

    def verifier(
        self, rule: str, sampling: SamplingParams, target: ServedTarget, *, detail: bool = False
    ) -> MatchVerifier:
        return VERIFIERS[rule](sampling, device=target.device, detail=detail)

    def proposal(self, block: Sequence[int], target: ServedTarget) -> Proposal:
        tokens = torch.tensor(block, device=target.device)
        return Proposal(tokens[1:], tokens, len(block) - 1)

    def numpy(self, array: Tensor) -> np.ndarray:
        values: np.ndarray = (array.float() if array.is_floating_point() else array).cpu().numpy()
        return values

    def clock(self, target: ServedTarget, *, exact: bool = False) -> CpuClock:
        return CudaClock(target.device) if target.device.type == "cuda" else CpuClock()

    def peak_memory(self, target: ServedTarget) -> int:
        return peak_memory(target.device)

    def reset_peak_memory(self, target: ServedTarget) -> None:
        reset_peak_memory(target.device)

    def versions(self) -> dict[str, str]:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return versions | {"cpu_passes": cpu_dflash.description()}


def serve_target(model: nn.Module, layer_ids: Sequence[int], *, native: bool = True) -> ServedTarget:
    """The native target where it computes the same as transformers' forward, else that; the log says why."""
    reason = reason_against(model) if native else "it was asked not to be"
    if reason is None:
        return NativeTarget(model, layer_ids)
    _log.info("the target is served through transformers: %s", reason)
    return TorchTarget(model, layer_ids)


class CpuClock:
    """Wall time: on a CPU an operation has ended when it returns."""

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)


class CudaClock(CpuClock):
    """Marks are CUDA events on the target's device, placed without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000


def load_draft_model(folder: Path, config: DraftConfig) -> DraftModel:
    """The drafter's weights in the precision they are stored in. Raises ``WeightsError``."""
    state: dict[str, Any] = {}
    for file in weight_files(folder):
        try:
            state |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read: {error}") from None
    with torch.device("meta"):
        model = DraftModel(config)
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise WeightsError(f"the weights in {folder} do not fit their config: {error}") from None
    return model
