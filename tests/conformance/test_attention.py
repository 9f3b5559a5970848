"""Where a drafter says it looks, against the reference's attention, on every backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash.backends import find_backend
from dflash.checkpoint import DraftConfig
from dflash.conformance.cases import CASES, Case
from dflash.conformance.checkpoints import write_pair
from dflash.conformance.reference import Reference
from dflash.errors import BackendError
from dflash.interfaces import Backend, Drafter

CLOSE = {"float32": 1e-5, "float16": 1.5e-3, "bfloat16": 1.5e-2}  # measured on CPUs: 2.1e-6, 4.1e-4 and 5.0e-3
CHOSEN = [
    case
    for case in CASES
    if case.name.startswith(("draft-", "sliding", "full-causal", "block-", "float16", "bfloat16", "taps-all"))
]
LENGTHS = (1, 37)


@pytest.fixture(scope="module", params=["torch", "mlx"])
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return find_backend(request.param)
    except BackendError as error:
        pytest.skip(str(error))


def array_of(backend: Backend) -> Callable[[np.ndarray], Any]:
    """What makes ``backend``'s own arrays."""
    if backend.name == "torch":
        return torch.from_numpy
    import mlx.core as mx

    return mx.array


def load(backend: Backend, case: Case, folder: Path) -> Drafter:
    target_folder, draft_folder = write_pair(case, folder)
    target = backend.load_target(target_folder, device="cpu", dtype=case.dtype, layer_ids=case.taps)
    return backend.load_drafter(draft_folder, DraftConfig.load(draft_folder), target)


def forbidden(case: Case, length: int, count: int) -> np.ndarray:
    """Which rows of a block must not look where, bool [L, 1 + count, length + 1 + count]; pair by pair."""
    total = length + 1 + count
    layers = zip(case.causality, case.windows, strict=True)
    return np.array(
        [
            [
                [(causal and key > row) or (window is not None and abs(row - key) >= window) for key in range(total)]
                for row in range(length, total)
            ]
            for causal, window in layers
        ]
    )


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_weights_are_those_of_the_reference(backend: Backend, case: Case, tmp_path: Path) -> None:
    """Contexts short and long, blocks of one slot, of the drafter's own size, and of more than it was made for."""
    reference, make = Reference(case), array_of(backend)
    features = np.random.default_rng(case.seed).normal(size=(max(LENGTHS), len(case.taps) * case.hidden))
    drafter = backend.run(lambda: load(backend, case, tmp_path))
    for length, count in itertools.product(LENGTHS, (1, case.count, case.block + 3)):
        known = features[:length].astype(np.float32)

        def look(known: np.ndarray = known, count: int = count) -> tuple[list[np.ndarray], int]:
            drafter.reset()
            drafter.observe(make(known), len(known))
            return [backend.numpy(weights) for weights in drafter.attention(5, count)], drafter.length

        layers, length_after = backend.run(look)
        assert length_after == length and len(layers) == case.draft_layers
        weights = np.stack(layers)
        assert weights.dtype == np.float32 and weights.shape[1:] == (1 + count, length + 1 + count)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
        unseen = forbidden(case, length, count)
        assert (weights[unseen] == 0).all() and (weights[~unseen] > 0).all()
        expected = np.stack(reference.attention(reference.context(known.astype(np.float64)), 5, count))
        assert np.abs(weights - expected).max() < CLOSE[case.dtype], (length, count)


def test_the_cases_have_every_kind_of_layer_and_look_anything_but_evenly() -> None:
    """Otherwise weights that ignore a setting, or the queries, would pass."""
    kinds = {
        (causal, window is not None)
        for case in CHOSEN
        for causal, window in zip(case.causality, case.windows, strict=True)
    }
    assert kinds == set(itertools.product((False, True), repeat=2))
    assert {case.draft_heads.queries // case.draft_heads.keys for case in CHOSEN} == {1, 2, 4}
    assert {case.dtype for case in CHOSEN} == set(CLOSE)
    for case in CHOSEN:
        reference = Reference(case)
        features = np.random.default_rng(case.seed).normal(size=(37, len(case.taps) * case.hidden))
        for weights in reference.attention(reference.context(features), 5, case.count):
            assert weights.max() > 2 * weights.mean() and np.abs(weights[0] - weights[-1]).max() > 3e-3
