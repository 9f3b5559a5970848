"""Engines and runs behind the page: which pair is in memory, what each visitor runs, how a run is stopped, and what a
failure leaves behind. Knows nothing of Gradio.

One engine is in memory at a time, and its device does one thing at a time: ``_device`` is held for every call into it
and let go between rounds, so that a run which was stopped in mid-round is over before another one begins.
"""

from __future__ import annotations

import gc
import logging
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dflash.backends import find_backend, installed_backends
from dflash.bench import seeded, warm_up
from dflash.comparison import Comparison
from dflash.engine import Engine
from dflash.errors import BackendError, DFlashError, ModelNotFoundError, UsageError
from dflash.generation import Generation
from dflash.loading import load
from dflash.registry import BUNDLED, PAIRS, find_local, resolve
from dflash.token_texts import TokenTexts
from dflash.trace import Trace, request_head
from dflash.types import GenerationResult, SamplingParams
from gradio_dflash.conditioning import look_inside
from gradio_dflash.race import ARMS, race_view
from gradio_dflash.view import Log, json_text, metrics_of, sentence

UPDATE_EVERY = 0.1  # seconds between two updates of a page, at least
STOPPED_RACE = "The race was stopped, so there is nothing to compare."
LONGEST = 4096  # new tokens that a visitor may ask for at once
_NO_MEMORY = (
    "out of memory",
    "not enough memory",
    "insufficient memory",
    "can't allocate memory",
    "unable to allocate",
    "bad_alloc",
)
KEPT = 100  # visitors whose last answer is remembered
T = TypeVar("T")
_log = logging.getLogger("gradio_dflash")


@dataclass(frozen=True)
class Request:
    """What a visitor asks for. ``block_size`` 0 and ``rule`` "auto" leave the choice to the drafter and the engine."""

    prompt: str
    pair: str = BUNDLED.name
    backend: str = "auto"
    block_size: int = 0
    rule: str = "auto"
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = 0
    max_new_tokens: int = 128

    def options(self) -> dict[str, Any]:
        """The options of ``Engine.stream``. Raises ``UsageError``."""
        if not 0 < self.max_new_tokens <= LONGEST:
            raise UsageError(f"the budget is {self.max_new_tokens}; it must be between 1 and {LONGEST} tokens")
        return {
            "max_new_tokens": self.max_new_tokens,
            "sampling": SamplingParams(self.temperature, top_p=self.top_p, seed=self.seed),
            "block_size": self.block_size or None,
            "verify": None if self.rule == "auto" else self.rule,
        }


@dataclass
class Run:
    """What runs, or ran last, for one visitor."""

    request: Request
    stop: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    log: Log = field(default_factory=Log)
    watch: Watch | None = None


@dataclass(frozen=True)
class Answer:
    """A visitor's last generation, for looking into it and for handing it on."""

    request: Request
    trace: Trace
    log: Log


class Watch:
    """A generation on its way into a log, and what is left of it when it has ended."""

    def __init__(self, log: Log, texts: TokenTexts, generation: Generation, head: dict[str, Any]) -> None:
        self.log, self.generation, self._head = log, generation, head
        self._texts, self._shown = texts, 0

    def take(self) -> None:
        """Write the steps that have come since the last time."""
        steps = self.generation.steps
        self._texts.take(steps[self._shown :])
        if self.generation.finish_reason != "cancelled":  # it has ended by itself
            self._texts.finish()
        self.log.steps(steps, self._shown, self._texts)
        self._shown = len(steps)

    def finish(self) -> Trace:
        """End the generation where it stands, and write the end of its log."""
        self.generation.close()
        result = _result(self.generation)
        self.take()
        self.log.figures(result.metrics)
        self.log.end(result.finish_reason, result.notes)
        self._texts.finish()
        self._texts.read_prompt(result.prompt_ids)
        return Trace.of(result, self._head, self._texts)


