"""What a request may ask: bad ones are refused with what was found; ids of any integer kind are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import PROMPT, ignore_silent_rounds, scripted_pair
from tiny_models import VOCAB, TinyPair

from dflash.errors import PromptError, UsageError
from dflash.types import SamplingParams

pytestmark = ignore_silent_rounds


@pytest.mark.parametrize(
    ("prompt", "options", "error", "says"),
    [
        ([], {}, PromptError, "empty"),
        ("text", {}, PromptError, "no tokenizer"),
        ([{"role": "user", "content": "x"}], {}, PromptError, "no tokenizer"),
        ([5, VOCAB], {}, PromptError, f"the id {VOCAB}.*0 to {VOCAB - 1}"),
        ([-1], {}, PromptError, "the id -1"),
        ([1.5], {}, PromptError, r"it holds 1\.5"),
        (PROMPT, {"max_new_tokens": -1}, UsageError, "max_new_tokens is -1"),
        (PROMPT, {"block_size": 1}, UsageError, "block_size is 1"),
        (PROMPT, {"block_size": -3}, UsageError, "block_size is -3"),
        (PROMPT, {"verify": "typical"}, UsageError, "'typical'.*greedy, match"),
        (PROMPT, {"verify": "greedy", "sampling": SamplingParams(temperature=1.0)}, UsageError, "temperature 0"),
        (PROMPT, {"stop": "x"}, UsageError, "tokenizer"),
    ],
)
def test_bad_requests_are_refused_with_what_was_found(
    pair: TinyPair, prompt: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        pair.engine().stream(prompt, **options)


@pytest.mark.parametrize("prompt", ["", "  \n", []])
def test_empty_prompts_are_refused(pair: TinyPair, prompt: Any) -> None:
    with pytest.raises(PromptError, match="empty"):
        scripted_pair(pair, "x").generate(prompt)


def test_empty_stop_strings_are_refused(pair: TinyPair) -> None:
    with pytest.raises(UsageError, match="none of them may be empty"):
        scripted_pair(pair, "x").generate("?", stop=["a", ""])


def test_a_chunk_below_one_is_refused(pair: TinyPair) -> None:
    with pytest.raises(UsageError, match="prefill_chunk is 0"):
        pair.engine(prefill_chunk=0)


def test_prompts_and_options_of_any_integer_kind_and_no_other(pair: TinyPair) -> None:
    engine, prompt = pair.engine(), [5, 9, 23]
    expected = engine.generate(prompt, max_new_tokens=4, ignore_eos=True).token_ids
    for same in (tuple(prompt), torch.tensor(prompt), np.array(prompt), pair.array(np.array(prompt))):
        assert engine.generate(same, max_new_tokens=4, ignore_eos=True).token_ids == expected
    four = np.array([4])[0]
    assert engine.generate(prompt, max_new_tokens=four, block_size=four, ignore_eos=True).token_ids == expected
    for wrong in ([prompt], [1.5], torch.tensor([prompt]), pair.array(np.array([prompt])), None, [5, {"role": "user"}]):
        with pytest.raises(PromptError, match="flat list of token ids"):
            engine.generate(wrong)
    with pytest.raises(PromptError, match="stop_token_ids must be"):
        engine.generate(prompt, stop_token_ids=7)
    for option in ({"max_new_tokens": 1.5}, {"max_new_tokens": "3"}, {"block_size": 2.5}):
        with pytest.raises(UsageError, match="is "):
            engine.generate(prompt, **option)
