"""Models on the hub: found whole in the hub client's cache, or fetched into it.

The client does the asking, the layout and the links. It no longer continues a file whose download was interrupted (each
attempt gets a partial file of its own, gone afterwards), and weights are gigabytes: those are fetched here, into a
partial file named by its content, which the next run continues. One after another, so that little is lost.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.checkpoint import CONFIG_FILE, weight_files, weight_names
from dflash.errors import BackendError, DFlashError, ModelNotFoundError, StorageError
from dflash.meter import Meter
from dflash.storage import sha256, sole_writer

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_SMALL = {
    "allow_patterns": ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"],  # no code, no pickles
    "ignore_patterns": ["*/*"],  # the same weights in other formats
}
_CANNOT_STORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def split(source: str) -> tuple[str, str | None] | None:
    """``owner/name`` and the revision of ``owner/name@revision``; None where ``source`` is no hub id."""
    match = _ID.fullmatch(source)
    return (match[1], match[2]) if match else None


def cached(source: str) -> Path | None:
    """The folder of a hub id that is wholly on this machine; None for any other. Asks no network."""
    repo, revision = _split(source)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:  # where the client knows the list of files, it misses those that are not there
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True, **_SMALL))
        weight_files(folder)
    except (OSError, ValueError, DFlashError):
        return None
    return folder if (folder / CONFIG_FILE).exists() else None


def fetch(source: str, near: str = "") -> Path:
    """The folder of a hub id, as the hub has it now; fetches what is missing, and continues what was interrupted.
    Progress on stderr. ``near`` ends the message about an id that the hub does not know. Raises
    ``ModelNotFoundError``, ``StorageError`` or ``BackendError``."""
    try:
        from huggingface_hub import HfApi, constants, errors, snapshot_download
    except ImportError:
        raise BackendError(f"{source} is on the hub; pip install huggingface_hub, or give a local folder") from None
    repo, revision = _split(source)
    if constants.HF_HUB_OFFLINE:
        raise _failure(source, errors.OfflineModeIsEnabled(), near)
    try:
        with Meter() as meter:
            meter.stage(f"looking up {source} on the hub")
            # The snapshot would fall back to what is here, and may wait for ever: this says why not, and soon.
            HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            folder = Path(snapshot_download(repo, revision=revision, tqdm_class=_no_bar(), **_SMALL))
            if not (folder / CONFIG_FILE).exists():
                raise ModelNotFoundError(f"{source} holds no {CONFIG_FILE} on the hub, so it is no model")
            _fetch_weights(repo, folder, meter)
    except KeyboardInterrupt:
        print(f"dflash: {source} is not whole yet; the next run continues it", file=sys.stderr)
        raise
    except DFlashError:
        raise
    except Exception as error:  # the hub client lets several libraries' errors through
        raise _failure(source, error, near) from error
    return folder


def _fetch_weights(repo: str, folder: Path, meter: Meter) -> None:
    """Every weight file of the snapshot in ``folder`` (``models--owner--name/snapshots/commit``), linked into it."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    names = [name for name in weight_names(folder) if not (folder / name).exists()]
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    info = HfApi().model_info(repo, revision=folder.name, files_metadata=True, timeout=timeout)
    files: dict[str, RepoSibling] = {file.rfilename: file for file in info.siblings or []}
    if missing := [name for name in names if name not in files]:
        raise ModelNotFoundError(f"{repo} holds no {missing[0]} on the hub; only safetensors are loaded")
    blobs = folder.parent.parent / "blobs"
    _check_room(repo, blobs, [files[name] for name in names])
    for count, name in enumerate(names, start=1):
        file = files[name]
        meter.stage(f"fetching {repo}: {name} ({count} of {len(names)}, {file.size / 1e6:,.0f} MB)")
        if file.lfs is not None and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            _fetch_blob(repo, folder.name, file, blobs, meter)
        hf_hub_download(repo, name, revision=folder.name, tqdm_class=_no_bar())


def _check_room(repo: str, blobs: Path, files: list[RepoSibling]) -> None:
    needed = sum(file.size - _size(_partial(blobs, file)) for file in files)
    blobs.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(blobs).free) < needed:
        raise StorageError(
            f"{blobs} has {free / 1e6:,.0f} MB free and {repo} needs {needed / 1e6:,.0f} MB more; "
            f"make room, or set HF_HOME to a folder with enough"
        )


def _fetch_blob(repo: str, commit: str, file: RepoSibling, blobs: Path, meter: Meter) -> None:
    """One file into ``blobs``, where the client looks for it by its SHA-256; there under that name only when whole."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, silent_tqdm

    class Bar(silent_tqdm):  # what the client counts on
        def __init__(self, *, initial: int, **_: Any) -> None:
            self.done = initial

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            meter(self.done / file.size)

    assert file.lfs is not None
    blob, partial = blobs / file.lfs.sha256, _partial(blobs, file)
    lock = blobs.parent.parent / ".locks" / blobs.parent.name / blob.name
    with sole_writer(lock, lambda: meter.stage("waiting for another process that fetches it")):
        if blob.exists():
            return
        if _size(partial) > file.size:
            partial.unlink()
        with partial.open("ab") as out:
            url, begun = hf_hub_url(repo, file.rfilename, revision=commit), out.tell()
            headers = build_hf_headers()
            http_get(url, out, resume_size=begun, headers=headers, expected_size=file.size, tqdm_class=Bar)
        if sha256(partial) != blob.name:
            partial.unlink()
            raise StorageError(
                f"{file.rfilename} of {repo} arrived damaged (its SHA-256 differs) and was deleted; run again"
            )
        os.replace(partial, blob)


def _no_bar() -> type:
    """For the client's own bars: what takes long is shown by ours."""
    from huggingface_hub.utils import tqdm

    class NoBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))

    return NoBar


def _partial(blobs: Path, file: RepoSibling) -> Path:
    return blobs / f"{file.lfs.sha256 if file.lfs else file.blob_id}.incomplete"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _split(source: str) -> tuple[str, str | None]:
    parts = split(source)
    if parts is None:
        raise ModelNotFoundError(f"{source!r} is no hub id (owner/name, or owner/name@revision)")
    return parts


def _failure(source: str, error: Exception, near: str) -> DFlashError:
    from huggingface_hub import constants, errors

    repo, revision = _split(source)
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(
            f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then log in with: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{repo} has no revision {revision or 'main'!r} on the hub")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(f"the hub has no model {repo} that you may see; {near or 'check its spelling'}")
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{repo!r} is no hub id (owner/name)")
    if isinstance(error, OSError) and error.errno in _CANNOT_STORE:
        return StorageError(f"{source} cannot be stored ({error.strerror}); set HF_HOME to a folder with enough room")
    text = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    if isinstance(error, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set"
    elif isinstance(error, errors.HfHubHTTPError):
        reason = f"the hub answered {error.response.status_code}"
    elif isinstance(error, (errors.HTTPError, OSError)):
        reason = f"the hub cannot be reached ({text})"
    else:
        reason = text
    return ModelNotFoundError(
        f"{source} cannot be fetched: {reason}; give a local folder, set HF_HOME to a cache that holds it, "
        f"or fetch it where there is a network with: dflash models --fetch {source}"
    )
