"""Property tests: arbitrary drafters, stops, budgets, block sizes, chunks and early closes, held to the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from engine_cases import ignore_silent_rounds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import PlannedDrafter, Rule, RuleTarget, ScriptedDrafter, TinyPair, chain_rule, make_config

from dflash.engine import Engine
from dflash.generation import Generation
from dflash.types import Proposal, SamplingParams

pytestmark = ignore_silent_rounds

VOCAB, BLOCK = 12, 5
RULES = [chain_rule(VOCAB, seed) for seed in range(3)]
RIGHT = None  # in a plan: the token that the target will choose

tokens = st.integers(0, VOCAB - 1)
plans = st.lists(st.lists(st.one_of(st.just(RIGHT), st.just(RIGHT), tokens), max_size=2 * BLOCK), max_size=6)
samplings = st.one_of(
    st.just(SamplingParams()),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 4]),
        top_p=st.sampled_from([1.0, 0.9, 0.5]),
        seed=st.integers(0, 2**63 - 1),
    ),
)


@dataclass
class Case:
    """One request, and what its drafter will say in each round."""

    prompt: list[int]
    plan: list[list[int | None]]
    budget: int
    block_size: int
    sampling: SamplingParams
    model_stops: tuple[int, ...]
    stop_token_ids: list[int]
    ignore_eos: bool
    detail: bool
    close_after: int | None

    @property
    def stops(self) -> set[int]:
        return set(self.stop_token_ids) | (set() if self.ignore_eos else set(self.model_stops))

    def options(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.budget,
            "block_size": self.block_size,
            "sampling": self.sampling,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "detail": self.detail,
        }


cases = st.builds(
    Case,
    prompt=st.lists(tokens, min_size=1, max_size=9),
    plan=plans,
    budget=st.integers(0, 2 * BLOCK + 1),
    block_size=st.integers(2, BLOCK + 2),
    sampling=samplings,
    model_stops=st.sampled_from([(), (), (3,), (3, 7)]),
    stop_token_ids=st.lists(tokens, max_size=2),
    ignore_eos=st.booleans(),
    detail=st.booleans(),
    close_after=st.one_of(st.none(), st.none(), st.integers(0, 6)),
)


def cut(output: list[int], stops: set[int], budget: int) -> list[int]:
    """The oracle's output up to its first stop id, which is part of it, or to the budget."""
    ends = [index + 1 for index, token in enumerate(output[:budget]) if token in stops]
    return output[: min([budget, *ends])]


def follow(plan: list[list[int | None]], script: list[int]) -> Callable[[list[int], int], list[int]]:
    """A drafter's plan: the next round's slots as they are written, right ones from ``script``; zeros when it ends."""
    rounds = iter(plan)

    def drafted(context: list[int], count: int) -> list[int]:
        slots = [*next(rounds, []), *([0] * count)][:count]
        ahead = [*script[len(context) :], *([0] * count)][:count]
        return [right if slot is RIGHT else slot for slot, right in zip(slots, ahead, strict=True)]

    return drafted


def hold_to_contract(
    engine: Engine, stream: Generation, expected: list[int], stops: set[int], budget: int, close_after: int | None
) -> None:
    """Drive ``stream``, checking state and events after every step, and its result. ``expected``: the oracle's."""
    prompt = stream._prompt_ids
    position = len(prompt)
    if close_after == 0:
        stream.close()
    for index, step in enumerate(stream):
        assert step.index == index
        assert (step.kind == "prefill") == (index == 0)
        assert step.position == position - 1
        assert step.anchor == (prompt + expected)[step.position]
        assert 1 <= len(step.committed) <= len(step.drafted) + 1
        assert 0 <= step.accepted <= len(step.drafted)
        assert step.committed[: step.accepted] == step.drafted[: step.accepted]
        if step.kind == "round":
            came = len(step.committed) == step.accepted + 1
            assert (step.next_kind is None) == (not came)
            if came:
                assert step.next_kind == ("bonus" if step.accepted == len(step.drafted) else "correction")
            if step.next_kind == "correction":
                assert step.committed[-1] != step.drafted[step.accepted]
        else:
            assert (step.drafted, step.accepted, step.next_kind) == ((), 0, None)
        position += len(step.committed)
        check_state(engine, stream, position)
        if index + 1 == close_after:
            stream.close()
    result = stream.result()
    emitted = [token for step in result.steps for token in step.committed]
    assert result.token_ids == emitted
    assert result.metrics.num_tokens == len(emitted)
    assert result.metrics.num_spec_steps == sum(step.kind == "round" for step in result.steps)
    if result.finish_reason == "cancelled":
        assert close_after is not None
        assert emitted == expected[: len(emitted)]
        assert len(emitted) < len(expected)
    else:
        assert emitted == expected
        assert result.finish_reason == ("stop" if emitted and emitted[-1] in stops else "length")
        assert result.finish_reason == "stop" or len(emitted) == budget


