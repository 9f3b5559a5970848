"""The training run: the same loss however a step is split, bit-identical resume, features, a drafter that learns."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch_dflash.training.batches import BatchPlan
from torch_dflash.training.features import FeatureStore
from torch_dflash.training.trainer import STATE_FILE, Trainer
from training_tiny import (
    TAPS,
    gradients,
    rank_main,
    tiny_recipe,
    tiny_records,
    tiny_target,
    tiny_trainer,
)

from dflash.anchors import valid_anchors
from dflash.errors import TrainingError
from dflash.records import ResponseRecord


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same_gradients(first, second, tolerance: float = 1e-5) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-5)
    for one, other in zip(first[1], second[1], strict=True):
        scale = float(other.abs().max()) + 1e-12
        torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=tolerance)


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [{}, {"soft_labels": 0.5}, {"loss_vocab": "seen"}], ids=str)
def test_the_loss_does_not_depend_on_how_a_step_is_split(tmp_path, recipe):
    whole = gradients(tiny_trainer(tmp_path / "a", tiny_recipe(**recipe)))
    for parts in (2, 3, 9):
        same_gradients(gradients(tiny_trainer(tmp_path / "a", tiny_recipe(**recipe), micro_batches=parts)), whole)


def test_two_processes_with_half_a_batch_equal_one_with_the_whole(tmp_path):
    """Also where the rows do not divide evenly, and where one rank gets none at all."""
    sizes = (4, 3, 1)
    second = multiprocessing.get_context("spawn").Process(target=rank_main, args=(1, 2, str(tmp_path), sizes))
    second.start()
    rank_main(0, 2, str(tmp_path), sizes)
    second.join()
    assert second.exitcode == 0
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for place, size in enumerate(sizes):
        alone = gradients(tiny_trainer(tmp_path / f"alone-{size}", tiny_recipe(batch_rows=size)))
        for rank in ranks:
            same_gradients(rank[place], alone)


def test_a_denominator_for_each_part_would_be_noticed(tmp_path, monkeypatch):
    whole = gradients(tiny_trainer(tmp_path / "a", tiny_recipe()))
    split = tiny_trainer(tmp_path / "a", tiny_recipe(), micro_batches=2)
    loss_sum = split.loss_sum
    total = float(split.plan.step(0).weights.sum())
    monkeypatch.setattr(split, "loss_sum", lambda part: loss_sum(part) * total / float(part.weights.sum()) / 2)
    with pytest.raises(AssertionError):
        same_gradients(gradients(split), whole)


def test_ragged_rows_and_padding_blocks_give_finite_gradients(tmp_path):
    trainer = tiny_trainer(tmp_path / "a", tiny_recipe(anchors=40, batch_rows=8))
    blocks = trainer.plan.step(0)
    counts = [len(valid_anchors(trainer.store.records[row].loss_mask)) for row in blocks.rows]
    assert min(counts) < 40 and len(set(counts)) > 2, "the fixture must be ragged"
    loss, found = gradients(trainer)
    assert math.isfinite(loss) and all(gradient.isfinite().all() for gradient in found)
    assert all(gradient.abs().max() > 0 for gradient in found)


def test_bfloat16_products_keep_float32_masters_and_finite_gradients(tmp_path):
    exact = gradients(tiny_trainer(tmp_path / "a", tiny_recipe()))
    trainer = tiny_trainer(tmp_path / "b", tiny_recipe(precision="bfloat16"))
    loss, found = gradients(trainer)
    assert loss == pytest.approx(exact[0], rel=0.02)
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in found)


# The plan -------------------------------------------------------------------------------------------------------------


def test_rows_without_an_anchor_or_too_long_are_dropped_before_batching():
    records = tiny_records()
    records[3] = ResponseRecord((5, 6, 7), (9,))
    records[4] = ResponseRecord((5, 6, 7), ())
    records[5] = ResponseRecord((5,) * 20, (9,) * 20)
    plan = BatchPlan(records, tiny_recipe(max_length=39, heldout_rows=3))
    used = set(plan.train.tolist()) | set(plan.heldout)
    assert used == set(range(len(records))) - {3, 4, 5}
    assert len(plan.heldout) == 3 and not set(plan.heldout) & set(plan.train.tolist())


def test_an_epoch_visits_every_row_once_with_fresh_anchors_each_time():
    plan = BatchPlan(tiny_records(18), tiny_recipe(batch_rows=4))
    assert plan.steps_per_epoch == 4
    epochs = [[plan.step(epoch * 4 + step) for step in range(4)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(row for blocks in epoch for row in blocks.rows) == plan.train.tolist()
    drawn = [{row: blocks.anchors[at] for blocks in epoch for at, row in enumerate(blocks.rows)} for epoch in epochs]
    long = [row for row in drawn[0] if len(valid_anchors(plan.records[row].loss_mask)) > 10]
    assert any((drawn[0][row] != drawn[1][row]).any() for row in long)


def test_endings_are_learnt():
    plan = BatchPlan([ResponseRecord((5, 6), (7, 8, 9, 1)) for _ in range(6)], tiny_recipe(anchors=9))
    blocks = plan.step(0)
    last = blocks.anchors[0].tolist().index(4)
    assert blocks.labels[0, last, 1] == 1 and blocks.weights[0, last].tolist() == [0, 1, 0, 0]


def test_too_few_rows_are_refused(tmp_path):
    with pytest.raises(TrainingError, match="2 usable rows are left"):
        tiny_trainer(tmp_path / "a", tiny_recipe(batch_rows=4, heldout_rows=12))


# The run --------------------------------------------------------------------------------------------------------------


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    slots = [trainer.optimiser.state[weight] for weight in trainer.model.parameters()]
    return [*trainer.model.state_dict().values(), *(slot[key] for slot in slots for key in ("exp_avg", "exp_avg_sq"))]


def assert_identical(first: Trainer, second: Trainer) -> None:
    assert first.step == second.step
    assert all(torch.equal(one, other) for one, other in zip(state_of(first), state_of(second), strict=True))


class Interrupted(Exception):
    pass


def stop_after(step: int):
    def report(progress):
        if progress.step == step:
            raise Interrupted

    return report


def test_a_resumed_run_is_bit_identical(tmp_path):
    losses: dict[str, list[float]] = {"whole": [], "resumed": []}
    whole = tiny_trainer(tmp_path / "whole", tiny_recipe())
    whole.run(lambda progress: losses["whole"].append(progress.loss))
    first = tiny_trainer(tmp_path / "resumed", tiny_recipe())
    first.run(lambda progress: losses["resumed"].append(progress.loss), until=3)
    second = tiny_trainer(tmp_path / "resumed", tiny_recipe())
    assert second.step == 3
    second.run(lambda progress: losses["resumed"].append(progress.loss))
    assert losses["whole"] == losses["resumed"] and len(losses["whole"]) == 6
    assert_identical(whole, second)
    assert whole.evaluate() == second.evaluate()


def test_a_run_killed_between_saves_continues_from_the_last_one(tmp_path):
    whole = tiny_trainer(tmp_path / "whole", tiny_recipe())
    whole.run(lambda _: None)
    killed = tiny_trainer(tmp_path / "killed", tiny_recipe(), save_every=2)
    with pytest.raises(Interrupted):
        killed.run(stop_after(2))
    shutil.copy(tmp_path / "killed" / STATE_FILE, tmp_path / "state of step 2")
    with pytest.raises(Interrupted):
        tiny_trainer(tmp_path / "killed", tiny_recipe()).run(stop_after(5))
    shutil.move(tmp_path / "state of step 2", tmp_path / "killed" / STATE_FILE)
    (tmp_path / "killed" / (STATE_FILE + ".partial")).write_bytes(b"half")
    again = tiny_trainer(tmp_path / "killed", tiny_recipe())
    assert again.step == 2
    again.run(lambda _: None)
    assert_identical(whole, again)


def test_an_interruption_inside_the_optimiser_leaves_the_last_whole_state(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path / "a", tiny_recipe(), save_every=2)
    step, calls = trainer.optimiser.step, []

    def interrupted():
        calls.append(None)
        step()
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer.optimiser, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(lambda _: None)
    again = tiny_trainer(tmp_path / "a", tiny_recipe())
    assert again.step == 2
    again.run(lambda _: None)
    whole = tiny_trainer(tmp_path / "whole", tiny_recipe())
    whole.run(lambda _: None)
    assert_identical(whole, again)


def test_another_recipe_does_not_continue_a_run(tmp_path):
    tiny_trainer(tmp_path / "a", tiny_recipe())
    with pytest.raises(TrainingError, match="another learning_rate, seed"):
        tiny_trainer(tmp_path / "a", tiny_recipe(seed=1, learning_rate=1e-2))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path, poison):
    trainer = tiny_trainer(tmp_path / "a", tiny_recipe())
    train_step = trainer.train_step

    def poisoned():
        if trainer.step == 3:
            trainer.embedding = trainer.embedding.new_full(trainer.embedding.shape, poison)  # not the drafter's own
        return train_step()

    trainer.train_step = poisoned
    with pytest.raises(TrainingError, match=r"the loss is nan .* at step 3.*lower learning rate"):
        trainer.run(lambda _: None)
    good = tiny_trainer(tmp_path / "a", tiny_recipe())
    assert good.step == 3 and all(value.isfinite().all() for value in state_of(good))


def test_the_log_and_the_progress_say_what_happened(tmp_path):
    seen = []
    tiny_trainer(tmp_path / "a", tiny_recipe(steps=50), evaluate_every=20).run(seen.append)
    assert [progress.step for progress in seen] == list(range(1, 51))
    assert seen[18].heldout is None and seen[19].heldout >= 1 and seen[-1].seconds_left == 0
    rates = [progress.learning_rate for progress in seen]
    assert rates[0] == pytest.approx(3e-3) and rates[-1] == pytest.approx(0, abs=1e-9) and max(rates) <= 3e-3
    log = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if "acceptance_length" in entry] == [20, 40, 50]
    assert [entry["step"] for entry in log if "loss" in entry] == [25, 50]


# Features -------------------------------------------------------------------------------------------------------------


def counting_store(folder=None, **options):
    target, records = tiny_target(), tiny_records()
    calls: list[int] = []
    target.get_decoder().register_forward_hook(lambda *_: calls.append(1))
    return FeatureStore(target, records, TAPS, folder=folder, **options), calls


def test_a_cached_row_equals_a_computed_one(tmp_path):
    online, online_calls = counting_store()
    cached, calls = counting_store(tmp_path / "features")
    rows = [1, 6, 9]
    fresh = [*online.batch(rows), *cached.batch(rows), *cached.batch(rows)]
    assert len(calls) == 1
    assert all(torch.equal(fresh[i], fresh[i + 3]) and torch.equal(fresh[i], fresh[i + 6]) for i in range(3))
    again, later_calls = counting_store(tmp_path / "features")
    assert all(torch.equal(one, other) for one, other in zip(fresh, again.batch(rows), strict=False))
    assert not later_calls, "another process reads what is there"
    online.batch(rows)
    assert len(online_calls) == 2


def test_a_row_is_the_same_in_any_company(tmp_path):
    store, _ = counting_store()
    _, together, _ = store.batch([0, 6])
    _, alone, _ = store.batch([0])
    size = len(store.records[0])
    assert size < together.shape[1] and not together[0, size:].any()
    torch.testing.assert_close(together[0, :size].float(), alone[0].float(), rtol=0.02, atol=1e-3)


def test_features_are_the_outputs_of_the_tapped_layers():
    store, _ = counting_store()
    tokens, features, final = store.batch([6])
    states = store.target(tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer + 1] for layer in TAPS], dim=-1)
    assert torch.equal(features, expected.bfloat16()) and torch.equal(final, states[-1].bfloat16())


def test_the_cache_keeps_to_its_limit(tmp_path):
    records = tiny_records()
    width = 3 * 32 * 2
    limit = width * (len(records[0]) + len(records[1])) + width - 1
    store, calls = counting_store(tmp_path / "features", limit_bytes=limit)
    assert sum(file.stat().st_size for file in (tmp_path / "features").glob("*.bin")) <= limit
    first = store.batch([0, 1, 2])
    for rows, computed in (([0, 1], 0), ([2], 1), ([0, 2], 1)):
        before = len(calls)
        _, features, _ = store.batch(rows)
        assert len(calls) - before == computed
        for place, row in enumerate(rows):
            size = len(records[row])
            torch.testing.assert_close(features[place, :size], first[1][row, :size], rtol=0.02, atol=1e-2)


def test_a_feature_file_that_is_too_short_stops_the_run(tmp_path):
    counting_store(tmp_path)[0].batch([0, 1])
    (file,) = tmp_path.glob("*.bin")
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 2)
    with pytest.raises(TrainingError, match=r"holds \d+ bytes, and should hold"):
        counting_store(tmp_path)


def test_a_disk_that_is_too_small_is_noticed_beforehand(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(TrainingError, match="give it a smaller limit"):
        counting_store(tmp_path)


def test_features_that_are_not_finite_are_refused():
    store, _ = counting_store()
    with torch.no_grad():
        store.target.model.layers[1].mlp.down_proj.weight.fill_(math.inf)
    with pytest.raises(TrainingError, match="not finite"):
        store.batch([0])
