"""A drafter whose weights do not fit into the target's float type."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="mlx cannot be imported here", exc_type=ImportError)

import torch
from mlx_dflash.backend import MlxBackend
from tiny_models import make_config, make_drafter, make_target, save_pair

from dflash.errors import CheckpointError


@pytest.mark.parametrize(("scale", "refused"), [(1.0, False), (1e6, True)])
def test_a_drafters_weight_beyond_float16_is_refused_by_name(scale: float, refused: bool, tmp_path: Path) -> None:
    config, backend = make_config(), MlxBackend()
    model = make_drafter(config)
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight.mul_(scale)
    target_folder, draft_folder = save_pair(tmp_path, make_target(), config, model)

    def load() -> None:
        target = backend.load_target(target_folder, device="cpu", dtype="float16", layer_ids=config.target_layer_ids)
        backend.load_drafter(draft_folder, config, target)

    if refused:
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight of the drafter .* overflows"):
            backend.run(load)
    else:
        backend.run(load)
