"""Names to folders, and the bundled target out of its wheel: whole or not there, whatever happens on the way."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_folders import draft_dict, write_draft, write_tensors

from dflash import bundled, registry, storage
from dflash.bundled import MANIFEST_FILE, WheelModel, damage, is_ready, prepare, tensors_sha256
from dflash.cli import convert as convert_command
from dflash.cli import models as models_command
from dflash.convert import convert
from dflash.errors import BackendError, DialectError, ModelNotFoundError, StorageError, UsageError, WeightsError
from dflash.loading import choose_pair
from dflash.registry import PAIRS, find_draft, find_local, locate, resolve

GGUF = b"GGUF" + bytes(range(200))
SHAPES = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,)}


class FakeBackend:
    """Converts by copying; ``step`` runs in mid-conversion, with half a file written."""

    def __init__(self, step: Callable[[Path], None] = lambda folder: None, seed: int = 0) -> None:
        self.step, self.seed, self.converted = step, seed, 0

    def convert_gguf(self, source: Path, folder: Path, progress: Callable[[float], None]) -> None:
        assert source.read_bytes() == GGUF
        (folder / "model.safetensors").write_bytes(b"half")
        progress(0.5)
        self.step(folder)
        write_tensors(folder / "model.safetensors", SHAPES, seed=self.seed)
        (folder / "config.json").write_text("{}")
        self.converted += 1

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DFLASH_CACHE", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    file = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny_model/model.gguf", GGUF)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return file


@pytest.fixture
def remote(wheel: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A pinned model in a wheel that pip finds in a folder, without a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    write_tensors(tmp_path / "expected.safetensors", SHAPES)
    return WheelModel(
        name="tiny",
        package="tiny-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/model.gguf",
        member_bytes=len(GGUF),
        member_sha256=hashlib.sha256(GGUF).hexdigest(),
        weights_sha256=tensors_sha256(tmp_path / "expected.safetensors"),
        converted_bytes=4096,
    )


@pytest.fixture
def model(remote: WheelModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The same model installed, so that no pip runs; pip would find nothing."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    assert importlib.metadata.version(remote.package) == "1.0"
    return remote


def leftovers(cache: Path) -> list[str]:
    """What lies beside the finished targets, the lock files excepted."""
    return [file.name for file in cache.glob("targets/.*") if not file.name.endswith(".lock")]


# Where things are


@pytest.mark.parametrize(
    ("environment", "system", "folder"),
    [
        ({"DFLASH_CACHE": "/somewhere"}, "linux", "/somewhere"),
        ({"XDG_CACHE_HOME": "/caches"}, "linux", "/caches/dflash"),
        ({"XDG_CACHE_HOME": "relative"}, "linux", "/home/u/.cache/dflash"),
        ({}, "linux", "/home/u/.cache/dflash"),
        ({}, "darwin", "/home/u/Library/Caches/dflash"),
        ({"DFLASH_CACHE": "~/models"}, "darwin", "/home/u/models"),
    ],
)
def test_the_cache_directory_follows_the_platform(
    environment: dict[str, str], system: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DFLASH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"HOME": "/home/u"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    assert storage.cache_dir() == Path(folder)


def test_pairs_are_found_by_name_and_drafters_by_target(cache: Path) -> None:
    assert resolve("SmolLM2-135M") is PAIRS[0]
    assert resolve("no-such-pair") is None
    assert find_draft("qwen/qwen3-8b") == "z-lab/Qwen3-8B-DFlash-b16"
    assert find_draft("smollm2-135m") == find_draft(str(bundled.SMOLLM2_135M.folder)) == "smollm2-135m"
    assert find_draft("gpt2") is None
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)
    assert all(pair.name == pair.name.casefold() for pair in PAIRS)


def test_a_request_names_both_models_by_their_own_sources(cache: Path) -> None:
    qwen = ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")
    assert choose_pair(None, None, None) == ("smollm2-135m", "smollm2-135m")
    assert choose_pair("Qwen3-8B", None, None) == choose_pair(None, "Qwen/Qwen3-8B", None) == qwen
    assert choose_pair(None, Path("here"), "there") == ("here", "there")
    with pytest.raises(UsageError, match="give either"):
        choose_pair("qwen3-8b", "here", None)


def test_an_existing_folder_is_itself(tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft")
    assert locate(str(folder), what="draft", backend=None) == folder


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("qwen3-8", "did you mean .*qwen3-8b"),
        ("./nowhere", "'./nowhere' is no pair, local folder or hub id"),
        ("", "no pair, local folder or hub id"),
        ("a/b/c", "no pair, local folder or hub id"),
    ],
)
def test_an_unknown_name_is_refused_with_near_matches(
    source: str, message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if not source:
        source = str(tmp_path / "gone")
    with pytest.raises(ModelNotFoundError, match=message):
        locate(source, what="target", backend=None)


def test_a_file_and_a_folder_without_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF)
    with pytest.raises(ModelNotFoundError, match="is a file"):
        locate(str(tmp_path / "model.gguf"), what="target", backend=None)
    with pytest.raises(ModelNotFoundError, match=r"holds no config.json"):
        locate(str(tmp_path), what="target", backend=None)


def test_a_hub_id_offline_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for source in ("nobody/nothing", "qwen3-8b"):
        with pytest.raises(ModelNotFoundError, match="the hub cannot be reached") as refusal:
            locate(source, what="target", backend=None)
        assert len(str(refusal.value).splitlines()) == 1
        assert find_local(source, what="target") is None


def test_a_hub_id_is_fetched_without_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert locate("someone/some-draft", what="draft", backend=None) == tmp_path
    assert asked["repo"] == "someone/some-draft"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any(pattern in ("*", "*.py", "*.bin") for pattern in asked["allow_patterns"])
    assert find_local("someone/some-draft", what="draft") is None  # the download has not finished: no weights yet
    write_draft(tmp_path)
    assert find_local("someone/some-draft", what="draft") == tmp_path


def test_a_full_disk_while_fetching_from_the_hub_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def snapshot_download(repo: str, **options: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(StorageError, match=r"No space left on device.*HF_HOME"):
        locate("someone/some-draft", what="draft", backend=None)


# The bundled target


def test_the_target_comes_out_of_the_wheel_and_stays(remote: WheelModel, cache: Path, capsys: Any) -> None:
    backend = FakeBackend()
    folder = prepare(remote, backend)
    assert folder == cache / "targets" / "tiny"
    assert is_ready(remote)
    assert damage(remote) == []
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for name, entry in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"]
    assert set(manifest["files"]) == {"config.json", "model.safetensors"}
    assert leftovers(cache) == []
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split()[1] for line in shown.err.splitlines()] == ["fetching", "converting", "checking"]

    assert prepare(remote, backend) == folder
    assert backend.converted == 1
    assert capsys.readouterr().err == ""


def test_an_installed_copy_spares_the_download(model: WheelModel, cache: Path) -> None:
    prepare(model, FakeBackend())
    assert is_ready(model)
    assert "tiny_model" not in sys.modules


def test_an_installed_copy_of_something_else_is_not_used(model: WheelModel, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "site" / "tiny_model" / "model.gguf").write_bytes(GGUF[:-1] + b"\x00")
    with pytest.raises(ModelNotFoundError, match=r"tiny-model==1.0.*could not be fetched.*pip install --no-deps"):
        prepare(model, FakeBackend())
    assert leftovers(cache) == []


def test_no_network_is_one_clear_sentence(remote: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    with pytest.raises(ModelNotFoundError, match="could not be fetched") as refusal:
        prepare(remote, FakeBackend())
    assert len(str(refusal.value).splitlines()) == 1
    assert not is_ready(remote)


def test_a_python_without_pip_is_told_what_to_do(
    remote: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false") or "/bin/false")
    with pytest.raises(ModelNotFoundError, match="install it beforehand"):
        prepare(remote, FakeBackend())


@pytest.mark.parametrize(
    ("log", "kind", "message"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM\n", StorageError, "not the pinned file"),
        ("ERROR: [Errno 28] No space left on device\n", StorageError, "is full; set DFLASH_CACHE"),
        ("/usr/bin/python: No module named pip\n", ModelNotFoundError, "which this Python lacks"),
        ("ERROR: first\nERROR: No matching distribution.\n", ModelNotFoundError, r"\(pip: No matching distribution\)"),
    ],
)
def test_what_pip_says_becomes_a_reason(log: str, kind: type[Exception], message: str, model: WheelModel) -> None:
    error = bundled._pip_error(model, log)
    assert isinstance(error, kind)
    with pytest.raises(kind, match=message):
        raise error


@pytest.mark.parametrize("pin", ["wheel_sha256", "member_sha256", "weights_sha256"])
def test_every_pinned_hash_is_checked(remote: WheelModel, cache: Path, pin: str) -> None:
    wrong = dataclasses.replace(remote, **{pin: "0" * 64})
    with pytest.raises(StorageError, match="pinned"):
        prepare(wrong, FakeBackend())
    assert not is_ready(wrong)
    assert not remote.folder.exists()
    assert leftovers(cache) == []


def test_a_wheel_without_the_file_is_refused(remote: WheelModel, cache: Path) -> None:
    with pytest.raises(StorageError, match=r"does not hold other.gguf"):
        prepare(dataclasses.replace(remote, member="other.gguf"), FakeBackend())


def test_without_a_backend_nothing_is_fetched(model: WheelModel, cache: Path) -> None:
    with pytest.raises(BackendError, match="needs a backend"):
        prepare(model, None)
    assert not cache.exists()


@pytest.mark.parametrize(
    "failure", [RuntimeError("broken"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr
)
def test_a_failed_conversion_leaves_nothing(model: WheelModel, cache: Path, failure: BaseException) -> None:
    def fail(folder: Path) -> None:
        raise failure

    with pytest.raises(StorageError if isinstance(failure, OSError) else type(failure)) as raised:
        prepare(model, FakeBackend(fail))
    if isinstance(failure, OSError):
        assert "No space left on device" in str(raised.value)
        assert "DFLASH_CACHE" in str(raised.value)
        assert str(cache) in str(raised.value)
    assert not is_ready(model)
    assert not model.folder.exists()
    assert leftovers(cache) == []


def test_a_disk_with_too_little_room_is_refused_before_anything_is_fetched(
    model: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 9, 1))
    monkeypatch.setattr(bundled, "_fetch_wheel", lambda *arguments: pytest.fail("fetched"))
    with pytest.raises(StorageError, match=r"free and tiny needs .*DFLASH_CACHE"):
        prepare(model, FakeBackend())
    assert leftovers(cache) == []


def test_a_cache_that_cannot_be_written_is_named(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match=r"file/cache cannot be written \(Not a directory\); set DFLASH_CACHE"):
        prepare(model, FakeBackend())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes wherever it likes")
def test_a_read_only_cache_is_refused_but_a_finished_target_in_it_is_used(model: WheelModel, cache: Path) -> None:
    (cache / "targets").mkdir(parents=True)
    (cache / "targets").chmod(0o555)
    with pytest.raises(StorageError, match="Permission denied"):
        prepare(model, FakeBackend())
    (cache / "targets").chmod(0o755)
    prepare(model, FakeBackend())
    (cache / "targets").chmod(0o555)
    assert prepare(model, None) == model.folder
    (cache / "targets").chmod(0o755)


def test_a_finished_target_is_used_without_writing(
    model: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(model, FakeBackend())

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert prepare(model, None) == model.folder


def test_damage_is_found_and_mended(model: WheelModel, cache: Path) -> None:
    backend = FakeBackend()
    weights = prepare(model, backend) / "model.safetensors"
    content = weights.read_bytes()

    weights.write_bytes(content[:-1] + b"\xff")  # the size is right: only the hash can tell
    assert is_ready(model)
    assert damage(model) == [f"{weights} has changed since it was written"]
    prepare(model, backend)
    assert backend.converted == 1
    prepare(model, backend, thorough=True)
    assert (backend.converted, damage(model)) == (2, [])

    weights.write_bytes(content[:-1])  # cut short: seen at an ordinary load
    assert not is_ready(model)
    prepare(model, backend)
    assert (backend.converted, damage(model)) == (3, [])

    (model.folder / MANIFEST_FILE).unlink()
    assert not is_ready(model)
    assert len(damage(model)) == 1
    prepare(model, backend)
    assert leftovers(cache) == []


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"weights_sha256": 1}', '{"files": {"a": 1}}'])
def test_a_broken_manifest_is_no_finished_target(model: WheelModel, cache: Path, manifest: str) -> None:
    prepare(model, FakeBackend())
    (model.folder / MANIFEST_FILE).write_text(manifest)
    assert not is_ready(model)
    assert len(damage(model)) == 1


def _slow_writer(model: WheelModel, started: Any) -> None:
    def wait(folder: Path) -> None:
        started.set()
        time.sleep(60)

    prepare(model, FakeBackend(wait))


def test_a_conversion_killed_in_the_middle_leaves_nothing_that_counts(model: WheelModel, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    writer = context.Process(target=_slow_writer, args=(model, started))
    writer.start()
    assert started.wait(30)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(10)
    assert len(leftovers(cache)) == 2  # the half-written folder and the download are there, under names nobody reads
    assert not model.folder.exists()
    assert not is_ready(model)
    prepare(model, FakeBackend())
    assert is_ready(model)
    assert leftovers(cache) == []


def _writer(model: WheelModel, results: Any) -> None:
    backend = FakeBackend(lambda folder: time.sleep(0.3))
    prepare(model, backend)
    results.put((backend.converted, damage(model)))


def test_concurrent_conversions_do_the_work_once(model: WheelModel, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    writers = [context.Process(target=_writer, args=(model, results)) for _ in range(3)]
    for writer in writers:
        writer.start()
    found = [results.get(timeout=30) for _ in writers]
    for writer in writers:
        writer.join(10)
    assert sorted(found) == [(0, []), (0, []), (1, [])]
    assert leftovers(cache) == []


def test_equal_tensors_have_one_hash_whatever_their_order(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    write_tensors(one, {"a": (8,)})
    write_tensors(other, {"a": (8,)}, seed=1)
    assert tensors_sha256(one) != tensors_sha256(other)
    text = one.read_bytes()[8:].split(b"}}")[0]
    padded = text + b'}, "__metadata__": {"format": "pt"}}'
    other.write_bytes(len(padded).to_bytes(8, "little") + padded + one.read_bytes()[-32:])
    assert tensors_sha256(one) == tensors_sha256(other)


# dflash models


def command(module: Any, *words: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words)))


@pytest.fixture
def pair(model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The bundled pair, replaced by the tiny model and a tiny drafter."""
    monkeypatch.setattr(bundled, "SMOLLM2_135M", model)
    monkeypatch.setattr(registry, "bundled_draft_folder", lambda: tmp_path / "shipped")
    monkeypatch.setattr("dflash.loading.find_backend", lambda name: FakeBackend())
    monkeypatch.setattr(registry, "_hub_folder", lambda hub_id, local_only=False: None)
    write_draft(tmp_path / "shipped")
    return model


