"""Which code a call takes, why, and that the package is whole without Triton."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from importlib import import_module

import pytest
import torch
import triton_dflash
from triton_dflash import choose, forced, language, use_kernels

NAMES = ["block_attention", "block_kv", "compact_path", "context_kv", "swiglu", "verify_greedy", "verify_rejection"]

WITHOUT_TRITON = """
import logging, sys
sys.modules["triton"] = None  # cannot be imported
import torch, triton_dflash
from triton_dflash import compact_path, forced, language, use_kernels, verify_greedy

assert "cannot be imported" in language.missing and not language.interpreted
logging.basicConfig(level=logging.INFO, format="%(message)s")
assert not use_kernels("cpu") and not use_kernels("cuda")
assert verify_greedy(torch.eye(3), torch.tensor([0, 2])).tolist() == [1, 1, 1, 0, 2]
cache = torch.arange(12.0).view(1, 4, 3)
compact_path(cache, torch.tensor([1]), torch.tensor([0, 2]))
assert cache[0, 2].tolist() == [9, 10, 11]
try:
    with forced(True):
        pass
except RuntimeError as error:
    assert "no kernel can run" in str(error)
else:
    raise AssertionError("forced(True) without Triton")
"""


def test_the_package_is_whole_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("plain PyTorch in place of Triton kernels") == 1, "said once"


@pytest.mark.parametrize("name", NAMES)
def test_kernel_and_plain_twin_have_one_signature(name: str) -> None:
    module, public = import_module(f"triton_dflash.{name}"), getattr(triton_dflash, name)
    assert inspect.signature(module.fused) == inspect.signature(module.naive) == inspect.signature(public)
    assert public.__name__ == name and public.__doc__ == module.naive.__doc__
    assert next(iter(inspect.signature(public).parameters.values())).annotation == "Tensor", "what the choice looks at"


def test_everything_is_public() -> None:
    assert sorted([*NAMES, "forced", "use_kernels"]) == sorted(triton_dflash.__all__)


def test_a_call_goes_where_it_is_forced(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    call = choose.either("call", lambda x: taken.append("naive"), lambda x: taken.append("fused"))
    x = torch.zeros(1, device=device)
    call(x)
    with forced(False):
        call(x)
        with forced(True):
            call(x)
        call(x)
    with pytest.raises(KeyError), forced(False):
        raise KeyError
    call(x)
    assert taken == ["fused", "naive", "fused", "naive", "fused"]


def test_the_reason_against_kernels_is_said_once(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose._say_once.cache_clear()
    monkeypatch.setattr(language, "interpreted", False)
    choose._reason_against.cache_clear()
    with caplog.at_level(logging.INFO, logger="triton_dflash.choose"):
        for _ in range(3):
            assert not use_kernels("cpu") and not use_kernels("meta") and not use_kernels(device, torch.float64)
    choose._reason_against.cache_clear()
    reasons = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert reasons == [
        "the kernels need a CUDA device, not cpu",
        "the kernels need a CUDA device, not meta",
        "the kernels do not compute in float64",
    ]


def test_the_interpreter_is_left_with_its_variable(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that runs after these tests in one process is not slowed down by kernels made for the interpreter."""
    if not language.interpreted:
        pytest.skip("the kernels run on a GPU here")
    assert use_kernels("cpu")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not use_kernels("cpu")


@pytest.mark.parametrize("name", ["sm_75", "rocm"])
def test_other_gpus_take_the_plain_code(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "interpreted", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5) if name == "sm_75" else (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.2" if name == "rocm" else None)
    choose._reason_against.cache_clear()
    assert not use_kernels("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    choose._reason_against.cache_clear()
    assert use_kernels("cuda")
    choose._reason_against.cache_clear()
