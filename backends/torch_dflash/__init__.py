"""The PyTorch backend of dflash: CUDA and CPU.

``as_assistant`` makes a drafter an assistant of ``transformers``.
"""

from typing import Any

__all__ = ["as_assistant"]


def __getattr__(name: str) -> Any:
    if name == "as_assistant":
        from torch_dflash.assistant import as_assistant

        return as_assistant
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
