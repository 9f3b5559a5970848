"""Fixtures without weights: T, a tiny random target whose own output is the oracle; S(n), a scripted drafter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch_dflash.backend import TorchBackend
from torch_dflash.drafter import TorchDrafter
from torch_dflash.modeling import DraftModel
from torch_dflash.target import TorchTarget
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.checkpoint import DraftConfig
from dflash.engine import Engine
from dflash.interfaces import Backend
from dflash.rope import RopeConfig
from dflash.types import Proposal, SamplingParams, TargetInfo, TargetOutput

VOCAB, HIDDEN, LAYERS, MASK = 300, 32, 4, 299

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_target(family: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    """A random float32 causal LM whose logits are spread enough for its greedy output to vary."""
    settings = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, eos_token_id=1, bos_token_id=0,
        pad_token_id=None, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(settings | changes))).eval().requires_grad_(False)
    return model


def make_config(**changes) -> DraftConfig:
    settings = dict(
        hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCAB, block_size=5, mask_token_id=MASK, target_layer_ids=(0, 2), rope=RopeConfig(1e4),
        num_target_layers=LAYERS, dtype="float32", max_position_embeddings=512,
    )  # fmt: skip
    return DraftConfig(**(settings | changes))


def make_drafter(config: DraftConfig, seed: int = 0) -> DraftModel:
    torch.manual_seed(seed)
    model = DraftModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if weight.dim() == 1 else 0.0))
    return model.eval()


def save_pair(folder: Path, target: PreTrainedModel, config: DraftConfig, model: DraftModel) -> tuple[Path, Path]:
    """Both models as local folders, as ``dflash.load`` takes them."""
    target_folder, draft_folder = folder / "target", folder / "draft"
    target.save_pretrained(target_folder)
    draft_folder.mkdir(parents=True)
    (draft_folder / "config.json").write_text(json.dumps(config.to_dict()))
    save_file(dict(model.state_dict()), draft_folder / "model.safetensors")
    return target_folder, draft_folder


@dataclass
class ScriptedDrafter:
    """Implements ``Drafter`` beside the target of ``pair``: proposes ``script[position]`` for the absolute position, so
    a test decides every token.

    ``wrong_at`` replaces the slots with these numbers (1 is the first) by another token, in every round."""

    pair: TinyPair
    script: list[int]
    wrong_at: tuple[int, ...] = ()
    config: DraftConfig = field(default_factory=make_config)
    length: int = 0

    def observe(self, features: Any, token_count: int) -> None:
        assert features is not None and 0 < token_count <= len(features)
        self.length += token_count

    def propose(self, anchor: int, count: int, sampling: SamplingParams, *, detail: bool = False) -> Proposal:
        start = self.length + 1
        tokens = [self.script[at] if at < len(self.script) else 7 for at in range(start, start + count)]
        for slot in self.wrong_at:
            if slot <= count:
                tokens[slot - 1] = (tokens[slot - 1] + 1) % VOCAB
        return self.pair.backend.proposal([anchor, *tokens], self.pair.target)

    def reset(self) -> None:
        self.length = 0


class TinyPair:
    """T with an engine around it, and its oracle: what the plain model says, computed without any cache.

    ``tiny_mlx.MlxPair`` is the same pair on the other backend, with the same weights and the same oracle."""

    backend: Backend = TorchBackend()

    def __init__(self, family: str = "llama", seed: int = 0, dtype: str = "float32", **changes: Any) -> None:
        self.model, self.dtype = make_target(family, seed, **changes), dtype
        self.target: Any = self.serve(self.model)

    def another(self, *options: Any, **changes: Any) -> TinyPair:
        """A fresh pair on the same backend."""
        return type(self)(*options, **changes)

    def serve(self, model: PreTrainedModel) -> Any:
        """``model`` as a target of this backend."""
        return TorchTarget(model.to(getattr(torch, self.dtype)), make_config().target_layer_ids)

    def array(self, values: np.ndarray) -> Any:
        """The backend's own array."""
        return torch.from_numpy(values)

    @property
    def cached(self) -> int:
        """Tokens that the target's cache holds, by its own count."""
        return self.target.cache.inner.get_seq_length()

    @property
    def held_features(self) -> dict[int, Any]:
        """What the taps hold on to."""
        return self.target.taps._seen

    @contextmanager
    def failing_layer(self, index: int, error: type[Exception]) -> Iterator[None]:
        """The target's layer raises."""

        def fail(*_: Any) -> None:
            raise error

        hook = self.model.model.layers[index].register_forward_hook(fail)
        try:
            yield
        finally:
            hook.remove()

    def oracle(self, prompt: list[int], count: int) -> list[int]:
        """The greedy continuation of ``prompt``, every token from a fresh forward over everything before it."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    def engine(self, drafter: Any = None, **options: Any) -> Engine:
        return Engine(self.backend, self.target, drafter or self.drafter(), check=True, **options)

    def drafter(self, seed: int = 0, **changes: Any) -> Any:
        embedding = self.model.get_input_embeddings().weight
        head = self.model.get_output_embeddings().weight
        return TorchDrafter(make_drafter(make_config(**changes), seed).to(head.dtype), embedding, head)

    def scripted(
        self, prompt: list[int], count: int = 64, wrong_at: tuple[int, ...] = (), **changes: Any
    ) -> ScriptedDrafter:
        """S(n): the oracle's tokens, wrong at the given slots."""
        return ScriptedDrafter(self, prompt + self.oracle(prompt, count), wrong_at, make_config(**changes))

    def rule_target(self, rule: Rule, vocab_size: int = VOCAB, **options: Any) -> RuleTarget:
        """A target without a model on this backend."""
        return RuleTarget(rule, vocab_size, self.backend, self.array, **options)


