"""Times every kernel against plain PyTorch on a CUDA device, and the bytes it must move against a measured copy.

``python -m triton_dflash.bench [--kernel NAME …] [--context N] [--rows N] [--dtype NAME]`` prints a table to stderr and
one JSON line to stdout. Sizes are those of an 8B target and its drafter; ``block_attention`` is also timed over long
contexts. Plain is the twin, but for ``block_attention``: SDPA over the keys that are there, under a mask made
beforehand. Before each timed call the second-level cache is overwritten; the time is the device's own, the median of
many. The roofline of a call is its bytes at the speed of the copy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import triton_dflash
from triton_dflash.block_attention import visible
from triton_dflash.choose import forced

WARM, TIMED, FLUSH = 10, 50, 256 << 20  # calls, calls, bytes


@dataclass(frozen=True)
class Sizes:
    """What the cases are made of; by default Qwen3-8B with five draft layers."""

    heads: int = 32
    groups: int = 8
    head_dim: int = 128
    intermediate: int = 12_288
    draft_layers: int = 5
    target_layers: int = 36
    vocabulary: int = 151_936
    context: int = 4096
    long: tuple[int, ...] = (8192, 16_384, 32_768, 65_536)
    rows: int = 16


@dataclass(frozen=True)
class Case:
    """One call of a public function, and the bytes that it cannot do without; ``plain`` where its twin is not what
    plain code would do."""

    name: str
    call: Callable[[], Any]
    bytes: int
    plain: Callable[[], Any] | None = None


def cases(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """A decoding round's calls, one after the other so that memory is freed in between; the long ``context_kv`` is the
    prompt's."""
    s, e = sizes, dtype.itemsize
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    start = torch.tensor([s.context], dtype=torch.int32, device=device)
    table = torch.ones(s.context + max(s.rows, s.context), s.head_dim // 2, device=device)
    for n, name in ((s.rows, "context_kv"), (s.context, "context_kv, prompt")):
        mixed = torch.randn(n, s.draft_layers * 2 * s.groups * s.head_dim, **made)
        cache = torch.zeros(s.draft_layers, 2, s.groups, s.context + n, s.head_dim, **made)
        weights = torch.ones(s.draft_layers, s.head_dim, **made)
        arguments = (mixed, weights, table, table, cache, start, 1e-6)
        yield Case(name, bind(triton_dflash.context_kv, *arguments), turned_bytes(mixed, n, s.head_dim))
    mixed = torch.randn(s.rows, (s.heads + 2 * s.groups) * s.head_dim, **made)
    cache, weight = torch.zeros(2, s.groups, s.context + s.rows, s.head_dim, **made), torch.ones(s.head_dim, **made)
    normed = (mixed, weight, weight, table, table, cache, start, 1e-6)
    yield Case("block_kv", bind(triton_dflash.block_kv, *normed), turned_bytes(mixed, s.rows, s.head_dim))
    for kind, window in (("both ways", None), ("causal", None), ("window", s.context // 4)):
        yield attention(f"block_attention, {kind}", s, s.context, kind != "both ways", window, made)
    for context in s.long:
        yield attention(f"block_attention, {context} keys", s, context, True, None, made)
    mixed = torch.randn(s.rows, 2 * s.intermediate, **made)
    yield Case("swiglu", bind(triton_dflash.swiglu, mixed), mixed.numel() * e * 3 // 2)
    logits = torch.randn(s.rows, s.vocabulary, **made)
    drafted = logits.argmax(-1)[:-1]
    yield Case("verify_greedy", bind(triton_dflash.verify_greedy, logits, drafted), logits.numel() * e)
    given = logits[:-1].float().softmax(-1)
    uniforms = torch.rand(2, s.rows, dtype=torch.float64, device=device)
    yield Case(
        "verify_rejection",
        bind(triton_dflash.verify_rejection, logits, drafted, given, uniforms, 1.0),
        logits.numel() * e + s.vocabulary * (e + 4),  # all rows once, then one row and its q
    )
    cache = torch.randn(s.target_layers, 2, s.groups, s.context + 4 * s.rows, s.head_dim, **made)
    path = torch.arange(0, 2 * s.rows, 2, device=device)
    still = 1  # the first row is in its place
    moved = 2 * s.target_layers * 2 * s.groups * (s.rows - still) * s.head_dim * e
    yield Case("compact_path", bind(triton_dflash.compact_path, cache, start, path), moved)


def turned_bytes(mixed: Tensor, n: int, d: int) -> int:
    """A product read and written once, and n rows of both tables."""
    return 2 * mixed.numel() * mixed.element_size() + 2 * n * (d // 2) * 4


def attention(name: str, s: Sizes, context: int, causal: bool, window: int | None, made: dict[str, Any]) -> Case:
    """``context`` keys and, after them, the block's own, in a cache that has room for a quarter more."""
    n, heads, d, end = s.rows, s.heads, s.head_dim, context + s.rows
    keys, values = torch.randn(2, s.groups, end + context // 4, d, **made)
    q = torch.randn(heads, n, d, **made)
    start = torch.tensor([context], dtype=torch.int32, device=q.device)
    sees = [(1 << (i + 1 if causal else n)) - 1 for i in range(n)]
    bits = torch.tensor([x if x < 2**63 else x - 2**64 for x in sees], device=q.device)
    folded, near, far = q.view(s.groups, -1, d), keys[:, :end], values[:, :end]
    mask = visible(end, start, bits, window, None).repeat(heads // s.groups, 1) if causal else None
    read = min(context, context if window is None else window - 1) + n
    return Case(
        name,
        bind(triton_dflash.block_attention, q, keys, values, start, bits, window),
        (2 * s.groups * read * d + 2 * q.numel()) * q.element_size(),
        bind(F.scaled_dot_product_attention, folded, near, far, attn_mask=mask),
    )


def bind(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: function(*arguments, **options)


def seconds(call: Callable[[], Any], flush: Tensor) -> float:
    """The device's median time of ``call`` with nothing of it in the cache. The host is ahead meanwhile: overwriting
    ``flush`` takes longer than a launch."""
    for _ in range(WARM):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMED)]
    for start, end in marks:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in marks) / 1000


def compared(case: Case, fused: float, plain: float, roofline: float) -> dict[str, Any]:
    """One result; ``of_copy`` is the share of the copy's ``roofline`` bytes a second that the kernel reaches."""
    least = case.bytes / roofline
    times = {"seconds": fused, "plain": plain, "roofline": least}
    return {"name": case.name, "bytes": case.bytes, **times, "of_copy": least / fused}


def as_line(result: dict[str, Any]) -> str:
    fused, plain, least = (result[name] * 1e6 for name in ("seconds", "plain", "roofline"))
    return (
        f"{result['name']:28} {fused:9.1f} µs   plain {plain:9.1f} µs   {plain / fused:5.2f}x   "
        f"roofline {least:8.1f} µs   {result['of_copy']:6.1%} of it"
    )


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m triton_dflash.bench", description="times the kernels")
    parser.add_argument("--kernel", action="append", help="only those whose name starts so; may be repeated")
    parser.add_argument("--context", type=int, default=Sizes.context, help="tokens in the cache")
    parser.add_argument("--rows", type=int, default=Sizes.rows, help="tokens in a block")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    if not torch.cuda.is_available():
        print("the benchmark needs a CUDA device; there is none", file=sys.stderr)
        return 2
    import triton

    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(flush)
    roofline = 2 * FLUSH / seconds(lambda: other.copy_(flush), flush)
    results = []
    for case in cases(Sizes(context=options.context, rows=options.rows), "cuda", getattr(torch, options.dtype)):
        if options.kernel and not case.name.startswith(tuple(options.kernel)):
            continue
        with forced(True):
            fused = seconds(case.call, flush)
        with forced(False):
            plain = seconds(case.plain or case.call, flush)
        results.append(compared(case, fused, plain, roofline))
        print(as_line(results[-1]), file=sys.stderr)
    print(f"the copy moves {roofline / 1e9:.0f} GB/s", file=sys.stderr)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({**about, **vars(options), "copy_bytes_per_second": roofline, "kernels": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
