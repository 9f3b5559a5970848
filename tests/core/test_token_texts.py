"""Texts of single tokens: each as a reader knows it, and together exactly the text of the generation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer, decode_bytes
from hypothesis import given
from hypothesis import strategies as st

from dflash.token_texts import TokenTexts, piece_of
from dflash.types import StepEvent


class Bytes(ByteTokenizer):
    """Ids from 256 on are control tokens, which have a text of their own where they are asked for it."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        parts = [token if token < 256 else f"<|{token}|>".encode() for token in ids if token < 256 or special]
        return b"".join(bytes([part]) if isinstance(part, int) else part for part in parts).decode(errors="replace")

    def spell(self, token: int) -> str | None:
        return f"‹{token:02X}›"


class Words:
    """Drops the space of the first word, as sentencepiece does; 3 has no text at all."""

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join({1: " one", 2: " two", 3: ""}[token] for token in ids).lstrip()

    def spell(self, token: int) -> str | None:
        raise AssertionError("there is no half character here")


def step(anchor: int, committed: Sequence[int], drafted: Sequence[int] = ()) -> StepEvent:
    return StepEvent("round", 1, 1, anchor, tuple(drafted), 0, tuple(committed), "correction", 0.0, 0.0, 0.0)


def texts_of(*steps: StepEvent, tokenizer: Any = None) -> TokenTexts:
    return TokenTexts.of_steps(steps, tokenizer or Bytes())


def test_a_piece_keeps_its_leading_space_and_an_empty_one_shows_its_id() -> None:
    piece = piece_of(Words())  # type: ignore[arg-type]
    assert (piece(1, 2), piece(1, 3)) == (" two", "<3>")
    assert piece_of(None)(1, 2) == "<2>"


def test_running_texts_are_empty_while_a_character_is_unfinished() -> None:
    texts = texts_of(step(0, "a€b".encode()))
    assert texts.running == ["a", "", "", "€", "b"]
    assert [texts.of(byte) for byte in "a€".encode()] == ["a", "‹E2›", "‹82›", "‹AC›"]
    assert not texts.special(0xE2)


def test_an_unfinished_character_at_the_end_belongs_to_the_last_token() -> None:
    texts = texts_of(step(0, "a€".encode()[:-1]))
    assert texts.running == ["a", "", "\ufffd"]
    texts.finish()
    assert texts.running == ["a", "", "\ufffd"]
    nothing = TokenTexts(Bytes())
    nothing.finish()
    assert nothing.running == []


def test_control_tokens_have_a_name_and_no_running_text() -> None:
    texts = texts_of(step(300, [104, 257, 105], drafted=[258]))
    assert texts.running == ["h", "", "i"]
    assert [texts.of(token) for token in (257, 258, 300)] == ["<|257|>", "<|258|>", "<|300|>"]
    assert all(texts.special(token) for token in (257, 258, 300)) and not texts.special(104)


def test_a_control_token_inside_a_character_takes_nothing_away() -> None:
    texts = texts_of(step(0, [0xC3, 257, 0xA9]))
    assert "".join(texts.running) == Bytes().decode([0xC3, 257, 0xA9]) == "é"
    assert texts.special(257)


def test_an_unfinished_character_before_a_control_token_belongs_to_itself() -> None:
    assert texts_of(step(0, [104, 0xC3, 257])).running == ["h", "\ufffd", ""]


def test_drafted_tokens_that_were_thrown_away_have_texts_too() -> None:
    texts = texts_of(step(104, [105], drafted=[ord("<"), ord("\n"), 0xF0]))
    assert [texts.of(token) for token in (ord("<"), ord("\n"), 0xF0)] == ["<", "\n", "‹F0›"]
    assert texts.running == ["i"]


def test_an_id_that_nobody_saw_is_its_number() -> None:
    assert TokenTexts(Bytes()).of(77) == "<77>"
    assert not TokenTexts(Bytes()).special(77)


def test_without_a_tokenizer_everything_is_its_number() -> None:
    texts = TokenTexts.of_steps([step(4, [5, 6])], None)
    assert texts.running == ["<5>", "<6>"] and texts.of(4) == "<4>"
    assert not texts.special(5)