Rule = Callable[[list[int]], np.ndarray]


class RuleTarget:
    """Implements ``Target`` without a model: the logits after a prefix are ``rule(prefix)`` [V], float32.

    The feature of a token is its id, so a drafter's context can be read back; ``seen`` is the cache. ``array`` makes
    ``backend``'s own arrays."""

    def __init__(
        self,
        rule: Rule,
        vocab_size: int,
        backend: Backend | None = None,
        array: Callable[[np.ndarray], Any] = torch.from_numpy,
        *,
        stop_token_ids: tuple[int, ...] = (),
        max_positions: int = 4096,
    ) -> None:
        self.rule, self.device, self.tapping = rule, torch.device("cpu"), True
        self.backend, self.array = backend or TorchBackend(), array
        self.info = TargetInfo(1, 1, vocab_size, max_positions, stop_token_ids, "float32", "cpu", "rule")
        self.seen: list[int] = []
        self._last = 0

    @property
    def length(self) -> int:
        return len(self.seen) - self._last

    def forward(self, tokens: Any, *, parents: Any = None, last_only: bool = False) -> TargetOutput:
        assert not self._last, "keep() must follow every forward()"
        assert parents is None
        new = [int(token) for token in tokens]
        assert new and len(self.seen) + len(new) <= self.info.max_positions
        self._last = len(new)
        self.seen += new
        first = len(self.seen) - (1 if last_only else len(new))
        logits = np.stack([self.rule(self.seen[: end + 1]) for end in range(first, len(self.seen))])
        features = self.array(np.array(new, dtype=np.int32)[:, None]) if self.tapping else None
        return TargetOutput(self.array(logits), features)

    def keep(self, path: Any) -> None:
        assert list(path) == list(range(len(path))) and 0 < len(path) <= self._last
        del self.seen[len(self.seen) - self._last + len(path) :]
        self._last = 0

    def reset(self) -> None:
        self.seen, self._last = [], 0

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The oracle: ``count`` greedy tokens after ``prompt``, straight from the rule."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.rule(ids).argmax()))
        return ids[len(prompt) :]


class PlannedDrafter:
    """Implements ``Drafter`` beside a ``RuleTarget``: drafts ``plan(context, count)``, whose context is every committed
    token, the anchor included. ``context`` holds what was observed."""

    def __init__(
        self, target: RuleTarget, plan: Callable[[list[int], int], list[int]], config: DraftConfig | None = None
    ) -> None:
        self.target, self.plan, self.config = target, plan, config or make_config()
        self.context: list[int] = []

    @property
    def length(self) -> int:
        return len(self.context)

    def observe(self, features: Any, token_count: int) -> None:
        assert 0 < token_count <= len(features)
        self.context += features[:token_count, 0].tolist()

    def propose(self, anchor: int, count: int, sampling: SamplingParams, *, detail: bool = False) -> Proposal:
        assert count > 0
        drafted = self.plan([*self.context, anchor], count)
        assert len(drafted) == count
        return self.target.backend.proposal([anchor, *drafted], self.target)

    def reset(self) -> None:
        self.context = []


def scripted_rule(script: list[int], vocab_size: int = VOCAB) -> Rule:
    """The greedy output continues ``script`` whatever it is given, and repeats its last token behind it."""

    def rule(prefix: list[int]) -> np.ndarray:
        logits = np.zeros(vocab_size, dtype=np.float32)
        logits[script[min(len(prefix), len(script) - 1)]] = 9.0
        return logits

    return rule


def chain_rule(vocab_size: int, seed: int = 0, spread: float = 2.0) -> Rule:
    """Random logits that depend on the last two tokens and on the position, so that a stale cache shows."""
    generator = torch.Generator().manual_seed(seed)
    table = (torch.randn(3, vocab_size, vocab_size, vocab_size, generator=generator) * spread).numpy()
    return lambda prefix: table[len(prefix) % 3, prefix[-2] if len(prefix) > 1 else 0, prefix[-1]]
