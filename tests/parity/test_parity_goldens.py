"""Our engine, on either backend, against traces of the official ``dflash`` 0.1.0 (its PyTorch code), stored by
``experiments/parity/run.py``: the same draft logits to 1e-4 relative in float32, the same proposals, accepted lengths
and tokens, round by round."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PARITY = Path(__file__).resolve().parents[2] / "experiments" / "parity"
if not PARITY.is_dir():
    pytest.skip("the parity scripts come with a checkout only", allow_module_level=True)
sys.path.insert(0, str(PARITY))

import cases  # noqa: E402
import goldens  # noqa: E402
import ours  # noqa: E402
from compare import TOLERANCE, Agreement  # noqa: E402
from workers import fingerprint  # noqa: E402

from dflash.checkpoint import CONFIG_FILE  # noqa: E402
from dflash.errors import DFlashError  # noqa: E402
from dflash.registry import BUNDLED, find_local  # noqa: E402

BY_NAME = {case.name: case for case in cases.CASES}
BUNDLED_ROUNDS = {"torch": None, "mlx": 6}  # rounds of its stored traces, or all: MLX's own BLAS takes a second each


@pytest.fixture(params=["torch", "mlx"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "mlx" and not importlib.util.find_spec("mlx_lm"):
        pytest.skip("mlx is not installed")
    return request.param


def agreement_of(golden: dict[str, Any], folder: Path, backend: str) -> Agreement:
    engine = ours.open_pair(folder / "target", folder / "draft", backend)
    agreement = Agreement()
    for request, trace in zip(golden["requests"], golden["traces"], strict=True):
        agreement.add(trace, ours.trace(engine, request))
    return agreement


def opening_agreement(golden: dict[str, Any], folder: Path, backend: str, rounds: int) -> Agreement:
    """The first ``rounds`` rounds of the first trace, which end before a budget of these and one block more does."""
    request, trace = golden["requests"][0], golden["traces"][0]
    tokens = 1 + sum(len(step["committed"]) for step in trace["rounds"][:rounds])
    budget = tokens + len(trace["rounds"][0]["drafted"])
    engine = ours.open_pair(folder / "target", folder / "draft", backend)
    mine = ours.trace(engine, request | {"max_new_tokens": budget})
    cut = [
        {
            **full,
            "rounds": full["rounds"][:rounds],
            "logits": full["logits"][:rounds],
            "output": full["output"][:tokens],
        }
        for full in (trace, mine)
    ]
    agreement = Agreement()
    agreement.add(*cut)
    return agreement


@pytest.mark.parametrize("name", BY_NAME)
def test_engine_agrees_with_the_official_code(name: str, tmp_path: Path, backend: str) -> None:
    golden = goldens.read(name)
    assert golden["case"] == BY_NAME[name].to_dict(), "the case has changed: run.py --update-goldens"
    cases.write_pair(BY_NAME[name], tmp_path, golden["weights"])
    agreement = agreement_of(golden, tmp_path, backend)
    assert agreement.differences == []
    assert agreement.worst <= TOLERANCE
    assert agreement.logit_rounds > 0


def test_goldens_hold_enough_rounds_of_varying_length() -> None:
    accepted: Counter[int] = Counter()
    full_blocks = 0
    for name in BY_NAME:
        for trace in goldens.read(name)["traces"]:
            accepted.update(step["accepted"] for step in trace["rounds"])
            full_blocks += sum(step["accepted"] == len(step["drafted"]) for step in trace["rounds"])
    assert accepted.total() >= 200
    assert full_blocks >= 20
    assert all(accepted[count] >= 5 for count in range(8)), accepted


@pytest.mark.parametrize(
    "change",
    [
        {"dflash_config": {"target_layer_ids": [1, 2]}},
        {"dflash_config": {"mask_token_id": 0}},
        {"rope_theta": 20_000.0},
        {"rms_norm_eps": 1e-2},
        {"is_causal": True},
    ],
    ids=lambda change: next(iter(change.get("dflash_config", change))),
)
def test_comparison_notices_a_changed_drafter(change: dict[str, Any], tmp_path: Path, backend: str) -> None:
    """Each of these is a fault that some port shipped; none of them may hide behind the tolerance."""
    name = "fitted-llama-block-4"
    golden = goldens.read(name)
    cases.write_pair(BY_NAME[name], tmp_path, golden["weights"])
    file = tmp_path / "draft" / CONFIG_FILE
    config = json.loads(file.read_text())
    nested = config["dflash_config"] | change.get("dflash_config", {})
    config |= {**change, "dflash_config": nested}
    if "rope_theta" in change:
        config["rope_parameters"]["rope_theta"] = change["rope_theta"]
    file.write_text(json.dumps(config))
    assert agreement_of(golden, tmp_path, backend).differences


def test_comparison_notices_a_changed_window(tmp_path: Path, backend: str) -> None:
    name = "fitted-llama-sliding-mixed"
    golden = goldens.read(name)
    case = dataclasses.replace(BY_NAME[name], window=BY_NAME[name].window + 1)
    cases.write_pair(case, tmp_path, golden["weights"])
    assert agreement_of(golden, tmp_path, backend).differences


@pytest.mark.slow
def test_bundled_pair_agrees_with_the_official_code(tmp_path: Path, backend: str) -> None:
    if not goldens.path_of(BUNDLED.name).exists():
        pytest.skip("no stored trace of the bundled pair")
    try:
        target, draft = (find_local(BUNDLED.name, what=what) for what in ("target", "draft"))
    except DFlashError as error:
        pytest.skip(str(error))
    if target is None or draft is None:
        pytest.skip("the bundled target is not prepared on this machine")
    golden = goldens.read(BUNDLED.name)
    assert golden["case"]["draft"] == fingerprint(draft), "the drafter has changed: run.py --update-goldens"
    (tmp_path / "target").symlink_to(target)
    (tmp_path / "draft").symlink_to(draft)
    rounds = BUNDLED_ROUNDS[backend]
    agreement = (
        opening_agreement(golden, tmp_path, backend, rounds) if rounds else agreement_of(golden, tmp_path, backend)
    )
    assert agreement.differences == []
    assert agreement.rounds >= 6
    assert agreement.logit_rounds > 0
