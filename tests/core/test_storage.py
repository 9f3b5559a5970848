"""Where the cache directory is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflash import storage


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