class Studio:
    """``models`` are options of ``dflash.load`` that hold for every pair (device, dtype …); ``named`` are pairs beside
    the registry's, by name, each with options of its own (target, draft); the first of all names is the default."""

    def __init__(
        self, models: Mapping[str, Any] | None = None, named: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self._models = dict(models or {})
        self._named = dict(named or {})
        self._device = threading.Lock()
        self._engine: Engine | None = None
        self._key: tuple[str, str] | None = None  # of the engine: pair and backend
        self._runs: dict[str, Run] = {}
        self._answers: dict[str, Answer] = {}

    # What there is to choose from ---------------------------------------------------------------------------------

    def pairs(self) -> list[str]:
        """Names of the pairs that are on this machine, the default first. The bundled one counts: it is fetched where
        it is not."""
        backends = installed_backends()
        here = [
            pair.name
            for pair in PAIRS
            if pair is BUNDLED or any(_is_here(pair.target_for(name), pair.draft) for name in backends)
        ]
        return list(dict.fromkeys((*self._named, *here)))

    def rules(self) -> list[str]:
        """What the engine in memory offers; before there is one, what its backend does. None without a backend."""
        try:
            return list((self._engine.backend if self._engine else find_backend()).rules)
        except BackendError:  # a saved trace can be looked at all the same
            return []

    def load(self, pair: str, backend: str = "auto") -> Engine:
        """The engine of a pair, kept for the next request. Raises ``DFlashError``."""
        key = self._wanted(pair, backend)
        with self._device:
            if self._key != key or self._engine is None:
                self._drop()
                self._engine, self._key = self._loaded(*key), key
            return self._engine

    # What a visitor may do ------------------------------------------------------------------------------------------

    def generate(self, request: Request, visitor: str) -> Generator[str]:
        """The log of a generation (see ``gradio_dflash.view``) as it grows, at most every ``UPDATE_EVERY`` seconds, and
        at its end. Raises ``DFlashError``, whose sentence is the log's last line then."""
        run = self._begin(request, visitor)

        def told(error: DFlashError) -> str:
            run.log.error(sentence(error))
            return run.log.text

        yield from self._guarded(run, visitor, self._generate(run, visitor), told)

    def race(self, request: Request, visitor: str) -> Generator[str]:
        """What happens in a race, as JSON, and at its end all of it (see ``gradio_dflash.race``). Raises
        ``DFlashError``."""
        run = self._begin(request, visitor)
        yield from self._guarded(run, visitor, self._race(run, visitor), _error)

    def conditioning(self, index: int, visitor: str) -> Generator[str]:
        """How round ``index`` of the visitor's last answer looks around, and what it drafts without conditioning, as
        JSON (see ``gradio_dflash.conditioning``). Raises ``DFlashError``."""
        answer = self._answers.get(visitor)
        if answer is None:
            raise UsageError("there is no answer yet to look into; generate one first")
        run = self._begin(answer.request, visitor)
        yield from self._guarded(run, visitor, self._look(run, answer, index), _error)

    def stop(self, visitor: str, patience: float = 60.0) -> str:
        """End what runs for the visitor at its next round, wait for that, and hand out the log as it ends."""
        run = self._runs.get(visitor)
        if run is None:
            return ""
        run.stop.set()
        # What has no end by now was cut off before there was a generation.
        if run.ended.wait(patience) and run.log.text and not run.log.ended:
            run.log.end("cancelled")
        answer = self._answers.get(visitor)  # a race or a look inside leaves it as it is
        return run.log.text or (answer.log.text if answer else "")

    def leave(self, visitor: str) -> None:
        """The visitor has closed the page: what runs for it ends at the next round, and is forgotten."""
        self._answers.pop(visitor, None)
        if run := self._runs.pop(visitor, None):
            run.stop.set()

    def answer(self, visitor: str) -> Answer | None:
        """The visitor's last generation."""
        return self._answers.get(visitor)

    # How it is done -------------------------------------------------------------------------------------------------

    def _begin(self, request: Request, visitor: str) -> Run:
        if before := self._runs.get(visitor):
            before.stop.set()
        run = Run(request)
        _keep(self._runs, visitor, run)
        return run

    def _finish(self, run: Run, visitor: str) -> None:
        """Sum up a generation that has ended; the run lets the engine go."""
        watch, run.watch = run.watch, None
        if watch is not None:
            trace = watch.finish()
            if visitor in self._runs:  # and has not left
                _keep(self._answers, visitor, Answer(run.request, trace, run.log))

    def _guarded(
        self, run: Run, visitor: str, updates: Iterator[str], told: Callable[[DFlashError], str]
    ) -> Generator[str]:
        """``updates``, and a failure as the last of them and as an error. They come from a frame of their own: it holds
        the engine, and goes with the failure."""
        try:
            yield from updates
        except Exception as error:
            run.watch = None
            failure = self._told(error)
            yield told(failure)
            raise failure from None
        finally:
            self._finish(run, visitor)  # where it was cut off
            run.ended.set()

    def _generate(self, run: Run, visitor: str) -> Iterator[str]:
        request, log = run.request, run.log
        options = request.options() | {"detail": True}
        for text in self._announce(request):
            log.status(text)
            yield log.text
        engine = self.load(request.pair, request.backend)
        head = request_head(engine, options)
        log.head(head, request.prompt, secrets.token_hex(4))
        with self._device:
            generation = engine.stream(request.prompt, **options)
        run.watch = watch = Watch(log, TokenTexts(engine.tokenizer), generation, head)
        yield log.text
        for _ in self._rounds(run, generation):
            watch.take()
            yield log.text
        self._finish(run, visitor)
        yield log.text

    def _race(self, run: Run, visitor: str) -> Iterator[str]:
        request = run.request
        options = request.options()
        options["sampling"] = seeded(options["sampling"])
        for text in self._announce(request):
            yield _state("running", text)
        engine = self.load(request.pair, request.backend)
        yield _state("running", "warming up: the first passes of a process pay for what later ones do not")
        with self._device:
            warm_up(engine, request.prompt, options)
        results: dict[str, GenerationResult] = {}
        for arm, label in ARMS.items():
            with self._device:
                generation = engine.stream(request.prompt, **options, speculate=arm == "dflash")
            for _ in self._rounds(run, generation):
                count = sum(len(step.committed) for step in generation.steps)
                yield _state("running", f"{label}: {count} of at most {request.max_new_tokens} tokens", arm=arm)
            if run.stop.is_set():
                yield _state("error", STOPPED_RACE)
                return
            results[arm] = _result(generation)
        compared = Comparison(results["dflash"], results["plain"], engine.target.info.dtype)
        answer = self._answers.get(visitor)
        if answer and answer.request == request:
            answer.log.figures(metrics_of(answer.trace), compared.speedup)
        yield json_text(race_view(compared, engine.tokenizer))

    def _look(self, run: Run, answer: Answer, index: int) -> Iterator[str]:
        for text in self._announce(answer.request):
            yield _state("running", text)
        engine = self.load(answer.request.pair, answer.request.backend)
        yield _state("running", "reading the text again, and drafting its rounds with and without conditioning")
        with self._device:
            look = look_inside(engine, answer.trace, index, run.stop.is_set)
        yield json_text(look)

    def _announce(self, request: Request) -> Iterator[str]:
        """A word before what takes a while: loading a pair."""
        pair, backend = key = self._wanted(request.pair, request.backend)
        if self._key != key:
            yield f"loading {pair} on {backend}"

    def _rounds(self, run: Run, generation: Generation) -> Iterator[None]:
        """Drive the generation to its end or to the visitor's stop; hands over now and then, not at every round."""
        due = time.monotonic()
        while not run.stop.is_set():
            with self._device:
                if next(generation, None) is None:
                    return
            if time.monotonic() >= due:
                yield
                due = time.monotonic() + UPDATE_EVERY

    def _wanted(self, pair: str, backend: str) -> tuple[str, str]:
        if backend == "auto":
            backend = self._models.get("backend", "auto")
        return pair, find_backend(backend).name

    def _loaded(self, name: str, backend: str) -> Engine:
        options = self._models | {"backend": backend}
        if name in self._named:
            return load(**{**options, **self._named[name]})
        pair = resolve(name)
        if pair is None:
            raise ModelNotFoundError(f"there is no pair {name!r} here; there are {', '.join(self.pairs())}")
        if pair is not BUNDLED and not _is_here(pair.target_for(backend), pair.draft):
            bring = f"dflash models --fetch {name} --backend {backend}"
            raise ModelNotFoundError(f"{name} is not on this machine for {backend}; `{bring}` brings it")
        return load(pair.name, **options)

    def _told(self, error: Exception) -> DFlashError:
        """What a visitor is told of a failure. Where memory ran out, the engine is let go, so that the next request
        finds room."""
        if isinstance(error, DFlashError):
            return error
        if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY):
            error.__traceback__ = None  # its frames hold what filled the memory
            with self._device:
                self._drop()
            return BackendError(
                "the memory is full; the request was given up and the models let go, and the next request loads them "
                "again. A shorter prompt, a smaller budget or a smaller block needs less"
            )
        _log.error("a request failed", exc_info=error)
        return BackendError(f"something went wrong ({type(error).__name__}: {error}); the server's log has the details")

    def _drop(self) -> None:
        self._engine, self._key = None, None
        gc.collect()


def _is_here(target: str, draft: str) -> bool:
    return find_local(target, what="target") is not None and find_local(draft, what="draft") is not None


def _keep(store: dict[str, T], visitor: str, value: T) -> None:
    """As the newest; the oldest goes where there are too many, of visitors who never said that they left."""
    store.pop(visitor, None)
    store[visitor] = value
    if len(store) > KEPT:
        del store[next(iter(store))]


def _result(generation: Generation) -> GenerationResult:
    """What it warns of stands in its notes too, which the page shows."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return generation.result()


def _error(error: DFlashError) -> str:
    return _state("error", sentence(error))


def _state(state: str, text: str, **more: Any) -> str:
    return json_text({"state": state, "text": text, **more})
