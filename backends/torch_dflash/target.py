"""Any transformers causal LM as a target: hidden states through hooks, cache rewind through one wrapper.

Shapes: n tokens in a pass, V vocabulary, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import BackendError, CheckpointError
from dflash.targets import check_dtype, check_layer_ids, leading, refuse_tree
from dflash.types import TargetInfo, TargetOutput
from torch_dflash.cache import RewindableCache, cache_argument
from torch_dflash.memory import align
from torch_dflash.taps import Taps, decoder_layers


class TorchTarget:
    """Implements ``dflash.interfaces.Target``."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.info = target_info(self.model, layer_ids)
        self.device = self.model.get_output_embeddings().weight.device
        self._cache_argument = cache_argument(model)
        self._last = 0
        self.reset()  # raises for a model that cannot be served, before it is hooked
        self.taps = Taps(model, layer_ids)

    @property
    def length(self) -> int:
        return self.cache.length - self._last

    @property
    def tapping(self) -> bool:
        return self.taps.enabled

    @tapping.setter
    def tapping(self, on: bool) -> None:
        self.taps.enabled = on

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor | Sequence[int], *, parents: Sequence[int] | None = None, last_only: bool = False
    ) -> TargetOutput:
        refuse_tree(parents)
        assert not self._last, "keep() must follow every forward()"
        ids = torch.as_tensor(tokens, device=self.device)[None]
        self._last = ids.shape[1]
        output = self.model(
            input_ids=ids, use_cache=True, logits_to_keep=int(last_only), **{self._cache_argument: self.cache.inner}
        )
        features = self.taps.take()
        return TargetOutput(output.logits[0], None if features is None else features[0])

    def keep(self, path: Sequence[int]) -> None:
        self.cache.rewind(self._last - leading(path, self._last))
        self._last = 0

    def reset(self) -> None:
        self.cache, self._last = RewindableCache(self.model), 0

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.taps.close()


def target_info(model: Any, layer_ids: Sequence[int]) -> TargetInfo:
    """What the core needs to know. Raises ``BackendError`` where ``layer_ids`` are not all layers of the model."""
    text, weight = model.config.get_text_config(), model.get_output_embeddings().weight
    count = len(decoder_layers(model))
    check_layer_ids(layer_ids, count)
    return TargetInfo(
        num_layers=count,
        hidden_size=text.hidden_size,
        vocab_size=weight.shape[0],
        max_positions=getattr(text, "max_position_embeddings", None) or 1 << 20,
        stop_token_ids=stop_token_ids(model),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        model_type=text.model_type,
    )


def stop_token_ids(model: Any) -> tuple[int, ...]:
    """The model's own stop ids, from its generation config and its config; there may be several."""
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        found.update(ids if isinstance(ids, Iterable) else () if ids is None else (ids,))
    return tuple(sorted(found))


def load_model(folder: Path, *, device: str, dtype: str) -> nn.Module:
    """A causal LM from a local folder. ``dtype`` ``auto`` is float32 on a CPU, else what its config says.

    Raises ``CheckpointError`` where transformers cannot read the folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    where = choose_device(device)
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    check_dtype(dtype, known)
    wanted: Any = known.get(dtype) or (torch.float32 if where.type == "cpu" else "auto")
    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=wanted, local_files_only=True)
    except Exception as error:  # transformers raises many kinds; each is about this folder
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"the target in {folder} cannot be loaded: {reason[0]}") from error
    moved: nn.Module = model.to(where)
    align(moved)
    return moved


def choose_device(device: str) -> torch.device:
    """``auto``: CUDA where there is a GPU, else the CPU. Raises ``BackendError`` for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackendError(f"device {device!r} cannot be used here: {reason}") from None
    return chosen
