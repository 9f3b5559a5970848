"""Times every kernel against its plain twin on a CUDA device, and the bytes it must move against a measured copy.

``python -m triton_dflash.bench [--kernel NAME …] [--context N] [--rows N] [--dtype NAME]`` prints a table to stderr and
one JSON line to stdout. The plain twin of ``block_attention`` is SDPA. Sizes are those of an 8B target and its drafter.
Before each timed call the second-level cache is overwritten; the time is the device's own, the median of many.
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
from torch import Tensor

import triton_dflash
from triton_dflash.choose import forced

WARM, TIMED, FLUSH = 10, 50, 256 << 20  # calls, calls, bytes


@dataclass(frozen=True)
class Sizes:
    """What the cases are made of; by default Qwen3-8B with five draft layers."""

    heads: int = 32
    groups: int = 8
    head_dim: int = 128
    draft_layers: int = 5
    target_layers: int = 36
    vocabulary: int = 151_936
    context: int = 4096
    rows: int = 16


@dataclass(frozen=True)
class Case:
    """One call of a public function, and the bytes that it cannot do without."""

    name: str
    call: Callable[[], Any]
    bytes: int


def cases(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Case]:
    """A decoding round's calls, one after the other so that memory is freed in between; the long ``context_kv`` is the
    prompt's."""
    s, e = sizes, dtype.itemsize
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    for n, name in ((s.rows, "context_kv"), (s.context, "context_kv, prompt")):
        mixed = torch.randn(n, s.draft_layers * 2 * s.groups * s.head_dim, **made)
        cache = torch.zeros(s.draft_layers, 2, s.groups, s.context + n, s.head_dim, **made)
        weights = torch.ones(s.draft_layers, s.head_dim, **made)
        table = torch.ones(n, s.head_dim // 2, device=device)
        arguments = (mixed, weights, table, table, cache, s.context, 1e-6)
        yield Case(name, bind(triton_dflash.context_kv, *arguments), 2 * (mixed.numel() * e + table.numel() * 4))
    cache = torch.randn(2, s.groups, s.context, s.head_dim, **made)
    q = torch.randn(s.heads, s.rows, s.head_dim, **made)
    moved = (cache.numel() + 2 * q.numel()) * e
    kin = torch.ones(s.rows, s.rows, dtype=torch.bool, device=device).tril()
    kinds: dict[str, dict[str, Any]] = {"both ways": {}, "causal": {"causal": True}, "tree": {"ancestors": kin}}
    for kind, options in kinds.items():
        yield Case(
            f"block_attention, {kind}", bind(triton_dflash.block_attention, q, cache[0], cache[1], **options), moved
        )
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
    yield Case("compact_path", bind(triton_dflash.compact_path, cache, s.context, path), moved)


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
            plain = seconds(case.call, flush)
        share = case.bytes / fused / roofline
        results.append({"name": case.name, "bytes": case.bytes, "seconds": fused, "plain": plain, "of_copy": share})
        print(
            f"{case.name:28} {fused * 1e6:9.1f} µs   plain {plain * 1e6:9.1f} µs   {plain / fused:5.2f}x   "
            f"{share:6.1%} of a copy's {roofline / 1e9:.0f} GB/s",
            file=sys.stderr,
        )
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({**about, **vars(options), "copy_bytes_per_second": roofline, "kernels": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
