"""Response regeneration: the target answers every prompt itself, many rows at once, into an append-only record file.

A drafter learns the target's own voice, so token ids are kept exactly as the target made them, end token included.
Shapes: r live rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash.errors import PromptError, TrainingError
from dflash.records import ResponseRecord
from torch_dflash.cache import cache_argument

LOOP_TURNS, LOOP_TOKENS, LOOP_PERIOD = 3, 24, 80
_BEGINNING = b'{"domain":'  # of every record's line


@dataclass(frozen=True)
class PromptIds:
    """A prompt as the target reads it: ids with its chat template."""

    ids: tuple[int, ...]
    domain: str = ""

    @property
    def key(self) -> str:
        """Sixteen hex digits of the ids; what a resumed run knows a prompt by."""
        return hashlib.sha256(np.array(self.ids, dtype=np.int64).tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Settings:
    """How responses are made. ``share`` of the prompts are sampled at ``temperature``, the others are greedy; which
    ones, and what they draw, follows from ``seed`` and the prompt alone. ``rows`` answer at the same time."""

    max_new_tokens: int = 224
    rows: int = 96
    temperature: float = 0.6
    share: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "rows"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.temperature > 0:
            raise TrainingError(f"temperature is {self.temperature}; it must be above 0 (a share of 0 is all greedy)")
        if not 0 <= self.share <= 1:
            raise TrainingError(f"share is {self.share}; it is the part of the prompts to sample, from 0 to 1")

    def draws(self, prompt: PromptIds) -> tuple[float, np.ndarray]:
        """This prompt's temperature (0 is greedy) and its uniform numbers [max_new_tokens]."""
        rng = np.random.default_rng([self.seed, int(prompt.key, 16)])
        temperature = self.temperature if rng.random() < self.share else 0.0
        return temperature, rng.random(self.max_new_tokens)


@dataclass(frozen=True)
class Progress:
    """``rows`` of ``total`` are on disk (resumed ones included); ``tokens`` and rates are this call's own."""

    rows: int
    total: int
    tokens: int
    tokens_per_second: float
    seconds_left: float


