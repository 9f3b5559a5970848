"""Text around the engine's ids: what a request is, the stream a caller reads, the result it ends in."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dflash.detokenizer import TextStream
from dflash.metrics import Metrics
from dflash.stopping import Stopper
from dflash.types import FinishReason, GenerationResult, StepEvent

SILENT_ROUNDS = 32  # this many rounds without one accepted token are no bad luck


class OnDevice(Iterator[StepEvent]):
    """``steps``, each made through ``run``: on the thread that may use the device, whoever asks for it."""

    def __init__(self, steps: Generator[StepEvent], run: Callable[[Callable[[], Any]], Any]) -> None:
        self._steps, self._run = steps, run

    def __next__(self) -> StepEvent:
        event: StepEvent = self._run(self._steps.__next__)
        return event

    def close(self) -> None:
        self._run(self._steps.close)


class Generation(Iterator[StepEvent]):
    """A running generation: iterate for its steps, each with the text it made certain; then ask for ``result()``.

    ``close()`` ends it at the round boundary where it stands (``finish_reason`` is ``"cancelled"``), and leaves the
    engine ready for the next request. Leaving a ``with`` block closes too."""

    def __init__(
        self,
        steps: Iterator[StepEvent],
        *,
        prompt_ids: Sequence[int],
        stopper: Stopper,
        text: TextStream | None,
        notes: list[str],
        peak_memory: Callable[[], int],
    ) -> None:
        self._inner, self._stopper, self._text, self.notes = steps, stopper, text, notes
        self._prompt_ids, self._peak_memory = list(prompt_ids), peak_memory
        self._seconds = 0.0  # spent here; what a reader does between steps is not the generation's time
        self._ttft: float | None = None
        self._ended = False
        self._result: GenerationResult | None = None
        self._broken = False
        self.steps: list[StepEvent] = []
        self.pieces: list[str] = []

    def __next__(self) -> StepEvent:
        if self._ended:
            raise StopIteration
        entered = time.perf_counter()
        try:
            event = next(self._inner)
        except StopIteration:
            self._ended = True
            raise
        except BaseException:  # the stopper and the text may be ahead of the steps by a round that never ended
            self._broken, self._text = True, None
            self.close()
            raise
        finally:
            self._seconds += time.perf_counter() - entered
        if self._ttft is None:
            self._ttft = self._seconds
        piece = self._text.take(last=self._stopper.reason is not None) if self._text else ""
        event = replace(event, text=piece)
        self.steps.append(event)
        self.pieces.append(piece)
        return event

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End at this round boundary; harmless when the generation has already ended."""
        self._ended = True
        closing = getattr(self._inner, "close", None)
        if closing is not None:
            with contextlib.suppress(ValueError):  # it is in mid-round, on another thread or under a signal: its last
                closing()

    @property
    def finish_reason(self) -> FinishReason:
        return "cancelled" if self._broken else self._stopper.reason or "cancelled"

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def result(self) -> GenerationResult:
        """Drain what is left and sum up. After ``close()`` or an interruption: what there is."""
        for _ in self:
            pass
        if self._result is None:
            self._result = self._sum_up()
        return self._result

    def _sum_up(self) -> GenerationResult:
        if self._text and self._stopper.reason is None:  # cancelled: nothing more can complete a stop string
            self.pieces.append(self._text.take(last=True))
        metrics = Metrics.from_steps(
            self.steps,
            num_prompt_tokens=len(self._prompt_ids),
            ttft=self._ttft,
            total_seconds=self._seconds,
            peak_memory=self._peak_memory(),
        )
        if metrics.num_spec_steps >= SILENT_ROUNDS and not metrics.num_accepted_draft_tokens:
            note = (
                f"none of {metrics.num_draft_tokens} drafted tokens was accepted in {metrics.num_spec_steps} rounds; "
                "the drafter does not fit this target, template or number format (dflash doctor says more)"
            )
            self.notes.append(note)
            warnings.warn(note, RuntimeWarning, stacklevel=3)
        return GenerationResult(
            token_ids=[token for step in self.steps for token in step.committed],
            text=self.text,
            finish_reason=self.finish_reason,
            steps=self.steps,
            metrics=metrics,
            prompt_ids=self._prompt_ids,
            notes=tuple(self.notes),
        )
