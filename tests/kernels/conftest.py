"""The kernels run on the GPU where there is one, and in Triton's interpreter elsewhere; without Triton, not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

ON_GPU = torch.cuda.is_available()

if not ON_GPU:  # kernels are made for the interpreter, or not, when they are imported: here, whoever did so before
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton_dflash"]:
        del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton_dflash  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """Calls choose the kernels while these tests run, and one thread is enough for what they compare with. Of the scope
    "package" a folder without an ``__init__.py`` would not end before the session does."""
    before, threads = os.environ.get("TRITON_INTERPRET"), torch.get_num_threads()
    torch.set_num_threads(1)
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
    yield
    torch.set_num_threads(threads)
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(autouse=True)
def poison(interpreter: None) -> Iterator[None]:
    """New memory holds NaN or the largest whole number: what a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def device() -> str:
    """Where kernels run; asking for it skips a test where none can."""
    from triton_dflash import language

    if language.missing:
        pytest.skip(language.missing)
    return "cuda" if ON_GPU else "cpu"
