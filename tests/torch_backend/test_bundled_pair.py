"""The real pair: SmolLM2-135M-Instruct and the drafter that ships in this package."""

from __future__ import annotations

import json

import pytest
import torch

import dflash
from dflash.cli.main import main
from dflash.prompts import load_prompts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine() -> dflash.Engine:
    return dflash.load("smollm2-135m", device="cpu", check=True)


def test_it_answers_and_speculation_changes_nothing(engine: dflash.Engine) -> None:
    prompts = [prompt.prompt for prompt in load_prompts("mini").take(3).prompts]
    accepted = rounds = 0
    for prompt in ["What is the capital of France?", *prompts]:
        result = engine.generate(prompt, max_new_tokens=48)
        plain = engine.generate(prompt, max_new_tokens=48, speculate=False)
        assert result.token_ids == plain.token_ids
        assert result.text == plain.text
        accepted += result.metrics.num_accepted_draft_tokens
        rounds += result.metrics.num_spec_steps
    assert "Paris" in engine.generate("What is the capital of France?", max_new_tokens=24).text
    assert accepted > 0.5 * rounds, f"{accepted} drafted tokens accepted in {rounds} rounds"


def test_sampling_with_a_seed_gives_the_same_tokens_with_and_without_the_drafter(engine: dflash.Engine) -> None:
    sampling = dflash.SamplingParams(temperature=0.7, top_p=0.9, top_k=50, seed=11)
    tokens = [
        engine.generate("Tell me a story.", max_new_tokens=32, sampling=sampling, speculate=speculate).token_ids
        for speculate in (True, False)
    ]
    assert tokens[0] == tokens[1]


def test_native_and_transformers_targets_agree(engine: dflash.Engine) -> None:
    from torch_dflash.native import NativeTarget
    from torch_dflash.target import TorchTarget

    assert isinstance(engine.target, NativeTarget)
    ids = engine.tokenizer.encode("Count from one to twenty.") if engine.tokenizer else []
    ours, theirs = engine.target, TorchTarget(engine.target.model, engine.drafter.config.target_layer_ids)
    ours.reset()
    ours.tapping = True
    try:
        a, b = ours.forward(ids), theirs.forward(ids)
        for part in ("logits", "features"):
            difference = (getattr(a, part) - getattr(b, part)).abs().max()
            assert difference < 1e-4 * getattr(b, part).abs().max()
    finally:
        ours.reset()
        theirs.close()


def test_as_an_assistant_of_transformers(engine: dflash.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as plain greedy decoding, and the engine's own accepted lengths."""
    from torch_dflash import as_assistant
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    committed = []
    inner = DFlashTokenCandidateGenerator.get_candidates

    def spy(self, input_ids, **kwargs):  # type: ignore[no-untyped-def]
        if not kwargs["is_first_iteration"] and not self.is_main_model_prefill:
            committed.append(int(kwargs["n_last_matches"]) + 1)
        return inner(self, input_ids, **kwargs)

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", spy)
    result = engine.generate("How many legs do three cats have?", max_new_tokens=40, ignore_eos=True)
    model = engine.target.model  # type: ignore[attr-defined]
    ids = torch.tensor([result.prompt_ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), assistant_model=as_assistant(engine.drafter),
        speculation_type="dflash", do_sample=False, max_new_tokens=40, eos_token_id=None,
    )  # fmt: skip
    assert output[0, ids.shape[1] :].tolist() == result.token_ids
    rounds = [len(step.committed) for step in result.steps if step.kind == "round"]
    assert committed == rounds[: len(committed)]
    assert len(committed) > 5


def test_the_main_job_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "What is the capital of France?", "--show", "rounds", "--compare", "--json"]
    assert main([*arguments, "--max-new-tokens", "32"]) == 0
    shown = capsys.readouterr()
    assert "identical to plain decoding: yes" in shown.err
    record = json.loads(shown.out.splitlines()[-1])
    assert "Paris" in record["text"]
    assert record["metrics"]["num_spec_steps"] > 0
