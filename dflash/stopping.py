"""Where an output ends: stop ids, stop strings, the budget. Asked once a round, before anything is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dflash.tokenizer import Tokenizer
from dflash.types import FinishReason


def all_stop_ids(model: Iterable[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a text, sorted: the ``model``'s own, by its configuration, and its tokenizer's end token."""
    return tuple(sorted({*model, *(tokenizer.stop_token_ids if tokenizer else ())}))


class Stopper:
    """One request's end.

    ``stop_ids`` end the output and are part of it. ``budget`` is the number of tokens at most. ``found_stop`` is asked
    for every token and answers whether the text so far holds a stop string (None: there are no stop strings).
    """

    def __init__(self, stop_ids: Iterable[int], budget: int, found_stop: Callable[[int], bool] | None = None) -> None:
        self.stop_ids = frozenset(stop_ids)
        self.left = budget
        self.reason: FinishReason | None = None if budget else "length"
        self._found_stop = found_stop

    def cut(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The part of ``tokens`` that may be committed; sets ``reason`` where the output ends with it."""
        for count, token in enumerate(tokens, 1):
            self.left -= 1
            if token in self.stop_ids or (self._found_stop is not None and self._found_stop(token)):
                self.reason = "stop"
            elif self.left == 0:
                self.reason = "length"
            if self.reason:
                return tuple(tokens[:count])
        return tuple(tokens)
