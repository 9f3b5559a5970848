"""Shapes of full-size pairs, to be filled with random weights for what a round costs: no weights of theirs are needed
to read as many bytes. ``torch_dflash.shapes`` makes engines of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash.checkpoint import DraftConfig, default_target_layer_ids
from dflash.errors import UsageError
from dflash.rope import RopeConfig


@dataclass(frozen=True)
class PairShape:
    """A target by the fields of its ``config.json``, and its drafter beside it."""

    name: str
    target: Mapping[str, Any]
    draft_layers: int
    block_size: int
    mask_token_id: int
    taps: int

    def layers(self, asked: int | None) -> int:
        """The target's layers, or the first ``asked`` of them. Raises ``UsageError``."""
        whole: int = self.target["num_hidden_layers"]
        if asked is not None and not self.taps <= asked <= whole:
            raise UsageError(f"layers is {asked}; {self.name} has {whole}, and its {self.taps} taps need as many")
        return asked or whole

    def draft_config(self, layers: int) -> DraftConfig:
        """The drafter's config on a target of that many layers: the paper's taps, or where it is too shallow for them
        taps from its first layer to its last."""
        target = self.target
        whole = layers == target["num_hidden_layers"]
        spread = tuple(at * (layers - 1) // (self.taps - 1) for at in range(self.taps))
        return DraftConfig(
            hidden_size=target["hidden_size"],
            intermediate_size=target["intermediate_size"],
            num_hidden_layers=self.draft_layers,
            num_attention_heads=target["num_attention_heads"],
            num_key_value_heads=target["num_key_value_heads"],
            head_dim=target["head_dim"],
            vocab_size=target["vocab_size"],
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=default_target_layer_ids(layers, self.taps) if whole else spread,
            rope=RopeConfig(target["rope_theta"]),
            num_target_layers=layers,
            rms_norm_eps=target["rms_norm_eps"],
            max_position_embeddings=target["max_position_embeddings"],
        )


SHAPES = {
    shape.name: shape
    for shape in (
        PairShape(
            "qwen3-8b",
            {
                "model_type": "qwen3",
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151_936,
                "max_position_embeddings": 40_960,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000.0,
                "tie_word_embeddings": False,
            },
            draft_layers=5,
            block_size=16,
            mask_token_id=151_669,
            taps=5,
        ),
        PairShape(
            "smollm2-135m",
            {
                "model_type": "llama",
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "vocab_size": 49_152,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "rope_theta": 100_000.0,
                "tie_word_embeddings": True,
            },
            draft_layers=3,
            block_size=8,
            mask_token_id=16,
            taps=5,
        ),
    )
}