def test_steps_may_come_one_by_one() -> None:
    steps = [step(0, b"na"), step(97, "ïv".encode()[:2]), step(0xC3, "ïv".encode()[2:])]
    one_by_one = TokenTexts(Bytes())
    for each in steps:
        one_by_one.take([each])
    assert one_by_one.running == texts_of(*steps).running == ["n", "a", "", "ï", "v"]


def test_what_was_saved_is_read() -> None:
    texts = texts_of(step(300, [*"a<€".encode(), 257], drafted=[0xF0]))
    read = TokenTexts.from_dict(json.loads(json.dumps(texts.to_dict())))
    assert read.to_dict() == texts.to_dict()
    assert read.running == texts.running and read.special(257) and read.of(0xF0) == "‹F0›"


GOOD = {"vocabulary": {"1": "a"}, "special": [2], "running": ["a"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"vocabulary": {"one": "a"}},
        {"vocabulary": {"1": 5}},
        {"vocabulary": {"1": None}},
        {"vocabulary": None},
        {"special": ["x"]},
        {"special": 5},
        {"running": [1]},
        {"running": None},
    ],
    ids=str,
)
def test_what_was_not_saved_here_is_refused(changes: dict[str, Any]) -> None:
    assert TokenTexts.from_dict(GOOD).of(1) == "a"
    with pytest.raises((ValueError, TypeError, AttributeError)):
        TokenTexts.from_dict(GOOD | changes)
    for name in GOOD:
        with pytest.raises(KeyError):
            TokenTexts.from_dict({key: value for key, value in GOOD.items() if key != name})


@given(st.lists(st.lists(st.integers(0, 270), max_size=6), max_size=8))
def test_running_texts_of_any_tokens_join_to_the_whole_text(committed: list[list[int]]) -> None:
    texts = texts_of(*(step(97, part) for part in committed))
    ids = [token for part in committed for token in part]
    assert len(texts.running) == len(ids)
    assert "".join(texts.running) == decode_bytes(ids)
    assert all(texts.of(token) for token in ids), "no token is without any text"
    assert {token for token in ids if texts.special(token)} == {token for token in ids if token >= 256}


# A real tokenizer ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("transformers")
    from saved_tokenizer import save_byte_tokenizer

    from dflash.tokenizer import Tokenizer

    return Tokenizer.load(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_a_byte_level_tokenizer_spells_half_characters(tokenizer: Any) -> None:
    ids = tokenizer.encode_text("a\n €🍎<b>")
    texts = TokenTexts.of_steps([step(2, [*ids, 5, 1])], tokenizer)
    assert "".join(texts.running) == tokenizer.decode(ids) == "a\n €🍎<b>"
    assert [texts.of(token) for token in ids[:6]] == ["a", "\n", " ", "‹E2›", "‹82›", "‹AC›"]
    assert [texts.of(token) for token in (2, 5, 1)] == ["<|system|>", "<|end|>", "<eos>"]
    assert [texts.special(token) for token in (2, 5, 1, ids[0])] == [True, True, True, False]


def test_spelling_knows_every_byte_and_nothing_that_is_not_one(tokenizer: Any) -> None:
    for byte in range(256):
        assert tokenizer.spell(6 + byte) == f"‹{byte:02X}›"
    assert tokenizer.spell(1) == "‹3C 65 6F 73 3E›"  # its name is five characters that stand for bytes
    assert tokenizer.spell(10_000) is None


class Pieces:
    """A sentencepiece vocabulary: single bytes under names, words with their marks."""

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return {1: "<0xF0>", 2: "▁café", 3: "<0xG0>"}.get(token)


def test_spelling_reads_the_single_bytes_of_sentencepiece() -> None:
    from dflash.tokenizer import Tokenizer

    spell = Tokenizer(Pieces()).spell
    assert (spell(1), spell(2), spell(9)) == ("‹F0›", None, None)
    assert spell(3) == "‹3C 30 78 47 30 3E›"


def test_the_prompt_is_kept_as_a_whole_text_with_its_control_tokens() -> None:
    texts = TokenTexts(Bytes())  # type: ignore[arg-type]
    texts.read_prompt([300, *"é?".encode()])
    assert texts.prompt == "<|300|>é?" and texts.of(300) == "<|300|>"
    assert TokenTexts.from_dict(texts.to_dict()).prompt == texts.prompt
    assert TokenTexts().prompt is None
