"""Shared by all tests: no network, one thread a process, the tiny pair."""

import contextlib
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

# Triton's own functions are made for its interpreter, or not, when it is imported, and other libraries import it: so it
# is done here, before all of them. Where there is a GPU, tests/kernels want them as they are.
with contextlib.suppress(ImportError), pytest.MonkeyPatch.context() as patch:
    import torch

    if not torch.cuda.is_available():
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401


@pytest.fixture(scope="session")
def tiny():
    """A tiny random target and drafter; see ``tiny_models``."""
    from tiny_models import TinyPair

    return TinyPair()
