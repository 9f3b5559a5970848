"""The flags that name models, and what of them reaches ``dflash.load``."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from dflash.cli.common import add_model_flags, load_engine


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], {"backend": "auto", "device": "auto", "dtype": "auto", "draft_bits": None}),
        (["--target", "qwen3-8b"], {"pair": "qwen3-8b"}),
        (["--target", "here", "--draft", "there"], {"target": "here", "draft": "there"}),
        (["--backend", "mlx", "--device", "gpu", "--draft-bits", "4"], {"backend": "mlx", "device": "gpu"}),
        (["--draft-bits", "8", "--dtype", "bfloat16"], {"draft_bits": 8, "dtype": "bfloat16"}),
    ],
)
def test_flags_reach_load(words: list[str], wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("dflash.loading.load", lambda **options: given.update(options))
    load_engine(parse(*words), check=True)
    assert wanted.items() <= given.items()
    assert given["check"] is True
    assert given["draft_bits"] == parse(*words).draft_bits


@pytest.mark.parametrize("bits", ["5", "16", "four", "0"])
def test_a_drafter_has_4_or_8_bits(bits: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse("--draft-bits", bits)
    assert "--draft-bits" in capsys.readouterr().err
