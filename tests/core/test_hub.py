"""Models from a hub: whole or not there, continued after an interruption, and one clear sentence where it cannot be."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, Files, serve_client

from dflash import hub
from dflash.errors import DFlashError, ModelNotFoundError, StorageError
from dflash.registry import find_local, locate

constants = pytest.importorskip("huggingface_hub.constants")
file_download = pytest.importorskip("huggingface_hub.file_download")
WEIGHTS = "model.safetensors"
MODEL: Files = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"tok": 1}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    WEIGHTS: bytes(range(256)) * 800,
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that publishes ``a/model``, and an empty cache for this process's hub client."""
    with FakeHub() as server:
        server.add("a/model", MODEL)
        serve_client(server.url, tmp_path / "hub", monkeypatch)
        yield server


def held(folder: Path) -> Files:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def partials(folder: Path) -> list[Path]:
    """Partial weight files; the client's own partial files carry a random part in their names."""
    return [file for file in folder.rglob("*.incomplete") if file.name.count(".") == 1]


def sentence(error: pytest.ExceptionInfo[DFlashError]) -> str:
    text = str(error.value)
    assert len(text.splitlines()) == 1
    return text


def command(url: str, home: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """``dflash`` in a process of its own, with its hub and its cache."""
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-m", "dflash.cli.main", *words],
        env=os.environ | settings | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )


# What is fetched


def test_a_model_arrives_whole_and_without_its_code(server: FakeHub, tmp_path: Path, capsys: Any) -> None:
    others = {
        "modeling.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "original/model.safetensors": b"again",
        "onnx/config.json": b"{}",
    }
    commit = server.add("a/model", MODEL | others | {"consolidated.safetensors": b"again"})
    folder = locate("a/model", what="target", backend=None)
    assert folder == tmp_path / "hub" / "models--a--model" / "snapshots" / commit
    assert held(folder) == MODEL
    assert partials(tmp_path) == []
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split()[1] for line in shown.err.splitlines()] == ["looking", "fetching"]


def test_what_is_here_is_found_without_asking(server: FakeHub, tmp_path: Path) -> None:
    folder = locate("a/model", what="target", backend=None)
    asked = len(server.asked)
    assert find_local("a/model", what="target") == folder == locate("a/model", what="draft", backend=None)
    assert len(server.asked) == asked
    assert find_local("a/other", what="target") is None


def test_shards_are_those_the_index_names(server: FakeHub) -> None:
    names = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    index = json.dumps({"weight_map": {"a.weight": names[0], "b.weight": names[1], "c.weight": names[0]}}).encode()
    shards = {name: MODEL[WEIGHTS][at:] for at, name in enumerate(names)}
    model = {"config.json": b"{}", "model.safetensors.index.json": index, **shards}
    server.add("a/large", model | {WEIGHTS: b"the same in one file"})
    assert held(hub.fetch("a/large")) == model
    assert server.fetched(WEIGHTS) == []


def test_a_quantised_mlx_model_is_one_file_with_an_index(server: FakeHub) -> None:
    config = json.dumps({"quantization": {"group_size": 64, "bits": 4}}).encode()
    index = json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": WEIGHTS}}).encode()
    server.add("mlx/model-4bit", MODEL | {"config.json": config, "model.safetensors.index.json": index})
    folder = locate("mlx/model-4bit", what="target", backend=None)
    assert json.loads((folder / "config.json").read_bytes())["quantization"]["bits"] == 4
    assert hub.cached("mlx/model-4bit") == folder


def test_fetching_again_takes_what_the_hub_has_now_and_keeps_what_is_equal(server: FakeHub) -> None:
    before = hub.fetch("a/model")
    server.add("a/model", MODEL | {"config.json": b'{"model_type": "qwen3"}'})
    assert locate("a/model", what="target", backend=None) == before
    after = hub.fetch("a/model")
    assert after != before
    assert (after / "config.json").read_bytes() == b'{"model_type": "qwen3"}'
    assert len(server.fetched(WEIGHTS)) == 1
    assert hub.cached("a/model") == after


def test_a_revision_is_a_branch_a_tag_or_a_commit(server: FakeHub) -> None:
    commit = server.add("a/model", MODEL | {"config.json": b"{}"}, revision="v1/old")
    assert held(hub.fetch("a/model@v1/old"))["config.json"] == b"{}"
    assert hub.cached("a/model@v1/old") == hub.cached(f"a/model@{commit}") == hub.fetch(f"a/model@{commit}")
    assert hub.cached("a/model") is None


# Interruptions


