"""Tokenizer and chat template behind one small face; the rest of the core handles ids and text only."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dflash.errors import CheckpointError, PromptError

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class Tokenizer:
    """A model folder's tokenizer, from ``transformers``, imported at the first use."""

    def __init__(self, inner: Any, thinking: bool | None = None) -> None:
        self._inner, self.thinking = inner, thinking

    @classmethod
    def load(cls, folder: Path, *, thinking: bool | None = None) -> Tokenizer | None:
        """The tokenizer in ``folder``; None where it holds none (prompts are ids then). ``thinking`` is what a chat
        template with a thinking mode is told (None: nothing). Raises ``CheckpointError``."""
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
        if not any((folder / name).exists() for name in names):
            return None
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(str(folder)), thinking)
        except Exception as error:  # transformers raises many kinds; each is about this folder
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {reason[0]}") from error

    @property
    def chat_template(self) -> str | None:
        return getattr(self._inner, "chat_template", None)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end token, if it has one."""
        end = getattr(self._inner, "eos_token_id", None)
        return () if end is None else (int(end),)

    @property
    def template_sha256(self) -> str | None:
        """What a checkpoint records of the template it was trained with."""
        template = self.chat_template
        return hashlib.sha256(str(template).encode()).hexdigest() if template else None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Messages with ``role`` and ``content`` through the chat template, ready for the assistant's turn."""
        if not self.chat_template:
            raise PromptError("this tokenizer has no chat template; give the prompt as text or token ids")
        told = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            ids = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **told,
            )["input_ids"]
        except Exception as error:  # templates raise whatever they like; all of it is about the messages
            raise PromptError(f"the chat template refuses these messages: {error}") from error
        return list(ids)

    def encode_text(self, text: str) -> list[int]:
        return list(self._inner(text)["input_ids"])

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Ids of a prompt: a text (one user message where there is a template and not ``raw``), messages, or ids."""
        if isinstance(prompt, str):
            if raw or not self.chat_template:
                return self.encode_text(prompt)
            return self.encode_chat([{"role": "user", "content": prompt}])
        if prompt and isinstance(prompt[0], Mapping):
            return self.encode_chat(prompt)  # type: ignore[arg-type]
        return list(prompt)  # type: ignore[arg-type]

    def spell(self, token: int) -> str | None:
        """The bytes of a token that is only a part of a character, as ``‹F0 9F›``; None where they are not known."""
        name = self._inner.convert_ids_to_tokens(token)
        if name is None:
            return None
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", name):  # sentencepiece's single bytes
            return f"‹{match[1]}›"
        stand_ins = _byte_stand_ins()
        if not all(char in stand_ins for char in name):
            return None
        return f"‹{' '.join(f'{stand_ins[char]:02X}' for char in name)}›"

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``; special tokens are left out unless ``special``."""
        return str(self._inner.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))


@cache
def _byte_stand_ins() -> dict[str, int]:
    """Character → byte in byte-level vocabularies: printable Latin-1 stands for itself, the other bytes for the
    characters from 256 on, in order (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
