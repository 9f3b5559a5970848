"""A byte-level tokenizer: ids below 256 are the bytes of UTF-8, ids above are special and leave no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class ByteTokenizer:
    """Stands in for ``dflash.tokenizer.Tokenizer``: a text is one token a byte, messages are their contents."""

    chat_template: str | None = None
    template_sha256: str | None = None
    stop_token_ids: tuple[int, ...] = ()

    def encode(self, prompt: Any, *, raw: bool = False) -> list[int]:
        if isinstance(prompt, str):
            return list(prompt.encode())
        if prompt and isinstance(prompt[0], dict):
            return list("".join(message["content"] for message in prompt).encode())
        return list(prompt)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return decode_bytes(ids)
