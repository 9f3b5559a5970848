"""Served evaluation: the real decode loop on a set of prompts. The only figure that is ever called τ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.engine import Engine
from dflash.errors import PromptError
from dflash.metrics import Metrics, per_prompt
from dflash.prompts import EvalPrompt

_FIGURES = ("mean_acceptance_length", "draft_acceptance_rate")


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