def test_models_lists_pairs_and_where_they_live(pair: WheelModel, tmp_path: Path, capsys: Any) -> None:
    assert command(models_command, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    first, *others = json.loads(line)
    wanted = {"name": "smollm2-135m", "target": str(pair.folder), "draft": str(tmp_path / "shipped"), "ready": False}
    assert first == wanted
    assert {row["name"]: row["ready"] for row in others} == {known.name: False for known in PAIRS[1:]}
    assert not pair.folder.exists()  # listing fetches nothing

    assert command(models_command, "--fetch", "smollm2-135m", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0] == wanted | {"ready": True}
    assert is_ready(pair)
    assert command(models_command) == 0
    assert f"target  {pair.folder}" in capsys.readouterr().out


def test_models_verifies_by_hash(pair: WheelModel, capsys: Any) -> None:
    assert command(models_command, "--verify") == 0
    assert "not on this machine yet" in capsys.readouterr().err
    command(models_command, "--fetch", "smollm2-135m")
    assert command(models_command, "--verify") == 0
    assert "every hash is right" in capsys.readouterr().err
    weights = pair.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert command(models_command, "--verify", "--json") == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1
    assert "has changed since it was written" in shown.err
    command(models_command, "--fetch", "smollm2-135m")
    assert command(models_command, "--verify") == 0


def test_an_installation_without_its_drafter_says_so(pair: WheelModel, tmp_path: Path, capsys: Any) -> None:
    shutil.rmtree(tmp_path / "shipped")
    with pytest.raises(ModelNotFoundError, match=r"missing from this installation .*reinstall"):
        locate("smollm2-135m", what="draft", backend=None)
    assert command(models_command, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["ready"] is False


def test_fetching_an_unknown_pair_is_refused(pair: WheelModel) -> None:
    with pytest.raises(ModelNotFoundError, match="no pair 'nothing' to fetch; known are smollm2-135m"):
        command(models_command, "--fetch", "nothing")


# dflash convert


def test_convert_rewrites_every_spelling_and_keeps_the_weights(tmp_path: Path, capsys: Any) -> None:
    old = draft_dict(
        block_size=None,
        dtype="bfloat16",
        rope_scaling={"type": "linear", "factor": 2.0},
        auto_map={"AutoModel": "modeling.Draft"},
        dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 3], "block_size": 4},
        dflash_lab={"template_sha256": "ab"},
    )
    source = write_draft(tmp_path / "old", old, dtype="BF16")
    (source / "README.md").write_text("card")
    (source / "modeling.py").write_text("raise SystemExit")
    assert command(convert_command, str(source), str(tmp_path / "new" / "draft")) == 0
    new = tmp_path / "new" / "draft"
    assert capsys.readouterr().out.strip() == str(new)
    assert sorted(file.name for file in new.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert (new / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    raw = json.loads((new / "config.json").read_text())
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    assert raw["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert raw["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert raw["dflash_lab"] == {"template_sha256": "ab"}
    assert "auto_map" not in raw
    assert [file.name for file in new.parent.iterdir()] == ["draft"]


def test_convert_refuses_a_taken_place_and_keeps_it(tmp_path: Path) -> None:
    source, taken = write_draft(tmp_path / "old"), tmp_path / "taken"
    taken.mkdir()
    assert convert(source, taken).block_size == 4  # an empty folder is free
    before = (taken / "config.json").read_bytes()
    with pytest.raises(UsageError, match="exists and is not an empty folder"):
        convert(source, taken)
    assert (taken / "config.json").read_bytes() == before
    with pytest.raises(UsageError, match="exists and is not an empty folder"):
        convert(source, source / "config.json")


def test_convert_refuses_other_dialects_and_bad_weights_and_writes_nothing(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "old")
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-4])
    with pytest.raises(WeightsError, match="promises"):
        convert(source, tmp_path / "new")
    (source / "config.json").write_text(json.dumps(draft_dict(architectures=["DFlash2DraftModel"])))
    with pytest.raises(DialectError, match="DFlash 2"):
        convert(source, tmp_path / "new")
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_convert_to_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_draft(tmp_path / "old")

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(StorageError, match="No space left on device"):
        convert(source, tmp_path / "new")
    assert [file.name for file in tmp_path.iterdir()] == ["old"]


def test_listing_and_converting_need_no_tensor_library() -> None:
    code = (
        "import sys, dflash.registry, dflash.bundled, dflash.convert, dflash.doctor, dflash.cli.models, "
        "dflash.cli.convert; assert not {'torch', 'transformers', 'mlx', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
