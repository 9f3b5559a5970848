"""``dflash models``: the pairs of both backends, what of them is here, and fetching them from a hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import command
from fake_hub import FakeHub, serve_client

from dflash import backends, hub
from dflash.cli import models
from dflash.errors import ModelNotFoundError
from dflash.registry import PAIRS

MODEL = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with Qwen3-8B for both backends and its drafter, and nothing on this machine."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    with FakeHub() as server:
        for repo in ("Qwen/Qwen3-8B", "mlx-community/Qwen3-8B-bf16", "z-lab/Qwen3-8B-DFlash-b16", "someone/else"):
            server.add(repo, MODEL)
        serve_client(server.url, tmp_path / "hub", monkeypatch)
        yield server


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that are only a name."""

    class Backend:
        def __init__(self, name: str) -> None:
            self.name = "torch" if name == "auto" else name

    monkeypatch.setattr(backends, "find_backend", Backend)


def row(capsys: Any, name: str = "qwen3-8b") -> dict[str, Any]:
    (line,) = capsys.readouterr().out.splitlines()
    return next(row for row in json.loads(line) if row["name"] == name)


def fetched(server: FakeHub) -> list[str]:
    return [path.removesuffix("/model.safetensors").split("/resolve/")[0][1:]
            for method, path, _ in server.asked if method == "GET" and path.endswith("/model.safetensors")]  # fmt: skip


def test_every_pair_is_listed_for_both_backends(server: FakeHub, capsys: Any) -> None:
    assert command(models, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [pair.name for pair in PAIRS]
    assert rows[2] == {
        "name": "qwen3-8b",
        "target": {"torch": "Qwen/Qwen3-8B", "mlx": "mlx-community/Qwen3-8B-bf16"},
        "draft": "z-lab/Qwen3-8B-DFlash-b16",
        "ready": {"torch": False, "mlx": False},
    }
    assert command(models) == 0
    shown = capsys.readouterr().out
    assert "on MLX  mlx-community/Qwen3-8B-bf16 (or …-8bit, …-4bit)" in shown
    assert "on MLX  mlx-community/gpt-oss-20b-MXFP4-Q8\n" in shown
    assert "--block-size 5" in shown
    assert server.asked == []


def test_a_pair_is_fetched_for_a_backend(server: FakeHub, backend: None, tmp_path: Path, capsys: Any) -> None:
    assert command(models, "--fetch", "Qwen3-8B", "--json") == 0
    torch = row(capsys)
    assert fetched(server) == ["Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"]
    assert torch["ready"] == {"torch": True, "mlx": False}
    assert Path(torch["target"]["torch"]).is_relative_to(tmp_path / "hub" / "models--Qwen--Qwen3-8B")
    assert Path(torch["draft"]).is_relative_to(tmp_path / "hub" / "models--z-lab--Qwen3-8B-DFlash-b16")
    assert command(models) == 0
    assert "qwen3-8b  (ready on torch, 0 MB)" in capsys.readouterr().out

    assert command(models, "--fetch", "qwen3-8b", "--backend", "mlx", "--json") == 0
    assert row(capsys)["ready"] == {"torch": True, "mlx": True}
    assert fetched(server) == ["Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", "mlx-community/Qwen3-8B-bf16"]


def test_a_hub_id_is_fetched_with_the_drafter_known_for_it(server: FakeHub, capsys: Any) -> None:
    assert command(models, "--fetch", "mlx-community/Qwen3-8B-bf16", "--json") == 0
    assert fetched(server) == ["mlx-community/Qwen3-8B-bf16", "z-lab/Qwen3-8B-DFlash-b16"]
    assert row(capsys)["ready"] == {"torch": False, "mlx": True}
    server.asked.clear()
    assert command(models, "--fetch", "someone/else", "--json") == 0
    assert fetched(server) == ["someone/else"]
    assert hub.cached("someone/else")


@pytest.mark.parametrize(("name", "near"), [("nothing", "pairs are smollm2-135m"), ("qwen3-8", "did you mean")])
def test_fetching_what_means_nothing_is_refused(server: FakeHub, name: str, near: str) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"'{name}' is no pair or hub id \(owner/name\) to fetch; {near}"):
        command(models, "--fetch", name)
    assert server.asked == []


def test_listing_and_converting_need_no_tensor_library() -> None:
    code = (
        "import sys, dflash.registry, dflash.hub, dflash.bundled, dflash.convert, dflash.doctor, dflash.cli.models, "
        "dflash.cli.convert; assert not {'torch', 'transformers', 'mlx', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
