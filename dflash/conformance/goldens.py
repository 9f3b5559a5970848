"""Golden traces: what the reference says of every case, stored so that no backend is held to a moving oracle.

    python -m dflash.conformance.goldens            hold the stored traces to the reference
    python -m dflash.conformance.goldens --write    store them anew

A trace is one request. Its rounds follow the engine: propose, verify, keep, observe. The first and the last verify the
drafter's own block; the others a block of the target's own next tokens that goes wrong at one slot, another one each
time, so that accepted lengths cover their whole range.

Shapes: n prompt tokens, N output tokens, R rounds, B block size, L target layers, D draft layers, K taps, s samples.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from dflash.conformance.cases import CASES, TOLERANCES, Case
from dflash.conformance.checkpoints import random_ids
from dflash.conformance.reference import Reference, choose
from dflash.types import SamplingParams
from dflash.uniforms import Uniforms

FOLDER = Path(__file__).with_name("traces")
OUTPUT = 40
"""Tokens of the output that an engine must reproduce."""
_STEP, _SAMPLES = 11, 384


@dataclass(frozen=True)
class Golden:
    """One case's trace. ``clear`` says how clear each choice is (``reference.choose``): of a verdict, the least clear
    row that it rests on."""

    prompt: np.ndarray  # [n] ids
    target_layers: np.ndarray  # [L, s] each decoder layer's output over the prompt
    context: np.ndarray  # [s] the prompt's features, projected
    first_logits: np.ndarray  # [s] the target's logits after the prompt
    output: np.ndarray  # [N] ids: the target's own continuation
    output_clear: np.ndarray  # [N]
    anchors: np.ndarray  # [R] ids
    draft_layers: np.ndarray  # [R, D, s] the block behind each draft layer
    draft_logits: np.ndarray  # [R, s]
    proposals: np.ndarray  # [R, B−1] ids: what the drafter proposes
    proposals_clear: np.ndarray  # [R, B−1]
    verified: np.ndarray  # [R, B−1] ids: what the target verifies, the proposal or a scripted block
    features: np.ndarray  # [R, K, s] each tap over the verified block
    target_logits: np.ndarray  # [R, s] the logits after each of the block's tokens
    accepted: np.ndarray  # [R]
    next_tokens: np.ndarray  # [R] ids
    verdicts_clear: np.ndarray  # [R]


def sample(array: np.ndarray) -> np.ndarray:
    """Every 11th number of an array [rows, width], in float32; of a large one about 384 in all. The step is odd, so it
    meets other channels in every row."""
    flat = np.asarray(array, np.float32).reshape(-1)
    return flat[:: max(_STEP, flat.size // _SAMPLES) | 1]


def script(output: Sequence[int], case: Case, wrong: int) -> list[int]:
    """The tokens of a block whose slot ``wrong`` (from 0; ``case.count``: none) differs from what the target itself
    says from there on, ``output``; behind it they are right again."""
    tokens = list(output[: case.count])
    if wrong < len(tokens):
        tokens[wrong] = (tokens[wrong] + 1) % case.vocab
    return tokens


def wrong_slots(count: int) -> list[int]:
    """Where scripted blocks of ``count`` tokens go wrong, long and short ones in turns."""
    slots = list(range(count + 1)) if count < 8 else [0, 1, count // 2, count - 1, count]
    return [slots.pop(0 if turn % 2 else -1) for turn in range(len(slots))]


def trace(case: Case) -> Golden:
    """What the reference says of ``case``. Raises ``ValueError`` where its choices are not clear enough."""
    reference, prompt = Reference(case), random_ids(case, case.prompt)
    turns: list[int | None] = [None, *wrong_slots(case.count), None]
    length = max(OUTPUT, sum(1 + (wrong or 0) for wrong in turns) + 2 * case.block)
    uniforms = Uniforms(case.sampling.seed or 0).range(0, length)
    output, output_clear = _continue(reference, prompt, uniforms)
    states, logits = reference.target(prompt)
    rounds, done = [], 1
    for wrong in turns:
        rounds.append(_round(reference, prompt, output, done, uniforms, wrong))
        done += 1 + int(rounds[-1]["accepted"])
    golden = Golden(
        prompt=np.array(prompt, np.int32),
        target_layers=np.stack([sample(state) for state in states]),
        context=sample(reference.context(_features(case, states))),
        first_logits=sample(logits[-1:]),
        output=np.array(output, np.int32),
        output_clear=np.array(output_clear, np.float32),
        **{name: np.stack([entry[name] for entry in rounds]) for name in rounds[0]},
    )
    _check(case, golden)
    return golden


def _continue(reference: Reference, prompt: list[int], uniforms: np.ndarray) -> tuple[list[int], list[float]]:
    """The target's own tokens after ``prompt``, one for each of ``uniforms``, and how clear each is."""
    output: list[int] = []
    clears: list[float] = []
    for uniform in uniforms:
        _, logits = reference.target(prompt + output)
        token, clear = choose(logits[-1], reference.case.sampling, uniform)
        output.append(token)
        clears.append(clear)
    return output, clears


