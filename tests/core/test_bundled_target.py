"""The bundled target out of its wheel: whole or not there, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import command
from model_folders import write_draft, write_tensors

from dflash import bundled, hub, registry
from dflash.bundled import MANIFEST_FILE, WheelModel, damage, is_ready, tensors_sha256
from dflash.cli import models as models_command
from dflash.errors import BackendError, ModelNotFoundError, StorageError
from dflash.registry import locate

GGUF = b"GGUF" + bytes(range(200))
SHAPES = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,)}


class FakeConverter:
    """Stands in for ``convert_gguf``; ``step`` runs in mid-conversion, with half a file written."""

    def __init__(self, step: Callable[[Path], None] = lambda folder: None, seed: int = 0) -> None:
        self.step, self.seed, self.converted = step, seed, 0

    def __call__(self, source: Path, folder: Path, progress: Callable[[float], None]) -> None:
        assert source.read_bytes() == GGUF
        (folder / "model.safetensors").write_bytes(b"half")
        progress(0.5)
        self.step(folder)
        write_tensors(folder / "model.safetensors", SHAPES, seed=self.seed)
        (folder / "config.json").write_text("{}")
        self.converted += 1


def prepare(model: WheelModel, converter: FakeConverter, **options: Any) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundled, "convert_gguf", converter)
        return bundled.prepare(model, **options)


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


def test_the_target_comes_out_of_the_wheel_and_stays(remote: WheelModel, cache: Path, capsys: Any) -> None:
    converter = FakeConverter()
    folder = prepare(remote, converter)
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

    assert prepare(remote, converter) == folder
    assert converter.converted == 1
    assert capsys.readouterr().err == ""


def test_an_installed_copy_spares_the_download(model: WheelModel, cache: Path) -> None:
    prepare(model, FakeConverter())
    assert is_ready(model)
    assert "tiny_model" not in sys.modules


def test_an_installed_copy_of_something_else_is_not_used(model: WheelModel, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "site" / "tiny_model" / "model.gguf").write_bytes(GGUF[:-1] + b"\x00")
    with pytest.raises(ModelNotFoundError, match=r"tiny-model==1.0.*could not be fetched.*pip install --no-deps"):
        prepare(model, FakeConverter())
    assert leftovers(cache) == []


def test_no_network_is_one_clear_sentence(remote: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    with pytest.raises(ModelNotFoundError, match="could not be fetched") as refusal:
        prepare(remote, FakeConverter())
    assert len(str(refusal.value).splitlines()) == 1
    assert not is_ready(remote)


def test_a_python_without_pip_is_told_what_to_do(
    remote: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false") or "/bin/false")
    with pytest.raises(ModelNotFoundError, match="install it beforehand"):
        prepare(remote, FakeConverter())


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
        prepare(wrong, FakeConverter())
    assert not is_ready(wrong)
    assert not remote.folder.exists()
    assert leftovers(cache) == []


def test_a_wheel_without_the_file_is_refused(remote: WheelModel, cache: Path) -> None:
    with pytest.raises(StorageError, match=r"does not hold other.gguf"):
        prepare(dataclasses.replace(remote, member="other.gguf"), FakeConverter())


def test_without_its_packages_nothing_is_fetched(
    remote: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="needs gguf, safetensors, tokenizers; pip install 'dflash-lab"):
        bundled.prepare(remote)
    assert not cache.exists()


@pytest.mark.parametrize(
    "failure", [RuntimeError("broken"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr
)
def test_a_failed_conversion_leaves_nothing(model: WheelModel, cache: Path, failure: BaseException) -> None:
    def fail(folder: Path) -> None:
        raise failure

    with pytest.raises(StorageError if isinstance(failure, OSError) else type(failure)) as raised:
        prepare(model, FakeConverter(fail))
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
        prepare(model, FakeConverter())
    assert leftovers(cache) == []


def test_a_cache_that_cannot_be_written_is_named(
    model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match=r"file/cache cannot be written \(Not a directory\); set DFLASH_CACHE"):
        prepare(model, FakeConverter())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes wherever it likes")
def test_a_read_only_cache_is_refused_but_a_finished_target_in_it_is_used(model: WheelModel, cache: Path) -> None:
    (cache / "targets").mkdir(parents=True)
    (cache / "targets").chmod(0o555)
    with pytest.raises(StorageError, match="Permission denied"):
        prepare(model, FakeConverter())
    (cache / "targets").chmod(0o755)
    prepare(model, FakeConverter())
    (cache / "targets").chmod(0o555)
    assert bundled.prepare(model) == model.folder
    (cache / "targets").chmod(0o755)


def test_a_finished_target_is_used_without_writing(
    model: WheelModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(model, FakeConverter())

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert bundled.prepare(model) == model.folder


def test_damage_is_found_and_mended(model: WheelModel, cache: Path) -> None:
    converter = FakeConverter()
    weights = prepare(model, converter) / "model.safetensors"
    content = weights.read_bytes()

    weights.write_bytes(content[:-1] + b"\xff")  # the size is right: only the hash can tell
    assert is_ready(model)
    assert damage(model) == [f"{weights} has changed since it was written"]
    prepare(model, converter)
    assert converter.converted == 1
    prepare(model, converter, thorough=True)
    assert (converter.converted, damage(model)) == (2, [])

    weights.write_bytes(content[:-1])  # cut short: seen at an ordinary load
    assert not is_ready(model)
    prepare(model, converter)
    assert (converter.converted, damage(model)) == (3, [])

    (model.folder / MANIFEST_FILE).unlink()
    assert not is_ready(model)
    assert len(damage(model)) == 1
    prepare(model, converter)
    assert leftovers(cache) == []


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"weights_sha256": 1}', '{"files": {"a": 1}}'])
def test_a_broken_manifest_is_no_finished_target(model: WheelModel, cache: Path, manifest: str) -> None:
    prepare(model, FakeConverter())
    (model.folder / MANIFEST_FILE).write_text(manifest)
    assert not is_ready(model)
    assert len(damage(model)) == 1


def _slow_writer(model: WheelModel, started: Any) -> None:
    def wait(folder: Path) -> None:
        started.set()
        time.sleep(60)

    prepare(model, FakeConverter(wait))


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
    prepare(model, FakeConverter())
    assert is_ready(model)
    assert leftovers(cache) == []


def _writer(model: WheelModel, results: Any) -> None:
    converter = FakeConverter(lambda folder: time.sleep(0.3))
    prepare(model, converter)
    results.put((converter.converted, damage(model)))


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


@pytest.fixture
def pair(model: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The bundled pair, replaced by the tiny model and a tiny drafter."""
    monkeypatch.setattr(bundled, "SMOLLM2_135M", model)
    monkeypatch.setattr(registry, "bundled_draft_folder", lambda: tmp_path / "shipped")
    monkeypatch.setattr(bundled, "convert_gguf", FakeConverter())
    monkeypatch.setattr(hub, "cached", lambda source: None)
    write_draft(tmp_path / "shipped")
    return model


def test_models_lists_the_bundled_pair_and_where_it_lives(pair: WheelModel, tmp_path: Path, capsys: Any) -> None:
    assert command(models_command, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    wanted = {
        "name": "smollm2-135m",
        "target": {"torch": str(pair.folder), "mlx": str(pair.folder)},
        "draft": str(tmp_path / "shipped"),
        "ready": {"torch": False, "mlx": False},
    }
    assert json.loads(line)[0] == wanted
    assert not pair.folder.exists()  # listing fetches nothing

    assert command(models_command, "--fetch", "smollm2-135m", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0] == wanted | {"ready": {"torch": True, "mlx": True}}
    assert is_ready(pair)
    assert command(models_command) == 0
    shown = capsys.readouterr().out
    assert f"target  {pair.folder}" in shown
    assert "smollm2-135m  (ready, " in shown


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
    assert not any(json.loads(capsys.readouterr().out)[0]["ready"].values())
