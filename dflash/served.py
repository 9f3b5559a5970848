"""Served evaluation: the real decode loop on a set of prompts. The only figure that is ever called τ."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.engine import Engine
from dflash.errors import PromptError
from dflash.metrics import Metrics, per_prompt
from dflash.records import open_text
from dflash.tokenizer import Prompt

_FIGURES = ("mean_acceptance_length", "draft_acceptance_rate")


@dataclass(frozen=True)
class EvalPrompt:
    """``prompt`` is a text (one user message), messages, or token ids."""

    prompt: Prompt
    domain: str = ""
    id: str = ""


@dataclass(frozen=True)
class Served:
    """Metrics of every prompt, in order; ratios of ``overall`` and ``domains`` are token-weighted."""

    prompts: tuple[EvalPrompt, ...]
    metrics: tuple[Metrics, ...]
    notes: tuple[str, ...] = ()

    @property
    def overall(self) -> Metrics:
        return Metrics.merge(self.metrics)

    @property
    def domains(self) -> dict[str, Metrics]:
        names = sorted({prompt.domain for prompt in self.prompts if prompt.domain})
        return {name: Metrics.merge(self._of(name)) for name in names}

    def _of(self, domain: str) -> list[Metrics]:
        return [part for prompt, part in zip(self.prompts, self.metrics, strict=True) if prompt.domain == domain]

    def to_dict(self) -> dict[str, Any]:
        """Figures over all and by domain, each token-weighted and as the mean of the prompts' own with its spread."""
        groups = {"overall": list(self.metrics)} | {name: self._of(name) for name in self.domains}
        figures = {name: _figures(parts) for name, parts in groups.items()}
        return {**figures.pop("overall"), "domains": figures, "notes": list(self.notes)}


def _figures(parts: Sequence[Metrics]) -> dict[str, Any]:
    merged = Metrics.merge(parts)
    return {
        "prompts": len(parts),
        "num_tokens": merged.num_tokens,
        "num_spec_steps": merged.num_spec_steps,
        "mean_acceptance_length": merged.mean_acceptance_length,
        "draft_acceptance_rate": merged.draft_acceptance_rate,
        "acceptance_rate_per_position": list(merged.acceptance_rate_per_position),
        "acceptance_histogram": list(merged.acceptance_histogram),
        "decode_tokens_per_second": merged.decode_tokens_per_second,
        "per_prompt": {name: per_prompt(parts, name) for name in _FIGURES},
    }


def evaluate(
    engine: Engine,
    prompts: Sequence[EvalPrompt],
    *,
    max_new_tokens: int = 128,
    report: Callable[[Served], None] = lambda _: None,
    **options: Any,
) -> Served:
    """Decode every prompt; ``report`` is called after each with what there is so far. ``options`` are those of
    ``Engine.generate``."""
    if not prompts:
        raise PromptError("there is no prompt to evaluate on; give at least one")
    metrics: list[Metrics] = []
    notes: dict[str, None] = {}
    for prompt in prompts:
        result = engine.generate(prompt.prompt, max_new_tokens=max_new_tokens, **options)
        metrics.append(result.metrics)
        notes |= dict.fromkeys(result.notes)
        served = Served(tuple(prompts[: len(metrics)]), tuple(metrics), tuple(notes))
        report(served)
    return served


def read_prompts(path: str | Path) -> list[EvalPrompt]:
    """Prompts of a JSON-lines file (``.gz`` or not): objects with ``prompt`` (text, messages or ids) or ``messages``,
    and perhaps ``domain`` and ``id``. Raises ``PromptError`` naming the line that is none."""
    path, prompts = Path(path), []
    try:
        with open_text(path, "r") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    prompts.append(_read_prompt(line, f"{path}, line {number},"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
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
