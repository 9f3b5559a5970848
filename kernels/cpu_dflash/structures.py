"""The structures of ``passes.cpp``, seen from Python."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor


class Linear(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("narrow", c_int64),
    )  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("post_norm", c_void_p),
        ("qkv", Linear), ("output", Linear), ("gate", Linear), ("up", Linear), ("down", Linear),
        ("sight", c_int64), ("window", c_int64),
    )  # fmt: skip


class Stack(ctypes.Structure):
    _fields_ = (
        ("layers", c_void_p), ("count", c_int64), ("heads", c_int64), ("groups", c_int64), ("head_dim", c_int64),
        ("rotated", c_int64), ("hidden", c_int64), ("intermediate", c_int64), ("eps", c_float),
    )  # fmt: skip


class Context(ctypes.Structure):
    _fields_ = (
        ("fc", Linear), ("kv", Linear), ("norm", c_void_p), ("k_norms", c_void_p), ("count", c_int64),
        ("groups", c_int64), ("head_dim", c_int64), ("rotated", c_int64), ("eps", c_float),
    )  # fmt: skip


class Head(ctypes.Structure):
    _fields_ = (("narrow", Linear), ("exact", Linear), ("norm", c_void_p), ("eps", c_float), ("error", c_float))


class Pass(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p), ("cache", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("depth", c_void_p),
        ("bits", c_void_p), ("states", c_void_p), ("scratch", c_void_p), ("n", c_int64), ("start", c_int64),
        ("capacity", c_int64), ("threads", c_int64),
    )  # fmt: skip


_STRUCTURES = {"linear": Linear, "layer": Layer, "stack": Stack, "context": Context, "head": Head, "pass": Pass}


@functools.cache
def sized(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """The library, once its structures are known to be these."""
    for name in (
        "scratch_floats",
        "context_scratch_floats",
        "choice_scratch_floats",
        *(f"size_of_{kind}" for kind in _STRUCTURES),
    ):
        getattr(loaded, name).restype = c_int64
    for kind, structure in _STRUCTURES.items():
        there, here = getattr(loaded, f"size_of_{kind}")(), ctypes.sizeof(structure)
        assert there == here, f"{kind} takes {there} bytes in the library and {here} here"
    return loaded


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A product's weights. The caller keeps the tensors."""
    assert weight.is_contiguous() and weight.dtype in (torch.float32, torch.bfloat16) and weight.device.type == "cpu"
    assert bias is None or (bias.is_contiguous() and bias.dtype == torch.float32)
    return Linear(weight.data_ptr(), address(bias), *weight.shape, int(weight.dtype == torch.bfloat16))


def address(tensor: Tensor | None) -> int | None:
    """Where a contiguous float32 or int64 tensor lies."""
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.int64) and tensor.device.type == "cpu"
    return tensor.data_ptr()