def check_state(engine: Engine, stream: Generation, committed: int) -> None:
    """Cache and drafter context hold everything committed but the newest token."""
    target, drafter = engine.target, engine.drafter
    assert target.length == committed - 1
    if target.tapping:
        assert drafter.length == committed - 1
    if isinstance(target, RuleTarget) and isinstance(drafter, PlannedDrafter):
        everything = stream._prompt_ids + [token for step in stream.steps for token in step.committed]
        assert target.seen == everything[:-1]
        assert drafter.context == (everything[:-1] if target.tapping else [])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(rule=st.sampled_from(RULES), chunk=st.integers(1, 6), requests=st.lists(cases, min_size=1, max_size=3))
def test_any_drafter_any_request_any_order_on_one_engine(
    pair: TinyPair, rule: Rule, chunk: int, requests: list[Case]
) -> None:
    target = pair.rule_target(rule, VOCAB)
    drafter = PlannedDrafter(target, lambda context, count: [0] * count, make_config(block_size=BLOCK))
    engine = Engine(pair.backend, target, drafter, prefill_chunk=chunk, check=True)
    for case in requests:
        target.info = replace(target.info, stop_token_ids=case.model_stops)
        if case.sampling.greedy:
            uncut = target.greedy(case.prompt, case.budget)
        else:
            plain = Engine(pair.backend, pair.rule_target(rule, VOCAB), drafter)
            uncut = plain.generate(
                case.prompt, max_new_tokens=case.budget, sampling=case.sampling, speculate=False
            ).token_ids
        expected = cut(uncut, case.stops, case.budget)
        for speculate in (True, False):
            drafter.plan = follow(case.plan, case.prompt + uncut)
            stream = engine.stream(case.prompt, speculate=speculate, **case.options())
            hold_to_contract(engine, stream, expected, case.stops, case.budget, case.close_after)


PROMPTS = [[5, 17, 200, 33], [0, 299], [(31 * index) % 300 for index in range(13)]]


@pytest.fixture(scope="module")
def oracles(tiny: TinyPair) -> list[list[int]]:
    return [tiny.oracle(prompt, 2 * BLOCK + 2) for prompt in PROMPTS]


@settings(
    max_examples=20, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    which=st.integers(0, len(PROMPTS) - 1),
    plan=st.lists(st.lists(st.one_of(st.just(RIGHT), st.integers(0, 299)), max_size=BLOCK), max_size=5),
    chunk=st.integers(1, 8),
    block=st.integers(2, BLOCK + 2),
    budget=st.integers(0, 2 * BLOCK + 1),
    stop_at=st.one_of(st.none(), st.integers(0, 2 * BLOCK)),
    close_after=st.one_of(st.none(), st.integers(0, 4)),
)
def test_the_real_target_and_its_cache_keep_the_contract(
    pair: TinyPair,
    oracles: list[list[int]],
    which: int,
    plan: list[list[int | None]],
    chunk: int,
    block: int,
    budget: int,
    stop_at: int | None,
    close_after: int | None,
) -> None:
    prompt, oracle = PROMPTS[which], oracles[which]
    stops = set() if stop_at is None else {oracle[stop_at]}
    drafter = ScriptedDrafter(pair, prompt + oracle)
    drafted = follow(plan, prompt + oracle)

    def propose(anchor: int, count: int, sampling: SamplingParams, *, detail: bool = False) -> Proposal:
        draft = drafted((prompt + oracle)[: drafter.length + 1], count)
        return pair.backend.proposal([anchor, *draft], pair.target)

    drafter.propose = propose  # type: ignore[method-assign]
    engine = pair.engine(drafter, prefill_chunk=chunk)
    stream = engine.stream(
        prompt, max_new_tokens=budget, block_size=block, stop_token_ids=sorted(stops), ignore_eos=True
    )
    hold_to_contract(engine, stream, cut(oracle, stops, budget), stops, budget, close_after)