def test_a_broken_connection_is_continued_where_it_broke(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    server.cuts = [100_000, 40_000]
    assert held(hub.fetch("a/model")) == MODEL
    first, second, third = server.fetched(WEIGHTS)
    assert first is None
    assert second == f"bytes={100_000 >> 14 << 14}-"
    assert third is not None and int(third[6:-1]) > int(second[6:-1])  # type: ignore[index]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_the_next_run_continues_an_interrupted_one(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub client reads in pieces of 10 MB: the file is of more than two."""
    weights = os.urandom(1 << 20) * 26
    with FakeHub(piece=1 << 20, slow=0.1) as server:
        server.add("a/model", MODEL | {WEIGHTS: weights})
        words = ("models", "--fetch", "a/model")
        run = command(server.url, tmp_path, *words)
        until(lambda: any(file.stat().st_size for file in partials(tmp_path)))
        run.send_signal(how)
        _, shown = run.communicate(timeout=20)
        assert run.returncode == (130 if how is signal.SIGINT else -how)
        assert ("the next run continues it" in shown) == (how is signal.SIGINT)
        (partial,) = partials(tmp_path)
        begun = partial.stat().st_size
        assert 0 < begun < len(weights)
        assert weights.startswith(partial.read_bytes())
        assert not list(tmp_path.rglob(WEIGHTS))

        serve_client(server.url, tmp_path / "hub", monkeypatch)
        assert hub.cached("a/model") is None
        server.slow = 0
        again = command(server.url, tmp_path, *words)
        assert again.communicate(timeout=60) and again.returncode == 0
        assert server.fetched(WEIGHTS) == [None, f"bytes={begun}-"]
    (file,) = tmp_path.rglob(WEIGHTS)
    assert file.read_bytes() == weights
    assert partials(tmp_path) == []


def until(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def begin(cache: Path, content: bytes) -> Path:
    """A partial file of ``MODEL``'s weights that an earlier run left."""
    blob = hashlib.sha256(MODEL[WEIGHTS]).hexdigest()
    partial = cache / "hub" / "models--a--model" / "blobs" / f"{blob}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(content)
    return partial


def test_a_hub_that_ignores_ranges_sends_everything_again(server: FakeHub, tmp_path: Path) -> None:
    begin(tmp_path, MODEL[WEIGHTS][:1000])
    server.ranges = False
    assert held(hub.fetch("a/model")) == MODEL
    assert server.fetched(WEIGHTS) == ["bytes=1000-"]


@pytest.mark.parametrize(("begun", "ranges"), [(len(MODEL[WEIGHTS]), []), (len(MODEL[WEIGHTS]) + 1, [None])])
def test_a_partial_file_may_be_whole_or_too_long(
    server: FakeHub, tmp_path: Path, begun: int, ranges: list[str | None]
) -> None:
    begin(tmp_path, (MODEL[WEIGHTS] + b"?")[:begun])
    assert held(hub.fetch("a/model")) == MODEL
    assert server.fetched(WEIGHTS) == ranges


@pytest.mark.parametrize("where", ["on the way", "before"])
def test_damage_is_seen_and_never_loaded(server: FakeHub, tmp_path: Path, where: str) -> None:
    if where == "before":
        begin(tmp_path, b"not the beginning of it")
    server.damage = where == "on the way"
    with pytest.raises(StorageError, match=r"model.safetensors of a/model arrived damaged .* run again") as refusal:
        hub.fetch("a/model")
    assert sentence(refusal)
    assert partials(tmp_path) == []
    assert hub.cached("a/model") is None
    server.damage = False
    assert held(hub.fetch("a/model")) == MODEL


def test_two_processes_fetch_a_file_once(tmp_path: Path) -> None:
    with FakeHub(piece=1 << 20, slow=0.1) as server:
        server.add("a/model", MODEL | {WEIGHTS: bytes(20 << 20)})
        runs = [command(server.url, tmp_path, "models", "--fetch", "a/model") for _ in range(2)]
        shown = [run.communicate(timeout=60)[1] for run in runs]
        assert [run.returncode for run in runs] == [0, 0], shown
        assert len(server.fetched(WEIGHTS)) == 1


# What is not whole is not there


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", WEIGHTS, "blob"])
def test_a_partial_snapshot_is_never_taken_for_a_model(server: FakeHub, lost: str) -> None:
    folder = hub.fetch("a/model")
    file = folder / (WEIGHTS if lost == "blob" else lost)
    (file.resolve() if lost == "blob" else file).unlink()
    assert hub.cached("a/model") is None
    assert held(hub.fetch("a/model")) == MODEL


def lay_out(cache: Path, files: Files, commit: str = "0" * 40) -> Path:
    """``b/model`` as the hub client lays it out, written by hand."""
    repo = cache / "models--b--model"
    folder = repo / "snapshots" / commit
    for part in (repo / "refs", repo / "blobs", folder):
        part.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for name, content in files.items():
        blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (folder / name).symlink_to(os.path.relpath(blob, folder))
    return folder


def test_a_cache_in_hub_layout_serves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_client("http://hub.invalid", tmp_path, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = lay_out(tmp_path, MODEL)
    assert locate("b/model", what="target", backend=None) == folder
    assert locate(f"b/model@{'0' * 40}", what="target", backend=None) == folder
    with pytest.raises(ModelNotFoundError, match="b/model@other cannot be fetched"):
        locate("b/model@other", what="target", backend=None)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelNotFoundError, match="b/model cannot be fetched"):
        locate("b/model", what="target", backend=None)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_a_broken_index_is_no_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    serve_client("http://hub.invalid", tmp_path, monkeypatch)
    lay_out(tmp_path, MODEL | {"model.safetensors.index.json": index.encode()})
    assert hub.cached("b/model") is None


# What cannot be


def test_a_disk_with_too_little_room_is_refused_before_weights_are_fetched(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, MODEL[WEIGHTS][:4800])
    free = len(MODEL[WEIGHTS]) - 4800
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(free, 0, free - 1))
    with pytest.raises(StorageError, match=r"has 0 MB free and a/model needs 0 MB more; .*HF_HOME") as refusal:
        hub.fetch("a/model")
    assert sentence(refusal)
    assert server.fetched(WEIGHTS) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(free, 0, free))
    assert held(hub.fetch("a/model")) == MODEL


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES], ids=os.strerror)
def test_a_disk_that_cannot_be_written_is_named_and_what_came_is_kept(
    server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(url: str, out: Any, **options: Any) -> None:
        if not url.endswith(WEIGHTS):
            return get(url, out, **options)
        out.write(MODEL[WEIGHTS][:5000])
        raise OSError(code, os.strerror(code))

    get = file_download.http_get
    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", fail)
        with pytest.raises(StorageError, match=rf"a/model cannot be stored \({os.strerror(code)}\); set HF_HOME"):
            hub.fetch("a/model")
        assert [file.stat().st_size for file in partials(tmp_path)] == [5000]
        assert hub.cached("a/model") is None
    assert held(hub.fetch("a/model")) == MODEL
    assert server.fetched(WEIGHTS) == ["bytes=5000-"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a/closed", r"^a/closed is gated: accept its terms at http://\S+/a/closed, then log in with: hf auth login$"),
        ("a/modle", r"^the hub has no model a/modle that you may see; pairs are smollm2-135m"),
        ("qwen/qwen3-8", r"^the hub has no model qwen/qwen3-8 that you may see; did you mean .*Qwen/Qwen3-8B"),
        ("a/model@v9", r"^a/model has no revision 'v9' on the hub$"),
        ("a/pickles", r"^a/pickles holds no model.safetensors on the hub; only safetensors are loaded$"),
        ("a/dataset", r"^a/dataset holds no config.json on the hub"),
        ("a/b--c", r"^'a/b--c' is no hub id"),
        ("a/shards", r"^a/shards holds no model-2.safetensors on the hub"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(server: FakeHub, tmp_path: Path, source: str, message: str) -> None:
    server.gated = {"a/closed"}
    server.add("a/closed", MODEL)
    server.add("a/pickles", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    server.add("a/dataset", {"data.json": b"{}"})
    index = json.dumps({"weight_map": {"a": WEIGHTS, "b": "model-2.safetensors"}}).encode()
    server.add("a/shards", MODEL | {"model.safetensors.index.json": index})
    with pytest.raises(ModelNotFoundError, match=message) as refusal:
        locate(source, what="target", backend=None)
    assert sentence(refusal)
    assert hub.cached(source) is None
    assert partials(tmp_path) == []


ALTERNATIVES = "give a local folder, set HF_HOME .* with: dflash models --fetch a/model$"


def test_a_failing_hub_is_one_sentence(server: FakeHub) -> None:
    server.failing = 503
    with pytest.raises(ModelNotFoundError, match=f"^a/model cannot be fetched: the hub answered 503; {ALTERNATIVES}"):
        locate("a/model", what="target", backend=None)


def test_offline_is_one_sentence(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=f"^a/model cannot be fetched: HF_HUB_OFFLINE is set; {ALTERNATIVES}"):
        locate("a/model", what="target", backend=None)
    assert server.asked == []


@pytest.mark.parametrize("kind", ["refused", "unresolved", "silent"])
def test_an_unreachable_hub_is_one_sentence_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def resolve(*_: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with socket.socket() as quiet:  # bound and not listening, or listening and never answering
        quiet.bind(("127.0.0.1", 0))
        if kind == "silent":
            quiet.listen()
            late = threading.Timer(8, quiet.close)  # for a client that would wait for ever
            late.daemon = True
            late.start()
        elif kind == "unresolved":
            monkeypatch.setattr(socket, "getaddrinfo", resolve)
        serve_client(f"http://127.0.0.1:{quiet.getsockname()[1]}", tmp_path, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
        begun = time.monotonic()
        with pytest.raises(
            ModelNotFoundError, match=rf"the hub cannot be reached \(\w+: .*\); {ALTERNATIVES}"
        ) as refusal:
            locate("a/model", what="target", backend=None)
        assert time.monotonic() - begun < 6
    assert sentence(refusal)


def test_a_hub_that_is_gone_leaves_what_is_here_usable(server: FakeHub) -> None:
    folder = hub.fetch("a/model")
    server.failing = 500
    assert locate("a/model", what="target", backend=None) == folder
    with pytest.raises(ModelNotFoundError, match="the hub answered 500"):
        hub.fetch("a/model")  # asked for the newest, it does not pass off what is here as that
