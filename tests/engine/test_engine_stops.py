"""Where an output ends: stop ids at every offset of a block, every budget, the context's last position."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from byte_tokenizer import ByteTokenizer
from engine_cases import BLOCK, EVERY_SLOT, LENGTH, PROMPT, ignore_silent_rounds, kinds
from tiny_models import MASK, VOCAB, PlannedDrafter, ScriptedDrafter, TinyPair, chain_rule, make_config, make_target

from dflash.engine import Engine
from dflash.errors import PromptError

pytestmark = ignore_silent_rounds

# Stops and budgets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(), (2,), EVERY_SLOT], ids=["right", "second wrong", "wrong"])
def test_the_first_stop_id_ends_the_output_at_every_offset_of_a_block(
    pair: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter], wrong: tuple[int, ...]
) -> None:
    engine = pair.engine(scripted(*wrong))
    for stop in oracle[: 2 * BLOCK + 2]:
        result = engine.generate(PROMPT, max_new_tokens=LENGTH, stop_token_ids=[stop])
        assert result.token_ids == oracle[: oracle.index(stop) + 1]
        assert result.finish_reason == "stop"
        assert result.metrics.num_tokens == len(result.token_ids)
        last = result.steps[-1]
        assert last.committed[-1] == stop
        assert last.accepted <= len(last.committed)
        assert (last.next_kind is None) == (last.kind == "prefill" or last.accepted == len(last.committed))


def test_a_stop_id_as_the_very_first_token_ends_at_the_prefill(pair: TinyPair, oracle: list[int]) -> None:
    result = pair.engine().generate(PROMPT, stop_token_ids=[oracle[0]])
    assert result.token_ids == oracle[:1]
    assert (result.finish_reason, kinds(result)) == ("stop", ["prefill"])
    assert result.metrics.mean_acceptance_length is None


@pytest.mark.parametrize("wrong", [(), (1,), (3,)], ids=["right", "first wrong", "third wrong"])
def test_every_budget_is_met_exactly(
    pair: TinyPair, oracle: list[int], scripted: Callable[..., ScriptedDrafter], wrong: tuple[int, ...]
) -> None:
    engine = pair.engine(scripted(*wrong))
    for budget in range(2 * BLOCK + 2):
        result = engine.generate(PROMPT, max_new_tokens=budget)
        assert result.token_ids == oracle[:budget]
        assert result.finish_reason == "length"
        assert result.metrics.num_tokens == budget == sum(len(step.committed) for step in result.steps)
        committed = result.metrics.per_step_committed
        assert sum(committed) == max(budget - 1, 0)


def test_stop_ids_come_from_both_configs_and_may_be_several(pair: TinyPair, oracle: list[int]) -> None:
    model = make_target(eos_token_id=[oracle[7], 298])
    model.generation_config.eos_token_id = [oracle[9], 297]
    target = pair.serve(model)
    assert target.info.stop_token_ids == tuple(sorted({oracle[7], oracle[9], 297, 298}))
    engine = Engine(pair.backend, target, ScriptedDrafter(pair, PROMPT + oracle), check=True)
    first = min(oracle.index(oracle[7]), oracle.index(oracle[9]))
    assert engine.generate(PROMPT, max_new_tokens=LENGTH).token_ids == oracle[: first + 1]
    assert engine.generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True).token_ids == oracle
    stopped = engine.generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, stop_token_ids=[oracle[2]])
    assert stopped.token_ids == oracle[: oracle.index(oracle[2]) + 1]


def test_stop_ids_come_from_the_tokenizer_too(pair: TinyPair) -> None:
    """A tokenizer's end token that the model's configuration does not name ends the output as well."""
    prompt = [5, 9, 23]
    output = pair.oracle(prompt, 12)
    end = next(token for token in output[3:] if token not in pair.target.info.stop_token_ids)
    tokenizer = ByteTokenizer()
    tokenizer.stop_token_ids = (end,)
    engine = pair.engine(tokenizer=tokenizer)
    assert engine.stop_token_ids == tuple(sorted({*pair.target.info.stop_token_ids, end}))
    result = engine.generate(prompt, max_new_tokens=12)
    assert result.token_ids == output[: output.index(end) + 1]
    assert result.finish_reason == "stop"
    assert engine.generate(prompt, max_new_tokens=12, ignore_eos=True).token_ids == output


def test_a_target_without_stop_ids_runs_to_its_budget(pair: TinyPair) -> None:
    pair = pair.another(eos_token_id=None)
    assert pair.target.info.stop_token_ids == ()
    assert pair.engine().generate(PROMPT, max_new_tokens=9).finish_reason == "length"


def test_the_mask_id_survives_in_prompt_and_output(pair: TinyPair, oracle: list[int]) -> None:
    prompt = [MASK, 5, MASK, MASK]
    assert pair.engine().generate(prompt, max_new_tokens=12).token_ids == pair.oracle(prompt, 12)
    mask = oracle[2]  # a mask that the target itself writes, several times
    assert oracle.count(mask) > 1
    engine = pair.engine(pair.drafter(mask_token_id=mask))
    assert engine.generate(PROMPT, max_new_tokens=LENGTH).token_ids == oracle
    engine = pair.engine(ScriptedDrafter(pair, PROMPT + oracle, config=make_config(mask_token_id=mask)))
    assert engine.generate(PROMPT, max_new_tokens=LENGTH).token_ids == oracle


# The context's end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(), (2,)], ids=["right", "second wrong"])
@pytest.mark.parametrize("prompt_length", [4, 19, 22, 23])
def test_the_output_fills_the_context_to_its_last_position(
    pair: TinyPair, prompt_length: int, wrong: tuple[int, ...]
) -> None:
    pair = pair.another(max_position_embeddings=24)
    prompt = [(7 * index + 3) % VOCAB for index in range(prompt_length)]
    room = 24 - prompt_length
    expected = pair.oracle(prompt, room)
    engine = pair.engine(ScriptedDrafter(pair, prompt + expected, wrong))
    result = engine.generate(prompt, max_new_tokens=100, ignore_eos=True)
    assert result.token_ids == expected
    assert result.finish_reason == "length"
    assert any(f"room for {room} of the 100" in note for note in result.notes)
    assert pair.target.length == 23
    assert not engine.generate(prompt, max_new_tokens=room).notes


def test_no_token_is_ever_fed_beyond_the_context(pair: TinyPair) -> None:
    """``RuleTarget`` asserts it in every forward."""
    for prompt_length in range(1, 16):
        target = pair.rule_target(chain_rule(12), 12, max_positions=16)
        engine = Engine(pair.backend, target, PlannedDrafter(target, lambda context, count: [3] * count), check=True)
        prompt = list(range(1, prompt_length + 1))
        prompt = [token % 12 for token in prompt]
        result = engine.generate(prompt, max_new_tokens=99, block_size=9)
        assert result.token_ids == target.greedy(prompt, 16 - prompt_length)


def test_a_prompt_that_fills_the_context_is_refused(pair: TinyPair) -> None:
    engine = pair.another(max_position_embeddings=24).engine()
    with pytest.raises(PromptError, match=r"24 tokens.*context holds 24"):
        engine.generate([3] * 24)
    assert len(engine.generate([3] * 23).token_ids) == 1
