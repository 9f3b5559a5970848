"""Families of the registry's targets beyond dense ones, through mlx-lm: experts, windows, attention sinks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)
pytest.importorskip("mlx_lm")

from mlx.utils import tree_flatten  # noqa: E402
from mlx_dflash.backend import MlxBackend  # noqa: E402
from mlx_lm.models import gpt_oss, qwen3_moe  # noqa: E402
from model_folders import draft_dict, write_draft  # noqa: E402

from dflash.checkpoint import DraftConfig  # noqa: E402
from dflash.engine import Engine  # noqa: E402

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt_oss": (
        gpt_oss,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "qwen3_moe": (
        qwen3_moe,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}  # fmt: skip


def write_random(folder: Path, family: str) -> tuple[Path, Any]:
    """A random model of the family in mlx-lm's layout, and mlx-lm's own copy of it."""
    module, settings = FAMILIES[family]
    config = {
        "model_type": family, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96, "rms_norm_eps": 1e-5, "eos_token_id": 95,
        "rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": False,
    } | settings  # fmt: skip
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(0)
    weights = [(name, value + mx.random.normal(value.shape) * 0.3) for name, value in tree_flatten(model.parameters())]
    model.load_weights(weights)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), metadata={"format": "mlx"})
    return folder, model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_the_targets_own(family: str, tmp_path: Path) -> None:
    """With random drafts, most of which are rejected: every round rewinds, past the window too."""
    backend = MlxBackend()
    folder, model = backend.run(lambda: write_random(tmp_path / "target", family))
    raw = draft_dict(hidden_size=32, vocab_size=96, num_target_layers=4)
    draft, config = write_draft(tmp_path / "draft", raw), DraftConfig.from_dict(raw)
    target = backend.run(lambda: backend.load_target(folder, device="auto", dtype="float32", layer_ids=(1, 3)))
    drafter = backend.run(lambda: backend.load_drafter(draft, config, target))
    prompt, count = [3, 17, 20, 45, 9] * 3, 24

    def oracle() -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(mx.argmax(model(mx.array([ids]))[0, -1])))
        return ids[len(prompt) :]

    expected = backend.run(oracle)
    result = Engine(backend, target, drafter).generate(prompt, max_new_tokens=count)
    assert list(result.token_ids) == expected[: len(result.token_ids)]
    assert len(result.token_ids) == count or result.token_ids[-1] == 95
    assert len(set(expected)) > 4  # a model that repeats itself would prove little
