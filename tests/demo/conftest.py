"""Shared by the tests of the demo: nothing is reported to anyone, and one small pair on disk serves them all."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import pytest

if TYPE_CHECKING:
    from gradio_dflash.studio import Studio

    from dflash.engine import Engine

Models = dict[str, str]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """``target`` and ``draft`` of the pair that recites ``demo_pairs.TEXTS``, as options of ``dflash.load``."""
    pytest.importorskip("torch")
    from demo_pairs import write_pair

    target, draft = write_pair(tmp_path_factory.mktemp("reciting"))
    return {"target": str(target), "draft": str(draft)}


@pytest.fixture(scope="session")
def engine(models: Models) -> Engine:
    """The reciting pair by itself: what a page must show is what it says."""
    import dflash

    return dflash.load(**models, backend="torch", device="cpu")


@cache
def _found(name: str = "auto") -> Any:
    from dflash.backends import find_backend

    return find_backend(name)


@pytest.fixture(scope="session")
def loaded() -> dict[str, Engine]:
    """Engines by their target's folder, each loaded once."""
    return {}


@pytest.fixture
def make_studio(models: Models, loaded: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Studio]:
    """A studio whose default pair is the reciting one, beside others by name. It loads what was loaded before; tests
    that need engines of their own put ``dflash.load`` back."""
    from gradio_dflash import studio
    from gradio_dflash.studio import Studio

    import dflash

    def load(*names: str, **options: Any) -> Engine:
        target = options.get("target", "")
        if target not in loaded:
            loaded[target] = dflash.load(*names, **options)
        return loaded[target]

    monkeypatch.setattr(studio, "load", load)
    monkeypatch.setattr(studio, "find_backend", _found)  # looking through what is installed takes its time

    def make(**others: dict[str, str]) -> Studio:
        return Studio({"device": "cpu", "backend": "torch"}, {"reciting": models, **others})

    return make


@pytest.fixture(scope="session")
def other_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Another pair, which recites something else whatever it is asked."""
    pytest.importorskip("torch")
    from demo_pairs import write_pair

    target, draft = write_pair(Path(tmp_path_factory.mktemp("other")), {"?": "Another pair, another text."}, block=4)
    return {"target": str(target), "draft": str(draft)}
