"""Shared by all tests: no network, one thread a process, the tiny pair."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session")
def tiny():
    """A tiny random target and drafter; see ``tiny_models``."""
    from tiny_models import TinyPair

    return TinyPair()
