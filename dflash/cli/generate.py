"""Generate text from one prompt: streamed, round by round, or as JSON lines.

The prompt comes from the argument, a file or stdin. Text goes to stdout, figures to stderr. Ctrl-C stops at the end of
the round with the text so far.

  dflash generate "Why is the sky blue?" --show rounds --compare
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dflash.cli import common

if TYPE_CHECKING:
    from rich.text import Text

    from dflash.comparison import Comparison
    from dflash.engine import Engine
    from dflash.generation import Generation
    from dflash.types import GenerationResult, SamplingParams, StepEvent

HELP = "generate text from one prompt, and show its rounds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="one user message (default: from --prompt-file, or stdin)")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from this UTF-8 file; - is stdin")
    parser.add_argument("--raw", action="store_true", help="give the text to the model as it is, without chat template")
    common.add_model_flags(parser)
    common.add_sampling_flags(parser)
    common.add_decoding_flags(parser)
    ends = parser.add_argument_group("where the output ends")
    ends.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    ends.add_argument("--ignore-eos", action="store_true", help="go on behind the model's own stop tokens")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--show",
        choices=("text", "rounds", "json"),
        default="text",
        help="text as it becomes certain, a line a round, or every step as a JSON line (default: text)",
    )
    shown.add_argument(
        "--compare", action="store_true", help="decode plainly too: the speedup, and whether tokens agree"
    )
    common.add_fallback_flag(shown, default=False)
    shown.add_argument(
        "--detail",
        action="store_true",
        help="add the drafter's and the target's probability of every drafted token to the steps, and time drafting "
        "and verifying apart on devices that only tell when waited for",
    )
    shown.add_argument("--trace", metavar="FILE", help="write every step to FILE as JSON lines (.gz: compressed)")
    shown.add_argument("--json", action="store_true", help="end with one JSON line on stdout")


def run(args: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    options = common.decoding_of(args) | {"stop": args.stop, "ignore_eos": args.ignore_eos, "raw": args.raw}
    options["detail"] = args.detail
    prompt = common.read_prompt(args.prompt, args.prompt_file)
    if args.trace:
        common.check_writable(Path(args.trace))
    if args.compare:
        options["sampling"] = _seeded(options["sampling"])

    engine = common.load_engine(args, fallback=args.fallback)
    if args.compare:
        from dflash.bench import warm_up

        warm_up(engine, prompt, options)
    generation = engine.stream(prompt, **options)
    show, comparison = _SHOWS[args.show](engine), None
    with common.Interruption() as interruption:
        result = _follow(generation, show, interruption)
        if args.compare and not interruption:
            comparison = _compare(engine, prompt, options, result, interruption)
    if args.trace:
        from dflash.trace import Trace

        Trace.of_request(engine, options, result).save(args.trace)
    _summarise(result, comparison)
    if args.json or args.show == "json":
        print(json.dumps(_record(engine, result, comparison)))
    interrupted = result.finish_reason == "cancelled" or (args.compare and comparison is None)
    return 130 if interrupted else 0


def _seeded(sampling: SamplingParams) -> SamplingParams:
    """Two runs are comparable only if they draw the same numbers."""
    import dataclasses
    import secrets

    if sampling.greedy or sampling.seed is not None:
        return sampling
    return dataclasses.replace(sampling, seed=secrets.randbits(31))


# What is shown while it happens -------------------------------------------------------------------------------------


class _TextShow:
    """Text as it becomes certain."""

    def __init__(self, engine: Engine) -> None:
        self._written = 0

    def step(self, event: StepEvent) -> None:
        self._written += len(event.text)
        print(event.text, end="", flush=True)

    def end(self, result: GenerationResult) -> None:
        print(result.text[self._written :], flush=True)


class _RoundsShow:
    """A line a step, then the text."""

    def __init__(self, engine: Engine) -> None:
        import sys

        from rich.console import Console

        from dflash.cli.render import WIDTH, marks_for
        from dflash.token_texts import piece_of

        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        self._marks, self._piece = marks_for(sys.stdout.encoding), piece_of(engine.tokenizer)
        self._width = self._console.width if self._console.is_terminal else WIDTH
        self._print(self._marks.legend())

    def step(self, event: StepEvent) -> None:
        from dflash.cli.render import step_lines

        self._print(*step_lines(event, self._piece, self._marks, self._width))

    def end(self, result: GenerationResult) -> None:
        print(f"\n{result.text}", flush=True)

    def _print(self, *lines: Text) -> None:
        for line in lines:
            self._console.print(line, soft_wrap=True)
        self._console.file.flush()


class _JsonShow:
    """Every step as a JSON line."""

    def __init__(self, engine: Engine) -> None:
        pass

    def step(self, event: StepEvent) -> None:
        import json

        print(json.dumps(event.to_dict()), flush=True)

    def end(self, result: GenerationResult) -> None:
        pass


_Show = _TextShow | _RoundsShow | _JsonShow
_SHOWS: dict[str, type[_Show]] = {"text": _TextShow, "rounds": _RoundsShow, "json": _JsonShow}


def _follow(generation: Generation, show: _Show, interruption: common.Interruption) -> GenerationResult:
    """Show the steps as they happen; the result when they have ended, or at the round in which Ctrl-C came."""
    with generation:
        for event in generation:
            show.step(event)
            if interruption:
                break
    result = common.result_of(generation)
    show.end(result)
    return result


# Afterwards --------------------------------------------------------------------------------------------------------


def _compare(
    engine: Engine, prompt: str, options: dict[str, Any], result: GenerationResult, interruption: common.Interruption
) -> Comparison | None:
    """The same request decoded plainly; None where Ctrl-C came first."""
    from contextlib import nullcontext

    from dflash.comparison import Comparison

    console = common.stderr()
    with (
        console.status("decoding plainly, for comparison …") if console.is_terminal else nullcontext(),
        engine.stream(prompt, **options, speculate=False) as generation,
    ):
        for _ in generation:
            if interruption:
                return None
    return Comparison(result, common.result_of(generation), engine.target.info.dtype)


def _summarise(result: GenerationResult, comparison: Comparison | None) -> None:
    from dflash.cli.render import comparison_lines, summary_lines

    lines = ["", *summary_lines(result)]
    if comparison:
        lines += comparison_lines(comparison)
    common.say(*lines, *(f"note: {note}" for note in result.notes))


def _record(engine: Engine, result: GenerationResult, comparison: Comparison | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "metrics": result.metrics.to_dict(),
        "notes": list(result.notes),
        "facts": engine.facts,
    }
    return record | ({"compare": comparison.to_dict()} if comparison else {})
