"""Text out of tokens as they come, never half a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\ufffd"


class Detokenizer:
    """Incremental ``decode``: the pieces, joined, are the text of all ids.

    A piece is held back while it ends inside a character. Only the ids since the last whole piece, and the piece before
    it for context, are decoded at each step."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = self._read = 0

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._ids.append(token)
        piece = self._pending()
        if not piece or piece.endswith(_HALF):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return piece

    def flush(self) -> str:
        """What is left at the end, an unfinished character included."""
        piece = self._pending()
        self._context = self._read = len(self._ids)
        return piece

    def _pending(self) -> str:
        known = self._decode(self._ids[self._context : self._read])
        return self._decode(self._ids[self._context :])[len(known) :]


class TextStream:
    """A detokenizer that ends at stop strings: ``push`` says when one is complete, ``take`` hands out what is safe."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stop = tuple(stop)
        self._waiting = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Take in ``token``; True where it completes a stop string, which is then cut off with what follows it."""
        if self.stopped:
            return True
        self._waiting += self._detokenizer.push(token)
        found = [at for string in self._stop if (at := self._waiting.find(string)) >= 0]
        if found:
            self._waiting, self.stopped = self._waiting[: min(found)], True
        return self.stopped

    def take(self, *, last: bool = False) -> str:
        """The text that no later token can take back; all of it where ``last``."""
        if last and not self.stopped:
            self._waiting += self._detokenizer.flush()
        held = 0 if last or self.stopped else self._beginning_of_stop()
        cut = len(self._waiting) - held
        piece, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return piece

    def _beginning_of_stop(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        longest = 0
        for string in self._stop:
            for size in range(min(len(string) - 1, len(self._waiting)), longest, -1):
                if self._waiting.endswith(string[:size]):
                    longest = size
                    break
        return longest
