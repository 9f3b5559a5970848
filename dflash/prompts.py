"""Prompt sets by name: ``mini`` (written for this project), a JSON-lines file, or a data set on the hub."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dflash.errors import BackendError, PromptError, StorageError, UsageError
from dflash.records import open_text
from dflash.tokenizer import Prompt

MINI = Path(__file__).parent / "prompt_sets" / "mini.jsonl"
HUB = "hf:"
_COLUMNS = ("prompt", "messages", "question", "text", "instruction")  # tried in this order where none is named


@dataclass(frozen=True)
class EvalPrompt:
    """``prompt`` is a text (one user message), messages, or token ids."""

    prompt: Prompt
    domain: str = ""
    id: str = ""


@dataclass(frozen=True)
class PromptSet:
    """Prompts in order, and the name they were asked for by."""

    name: str
    prompts: tuple[EvalPrompt, ...]

    @property
    def sha256(self) -> str:
        """Of what is used of every prompt (id, domain, prompt), one JSON line each: independent of where it came
        from, different for a part of the set."""
        lines = [json.dumps([each.id, each.domain, each.prompt], ensure_ascii=False) for each in self.prompts]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @property
    def domains(self) -> tuple[str, ...]:
        """In order of appearance; prompts without one have none here."""
        return tuple(dict.fromkeys(prompt.domain for prompt in self.prompts if prompt.domain))

    def take(self, limit: int | None = None, domains: Sequence[str] = ()) -> PromptSet:
        """The first ``limit`` prompts, the domains in turn so that each has its share, of ``domains`` only where named.
        Raises ``UsageError``."""
        if limit is not None and limit < 1:
            raise UsageError(f"limit is {limit}; it must be at least 1")
        if unknown := [name for name in domains if name not in self.domains]:
            known = ", ".join(self.domains) or "none"
            raise UsageError(f"domain {unknown[0]!r} is not in {self.name}; there are {known}")
        chosen = [prompt for prompt in self.prompts if not domains or prompt.domain in domains]
        if limit is not None:
            by_domain: dict[str, list[EvalPrompt]] = {}
            for prompt in chosen:
                by_domain.setdefault(prompt.domain, []).append(prompt)
            in_turn = [prompt for row in zip_longest(*by_domain.values()) for prompt in row if prompt is not None]
            chosen = in_turn[:limit]
        return PromptSet(self.name, tuple(chosen))


def load_prompts(source: str, *, limit: int | None = None) -> PromptSet:
    """``mini``, the path of a JSON-lines file, or ``hf:OWNER/NAME[/CONFIG][:SPLIT[:COLUMN]]``.

    ``limit`` bounds what is read from the hub only, where a set may have millions of rows. Raises ``PromptError``,
    and for the hub ``BackendError`` (no ``datasets`` package) or ``StorageError`` (unreachable)."""
    if source.startswith(HUB):
        return _from_hub(source, limit)
    prompts = read_prompts(MINI if source == "mini" else Path(source).expanduser())
    numbered = [prompt if prompt.id else replace(prompt, id=str(at)) for at, prompt in enumerate(prompts, 1)]
    return PromptSet(source if source == "mini" else Path(source).name, tuple(numbered))


def read_prompts(path: str | Path) -> list[EvalPrompt]:
    """Prompts of a JSON-lines file (``.gz`` or not): objects with ``prompt`` (text, messages or ids) or ``messages``,
    and perhaps ``domain`` and ``id``. Raises ``PromptError`` naming the line that is none."""
    path, prompts = Path(path), []
    try:
        with open_text(path, "r") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    prompts.append(_read_prompt(line, f"{path}, line {number},"))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise PromptError(f"{path} cannot be read as prompts: {error}") from None
    if not prompts:
        raise PromptError(f"{path} holds no prompts")
    return prompts


def _read_prompt(line: str, where: str) -> EvalPrompt:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError:
        raise PromptError(f"{where} is not JSON") from None
    prompt = (raw.get("prompt") or raw.get("messages")) if isinstance(raw, dict) else None
    if not prompt or not (isinstance(prompt, str) or _is_messages(prompt) or _is_ids(prompt)):
        raise PromptError(f"{where} needs a prompt that is a text, a list of messages or a list of token ids")
    return EvalPrompt(prompt, str(raw.get("domain", "")), str(raw.get("id", "")))


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(part, dict) and "role" in part for part in prompt)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(part, int) and part >= 0 for part in prompt)


def _from_hub(source: str, limit: int | None) -> PromptSet:
    address, split, column, *more = (*source.removeprefix(HUB).split(":"), "", "")
    owner, name, config, *deeper = (*address.split("/"), "", "")
    if any(more) or any(deeper) or not (owner and name):
        raise UsageError(f"{source!r} is no data set; write {HUB}OWNER/NAME[/CONFIG][:SPLIT[:COLUMN]]")
    try:
        import datasets
    except ImportError:
        raise BackendError(f"{source} needs the datasets package; pip install 'dflash-lab[bench]'") from None
    try:
        rows = datasets.load_dataset(f"{owner}/{name}", config or None, split=split or "test")
    except Exception as error:  # the hub client lets several libraries' errors through
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StorageError(
            f"{source} cannot be loaded ({reason}); check the name and the network, or give a JSON-lines file"
        ) from error
    names = list(rows.column_names)
    column = column or next((known for known in _COLUMNS if known in names), "")
    if column not in names:
        raise PromptError(f"{source} has no such column of prompts; it has {', '.join(names)}")
    count = len(rows) if limit is None else min(limit, len(rows))
    prompts = [_hub_prompt(rows[at], column, f"{source}, row {at},") for at in range(count)]
    if not prompts:
        raise PromptError(f"{source} holds no prompts")
    return PromptSet(source, tuple(replace(prompt, id=str(at)) for at, prompt in enumerate(prompts)))


def _hub_prompt(row: Mapping[str, Any], column: str, where: str) -> EvalPrompt:
    prompt = row[column]
    if prompt and _is_messages(prompt):
        return EvalPrompt(prompt)
    if not isinstance(prompt, str) or not prompt.strip():
        raise PromptError(f"{where} holds neither a text nor messages in {column}")
    return EvalPrompt(prompt)
