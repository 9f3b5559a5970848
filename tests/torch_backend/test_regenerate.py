"""Response regeneration: the same rows as one prompt at a time, resumable, loops cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch_dflash.training.regenerate import (
    PromptIds,
    Settings,
    choose,
    in_loop,
    regenerate,
    respond,
    resume_keys,
)
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.errors import PromptError, TrainingError
from dflash.records import ResponseRecord, read_records

VOCAB, STOPS = 97, tuple(range(7))
GREEDY = Settings(max_new_tokens=20, rows=5, share=0.0)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        eos_token_id=STOPS[0],
    )
    return LlamaForCausalLM(config).float().eval().requires_grad_(False)


def some_prompts(count: int, longest: int = 30) -> list[PromptIds]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [
        PromptIds(tuple(torch.randint(7, VOCAB, (length,), generator=generator).tolist()), ("math", "code")[place % 2])
        for place, length in enumerate(lengths)
    ]


def alone(target: LlamaForCausalLM, prompt: PromptIds, settings: Settings) -> list[int]:
    """The plain oracle: no cache, no padding, the whole sequence again for every token."""
    temperature, uniforms = settings.draws(prompt)
    response: list[int] = []
    for turn in range(settings.max_new_tokens):
        logits = target(torch.tensor([[*prompt.ids, *response]])).logits[0, -1]
        if temperature:
            heights = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
            token = int((heights <= uniforms[turn] * heights[-1]).sum())
        else:
            token = int(logits.argmax())
        response.append(token)
        if token in STOPS or in_loop(response):
            break
    return response


@pytest.mark.parametrize("settings", [GREEDY, Settings(max_new_tokens=20, rows=5, temperature=0.9, share=0.6)])
def test_batched_rows_equal_one_prompt_at_a_time(target, tmp_path, settings):
    prompts = some_prompts(12)
    assert regenerate(target, prompts, tmp_path / "rows.jsonl", STOPS, settings) == len(prompts)
    records = {record.prompt: record for record in read_records([tmp_path / "rows.jsonl"])}
    assert len(records) == len(prompts)
    ended = 0
    for prompt in prompts:
        record = records[prompt.ids]
        assert list(record.response) == alone(target, prompt, settings)
        assert record.finished == (record.response[-1] in STOPS)
        assert (record.domain, record.key) == (prompt.domain, prompt.key)
        assert (record.temperature > 0) == (settings.draws(prompt)[0] > 0)
        ended += record.finished
    assert 0 < ended < len(prompts), "the fixture must have rows that end early and rows that do not"


def test_a_killed_run_continues_and_a_half_written_line_is_dropped(target, tmp_path):
    prompts, whole, killed = some_prompts(11), tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    regenerate(target, prompts, whole, STOPS, GREEDY)

    class Killed(Exception):
        pass

    def kill(progress):
        if progress.rows == 7:
            raise Killed

    with pytest.raises(Killed):
        regenerate(target, prompts, killed, STOPS, GREEDY, kill)
    with killed.open("a") as stream:
        stream.write('{"domain":"math","temp":0.0,"prompt":[1,2')
    seen = []
    assert regenerate(target, prompts, killed, STOPS, GREEDY, seen.append) == 4
    assert [progress.rows for progress in seen] == [8, 9, 10, 11]
    assert seen[-1].total == 11 and seen[-1].seconds_left == 0
    assert set(killed.read_text().splitlines()) == set(whole.read_text().splitlines())
    assert regenerate(target, prompts, killed, STOPS, GREEDY) == 0


def test_the_same_prompt_is_answered_once(target, tmp_path):
    prompts = some_prompts(3) * 2
    assert regenerate(target, prompts, tmp_path / "rows.jsonl", STOPS, GREEDY) == 3


def test_rows_that_end_leave_the_batch_and_are_handed_out_at_once(target):
    prompts = some_prompts(10)
    order = [len(response) for _, response, _ in respond(target, prompts, STOPS, GREEDY)]
    assert order == sorted(order) and len(set(order)) > 1


@pytest.mark.parametrize("period", [1, 2, 5, 8, 12, 33, 80])
def test_a_loop_is_cut_at_its_third_turn(period):
    start = list(range(1000, 1007))
    turn = list(range(period))
    text = start + turn * 40
    cut = next(size for size in range(len(text) + 1) if in_loop(text[:size]))
    assert cut == len(start) + max(3 * period, 24)


def test_what_is_no_loop_is_left_alone():
    assert not in_loop([])
    assert not in_loop(list(range(300)))
    assert not in_loop([1, 2, 3] * 2)
    assert not in_loop([7] * 23)
    varied = list(itertools.chain.from_iterable([*range(20, 30), turn] for turn in range(9)))  # a table, counted
    assert not any(in_loop(varied[:size]) for size in range(len(varied)))


def test_a_draw_follows_the_distribution_and_never_takes_what_has_no_probability():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]]).repeat(2000, 1)
    uniforms = torch.linspace(0, 1, 2001, dtype=torch.float64)[:-1]
    drawn = choose(logits, torch.full((2000,), 0.5, dtype=torch.float64), uniforms)
    assert set(drawn.tolist()) == {0, 2}
    assert abs(float((drawn == 0).double().mean()) - float(torch.sigmoid(torch.tensor(-2.0)))) < 1e-3


def test_share_and_seed_decide_which_prompts_are_sampled():
    prompts = some_prompts(400)
    sampled = [Settings(share=0.3).draws(prompt)[0] > 0 for prompt in prompts]
    assert 0.2 < sum(sampled) / len(sampled) < 0.4
    assert sampled == [Settings(share=0.3).draws(prompt)[0] > 0 for prompt in prompts]
    assert sampled != [Settings(share=0.3, seed=1).draws(prompt)[0] > 0 for prompt in prompts]


def test_bad_requests_are_refused(target, tmp_path):
    with pytest.raises(PromptError, match="120 tokens"):
        regenerate(target, [PromptIds(tuple(range(7, 87)) + tuple(range(7, 47)))], tmp_path / "a.jsonl", STOPS, GREEDY)
    with pytest.raises(TrainingError, match="compressed"):
        resume_keys(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.jsonl").write_text("no record\n")
    with pytest.raises(TrainingError, match="line 1"):
        resume_keys(tmp_path / "b.jsonl")
    for foreign in ("no record\nat all", "one line without an end"):
        (tmp_path / "c.txt").write_text(foreign)
        with pytest.raises(TrainingError, match=r"c\.txt"):
            resume_keys(tmp_path / "c.txt")
        assert (tmp_path / "c.txt").read_text() == foreign, "a file that is not ours stays as it is"
    with pytest.raises(TrainingError, match="share is 2"):
        Settings(share=2)
    with pytest.raises(TrainingError, match="temperature is 0"):
        Settings(temperature=0)


def test_record_lines_survive_a_round_trip(tmp_path):
    record = ResponseRecord((1, 2), (3, 5), "math", 0.6, True, "abc")
    (tmp_path / "rows.jsonl").write_text(record.to_json() + "\n")
    assert read_records([tmp_path / "rows.jsonl"]) == [record]
    assert resume_keys(tmp_path / "rows.jsonl") == {"abc"}
