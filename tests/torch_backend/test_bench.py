"""The benchmark protocol on the tiny pair: what is interleaved, what is counted, what a record holds."""

import json

import pytest
from saved_tokenizer import save_byte_tokenizer
from tiny_models import VOCAB

from dflash.bench import run_benchmark
from dflash.environment import environment, fingerprint
from dflash.errors import PromptError, UsageError
from dflash.prompts import EvalPrompt, PromptSet
from dflash.tokenizer import Tokenizer
from dflash.types import SamplingParams

IDS = {"a": [5, 6, 7], "b": [9, 10], "c": [20, 21, 22, 23]}
PROMPTS = PromptSet("tiny", tuple(EvalPrompt(ids, "math" if name < "c" else "chat", name) for name, ids in IDS.items()))
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def calls(monkeypatch):
    """An engine's requests in order, as (first prompt id, speculate, budget)."""
    from dflash.engine import Engine

    seen, stream = [], Engine.stream

    def watched(self, prompt, **options):
        seen.append((prompt[0], options.get("speculate", True), options["max_new_tokens"]))
        return stream(self, prompt, **options)

    monkeypatch.setattr(Engine, "stream", watched)
    return seen


def test_the_arms_take_turns_and_turns_in_going_first(tiny, calls):
    benchmark = run_benchmark(tiny.engine(), PROMPTS, OPTIONS, repeats=2)
    checked, warm, measured = calls[:3], calls[3:5], calls[5:]
    assert [prompt for prompt, _, _ in checked] == [5, 9, 20]
    assert {speculate for _, speculate, _ in warm} == {True, False}
    assert [prompt for prompt, _, _ in measured] == [5, 5, 9, 9, 20, 20] * 2
    firsts = [speculate for _, speculate, _ in measured[::2]]
    assert firsts == [False, True, False, True, False, True]
    assert [first != second for first, second in zip(firsts, [s for _, s, _ in measured[1::2]], strict=True)] == [
        True
    ] * 6
    assert not benchmark.partial


def test_figures_are_those_of_the_rounds(tiny):
    """S(2): wrong at the second slot of every round, so that each accepts one token and commits two."""
    prompt = IDS["a"]
    engine = tiny.engine(tiny.scripted(prompt, wrong_at=(2,)))
    only = PromptSet("one", (EvalPrompt(prompt, "math", "a"),))
    record = run_benchmark(engine, only, {"max_new_tokens": 13, "ignore_eos": True}, repeats=3).to_dict()
    assert record["prompts"] == 1 and record["repeats"] == 3 and record["identical_prompts"] == 1
    assert record["num_tokens"] == 13 and record["num_spec_steps"] == 6  # of one repeat, not of three
    assert record["mean_acceptance_length"] == 2.0
    assert record["acceptance_rate_per_position"][:2] == [1.0, 0.0]
    assert record["acceptance_histogram"][1] == 6
    assert record["per_prompt"]["mean_acceptance_length"]["mean"] == 2.0
    for arm in ("plain", "dflash"):
        speeds = record[arm]
        assert speeds["num_tokens"] == 13
        for name in ("decode_tokens_per_second", "end_to_end_tokens_per_second", "ttft", "total_seconds"):
            assert 0 < speeds[name]["min"] <= speeds[name]["median"] <= speeds[name]["max"]
    assert record["domains"]["math"]["mean_acceptance_length"] == 2.0
    json.dumps(record)


def test_speedup_is_plain_time_divided_by_speculative(tiny):
    benchmark = run_benchmark(tiny.engine(), PROMPTS, OPTIONS, repeats=1)
    times = {
        arm: sum(getattr(twin, arm).metrics.total_seconds for twin in benchmark.twins) for arm in ("plain", "dflash")
    }
    assert benchmark.to_dict()["speedup"]["median"] == pytest.approx(times["plain"] / times["dflash"])


def test_a_difference_in_one_repeat_is_counted(tiny):
    benchmark = run_benchmark(tiny.engine(), PROMPTS, OPTIONS, repeats=2)
    assert benchmark.to_dict()["identical_prompts"] == 3
    benchmark.twins[4].plain.token_ids[-1] += 1
    assert benchmark.to_dict()["identical_prompts"] == 2


def test_sampling_gets_one_seed_for_both_arms(tiny):
    options = OPTIONS | {"sampling": SamplingParams(temperature=1.0)}
    assert run_benchmark(tiny.engine(), PROMPTS, options, repeats=2).to_dict()["identical_prompts"] == 3


def test_an_interruption_keeps_whole_prompts_and_says_partial(tiny):
    done = []
    benchmark = run_benchmark(
        tiny.engine(), PROMPTS, OPTIONS, report=lambda part: done.append(part), stopped=lambda: len(done) == 4
    )
    assert benchmark.partial and len(benchmark.twins) == 4
    record = benchmark.to_dict()
    assert record["partial"] and record["repeats"] == 1 and record["prompts"] == 3  # the second repeat broke off
    done.clear()
    early = run_benchmark(
        tiny.engine(), PROMPTS, OPTIONS, report=lambda part: done.append(part), stopped=lambda: len(done) == 1
    ).to_dict()
    assert early["partial"] and early["prompts"] == 1 and list(early["domains"]) == ["math"]


def test_what_cannot_work_is_refused_before_anything_is_measured(tiny, calls):
    long = PromptSet("long", (*PROMPTS.prompts, EvalPrompt([3] * 600, id="too-long")))
    with pytest.raises(PromptError, match="prompt too-long of long: the prompt has 600 tokens"):
        run_benchmark(tiny.engine(), long, OPTIONS)
    with pytest.raises(UsageError, match="repeats is 0"):
        run_benchmark(tiny.engine(), PROMPTS, OPTIONS, repeats=0)
    assert len(calls) == 4


def test_a_record_says_where_it_was_measured(tiny, tmp_path):
    save_byte_tokenizer(tmp_path)
    facts = {"target": "t", "draft": "d", "backend": "torch", "device": "cpu", "dtype": "float32"}
    record = environment(tiny.engine(tokenizer=Tokenizer.load(tmp_path), facts=facts))
    assert record["models"] == {role: {"name": role[0], "fingerprint": None} for role in ("target", "draft")}
    assert record["versions"]["torch"] and record["versions"]["dflash-lab"]
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["cpu"]
    assert len(record["template_sha256"]) == 64 and record["dtype"] == "float32"
    json.dumps(record)


def test_a_fingerprint_sees_a_changed_weight_and_not_a_changed_place(tmp_path):
    weights = bytes(range(256)) * 8192  # 2 MiB: more than is read in whole
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        changed = bytes(byte ^ 1 for byte in weights) if name == "other" else weights
        (tmp_path / name / "model.safetensors").write_bytes(changed)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two") != fingerprint(tmp_path / "other")


def test_vocabulary_is_large_enough_for_the_byte_tokenizer(tmp_path):
    tokenizer = Tokenizer.load(save_byte_tokenizer(tmp_path))
    text = "olá, mundo ✓\n\tx"
    ids = tokenizer.encode(text, raw=True)
    assert max(ids) < VOCAB and tokenizer.decode(ids) == text
