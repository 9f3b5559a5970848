"""The whole way on a tiny pair: the target answers, a drafter learns, is exported, served and measured."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from torch_dflash.backend import load_draft_model
from torch_dflash.training import batches
from torch_dflash.training.regenerate import PromptIds, Settings, regenerate
from torch_dflash.training.run import Ending, Job, View, run, side_by_side
from training_tiny import MASK, STOP, VOCAB, tiny_recipe, tiny_target

import dflash
from dflash.anchors import label_blocks
from dflash.checkpoint import DraftConfig, read_header
from dflash.cli import main as cli
from dflash.errors import TrainingError, UsageError
from dflash.records import read_records

STEPS = 110


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    """A target that has learnt to follow one fixed walk through its vocabulary, and stops at the walk's end."""
    torch.manual_seed(0)
    model = tiny_target(initializer_range=0.1).train().requires_grad_(True)
    walk = torch.randperm(VOCAB - 4, generator=torch.Generator().manual_seed(1)) + 4
    follows = torch.zeros(VOCAB, dtype=torch.long)
    follows[walk] = torch.cat((walk[1:], torch.tensor([STOP])))
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        rows = [torch.randint(0, len(walk) - 12, (16,))]
        tokens = torch.stack([walk[start : start + 12] for start in rows[0]])
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), follows[tokens].flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    folder = tmp_path_factory.mktemp("target")
    model.eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def records_file(target_folder, tmp_path_factory) -> Path:
    """What that target answers."""
    from torch_dflash.target import load_model

    generator = torch.Generator().manual_seed(2)
    prompts = [
        PromptIds(tuple(torch.randint(4, VOCAB, (3,), generator=generator).tolist()), ("math", "code")[row % 2])
        for row in range(60)
    ]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    target = load_model(target_folder, device="cpu", dtype="float32").requires_grad_(False)
    regenerate(target, prompts, path, (STOP,), Settings(max_new_tokens=24, rows=60, share=0.0))
    return path


def a_job(target_folder: Path, records_file: Path, folder: Path, **changes) -> Job:
    values = {"steps": STEPS, "batch_rows": 8, "anchors": 8, "heldout_rows": 12, "learning_rate": 1e-2}
    recipe = tiny_recipe(**(values | changes))
    return Job(target_folder, "tiny", "tiny", (records_file,), folder, recipe, device="cpu", cache=folder / "features")


def an_ending(out: Path) -> Ending:
    return Ending(out, {}, served_rows=12, max_new_tokens=24, command="dflash train run")


