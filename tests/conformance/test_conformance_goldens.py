"""The stored traces are the reference's, and the matrix holds every setting it claims to."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from dflash.checkpoint import DraftConfig, check_weights
from dflash.conformance import checkpoints, goldens
from dflash.conformance.cases import CASES, Case
from dflash.conformance.goldens import FOLDER, differences, read, sample, script, trace, write, wrong_slots


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_still_says_what_is_stored(case: Case) -> None:
    assert list(differences(read(case.name), trace(case))) == []


def test_there_is_one_trace_a_case_and_all_of_them_are_small() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {f"{case.name}.npy.gz" for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 600_000


def test_a_difference_is_seen_and_named() -> None:
    golden = read("llama")
    logits = golden.draft_logits.copy()
    logits[3, -1] += 1e-4
    accepted = golden.accepted.copy()
    accepted[1] -= 1
    changed = dataclasses.replace(golden, draft_logits=logits, accepted=accepted, output=golden.output[:-1])
    assert list(differences(golden, changed)) == ["output", "draft_logits", "accepted"]


def test_the_same_golden_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = (FOLDER / "qwen2.npy.gz").read_bytes()
    golden = read("qwen2")
    monkeypatch.setattr(goldens, "FOLDER", tmp_path / "new")
    for _ in range(2):
        write("qwen2", golden)
        assert list(differences(golden, read("qwen2"))) == []
        assert len((tmp_path / "new" / "qwen2.npy.gz").read_bytes()) == pytest.approx(len(stored), rel=0.02)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["qwen2.npy.gz"]


@pytest.mark.parametrize("seed", [12, 112])
def test_choices_that_are_too_close_are_refused(seed: int) -> None:
    case = next(case for case in CASES if case.name == "qwen2-nested-tied")
    with pytest.raises(
        ValueError, match=r"qwen2-nested-tied: \d+% of (output|proposals|verdicts) are clear in float32"
    ):
        trace(dataclasses.replace(case, seed=seed))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_accepted_lengths_cover_their_range(case: Case) -> None:
    golden = read(case.name)
    scripted = golden.accepted[1:-1].tolist()
    assert sorted(scripted) == sorted(wrong_slots(case.count))
    assert {0, case.count} <= set(scripted)
    assert case.count > 7 or set(scripted) == set(range(case.count + 1))
    path = golden.output.tolist()
    for index, accepted in enumerate(golden.accepted.tolist()):  # every round continues the target's own output
        done = 1 + int((1 + golden.accepted[:index]).sum())
        assert golden.anchors[index] == path[done - 1]
        assert golden.verified[index, :accepted].tolist() == path[done : done + accepted]
        assert golden.next_tokens[index] == path[done + accepted]
    assert (golden.verified[[0, -1]] == golden.proposals[[0, -1]]).all()


def test_a_script_goes_wrong_once() -> None:
    case = next(case for case in CASES if case.name == "block-16")
    right = list(range(50, 50 + case.count))
    for wrong in range(case.count):
        tokens = script(right, case, wrong)
        assert [slot for slot in range(case.count) if tokens[slot] != right[slot]] == [wrong]
    assert script(right, case, case.count) == right
    assert right == list(range(50, 50 + case.count))


def test_samples_meet_every_channel() -> None:
    numbers = np.tile(np.arange(32), (24, 1))
    assert set(sample(numbers).tolist()) == set(range(32))
    assert len(sample(np.ones((500, 48)))) < 600


def test_the_matrix_holds_what_it_claims() -> None:
    def seen(of) -> set:
        return {of(case) for case in CASES}

    families = {"llama", "qwen2", "qwen3"}
    groups = {"shared", "grouped", "multi"}

    def group(heads) -> str:
        return "multi" if heads.keys == heads.queries else "shared" if heads.keys == 1 else "grouped"

    assert seen(lambda case: (case.family, case.tied)) == {(f, tied) for f in families for tied in (True, False)}
    assert seen(lambda case: (case.family, case.nested)) == {(f, nested) for f in families for nested in (True, False)}
    assert {(f, g) for f in families for g in ("grouped", "multi", "shared")} == seen(
        lambda case: (case.family, group(case.heads))
    )
    assert {(f, kind) for f in families for kind in ("default", "linear", "yarn")} <= seen(
        lambda case: (case.family, case.rope.kind)
    )
    nested = {case.rope for case in CASES if case.nested}
    assert {rope.kind for rope in nested} == {"default", "linear", "yarn", "llama3"}
    assert all(rope.theta not in (10_000.0, 1_000_000.0) for rope in nested)  # what mlx-lm takes where it reads none
    assert {True, False} == seen(lambda case: case.bias) == seen(lambda case: case.draft_bias)
    assert seen(lambda case: group(case.draft_heads)) == groups
    assert seen(lambda case: case.draft_rope.kind) == {"default", "linear", "yarn", "llama3"}
    assert seen(lambda case: case.draft_rope.partial) == {0.5, 1.0}
    layers = {pair for case in CASES for pair in zip(case.causality, case.windows, strict=True)}
    assert {(causal, window is not None) for causal, window in layers} == {(c, w) for c in (0, 1) for w in (0, 1)}
    assert any(window and window < case.prompt for case in CASES for window in case.windows)
    assert any(0 in case.taps for case in CASES) and any(case.layers - 1 in case.taps for case in CASES)
    assert seen(lambda case: case.block) == {2, 5, 8, 16, 32}
    assert {0, 1, 4} <= seen(lambda case: case.chunk)
    assert {(sliding, chunk) for sliding in (True, False) for chunk in (0, 1, 4)} <= seen(
        lambda case: (case.window is not None, case.chunk)
    )
    assert {(d, f) for d in ("float16", "bfloat16") for f in families} <= seen(lambda case: (case.dtype, case.family))
    assert {(case.sampling.top_k > 0, case.sampling.top_p < 1) for case in CASES if not case.sampling.greedy} == {
        (k, p) for k in (True, False) for p in (True, False)
    }


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_number_format_holds_the_weights_exactly(dtype: str, tmp_path: Path) -> None:
    case = dataclasses.replace(next(case for case in CASES if case.name == "llama-biases"), stored=dtype)
    target, draft = checkpoints.write_pair(case, tmp_path)
    for folder, weights in ((target, checkpoints.target_weights(case)), (draft, checkpoints.draft_weights(case))):
        stored = load_tensors(folder / "model.safetensors")
        assert set(stored) == set(weights)
        for name, values in weights.items():
            assert str(stored[name].dtype) == f"torch.{dtype}"
            np.testing.assert_array_equal(stored[name].double().numpy(), values)
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    check_weights(draft, DraftConfig.load(draft))


def test_weights_do_not_depend_on_the_numpy_at_hand(tmp_path: Path) -> None:
    """A few values, as they were when the traces were stored."""
    target, _ = checkpoints.write_pair(CASES[0], tmp_path)
    stored = load_file(target / "model.safetensors")
    assert stored["model.embed_tokens.weight"][0, :4].tolist() == [0.056640625, 0.10546875, -0.126953125, -0.05859375]
    assert checkpoints.random_ids(CASES[0], 6) == [58, 30, 55, 11, 34, 52]
