"""Talk with the model: answers stream, the conversation goes on until Ctrl-D.

  /reset   forget the conversation        /stats   figures of the last answer and of all
  /help    this list                      /quit    leave (so does Ctrl-D)

Ctrl-C ends the answer that is being written and keeps what there is of it. Without a terminal every line of stdin is
one turn.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from dflash.cli import common
from dflash.errors import PromptError

if TYPE_CHECKING:
    from dflash.engine import Engine
    from dflash.types import GenerationResult

HELP = "talk with the model in the terminal"
COMMANDS = "/reset forget the conversation · /stats figures · /help this line · /quit leave (or Ctrl-D)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    common.add_fallback_flag(parser, default=True)
    common.add_model_flags(parser)
    common.add_sampling_flags(parser)
    common.add_decoding_flags(parser, max_new_tokens=512)


def run(args: argparse.Namespace) -> int:
    options = common.decoding_of(args)
    if not common.is_text(args.system or ""):
        raise PromptError("--system is not UTF-8 text")
    engine = common.load_engine(args, fallback=args.fallback)
    chat = Chat(engine, options, args.system)
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  # line editing and history for input()

        common.say(COMMANDS)
    while True:
        try:
            line = _read(interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise
            common.say("", "Ctrl-D or /quit leaves")
            continue
        if line is None or line.strip() == "/quit":
            return 0
        try:
            chat.handle(line)
        except PromptError as error:
            if not interactive:
                raise
            common.say(f"dflash: error: {error}")


def _read(interactive: bool) -> str | None:
    """The next line; None at the end of the input."""
    try:
        if interactive:
            return input("> ")
        line = sys.stdin.readline()
    except EOFError:
        print()
        return None
    except UnicodeDecodeError:
        raise PromptError("the prompt is not UTF-8 text") from None
    return line.rstrip("\n") if line else None


class Chat:
    """A conversation: the turns so far, and the figures of its answers."""

    def __init__(self, engine: Engine, options: dict[str, Any], system: str | None) -> None:
        if engine.tokenizer is None or not engine.tokenizer.chat_template:
            raise PromptError(
                "this target has no chat template to talk through; dflash generate --raw takes plain text"
            )
        self._engine, self._tokenizer, self._options = engine, engine.tokenizer, options
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = []
        self._results: list[GenerationResult] = []
        self._told: set[str] = set()

    def handle(self, line: str) -> None:
        """A command or a turn. Raises ``PromptError`` for a turn that cannot be answered; it is forgotten then."""
        match line.strip():
            case "":
                pass
            case "/help":
                common.say(COMMANDS)
            case "/reset":
                self._turns.clear()
                common.say("the conversation is forgotten")
            case "/stats":
                self._stats()
            case text if text.startswith("/") and " " not in text:
                common.say(f"there is no command {text}; {COMMANDS}")
            case text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        from dflash.cli.render import brief

        if not common.is_text(text):
            raise PromptError("the prompt is not UTF-8 text")
        self._turns.append({"role": "user", "content": text})
        try:
            self._make_room()
            with common.Interruption() as interruption:
                result = self._stream(interruption)
        except BaseException:
            self._turns.pop()
            raise
        self._turns.append({"role": "assistant", "content": result.text})
        self._results.append(result)
        stopped = " · stopped" if result.finish_reason == "cancelled" else ""
        common.say(f"[{brief(result.metrics)}{stopped}]")
        for note in result.notes:
            if note not in self._told:
                self._told.add(note)
                common.say(f"note: {note}")

    def _stream(self, interruption: common.Interruption) -> GenerationResult:
        written = 0
        with self._engine.stream(self._system + self._turns, **self._options) as generation:
            for event in generation:
                print(event.text, end="", flush=True)
                written += len(event.text)
                if interruption:
                    break
        result = common.result_of(generation)
        print(result.text[written:], flush=True)
        return result

    def _make_room(self) -> None:
        """Drop the oldest turns where the conversation leaves no room for an answer, and say so."""
        most = self._engine.target.info.max_positions
        answer = min(self._options["max_new_tokens"], most // 4)
        dropped = 0
        while (held := len(self._tokenizer.encode_chat(self._system + self._turns))) + answer > most:
            if len(self._turns) < 3:
                if held >= most:
                    raise PromptError(
                        f"this turn has {held} tokens; the target's context holds {most}, answer included"
                    )
                break
            del self._turns[:2]
            dropped += 1
        if dropped:
            common.say(
                f"note: the target's context holds {most} tokens, so it no longer sees the oldest "
                + (f"{dropped} turns" if dropped > 1 else "turn")
            )

    def _stats(self) -> None:
        from dflash.cli.render import brief, summary_lines
        from dflash.metrics import Metrics

        if not self._results:
            common.say("there is no answer yet")
            return
        common.say(*summary_lines(self._results[-1]))
        common.say(f"{'all answers':<11} {brief(Metrics.merge(result.metrics for result in self._results))}")
