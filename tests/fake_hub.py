"""A hub on 127.0.0.1: as much of its HTTP interface as the hub client needs to fetch a model, and its bad days."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

Files = dict[str, bytes]


@dataclass
class FakeHub:
    """``repos``: id → revision → files. Use as a context manager; ``url`` is then its endpoint, and ``asked`` holds
    ``(method, path, Range header)`` of every request."""

    repos: dict[str, dict[str, Files]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    failing: int = 0  # the status of every answer, where not 0
    cuts: list[int] = field(
        default_factory=list
    )  # bytes after which the connection breaks, of the next weight requests
    piece: int = 1 << 14  # bytes sent at a time
    slow: float = 0.0  # seconds after each piece of a weight file
    ranges: bool = True  # whether Range is honoured
    damage: bool = False  # whether weights arrive with a byte changed
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def add(self, repo: str, files: Files, revision: str = "main") -> str:
        """Publish ``files``; returns the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repos.setdefault(repo, {}).update({revision: files, commit: files})
        return commit

    def fetched(self, name: str) -> list[str | None]:
        """The Range headers of the GET requests for a file."""
        return [range_ for method, path, range_ in self.asked if method == "GET" and path.endswith(f"/{name}")]

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def serve_client(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point this process's hub client, which reads its environment only once, at a hub and a cache folder."""
    constants = pytest.importorskip("huggingface_hub.constants")
    settings = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": 1 << 14,
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def describe(path: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it; weights are stored apart (LFS) and known by their SHA-256."""
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if path.endswith(".safetensors"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def sibling(path: str, content: bytes) -> dict[str, Any]:
    """The same in the other of the hub's two spellings."""
    entry = describe(path, content)
    lfs = {"lfs": entry["lfs"] | {"sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {}
    return {"rfilename": path, "size": entry["size"], "blobId": entry["oid"], **lfs}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        if self.hub.failing:
            return self._send(self.hub.failing)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            repo, kind, revision = match[1], match[2], match[3] or "main"
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, kind, revision = match[1], "resolve", match[2]
        else:
            return self._send(404)
        if repo not in self.hub.repos:
            return self._send(401, error="RepoNotFound")
        files = self.hub.repos[repo].get(revision)
        if files is None:
            return self._send(404, error="RevisionNotFound")
        commit = next(name for name, held in self.hub.repos[repo].items() if held is files and len(name) == 40)
        if kind == "resolve":
            return self._resolve(repo, commit, match[3], files)
        if kind == "tree":
            return self._send(200, [describe(name, content) for name, content in files.items()])
        self._send(200, {"id": repo, "sha": commit, "siblings": [sibling(name, held) for name, held in files.items()]})

    def _resolve(self, repo: str, commit: str, name: str, files: Files) -> None:
        if repo in self.hub.gated:
            return self._send(403, error="GatedRepo")
        if name not in files:
            return self._send(404, error="EntryNotFound")
        content, entry, weights = files[name], describe(name, files[name]), name.endswith(".safetensors")
        headers = {"ETag": f'"{entry.get("lfs", entry)["oid"]}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status, start, asked = 200, 0, re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked and self.hub.ranges:
            status, start = 206, int(asked[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            if weights and self.hub.damage:
                content = content[:-1] + bytes([content[-1] ^ 1])
            self._body(content[start:], weights)

    def _body(self, body: bytes, weights: bool) -> None:
        cut = self.hub.cuts.pop(0) if weights and self.hub.cuts else None
        sent = body[:cut]
        try:
            for at in range(0, len(sent), self.hub.piece):
                self.wfile.write(sent[at : at + self.hub.piece])
                self.wfile.flush()
                time.sleep(self.hub.slow if weights else 0)
        except OSError:  # the client hung up
            cut = 0
        if cut is not None:
            self.close_connection = True

    def _send(self, status: int, value: Any = None, error: str | None = None) -> None:
        body = json.dumps({"error": error} if value is None else value).encode()
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
            self.send_header("X-Error-Message", error)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
