"""What single tokens read as: each id's own text, and the running text that committed ones add up to.

A generation is ids and its text is a string; whoever shows tokens one by one needs both, also later from a trace, where
no tokenizer is at hand any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dflash.detokenizer import Detokenizer
from dflash.types import StepEvent

if TYPE_CHECKING:
    from dflash.tokenizer import Tokenizer

Piece = Callable[[int, int], str]
_HALF = "\ufffd"


def piece_of(tokenizer: Tokenizer | None) -> Piece:
    """(token before, token) → the token's own text, a leading space included; its number where it has none."""
    if tokenizer is None:
        return lambda before, token: f"<{token}>"
    decode = tokenizer.decode

    def piece(before: int, token: int) -> str:
        # Some tokenizers drop the space of the first token they decode: let the one before it be the first. Where that
        # one ends in mid-character, what follows could vanish in it.
        context, both = decode([before], special=True), decode([before, token], special=True)
        alone = context.endswith(_HALF) or not both.startswith(context)
        text = decode([token], special=True) if alone else both.removeprefix(context)
        return text or f"<{token}>"  # an id without any text of its own

    return piece


class TokenTexts:
    """The texts of one generation's tokens, taken in step by step; or read from a trace, without a tokenizer.

    ``running[n]`` is what the n-th committed token adds to the text: empty while a character is unfinished, and for
    special tokens, which are no text. Joined, it is the text of all committed tokens. Without a tokenizer a token's own
    text and what it adds are its number."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer, self._piece = tokenizer, piece_of(tokenizer)
        self._stream = Detokenizer(tokenizer.decode) if tokenizer else None
        self._texts: dict[int, str] = {}
        self._special: set[int] = set()
        self.running: list[str] = []
        self.prompt: str | None = None
        self._newest: int | None = None  # number of the last token that is text

    def take(self, steps: Iterable[StepEvent]) -> None:
        """Take in the next steps of the generation."""
        for step in steps:
            self.learn((step.anchor, *step.drafted))
            self.learn((step.anchor, *step.committed))
            for token in step.committed:
                self.running.append(self._run_on(token))
                if token not in self._special:
                    self._newest = len(self.running) - 1

    def finish(self) -> None:
        """Nothing follows: an unfinished character belongs to the last token that is text."""
        if self._stream and self._newest is not None:
            self.running[self._newest] += self._stream.flush()

    def learn(self, tokens: Iterable[int]) -> None:
        """Find out the texts of ids that follow each other."""
        before = 0
        for token in tokens:
            if token not in self._texts:
                self._texts[token] = self._read(before, token)
            before = token

    def read_prompt(self, ids: Sequence[int]) -> None:
        """Take in the tokens of the prompt; ``prompt`` is its text then, control tokens included."""
        self.learn(ids)
        if self._tokenizer:
            self.prompt = self._tokenizer.decode(ids, special=True)

    def of(self, token: int) -> str:
        """The text of an id as a reader would know it; bytes of an unfinished character by their numbers."""
        return self._texts.get(token, f"<{token}>")

    def special(self, token: int) -> bool:
        """Whether it is a control token, which no text shows."""
        return token in self._special

    def to_dict(self) -> dict[str, Any]:
        return {
            "vocabulary": {str(token): text for token, text in sorted(self._texts.items())},
            "special": sorted(self._special),
            "running": self.running,
            "prompt": self.prompt,
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> TokenTexts:
        """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for what ``to_dict`` did not write."""
        texts = cls()
        texts._texts = {int(token): text for token, text in record["vocabulary"].items()}
        texts._special = {int(token) for token in record["special"]}
        texts.running, texts.prompt = list(record["running"]), record.get("prompt")
        if not all(isinstance(text, str) for text in (*texts._texts.values(), *texts.running, texts.prompt or "")):
            raise ValueError("a token's text is no text")
        return texts

    @classmethod
    def of_steps(cls, steps: Iterable[StepEvent], tokenizer: Tokenizer | None) -> TokenTexts:
        """The texts of a whole generation."""
        texts = cls(tokenizer)
        texts.take(steps)
        texts.finish()
        return texts

    def _read(self, before: int, token: int) -> str:
        text = self._piece(before, token)
        if self._tokenizer is None:
            return text
        if not self._tokenizer.decode([token]) and self._tokenizer.decode([token], special=True):
            self._special.add(token)
        return (self._tokenizer.spell(token) or text) if _HALF in text else text

    def _run_on(self, token: int) -> str:
        if self._stream is None:
            return self._texts[token]
        return self._stream.push(token)
