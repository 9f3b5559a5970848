"""A fresh drafter for a target: its configuration from the recipe, its first weights."""

from __future__ import annotations

import torch
from torch import nn

from dflash.checkpoint import DraftConfig, default_target_layer_ids
from dflash.errors import TrainingError
from dflash.recipe import Recipe
from dflash.rope import RopeConfig
from torch_dflash.modeling import DraftModel
from torch_dflash.taps import decoder_layers


def draft_config(recipe: Recipe, target: nn.Module) -> DraftConfig:
    """The drafter's shape: the recipe's own numbers, everything else as the target has it."""
    config = target.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return DraftConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=recipe.draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        block_size=recipe.block_size,
        mask_token_id=recipe.mask_token_id,
        target_layer_ids=recipe.target_layer_ids or default_target_layer_ids(config.num_hidden_layers, recipe.taps),
        rope=RopeConfig(theta=float(rope.get("rope_theta", 10_000.0)), max_positions=config.max_position_embeddings),
        num_target_layers=config.num_hidden_layers,
        rms_norm_eps=float(f"{config.rms_norm_eps:.6g}"),
        max_position_embeddings=config.max_position_embeddings,
        dtype="bfloat16",
    )


def fresh_drafter(config: DraftConfig, recipe: Recipe, target: nn.Module) -> DraftModel:
    """A drafter with its first weights, which depend on the recipe's seed alone.

    ``normal``: every matrix from a normal of 0.02, every norm 1. ``target``: the layers are copies of the target's
    last ones, and the projection begins as its deepest tap plus noise."""
    model = DraftModel(config)
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
            elif name.endswith("bias"):
                weight.zero_()
        if recipe.init == "target":
            sources = list(decoder_layers(target))[-config.num_hidden_layers :]
            if len(sources) < config.num_hidden_layers:
                raise TrainingError(
                    f"draft_layers is {config.num_hidden_layers} and the target has {len(sources)} layers to start "
                    "from; take fewer, or init normal"
                )
            for layer, source in zip(model.layers, sources, strict=True):
                theirs = dict(source.named_parameters())
                for name, weight in layer.named_parameters():
                    if name in theirs and theirs[name].shape == weight.shape:
                        weight.copy_(theirs[name])
            model.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
    return model.to(next(target.parameters()).device)
