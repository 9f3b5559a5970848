"""The project's own prompts: many, distinct, the same for a seed."""

from __future__ import annotations

import re

import pytest

from dflash import prompt_templates
from dflash.errors import UsageError
from dflash.prompt_templates import DOMAINS, template_prompts


def test_a_seed_gives_thousands_of_distinct_prompts_in_turn():
    prompts = template_prompts(9000, seed=3)
    assert len(set(prompts)) == 9000
    assert [prompt.domain for prompt in prompts[:6]] == list(DOMAINS) * 2
    assert all(prompt.prompt == prompt.prompt.strip() and len(prompt.prompt) > 10 for prompt in prompts)
    assert not any(re.search(r"\{[a-z0-9-]+\}", prompt.prompt) for prompt in prompts), "a slot was left open"


def test_asking_for_more_appends_and_another_seed_differs():
    assert template_prompts(60, seed=1) == template_prompts(200, seed=1)[:60]
    assert template_prompts(60, seed=1) != template_prompts(60, seed=2)
    chosen = template_prompts(20, ["code"], seed=1)
    assert {prompt.domain for prompt in chosen} == {"code"}


def test_what_cannot_be_made_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="domain 'law' is unknown"):
        template_prompts(3, ["law"])
    with pytest.raises(UsageError, match="rows is 0"):
        template_prompts(0)
    monkeypatch.setitem(prompt_templates._MAKERS, "chat", lambda rng: rng.choice("abc"))
    with pytest.raises(UsageError, match="no more than about 3"):
        template_prompts(4, ["chat"])
