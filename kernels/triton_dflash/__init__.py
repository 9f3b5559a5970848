"""Triton kernels of a decoding round, each beside a plain twin with the same signature.

``from triton_dflash import context_kv`` and the rest: each call takes the kernel where one can run and the plain
PyTorch code elsewhere (``choose.py``). The package can be imported without Triton.
"""

from triton_dflash.block_attention import block_attention
from triton_dflash.block_kv import block_kv
from triton_dflash.choose import forced, use_kernels
from triton_dflash.compact_path import compact_path
from triton_dflash.context_kv import context_kv
from triton_dflash.swiglu import swiglu
from triton_dflash.verify_greedy import verify_greedy
from triton_dflash.verify_rejection import verify_rejection

__all__ = [
    "block_attention",
    "block_kv",
    "compact_path",
    "context_kv",
    "forced",
    "swiglu",
    "use_kernels",
    "verify_greedy",
    "verify_rejection",
]
