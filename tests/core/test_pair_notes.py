"""What loading tells of a pair, and what the chat template is told."""

from __future__ import annotations

from typing import Any

import pytest
from model_folders import draft_dict

from dflash import loading
from dflash.checkpoint import DraftConfig
from dflash.tokenizer import Tokenizer


class Template:
    """A tokenizer whose template shows what it was told."""

    chat_template = "{{ enable_thinking }}"

    def apply_chat_template(self, messages: Any, enable_thinking: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(enable_thinking)]}


@pytest.mark.parametrize(("thinking", "told"), [(None, 1), (True, 1), (False, 0)])
def test_the_template_is_told_whether_to_think(thinking: bool | None, told: int) -> None:
    assert Tokenizer(Template(), thinking).encode("hello") == [told]


def test_thinking_is_what_the_drafter_was_trained_with() -> None:
    def trained(target: str, **recorded: Any) -> bool | None:
        config = DraftConfig.from_dict(draft_dict(**({"dflash_lab": recorded} if recorded else {})))
        return loading._trained_thinking(config, target)

    assert trained("Qwen/Qwen3-8B") is False
    assert trained("mlx-community/Qwen3-8B-4bit") is False
    assert trained("Qwen/Qwen3-8B", thinking=True) is True
    assert trained("someone/else") is None


@pytest.mark.parametrize(
    ("trained", "thinking", "quantised", "block", "words"),
    [
        (False, True, False, 4, ["trained without thinking"]),
        (True, None, False, 4, ["trained with thinking"]),
        (False, False, False, 8, []),
        (None, True, True, 4, []),
        (None, None, True, 8, ["quantised"]),
    ],
)
def test_a_pair_that_will_accept_less_says_so(
    trained: bool | None, thinking: bool | None, quantised: bool, block: int, words: list[str]
) -> None:
    config = DraftConfig.from_dict(draft_dict(block_size=block))
    tokenizer = Tokenizer(Silent(), thinking)
    notes = list(loading._notes(config, tokenizer, trained, quantised))
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


class Silent:
    """Decodes every id to nothing, as a special token's."""

    def decode(self, *_: Any, **__: Any) -> str:
        return ""
