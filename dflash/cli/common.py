"""Flags and small things that several commands share."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.errors import PromptError, StorageError, UsageError
from dflash.types import DRAFT_POLICIES, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from dflash.engine import Engine
    from dflash.generation import Generation
    from dflash.types import GenerationResult


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """``--target --draft --backend --device --dtype --draft-bits --thinking``."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target", metavar="MODEL", help="target: a pair's name, a folder or a hub id (default: smollm2-135m)"
    )
    group.add_argument(
        "--draft", metavar="MODEL", help="drafter: a folder or a hub id (default: the one known for the target)"
    )
    group.add_argument(
        "--backend", default="auto", help="auto, torch or mlx (default: auto, mlx on Apple silicon and torch elsewhere)"
    )
    group.add_argument(
        "--device", default="auto", help="torch: auto, cpu, cuda, cuda:1 …; mlx: auto, cpu or gpu (default: auto)"
    )
    group.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: auto)")
    group.add_argument(
        "--draft-bits",
        type=int,
        choices=(4, 8),
        help="the drafter's weights in 4 or 8 bits; the output stays the target's (mlx only; default: as stored)",
    )
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="what a chat template with a thinking mode is told (default: as when the drafter was trained)",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """``--temperature --top-p --top-k --seed``."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    group.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this share (default: 1, off)"
    )
    group.add_argument("--top-k", type=int, default=0, help="keep this many tokens (default: 0, off)")
    group.add_argument("--seed", type=int, help="same seed, same options, same machine: same tokens")


def add_decoding_flags(parser: argparse.ArgumentParser, *, max_new_tokens: int = 256) -> None:
    """``--max-new-tokens --block-size --verify --draft-policy``."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=f"default: {max_new_tokens}"
    )
    group.add_argument(
        "--block-size",
        metavar="N|auto",
        help="anchor and slots; auto: what costs measured here and recent acceptance promise each round, plain steps "
        "where they are faster (default: the drafter's)",
    )
    group.add_argument(
        "--verify", metavar="RULE", help="greedy, match or rejection (default: greedy at temperature 0, else match)"
    )
    group.add_argument(
        "--draft-policy",
        choices=DRAFT_POLICIES,
        default=DRAFT_POLICIES[0],
        help="what the drafter puts forward: its likeliest tokens, or a sample of its distribution at the temperature, "
        f"top-k and top-p of the target's (default: {DRAFT_POLICIES[0]})",
    )


def add_fallback_flag(parser: argparse._ActionsContainer, *, default: bool) -> None:
    """``--fallback`` and ``--no-fallback``."""
    text = f"go on without the drafter where it measures slower (default: {'on' if default else 'off'})"
    parser.add_argument("--fallback", action=argparse.BooleanOptionalAction, default=default, help=text)


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)


def block_size_of(args: argparse.Namespace) -> int | str | None:
    if args.block_size in (None, "auto"):
        return args.block_size
    try:
        size = int(args.block_size)
    except ValueError:
        size = 0
    if size < 2:
        raise UsageError(f"--block-size is {args.block_size!r}; it must be a whole number from 2, or auto")
    return size


def decoding_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of ``Engine.stream`` that the shared flags hold, refused before any model is loaded for them."""
    if args.max_new_tokens < 0:
        raise UsageError(f"--max-new-tokens is {args.max_new_tokens}; it must be 0 or above")
    return {
        "max_new_tokens": args.max_new_tokens,
        "sampling": sampling_of(args),
        "block_size": block_size_of(args),
        "verify": args.verify,
        "draft_policy": args.draft_policy,
    }


def load_engine(args: argparse.Namespace, **options: Any) -> Engine:
    """The engine that the model flags name."""
    from dflash.loading import load

    models: dict[str, Any] = {"target": args.target, "draft": args.draft}
    if args.target is not None and args.draft is None:  # a pair's name is a target with a known drafter
        models = {"pair": args.target}
    names = ("backend", "device", "dtype", "draft_bits", "thinking")
    return load(**models, **{name: getattr(args, name) for name in names}, **options)


def read_prompt(text: str | None, file: str | None) -> str:
    """A prompt from the argument, a file (``-``: stdin), or a stdin that is no terminal."""
    if text is not None and file is not None:
        raise UsageError("give the prompt as an argument or as --prompt-file, not both")
    try:
        if text is None and file is None:
            if sys.stdin is None or sys.stdin.isatty():
                raise PromptError("there is no prompt; give it as an argument, as --prompt-file, or on stdin")
            file = "-"
        if text is None:
            assert file is not None
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"the prompt file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError(f"the prompt file {file} is not UTF-8 text") from None
    if not text.strip():
        raise PromptError("the prompt is empty; give at least one word")
    if not is_text(text):
        raise PromptError("the prompt is not UTF-8 text")
    return text


def is_text(text: str) -> bool:
    """False where bytes of the command line or of stdin were no UTF-8 and Python carries them as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def check_writable(path: Path) -> None:
    """Raise ``StorageError`` where a file at ``path`` could not be written: better now than after the work."""
    folder = path.absolute().parent
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise StorageError(f"{path} is no regular file; give a file to write to")
    if not folder.is_dir():
        raise StorageError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise StorageError(f"{path} cannot be written: permission denied or a read-only file system")


def stderr() -> Console:
    """A console on stderr: colour and bars in a terminal only."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(*lines: str) -> None:
    """Plain lines on stderr."""
    for line in lines:
        print(line, file=sys.stderr)


def result_of(generation: Generation) -> GenerationResult:
    """The result of a generation; what it warns of stands in its notes too, which a command shows."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return generation.result()


class Interruption:
    """True once Ctrl-C was pressed; a second one interrupts at once. Use as a context manager."""

    def __init__(self) -> None:
        self._asked = False

    def __bool__(self) -> bool:
        return self._asked

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
