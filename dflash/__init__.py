"""dflash-lab: lossless text generation with DFlash, block-diffusion speculative decoding.

``import dflash`` is cheap: neither torch nor mlx is imported before a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash.errors import DFlashError
from dflash.types import GenerationResult, SamplingParams, StepEvent

if TYPE_CHECKING:
    from dflash.engine import Engine
    from dflash.loading import load

__all__ = ["DFlashError", "Engine", "GenerationResult", "SamplingParams", "StepEvent", "__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load":
        from dflash.loading import load

        return load
    if name == "Engine":
        from dflash.engine import Engine

        return Engine
    raise AttributeError(f"module 'dflash' has no attribute {name!r}")
