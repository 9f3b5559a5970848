"""The engine's tests run on every backend: one engine, one contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_cases import LENGTH, PROMPT
from tiny_models import ScriptedDrafter, TinyPair


@pytest.fixture(scope="session", params=["torch", "mlx"])
def pair(request: pytest.FixtureRequest, tiny: TinyPair) -> TinyPair:
    """The tiny pair on each backend, with the same weights."""
    if request.param == "torch":
        return tiny
    pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)
    from tiny_mlx import MlxPair

    return MlxPair()


@pytest.fixture(scope="session")
def oracle(tiny: TinyPair) -> list[int]:
    """What the tiny target writes after ``PROMPT``; the same on every backend."""
    return tiny.oracle(PROMPT, LENGTH)


@pytest.fixture
def scripted(pair: TinyPair, oracle: list[int]) -> Callable[..., ScriptedDrafter]:
    """S(n) for ``PROMPT``."""
    return lambda *wrong_at: ScriptedDrafter(pair, PROMPT + oracle, wrong_at)
