"""A backend held to the golden traces, through ``dflash.interfaces`` alone.

Each case loads its pair twice: with every target layer tapped, to see where the target departs; and as the engine does,
with the drafter's taps, to follow the trace round by round. Then an engine generates its output. Arrays are compared in
the order in which they come about, so the first one beyond the tolerance names the layer at fault.
"""

from __future__ import annotations

import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash.checkpoint import DraftConfig, check_weights
from dflash.conformance.cases import CASES, MAX_POSITIONS, STOP_ID, TOLERANCES, Case
from dflash.conformance.checkpoints import write_pair
from dflash.conformance.goldens import OUTPUT, Golden, read, sample, script, wrong_slots
from dflash.engine import Engine
from dflash.errors import BackendError
from dflash.interfaces import Backend, Drafter, Target, Verifier
from dflash.types import Array, Proposal, SamplingParams

PLAIN = 12
"""Tokens generated without the drafter, on the same engine after it was used with one."""


@dataclass
class Tally:
    """How many choices were the golden's, of how many that are clear enough in the case's number format; ``unclear``
    ones were not compared."""

    agreed: int = 0
    compared: int = 0
    unclear: int = 0


@dataclass
class Result:
    """What came of a case. ``drift`` maps every array, in the order in which they come about, to its largest difference
    from the golden relative to the golden's largest number; ``fault`` says what went wrong first, None where nothing
    did; ``error`` is what the backend raised."""

    case: Case
    device: str = ""
    drift: dict[str, float] = field(default_factory=dict)
    proposals: Tally = field(default_factory=Tally)
    verdicts: Tally = field(default_factory=Tally)
    output: Tally = field(default_factory=Tally)
    fault: str | None = None
    error: Exception | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.fault is None

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.case.dtype]

    @property
    def worst(self) -> float:
        """The largest drift; NaN where there is one."""
        return float(np.max(list(self.drift.values()), initial=0.0))

    def report(self) -> list[str]:
        """The fault, and the drift layer by layer: what a bug report needs."""
        lines = [f"{self.case.name}: {self.fault or 'ok'}"]
        for what, drift in self.drift.items():
            lines.append(f"  {what:<24} {drift:.1e}" + ("" if drift <= self.tolerance else "  ← beyond"))
        for what in ("proposals", "verdicts", "output"):
            tally: Tally = getattr(self, what)
            lines.append(f"  {what:<24} {tally.agreed} of {tally.compared} agree, {tally.unclear} too close to compare")
        return lines

    # What the comparison notes ----------------------------------------------------------------------------------

    def fail(self, fault: str) -> None:
        self.fault = self.fault or fault

    def same(self, what: str, ours: Any, golden: Any) -> None:
        if ours != golden:
            self.fail(f"{what} is {ours!r}, not {golden!r}")

    def array(self, what: str, where: str, ours: np.ndarray, golden: np.ndarray) -> None:
        """Note the drift of ``what``; ``golden`` holds samples of it."""
        ours = sample(ours)
        if ours.shape != golden.shape:
            self.fail(f"{what} has {ours.size} samples {where}, not {golden.size}: its shape is wrong")
            return
        drift = float(np.abs(ours - golden).max() / np.abs(golden).max())
        self.drift[what] = float(np.maximum(drift, self.drift.get(what, 0.0)))  # keeps a NaN
        if not drift <= self.tolerance:
            self.fail(f"{what} is off by {drift:.1e} {where}, beyond {self.tolerance:g}")

    def choices(self, what: str, where: str, ours: Sequence[Any], golden: Sequence[Any], clear: np.ndarray) -> None:
        """Count the choices that agree, of those that are clear."""
        tally: Tally = getattr(self, what)
        for place, (one, other, by) in enumerate(zip(ours, golden, clear, strict=True)):
            if not by > self.tolerance:
                tally.unclear += 1
                continue
            tally.compared += 1
            tally.agreed += one == other
            if one != other:
                self.fail(f"{what} {where}: {one} at place {place}, not {other}")


def run(backend: Backend, cases: Sequence[Case] = CASES, *, device: str = "auto") -> Iterator[Result]:
    """The result of each case, as it comes. Raises ``BackendError`` where the backend cannot load the first target on
    ``device``: it could load none."""
    for index, case in enumerate(cases):
        result = run_case(backend, case, device=device)
        if index == 0 and not result.device and isinstance(result.error, BackendError):
            raise result.error
        yield result


