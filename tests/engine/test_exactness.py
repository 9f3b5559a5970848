"""Token for token: the engine's output is the target's own, whatever the drafter does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_cases import BLOCK, EVERY_SLOT, LENGTH, PROMPT, ignore_silent_rounds, kinds, timeless
from tiny_models import VOCAB, ScriptedDrafter, TinyPair

from dflash.engine import Engine

pytestmark = ignore_silent_rounds


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_float32_equals_the_oracle_for_every_kind_of_drafter(pair: TinyPair, family: str) -> None:
    pair = pair.another(family, seed=3)
    expected = pair.oracle(PROMPT, 24)
    drafters = [
        pair.drafter(),
        *(ScriptedDrafter(pair, PROMPT + expected, wrong) for wrong in ((), EVERY_SLOT, (2,), (4,))),
    ]
    for drafter in drafters:
        result = pair.engine(drafter).generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        assert result.token_ids == expected
    plain = pair.engine().generate(PROMPT, max_new_tokens=24, ignore_eos=True, speculate=False)
    assert plain.token_ids == expected
    assert set(kinds(plain)) == {"prefill", "plain"}


@pytest.mark.parametrize("wrong", range(1, BLOCK + 1))
def test_a_round_accepts_up_to_the_first_wrong_slot(
    pair: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter], wrong: int
) -> None:
    result = pair.engine(scripted(wrong)).generate(PROMPT, max_new_tokens=LENGTH)
    assert result.token_ids == oracle
    full = [step for step in result.steps[1:] if len(step.drafted) == BLOCK - 1]
    assert full and all(step.accepted == wrong - 1 for step in full)
    kind = "bonus" if wrong == BLOCK else "correction"
    assert all(step.next_kind == kind and len(step.committed) == wrong for step in full[:-1])


def test_steps_tell_the_positions_anchors_and_tokens_of_the_output(
    pair: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter]
) -> None:
    result = pair.engine(scripted(3)).generate(PROMPT, max_new_tokens=20)
    prefill, *rounds = result.steps
    assert (prefill.kind, prefill.index, prefill.position) == ("prefill", 0, len(PROMPT) - 1)
    assert (prefill.anchor, prefill.drafted, prefill.committed) == (PROMPT[-1], (), tuple(oracle[:1]))
    everything = PROMPT + oracle
    for index, step in enumerate(rounds, 1):
        assert step.index == index
        assert everything[step.position] == step.anchor
        after = step.position + 1
        assert list(step.committed) == everything[after : after + len(step.committed)]
        assert list(step.drafted[: step.accepted]) == everything[after : after + step.accepted]


def test_generate_is_the_drained_stream(pair: TinyPair) -> None:
    engine = pair.engine()
    stream = engine.stream(PROMPT, max_new_tokens=12)
    steps = list(stream)
    whole = engine.generate(PROMPT, max_new_tokens=12)
    assert timeless(steps) == timeless(whole.steps)
    assert stream.result().token_ids == whole.token_ids
    assert stream.result() is stream.result()


def test_sixteen_bit_greedy_is_near_tie_exact(pair: TinyPair) -> None:
    """Blocks and single rows round differently, so every token is teacher-forced through the target one at a time and
    must be its argmax or within ``gap`` of it. At logits of about 4 a step of bfloat16 is 1/64; the gap is eight."""
    gap = 8 / 64
    pair = pair.another(dtype="bfloat16")
    backend, target, own = pair.backend, pair.target, pair.drafter()
    assert target.info.dtype == "bfloat16"

    def gaps(prompt: list[int], output: list[int]) -> list[float]:
        target.reset()
        found, fed = [], prompt
        for token in output:
            logits = backend.numpy(target.forward(fed).logits)[-1]
            target.keep(range(len(fed)))
            found.append(float(logits.max() - logits[token]))
            fed = [token]
        return found

    for first in range(3):
        prompt = [first, 17, 200]
        plain = Engine(backend, target, own).generate(prompt, max_new_tokens=20, speculate=False).token_ids
        for drafter in (
            own,
            ScriptedDrafter(pair, prompt + plain),
            ScriptedDrafter(pair, prompt + plain, (3,)),
        ):
            output = Engine(backend, target, drafter, check=True).generate(prompt, max_new_tokens=20).token_ids
            found = backend.run(lambda prompt=prompt, output=output: gaps(prompt, output))
            assert max(found) <= gap
        output[9] = (output[9] + 1) % VOCAB
        wrong = backend.run(lambda prompt=prompt, output=output: gaps(prompt, output))
        assert max(wrong) > gap, "the check must catch a wrong token"