def _round(
    reference: Reference, prompt: list[int], output: list[int], done: int, uniforms: np.ndarray, wrong: int | None
) -> dict[str, np.ndarray]:
    """The round whose anchor is the last of the first ``done`` tokens of ``output``, by names of ``Golden``'s fields;
    ``wrong`` None verifies the drafter's own block."""
    case, anchor, committed = reference.case, output[done - 1], prompt + output[: done - 1]
    states, _ = reference.target(committed)
    layers, draft_logits = reference.draft(reference.context(_features(case, states)), anchor, case.count)
    proposed = [choose(row, SamplingParams(), 0) for row in draft_logits]
    block = [token for token, _ in proposed] if wrong is None else script(output[done:], case, wrong)
    states, logits = reference.target([*committed, anchor, *block])
    rows = logits[len(committed) :]
    chosen = [choose(row, case.sampling, uniform) for row, uniform in zip(rows, uniforms[done:], strict=False)]
    accepted = next((slot for slot, token in enumerate(block) if token != chosen[slot][0]), case.count)
    return {
        "anchors": np.array(anchor, np.int32),
        "draft_layers": np.stack([sample(state) for state in layers]),
        "draft_logits": sample(draft_logits),
        "proposals": np.array([token for token, _ in proposed], np.int32),
        "proposals_clear": np.array([clear for _, clear in proposed], np.float32),
        "verified": np.array(block, np.int32),
        "features": np.stack([sample(states[tap][len(committed) :]) for tap in case.taps]),
        "target_logits": sample(rows),
        "accepted": np.array(accepted, np.int32),
        "next_tokens": np.array(chosen[accepted][0], np.int32),
        "verdicts_clear": np.array(min(clear for _, clear in chosen[: accepted + 1]), np.float32),
    }


def _features(case: Case, states: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([states[tap] for tap in case.taps], axis=-1)


def _check(case: Case, golden: Golden) -> None:
    exact = case.dtype == "float32"  # of a 16-bit verdict, every row it rests on would have to be clear
    for what, needed in (("output", 0.5), ("proposals", 0.5), ("verdicts", 0.25)):
        share = float((getattr(golden, what + "_clear") > TOLERANCES[case.dtype]).mean())
        if share < (1.0 if exact else needed):
            raise ValueError(f"{case.name}: {share:.0%} of {what} are clear in {case.dtype}; another seed may do")
    if len(np.unique(golden.output[:OUTPUT])) < min(8, case.vocab // 4) or len(np.unique(golden.proposals)) < 3:
        raise ValueError(f"{case.name}: output or proposals repeat themselves; another seed may do")


def read(name: str) -> Golden:
    """The stored trace of a case."""
    with gzip.open(FOLDER / f"{name}.npy.gz") as stream:
        return Golden(*(np.load(stream, allow_pickle=False) for _ in fields(Golden)))


def write(name: str, golden: Golden) -> None:
    """The fields one behind the other, as numpy stores arrays. The same golden gives the same bytes."""
    plain = io.BytesIO()
    for field in fields(Golden):
        np.save(plain, getattr(golden, field.name), allow_pickle=False)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.npy.gz").write_bytes(gzip.compress(plain.getvalue(), 9, mtime=0))


def differences(stored: Golden, fresh: Golden) -> Iterator[str]:
    """Names of the fields in which two traces differ by more than float32 rounds."""
    for field in fields(Golden):
        ours, theirs = getattr(stored, field.name), getattr(fresh, field.name)
        whole = ours.dtype.kind == "i"
        if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=0, atol=0 if whole else 1e-6):
            yield field.name


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dflash.conformance.goldens", description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the traces anew")
    args = parser.parse_args()
    failed = 0
    if args.write:
        for file in FOLDER.glob("*.npy.gz"):
            file.unlink()
    for case in CASES:
        golden = trace(case)
        if args.write:
            write(case.name, golden)
        elif differing := list(differences(read(case.name), golden)):
            failed += 1
            print(f"{case.name}: {', '.join(differing)} differ from what the reference says", file=sys.stderr)
    print(f"{len(CASES)} traces, {'written' if args.write else f'{failed} of them stale'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
