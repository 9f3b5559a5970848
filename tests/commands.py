"""A subcommand called in this process."""

from __future__ import annotations

import argparse
from types import ModuleType


def command(module: ModuleType, *words: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words)))
