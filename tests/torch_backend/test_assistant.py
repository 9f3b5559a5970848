"""A native drafter inside transformers' own ``generate``: the same tokens as plain greedy, the engine's own rounds."""

import pytest
import torch
from tiny_models import MASK, TinyPair, make_config
from torch_dflash import as_assistant

PROMPT = [5, 9, 23, 42, 8, 77]


def assisted(pair, drafter, budget, monkeypatch):
    """Tokens of an assisted generation, and how many tokens each of its rounds committed."""
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    matches = []
    inner = DFlashTokenCandidateGenerator.get_candidates

    def spy(self, input_ids, **kwargs):
        if not kwargs["is_first_iteration"] and not self.is_main_model_prefill:
            matches.append(int(kwargs["n_last_matches"]) + 1)
        return inner(self, input_ids, **kwargs)

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", spy)
    output = pair.model.generate(
        torch.tensor([PROMPT]), assistant_model=as_assistant(drafter), speculation_type="dflash", do_sample=False,
        max_new_tokens=budget, eos_token_id=None,
    )  # fmt: skip
    return output[0, len(PROMPT) :].tolist(), matches


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"causal": (True, True)}, {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 6}],
    ids=["bidirectional", "causal", "sliding"],
)
def test_same_tokens_and_rounds_as_the_engine(family, changes, monkeypatch):
    pair = TinyPair(family)
    drafter = pair.drafter(**changes)
    result = pair.engine(drafter).generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    tokens, rounds = assisted(pair, drafter, 30, monkeypatch)
    assert tokens == pair.oracle(PROMPT, 30) == result.token_ids
    committed = [len(step.committed) for step in result.steps if step.kind == "round"]
    assert rounds == committed[: len(rounds)] and len(rounds) > 10


def test_accepted_lengths_vary_and_agree(monkeypatch):
    """A drafter that always says the target's favourite token is right now and then, in runs of every length."""
    pair = TinyPair("llama")
    oracle = pair.oracle(PROMPT, 60)
    favourite = max(set(oracle), key=oracle.count)
    drafter = pair.drafter()
    with torch.no_grad():  # layers that add nothing, so that a mask's embedding goes straight to the head
        for layer in drafter.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        drafter.model.norm.weight.fill_(1.0)
        pair.model.get_input_embeddings().weight[MASK] = pair.model.get_output_embeddings().weight[favourite]
    result = pair.engine(drafter).generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    tokens, rounds = assisted(pair, drafter, 60, monkeypatch)
    assert tokens == result.token_ids == oracle
    committed = [len(step.committed) for step in result.steps if step.kind == "round"]
    assert rounds == committed[: len(rounds)]
    assert len(set(rounds)) >= 3, f"accepted lengths do not vary: {rounds}"


def test_old_transformers_is_refused_by_name(monkeypatch):
    from torch_dflash.modeling import DraftModel
    from transformers.generation import candidate_generator

    from dflash.errors import BackendError

    monkeypatch.delattr(candidate_generator, "DFlashTokenCandidateGenerator")
    with pytest.raises(BackendError, match="no DFlash assistants"):
        as_assistant(DraftModel(make_config()))
