"""Entry point: finds the subcommand, turns every ``DFlashError`` into one sentence and an exit code."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from dflash import __version__
from dflash.errors import DFlashError

COMMANDS = ("generate", "chat", "bench", "evaluate", "train", "convert", "doctor", "models", "demo")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """Usage errors as one sentence, like every other error."""
        print(f"dflash: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dflash", description="Lossless text generation with DFlash, and a laboratory for it.")
    parser.add_argument("--version", action="version", version=f"dflash-lab {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"dflash.cli.{name}")
        command = commands.add_parser(
            name, help=module.HELP, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 (failed), 2 (usage) or 130 (interrupted)."""
    args = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may say what this terminal cannot: never die of a character
        sys.stdout.reconfigure(errors="replace")
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except DFlashError as error:
        print(f"dflash: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("dflash: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away; that is its right
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a disk that fills up in mid-work, wherever that shows
        where = f"{error.filename}: " if error.filename else ""
        print(f"dflash: error: {where}{error.strerror or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