def run_case(backend: Backend, case: Case, *, device: str = "auto") -> Result:
    """One case from its files on. Whatever the backend raises is the result's ``fault``."""
    result, begun = Result(case), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dflash-conformance-") as folder:
        target, draft = write_pair(case, Path(folder))
        pair = _Pair(backend, case, read(case.name), target, draft, device)
        try:
            backend.run(lambda: pair.compare(result))
        except Exception as error:  # a backend under test may raise anything, and the other cases are to be run
            result.error = error
            result.fail(f"{type(error).__name__}: {error}")
    result.seconds = time.perf_counter() - begun
    return result


@dataclass
class _Pair:
    backend: Backend
    case: Case
    golden: Golden
    target_folder: Path
    draft_folder: Path
    device: str

    def compare(self, result: Result) -> None:
        """Everything of the case, on the thread that owns the device."""
        case, golden = self.case, self.golden
        self._target_layers(result)
        config = DraftConfig.load(self.draft_folder)
        check_weights(self.draft_folder, config)
        target = self._load(case.taps)
        drafter = self.backend.load_drafter(self.draft_folder, config, target)
        self._trace(result, target, drafter)
        scripted: Any = _Scripted(self, drafter, target)
        engine = Engine(self.backend, target, scripted, prefill_chunk=self._chunk, check=True)
        for where, count, speculate in (("", OUTPUT, True), (" without a drafter", PLAIN, False)):
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of nothing accepted
                generated = engine.generate(
                    golden.prompt.tolist(),
                    max_new_tokens=count,
                    sampling=case.sampling,
                    ignore_eos=True,
                    speculate=speculate,
                )
            self._output(result, where, generated.token_ids, count)

    @property
    def _chunk(self) -> int:
        return self.case.chunk or len(self.golden.prompt)

    def _load(self, layers: Sequence[int]) -> Target:
        return self.backend.load_target(
            self.target_folder, device=self.device, dtype=self.case.dtype, layer_ids=tuple(layers)
        )

    def _prefill(self, target: Target, observe: Callable[[Array, int], None]) -> tuple[Array, np.ndarray]:
        """The prompt in chunks, as the engine feeds it: the last chunk's output, and all features [n, K*H]."""
        prompt, features = self.golden.prompt.tolist(), []
        for start in range(0, len(prompt), self._chunk):
            chunk = prompt[start : start + self._chunk]
            output = target.forward(chunk, last_only=True)
            target.keep(range(len(chunk)))
            observe(output.features, len(chunk))
            features.append(self.backend.numpy(output.features))
        return output, np.concatenate(features)

    def _target_layers(self, result: Result) -> None:
        case, golden = self.case, self.golden
        target = self._load(range(case.layers))
        info = target.info
        result.device = info.device
        for what, ours, stated in (
            ("the target's number of layers", info.num_layers, case.layers),
            ("the target's hidden size", info.hidden_size, case.hidden),
            ("the target's vocabulary", info.vocab_size, case.vocab),
            ("the target's longest context", info.max_positions, MAX_POSITIONS),
            ("the target's stop ids", tuple(info.stop_token_ids), (STOP_ID,)),
            ("the target's dtype", info.dtype, case.dtype),
        ):
            result.same(what, ours, stated)
        output, features = self._prefill(target, lambda *_: None)
        for layer, state in enumerate(np.split(features, case.layers, axis=-1)):
            result.array(f"target layer {layer}", "in the prefill", state, golden.target_layers[layer])
        result.array("first logits", "after the prompt", self.backend.numpy(output.logits), golden.first_logits)

    def _trace(self, result: Result, target: Target, drafter: Drafter) -> None:
        case, golden, numpy = self.case, self.golden, self.backend.numpy
        rule = "greedy" if case.sampling.greedy else "match"
        verifier = self.backend.verifier(rule, case.sampling, target)
        contexts: list[np.ndarray] = []

        def observe(features: Array, count: int) -> None:
            contexts.append(numpy(drafter.projection(features)))
            drafter.observe(features, count)

        output, features = self._prefill(target, observe)
        self._taps(result, "in the prefill", features, golden.target_layers[list(case.taps)])
        result.array("context", "in the prefill", np.concatenate(contexts), golden.context)
        first = verifier.verify(self.backend.proposal([int(golden.prompt[-1])], target), output)
        wanted = golden.output[:1].tolist()
        result.choices("verdicts", "after the prompt", [first.next_token], wanted, golden.output_clear[:1])
        for index in range(len(golden.anchors)):
            self._round(result, index, target, drafter, verifier)

    def _round(self, result: Result, index: int, target: Target, drafter: Drafter, verifier: Verifier) -> None:
        case, golden, numpy, where = self.case, self.golden, self.backend.numpy, f"in round {index}"
        anchor = int(golden.anchors[index])
        for layer, state in enumerate(drafter.layer_states(anchor, case.count)):
            result.array(f"draft layer {layer}", where, numpy(state), golden.draft_layers[index, layer])
        result.array("draft logits", where, numpy(drafter.logits(anchor, case.count)), golden.draft_logits[index])
        proposal = drafter.propose(anchor, case.count, case.sampling)
        proposed, wanted = numpy(proposal.tokens).tolist(), golden.verified[index].tolist()
        result.choices("proposals", where, proposed, golden.proposals[index].tolist(), golden.proposals_clear[index])
        if proposed != wanted:
            proposal = self.backend.proposal([anchor, *wanted], target)
        output = target.forward(proposal.block)
        verdict = verifier.verify(proposal, output)
        self._taps(result, where, numpy(output.features), golden.features[index])
        result.array("target logits", where, numpy(output.logits), golden.target_logits[index])
        result.same(f"what was verified {where}", list(verdict.drafted), wanted)
        accepted, next_token = int(golden.accepted[index]), int(golden.next_tokens[index])
        result.choices(
            "verdicts",
            where,
            [(verdict.accepted, verdict.next_token, verdict.kind)],
            [(accepted, next_token, "bonus" if accepted == case.count else "correction")],
            golden.verdicts_clear[index : index + 1],
        )
        target.keep(range(1 + accepted))
        drafter.observe(output.features, 1 + accepted)
        committed = len(golden.prompt) + int((1 + golden.accepted[: index + 1]).sum())
        result.same(f"the length of target and context {where}", (target.length, drafter.length), (committed,) * 2)

    def _taps(self, result: Result, where: str, features: np.ndarray, goldens: np.ndarray) -> None:
        for tap, state, golden in zip(self.case.taps, np.split(features, len(goldens), axis=-1), goldens, strict=True):
            result.array(f"tap of target layer {tap}", where, state, golden)

    def _output(self, result: Result, where: str, tokens: list[int], count: int) -> None:
        """An engine's output against the golden's, up to where they part if the choice there is no clear one."""
        golden, clear = self.golden.output[:count].tolist(), self.golden.output_clear[:count]
        result.same(f"the output's length{where}", len(tokens), count)
        parted = next((at for at, pair in enumerate(zip(tokens, golden, strict=False)) if pair[0] != pair[1]), count)
        until = min(parted + 1, len(tokens), count)
        result.choices("output", f"of the engine{where}", tokens[:until], golden[:until], clear[:until])


class _Scripted:
    """The drafter of a pair, every second of whose proposals gives way to a scripted one, so that an engine meets
    blocks of which any number is accepted."""

    def __init__(self, pair: _Pair, drafter: Drafter, target: Target) -> None:
        self._pair, self._drafter, self._target = pair, drafter, target
        self.config, self.projection = drafter.config, drafter.projection
        self.observe, self.logits, self.layer_states = drafter.observe, drafter.logits, drafter.layer_states
        self.reset()

    @property
    def length(self) -> int:
        return self._drafter.length

    def reset(self) -> None:
        self._drafter.reset()
        slots = wrong_slots(self._pair.case.count)
        self._turns = itertools.cycle(turn for slot in slots for turn in (None, slot))

    def propose(self, anchor: int, count: int, sampling: SamplingParams, *, detail: bool = False) -> Proposal:
        proposal = self._drafter.propose(anchor, count, sampling, detail=detail)
        golden, wrong = self._pair.golden, next(self._turns)
        done = self.length - len(golden.prompt) + 1  # of the output, the anchor included
        rest = golden.output[done : done + count].tolist()
        if wrong is None or len(rest) < count:
            return proposal
        return self._pair.backend.proposal([anchor, *script(rest, self._pair.case, wrong)], self._target)
