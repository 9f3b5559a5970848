"""Families of the registry's targets that are served through transformers alone: experts, windows, attention sinks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import tiny_models
from tiny_models import TinyPair
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

FAMILIES = {"gpt_oss": (GptOssConfig, GptOssForCausalLM), "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM)}
EXPERTS = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
}


@pytest.mark.parametrize("wrong_at", [(), (2,), (1,)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_the_targets_own(family: str, wrong_at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_models.FAMILIES, family, FAMILIES[family])
    pair = TinyPair(family, **EXPERTS[family])
    prompt = [3, 17, 200, 45, 9] * 3  # the window of 16 is passed while tokens are generated
    oracle = pair.oracle(prompt, 24)
    result = pair.engine(pair.scripted(prompt, wrong_at=wrong_at)).generate(prompt, max_new_tokens=24)
    assert list(result.token_ids) == oracle[: len(result.token_ids)]
    assert len(result.token_ids) == 24 or oracle[len(result.token_ids) - 1] == 1