def regenerate(
    target: nn.Module,
    prompts: Sequence[PromptIds],
    path: Path,
    stop_ids: Sequence[int],
    settings: Settings,
    report: Callable[[Progress], None] = lambda _: None,
) -> int:
    """Append the target's response to every prompt that ``path`` does not hold yet; returns how many were added.

    A row is written when it ends, so a killed run loses only the rows in flight and continues where it was; a
    half-written last line is dropped. Prompts are grouped by length, the longest first, so that a lack of memory shows
    at once. Raises ``PromptError`` for a prompt that leaves no room for a response, ``TrainingError`` for a file that
    cannot be continued."""
    room = getattr(target.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[operator, union-attr]
    for prompt in prompts:
        if not prompt.ids or (room and len(prompt.ids) + settings.max_new_tokens > room):
            raise PromptError(
                f"a prompt has {len(prompt.ids)} tokens; with {settings.max_new_tokens} new ones it must have at least "
                f"one and fit into the target's {room} positions"
            )
    wanted = {prompt.key: prompt for prompt in prompts}
    done = resume_keys(path)
    todo = sorted((prompt for key, prompt in wanted.items() if key not in done), key=lambda p: -len(p.ids))
    begun, tokens, rows, kept = time.monotonic(), 0, 0, len(wanted) - len(todo)
    with path.open("a", encoding="utf-8") as stream:
        for start in range(0, len(todo), settings.rows):
            batch = todo[start : start + settings.rows]
            for place, response, finished in respond(target, batch, stop_ids, settings):
                temperature, _ = settings.draws(batch[place])
                record = ResponseRecord(
                    prompt=batch[place].ids,
                    response=tuple(response),
                    domain=batch[place].domain,
                    temperature=temperature,
                    finished=finished,
                    key=batch[place].key,
                )
                stream.write(record.to_json() + "\n")
                stream.flush()
                tokens, rows = tokens + len(response), rows + 1
                seconds = time.monotonic() - begun
                report(
                    Progress(kept + rows, len(wanted), tokens, tokens / seconds, (len(todo) - rows) * seconds / rows)
                )
    return rows


def resume_keys(path: Path) -> set[str]:
    """The keys of the prompts that ``path`` already answers, after its half-written last line, if any, is dropped. A
    file of something else is refused as it is."""
    if path.suffix == ".gz":
        raise TrainingError(f"{path} is compressed, and rows are appended to plain text; name a .jsonl file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as stream:
            stream.seek(0)
            whole = stream.read()
            end = whole.rfind(b"\n") + 1
            keys = {_key(line, f"{path}, line {number},") for number, line in enumerate(whole[:end].splitlines(), 1)}
            if not (whole[end:].startswith(_BEGINNING) or _BEGINNING.startswith(whole[end:])):
                raise TrainingError(f"{path} ends in something else than a response record; name another file")
            stream.truncate(end)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror}") from None
    return keys


def _key(line: bytes, where: str) -> str:
    try:
        return ResponseRecord.from_dict(json.loads(line)).key
    except (ValueError, TypeError, AttributeError) as error:
        raise TrainingError(f"{where} is not a response record: {error}") from None


@torch.inference_mode()
def respond(
    target: nn.Module, prompts: Sequence[PromptIds], stop_ids: Sequence[int], settings: Settings
) -> Iterator[tuple[int, list[int], bool]]:
    """Answer ``prompts`` at once; yields (place, response ids, whether it ended by itself) as each one ends.

    Prompts are padded on the left; a row's positions and mask leave the padding out, so every row is what it would be
    alone, up to the order of float sums. Rows that have ended leave the batch."""
    device = next(target.parameters()).device
    longest, room = max(len(prompt.ids) for prompt in prompts), settings.max_new_tokens
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest + room, dtype=torch.long)
    for place, prompt in enumerate(prompts):
        tokens[place, longest - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask[place, longest - len(prompt.ids) :] = 1
    tokens, mask = tokens.to(device), mask.to(device)
    positions = (mask[:, :longest].cumsum(1) - 1).clamp(min=0)
    drawn = [settings.draws(prompt) for prompt in prompts]
    temperatures = torch.tensor([temperature for temperature, _ in drawn], dtype=torch.float64, device=device)
    uniforms = torch.from_numpy(np.stack([numbers for _, numbers in drawn])).to(device)
    cache = roomy_cache(target, longest + room)
    cache_keyword: Any = {cache_argument(target): cache}
    live = list(range(len(prompts)))
    responses: list[list[int]] = [[] for _ in prompts]
    for turn in range(room):
        logits = target(
            input_ids=tokens,
            attention_mask=mask[:, : longest + turn],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache_keyword,
        ).logits[:, -1]  # [r, V]
        chosen = choose(logits, temperatures, uniforms[:, turn])
        keep = []
        for place, (row, token) in enumerate(zip(live, chosen.tolist(), strict=True)):
            responses[row].append(token)
            if token in stop_ids or turn == room - 1 or in_loop(responses[row]):
                yield row, responses[row], token in stop_ids
            else:
                keep.append(place)
        if not keep:
            return
        tokens, positions = chosen[:, None], positions[:, -1:] + 1
        if len(keep) < len(live):
            kept = torch.tensor(keep, device=device)
            tokens, positions, mask = tokens[kept], positions[kept], mask[kept]
            temperatures, uniforms = temperatures[kept], uniforms[kept]
            cache.batch_select_indices(kept)
            live = [live[place] for place in keep]


def choose(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """The next token [r] of every row: the argmax at temperature 0, else where the row's cumulative distribution first
    exceeds its uniform number, so that a row's draw does not depend on its neighbours."""
    chosen = logits.argmax(-1)
    sampled = temperatures > 0
    if sampled.any():
        heights = (logits[sampled].double() / temperatures[sampled, None]).softmax(-1).cumsum(-1)
        aims = uniforms[sampled, None] * heights[:, -1:]
        chosen[sampled] = torch.searchsorted(heights, aims, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return chosen


def in_loop(response: Sequence[int]) -> bool:
    """Whether the response ends in the third turn of a loop of up to 80 tokens. Loops shorter than 8 tokens need more
    turns, 24 tokens in all, because tables, rulers and numbers repeat with reason."""
    size = len(response)
    for period in range(1, min(LOOP_PERIOD, size // LOOP_TURNS) + 1):
        span = max(LOOP_TURNS * period, LOOP_TOKENS)
        if (
            span <= size
            and response[-1] == response[-1 - period]
            and response[-period - 1] == response[-2 * period - 1]
        ):
            tail = response[size - span :]
            if tail[period:] == tail[:-period]:
                return True
    return False


class _RoomyLayer(DynamicLayer):
    """A cache layer whose buffers hold the whole response from the start, so that a step copies one token, not all."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.size, self.is_initialized = room, 0, False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.device = key_states.device
            self.buffers = [
                new.new_empty(*new.shape[:2], self.room, new.shape[-1]) for new in (key_states, value_states)
            ]
            self.is_initialized = True
        end = self.size + key_states.shape[-2]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.size : end] = new
        self.size = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.size

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = [buffer[indices] for buffer in self.buffers]


def roomy_cache(target: nn.Module, room: int) -> DynamicCache:
    """A cache for ``room`` tokens a row; layers of another kind (a sliding window) stay as transformers makes them."""
    cache = DynamicCache(config=target.config)
    cache.layers = [_RoomyLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
