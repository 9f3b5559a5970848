"""Prompt sets: the one that ships, files, the hub; their hashes and how a part is taken."""

import gzip
import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from dflash.errors import BackendError, PromptError, StorageError, UsageError
from dflash.prompts import MINI, load_prompts


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_mini_is_eight_prompts_a_domain_half_of_them_portuguese():
    rows = [json.loads(line) for line in MINI.read_text(encoding="utf-8").splitlines()]
    assert Counter((row["domain"], row["language"]) for row in rows) == {
        (domain, language): 4 for domain in ("math", "code", "chat") for language in ("en", "pt")
    }
    prompts = load_prompts("mini").prompts
    assert len({prompt.id for prompt in prompts}) == len({prompt.prompt for prompt in prompts}) == 24


def test_the_hash_changes_with_the_prompts_and_not_with_the_file(tmp_path):
    one = {"id": "a", "domain": "chat", "prompt": "olá"}
    spaced = json.dumps(one, indent=None, separators=(" , ", " : ")) + "\n\n"
    first, same = load_prompts(write(tmp_path / "1.jsonl", one)), load_prompts(write(tmp_path / "2.jsonl", spaced))
    other = load_prompts(write(tmp_path / "3.jsonl", one | {"prompt": "ola"}))
    assert first.sha256 == same.sha256 != other.sha256


def test_a_limit_takes_the_domains_in_turn(tmp_path):
    rows = [{"id": f"{domain}{at}", "domain": domain, "prompt": "x"} for domain in "ab" for at in range(3)]
    prompts = load_prompts(write(tmp_path / "p.jsonl", *rows))
    assert [prompt.id for prompt in prompts.take(4).prompts] == ["a0", "b0", "a1", "b1"]
    assert [prompt.id for prompt in prompts.take(2, ["b"]).prompts] == ["b0", "b1"]
    assert prompts.take().prompts == prompts.prompts
    with pytest.raises(UsageError, match=r"domain 'c' is not in p\.jsonl; there are a, b"):
        prompts.take(domains=["c"])
    with pytest.raises(UsageError, match="limit is 0"):
        prompts.take(0)


def test_prompts_without_an_id_are_numbered_and_messages_are_prompts(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    prompts = load_prompts(write(tmp_path / "p.jsonl", {"prompt": "x"}, {"messages": messages})).prompts
    assert [prompt.id for prompt in prompts] == ["1", "2"] and prompts[1].prompt == messages


@pytest.mark.parametrize("bad", ["{nonsense\n", "[]\n", '{"id": "x"}\n', '{"prompt": ""}\n', '{"prompt": 3}\n'])
def test_a_bad_line_is_named_by_its_number(tmp_path, bad):
    with pytest.raises(PromptError, match="line 2"):
        load_prompts(write(tmp_path / "p.jsonl", {"prompt": "fine"}, bad))


def test_a_file_that_is_missing_or_empty_is_one_sentence(tmp_path):
    with pytest.raises(PromptError, match=r"absent.jsonl cannot be read"):
        load_prompts(str(tmp_path / "absent.jsonl"))
    with pytest.raises(PromptError, match="holds no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl"))
    damaged = bytearray(gzip.compress(MINI.read_bytes()))
    damaged[100:200] = bytes(100)
    (tmp_path / "damaged.jsonl.gz").write_bytes(damaged)
    with pytest.raises(PromptError, match=r"damaged.jsonl.gz cannot be read"):
        load_prompts(str(tmp_path / "damaged.jsonl.gz"))


class Rows(list):
    @property
    def column_names(self):
        return list(self[0])


def fake_hub(monkeypatch, load):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))


def test_a_hub_set_takes_config_split_and_column_from_its_address(monkeypatch):
    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        return Rows({"question": f"q{at}", "answer": f"a{at}"} for at in range(5))

    fake_hub(monkeypatch, load)
    prompts = load_prompts("hf:openai/gsm8k/main", limit=2)
    assert [prompt.prompt for prompt in prompts.prompts] == ["q0", "q1"]  # question is found by itself
    assert load_prompts("hf:openai/gsm8k:train:answer").prompts[4].prompt == "a4"
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", None, "train")]
    with pytest.raises(PromptError, match="no such column of prompts; it has question, answer"):
        load_prompts("hf:openai/gsm8k:train:other")


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def load(name, config, split):
        raise ConnectionError("no route\nto the host")

    fake_hub(monkeypatch, load)
    with pytest.raises(StorageError, match=r"hf:a/b cannot be loaded \(no route\); check the name and the network"):
        load_prompts("hf:a/b")


def test_the_hub_needs_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BackendError, match="needs the datasets package"):
        load_prompts("hf:a/b")


@pytest.mark.parametrize("address", ["hf:", "hf:name", "hf:a/b/c/d", "hf:a/b:s:c:more"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UsageError, match="is no data set"):
        load_prompts(address)
