"""``dflash bench --suite rounds|end-to-end|kernels``: from flags to a record, with a bar while it is measured."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

from dflash.cli import bench_tables, common
from dflash.cli.bench import finish, prompt_facts, read_prompts
from dflash.cli.progress import Bar
from dflash.environment import environment
from dflash.errors import UsageError

if TYPE_CHECKING:
    from dflash.engine import Engine


def run_suite(args: argparse.Namespace) -> int:
    """Measure one suite and show it; its exit code."""
    if args.output:
        common.check_writable(args.output)
    suites = {"rounds": _rounds, "end-to-end": _end_to_end, "kernels": _kernels}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a drafter that accepts nothing costs the same
        record = suites[args.suite](args)
    if record is None:
        common.say("dflash: interrupted before anything was measured")
        return 130
    return finish(args, record)


def _rounds(args: argparse.Namespace) -> dict[str, Any] | None:
    from dflash.suites.rounds import BLOCK_SIZES, CONTEXTS, ROUNDS, context_ids, fitting_contexts, measure_rounds

    block_sizes = _numbers(args.block_sizes, "--block-sizes") or BLOCK_SIZES
    contexts = _numbers(args.contexts, "--contexts")
    if args.rounds is not None and args.rounds < 1:
        raise UsageError(f"--rounds is {args.rounds}; it must be at least 1")
    if args.layers is not None and args.shape is None:
        raise UsageError("--layers goes with --shape")
    prompts = read_prompts(args)
    engine = _shaped(args, max(contexts or CONTEXTS)) if args.shape else common.load_engine(args)
    facts = environment(engine) | {"threads": _threads(engine)}
    contexts = contexts or fitting_contexts(engine, CONTEXTS, block_sizes)
    if not contexts:
        raise UsageError(
            f"the target's {engine.target.info.max_positions} positions hold none of the usual context lengths; "
            "give shorter --contexts"
        )
    ids, source = context_ids(engine, prompts, max(contexts))
    with common.Interruption() as interruption, Bar("contexts") as bar:
        measured = measure_rounds(
            engine,
            ids,
            contexts,
            block_sizes,
            repeats=args.repeats,
            rounds=args.rounds or ROUNDS,
            report=bar.update,
            stopped=lambda: bool(interruption),
        )
    if not measured.samples:
        return None
    record = {"kind": "bench-rounds", **measured.to_dict(), "context_tokens": source}
    if args.shape:
        record |= {"shape": args.shape, "layers": engine.target.info.num_layers}
    record |= {"prompt_set": None if args.shape else prompt_facts(prompts), **facts}
    bench_tables.show_rounds(record)
    return record


def _shaped(args: argparse.Namespace, longest: int) -> Engine:
    from dflash.suites.shapes import SHAPES

    if args.shape not in SHAPES:
        raise UsageError(f"--shape is {args.shape!r}; there is {', '.join(SHAPES)}")
    if args.target or args.draft or args.draft_bits or args.backend not in ("auto", "torch"):
        raise UsageError("--shape makes a pair of its own, with PyTorch; leave --target, --draft and --backend out")
    from torch_dflash.shapes import shape_engine

    common.say(f"dflash: making random weights in {args.shape}'s shape")
    return shape_engine(SHAPES[args.shape], layers=args.layers, longest=longest, device=args.device, dtype=args.dtype)


def _end_to_end(args: argparse.Namespace) -> dict[str, Any] | None:
    from contextlib import ExitStack

    from dflash.suites.arms import Programs, open_arms
    from dflash.suites.end_to_end import EndToEnd, measure_arms, prompt_ids

    options = common.decoding_of(args)
    budget = options["max_new_tokens"]
    if budget < 1:
        raise UsageError("--max-new-tokens is 0; there is nothing to measure without a token")
    programs = Programs(args.official, args.llama, args.gguf)
    prompts = read_prompts(args)
    engine = common.load_engine(args)
    facts = environment(engine) | {"threads": _threads(engine)}
    ids = prompt_ids(engine, prompts, budget)
    longest = max(map(len, ids)) + budget

    def so_far(measured: EndToEnd) -> str:
        arms = measured.to_dict()["arms"]
        return " · ".join(f"{name} {arm['tokens_per_second']['median']:.1f}" for name, arm in arms.items())

    with common.Interruption() as interruption, Bar("prompts") as bar, ExitStack() as processes:
        arms, missing = open_arms(
            engine, programs, block_size=options["block_size"], longest=longest, processes=processes, say=bar.say
        )
        measured = measure_arms(
            arms,
            prompts,
            ids,
            budget,
            repeats=args.repeats,
            missing=missing,
            report=lambda part: bar.update(len(part.turns), len(ids) * args.repeats, so_far(part)),
            stopped=lambda: bool(interruption),
        )
    if not measured.turns:
        return None
    record = {
        "kind": "bench-end-to-end",
        **measured.to_dict(),
        "max_new_tokens": budget,
        "block_size": options["block_size"] or engine.drafter.config.block_size,
        "prompt_set": prompt_facts(prompts),
        **facts,
    }
    bench_tables.show_end_to_end(record)
    return record


def _kernels(args: argparse.Namespace) -> dict[str, Any] | None:
    from dflash.suites.kernels import ROWS

    rows = _numbers(args.rows, "--rows") or ROWS
    engine = common.load_engine(args)
    facts = environment(engine)
    if engine.backend.name == "torch" and engine.target.info.device.startswith("cuda"):
        from torch_dflash.measure import measure_triton

        return {"kind": "bench-kernels", "partial": False, **measure_triton(), **facts}
    from torch_dflash.measure import measure_products

    common.say("dflash: no CUDA device is used, so what is measured are the products of few rows on the CPU")
    with common.Interruption() as interruption, Bar("products") as bar:
        measured = measure_products(
            engine, rows, repeats=args.repeats, report=bar.update, stopped=lambda: bool(interruption)
        )
    figures = measured.to_dict()
    if not figures["products"]:
        return None
    record = {"kind": "bench-kernels", **figures, **facts, "threads": _threads(engine)}
    bench_tables.show_products(record)
    return record


def _threads(engine: Engine) -> int:
    from dflash.suites.arms import thread_count

    return thread_count(engine)


def _numbers(text: str | None, flag: str) -> tuple[int, ...]:
    """``8,16`` as numbers in order, each once; empty where nothing was given. Raises ``UsageError``."""
    if text is None:
        return ()
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise UsageError(f"{flag} is {text!r}; it must be whole numbers from 1, with commas between")
    return tuple(numbers)