@pytest.fixture(scope="module")
def trained(target_folder, records_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    said: list[str] = []
    job = a_job(target_folder, records_file, folder)
    return folder, run(job, an_ending(folder / "drafter"), View(said.append)), said


def test_a_drafter_learns_and_served_acceptance_shows_it_beside_the_held_out_figure(trained, target_folder):
    folder, facts, said = trained
    served = facts["served"]["Prompts of held-out rows"]
    assert facts["heldout"]["acceptance_length"] > 1.5 and served["mean_acceptance_length"] > 1.5
    assert "warning" not in said[-1] and "held-out, all anchors" in said[-1] and "served τ" in said[-1]
    assert set(served["domains"]) == {"math", "code"} == set(facts["heldout"]["by_domain"])
    engine = dflash.load(target=target_folder, draft=folder / "drafter", backend="torch", device="cpu", check=True)
    with_draft = engine.generate([7, 8, 9], max_new_tokens=24)
    assert with_draft.token_ids == engine.generate([7, 8, 9], max_new_tokens=24, speculate=False).token_ids


def test_the_export_is_a_native_16_bit_folder_with_its_story(trained):
    folder, facts, _ = trained
    drafter = folder / "drafter"
    config = DraftConfig.load(drafter)
    header = read_header(drafter / "model.safetensors")
    assert {name: shape for name, (shape, _) in header.items()} == config.tensor_shapes()
    assert {kind for _, kind in header.values()} == {"BF16"}
    lab = config.extra["dflash_lab"]
    assert lab["step"] == STEPS and lab["recipe"]["seed"] == 0 and lab["thinking"] is None
    assert "template_sha256" in lab and config.mask_token_id == MASK
    state = torch.load(folder / "state.pt", weights_only=True)["model"]
    for name, weight in load_draft_model(drafter, config).state_dict().items():
        assert torch.equal(weight, state[name].bfloat16())
    card = (drafter / "README.md").read_text()
    for part in ("rows.jsonl", "SHA-256", "seed 0", "hours", "| step |", "τ", "| math |", "dflash train run"):
        assert part in card
    assert f"| {STEPS} |" in card and not list(drafter.glob("*.partial"))
    json.dumps(facts)


def test_labels_shifted_by_one_would_be_noticed_when_served(target_folder, records_file, tmp_path, monkeypatch):
    def shifted(tokens, mask, anchors, keep, block_size, gamma):
        labels, _ = label_blocks(tokens[1:], mask[1:], anchors.clip(max=len(tokens) - 3), keep, block_size, gamma)
        return labels, label_blocks(tokens, mask, anchors, keep, block_size, gamma)[1]

    monkeypatch.setattr(batches, "label_blocks", shifted)
    job = a_job(target_folder, records_file, tmp_path, steps=60)  # enough for 1.3 with the right labels
    facts = run(job, an_ending(tmp_path / "drafter"), View())
    assert facts["served"]["Prompts of held-out rows"]["mean_acceptance_length"] < 1.2


def test_a_stop_saves_and_the_same_job_resumes_to_the_same_drafter(target_folder, records_file, tmp_path):
    def to_the_end(folder: Path) -> bytes:
        job = a_job(target_folder, records_file, folder, steps=8)
        run(job, Ending(folder / "drafter", {}, served_rows=0), View(said.append))
        return (folder / "drafter" / "model.safetensors").read_bytes()

    said: list[str] = []
    whole = to_the_end(tmp_path / "whole")
    assert said[0].startswith("starting of 8")
    steps: list[int] = []
    view = View(step=lambda progress: steps.append(progress.step), stop=lambda: len(steps) == 5)
    job = a_job(target_folder, records_file, tmp_path / "stopped", steps=8)
    with pytest.raises(KeyboardInterrupt):
        run(job, an_ending(tmp_path / "stopped" / "drafter"), view)
    assert steps == [1, 2, 3, 4, 5] and not (tmp_path / "stopped" / "drafter").exists()
    said.clear()
    assert to_the_end(tmp_path / "stopped") == whole
    assert said[0].startswith("resuming at step 5 of 8")


def test_a_run_continues_only_on_its_own_data(target_folder, records_file, tmp_path):
    job = a_job(target_folder, records_file, tmp_path / "run", steps=2)
    run(job, Ending(tmp_path / "out", {}, served_rows=0), View())
    other = tmp_path / "other.jsonl"
    other.write_text("".join(records_file.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(TrainingError, match="another data"):
        run(a_job(target_folder, other, tmp_path / "run", steps=2), Ending(tmp_path / "out", {}), View())


def test_a_folder_of_something_else_is_not_replaced(target_folder, records_file, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="holds something else"):
        run(a_job(target_folder, records_file, tmp_path / "run"), Ending(tmp_path, {}), View())
    assert (tmp_path / "thesis.txt").read_text() == "precious" and not (tmp_path / "run").exists()


def test_figures_far_apart_are_called_out():
    assert "warning" not in side_by_side(1.7, "set", 1.75)
    assert "warning" not in side_by_side(1.02, "set", 1.0)
    assert "warning" in side_by_side(2.5, "set", 1.1)
    assert "–" in side_by_side(1.5, "set", None)


# The command line -----------------------------------------------------------------------------------------------------


def test_the_commands_from_prompts_to_a_measured_drafter(target_folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"domain": "math", "prompt": [5 + row, 6, 7]} for row in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target, data, folder = str(target_folder), str(tmp_path / "rows.jsonl"), str(tmp_path / "run")
    make = ["train", "data", "--target", target, "--out", data, "--prompts", str(prompts), "--max-new-tokens", "16"]
    assert cli.main(make) == 0 and len(read_records([data])) == 16
    flags = (
        f"--steps 4 --batch-rows 4 --anchors 4 --heldout-rows 3 --block-size 4 --mask-token-id {MASK} --draft-layers 1"
    )
    start = ["train", "run", "--target", target, "--data", data, "--out", folder, "--target-layer-ids", "0,2"]
    assert cli.main([*start, *flags.split(), "--served-rows", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["step"] == 4 and facts["recipe"]["target_layer_ids"] == [0, 2]
    assert "--draft-layers 1" in facts["command"] and str(tmp_path) not in facts["command"]
    again = ["train", "export", "--run", folder, "--out", str(tmp_path / "drafter"), "--served-rows", "0"]
    assert cli.main(again) == 0
    written = [(tmp_path / place / "model.safetensors").read_bytes() for place in ("drafter", "run/drafter")]
    assert written[0] == written[1]
    measure = ["evaluate", "--target", target, "--draft", str(tmp_path / "drafter"), "--prompts", str(prompts)]
    capsys.readouterr()
    assert cli.main([*measure, "--limit", "4", "--max-new-tokens", "12", "--heldout", data, "--json"]) == 0
    shown = capsys.readouterr()
    figures = json.loads(shown.out)
    assert figures["prompts"] == 4 and figures["mean_acceptance_length"] >= 1 and figures["heldout"]["anchors"] > 0
    assert "by position" in shown.err and "held-out, all anchors" in shown.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train run --out {tmp}/r --target {target} --data {tmp}/none.jsonl --mask-token-id 3", "cannot be read"),
        ("train run --out {tmp}/r --target {target} --data {data}", "name a mask token"),
        ("train run --out {tmp}/r", "give --target and --data"),
        ("train run --out {tmp}/r --target {target} --data {data} --mask-token-id 3 --steps few", "must be a number"),
        ("train run --out {tmp}/r --target {target} --data {data} --mask-token-id 3 --steps 0", "at least 1"),
        (
            "train run --out {tmp}/r --target {target} --data {data} --mask-token-id 3 --init warm",
            "one of normal, target",
        ),
        ("train run --out {tmp}/r --target {tmp}/gone --data {data} --mask-token-id 3", "gone"),
        ("train export --run {tmp}/r --out {tmp}/d", "holds no run"),
        ("train data --target {target} --out {tmp}/r.jsonl --rows 0", "rows is 0"),
        ("train data --target {target} --out {tmp}/r.jsonl --rows 3 --domains law", "unknown"),
        ("train data --target {target} --out {tmp}/r.jsonl --rows 3", "no tokenizer"),
        ("evaluate --target {target} --draft {target} --prompts {tmp}/none.jsonl", "cannot be read"),
    ],
)
def test_bad_requests_end_in_one_sentence(words, sentence, target_folder, records_file, tmp_path, capsys):
    filled = words.format(tmp=tmp_path, target=target_folder, data=records_file)
    assert cli.main(filled.split()) in (1, 2)
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error and error.count("\n") == 1
    assert not (tmp_path / "r").exists() and not (tmp_path / "d").exists()


def test_ctrl_c_ends_a_run_after_a_step_and_says_how_to_go_on(target_folder, records_file, tmp_path, capsys):
    from torch_dflash.training import trainer

    train_step = trainer.Trainer.train_step
    taken: list[int] = []

    def pressed(self):
        taken.append(self.step)
        if len(taken) == 3:
            signal.raise_signal(signal.SIGINT)
        return train_step(self)

    words = f"train run --target {target_folder} --data {records_file} --out {tmp_path / 'r'} --mask-token-id 3"
    shape = "--target-layer-ids 0,2 --block-size 4 --steps 9 --heldout-rows 4 --served-rows 0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", pressed)
        assert cli.main([*words.split(), *shape.split()]) == 130
    assert "resumes" in capsys.readouterr().err
    assert cli.main(["train", "run", "--out", str(tmp_path / "r"), "--served-rows", "0"]) == 0
    assert "resuming at step 3 of 9" in capsys.readouterr().err
