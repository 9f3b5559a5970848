"""Text as it comes: whole characters only, nothing that a stop string could still take back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from byte_tokenizer import decode_bytes
from hypothesis import given
from hypothesis import strategies as st

from dflash.detokenizer import Detokenizer, TextStream

MIXED = "naïve — 東京 🙂👩‍👩‍👧 é\n\tfim"


def stream_text(ids: Sequence[int], stop: Sequence[str] = (), takes: Sequence[bool] = ()) -> tuple[str, int]:
    """The text of ``ids`` taken at the marked tokens and at the end, and how many tokens were pushed."""
    stream, pieces, pushed = TextStream(decode_bytes, stop), [], 0
    for index, token in enumerate(ids):
        pushed += 1
        if stream.push(token):
            break
        if index < len(takes) and takes[index]:
            pieces.append(stream.take())
    return "".join([*pieces, stream.take(last=True)]), pushed


def test_characters_split_over_tokens_come_out_whole() -> None:
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.push(byte) for byte in MIXED.encode()]
    assert "".join(pieces) == MIXED
    assert all(len(piece) <= 1 for piece in pieces)
    assert "\ufffd" not in "".join(pieces)


def test_an_unfinished_character_is_held_until_the_end() -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert [detokenizer.push(byte) for byte in "a€".encode()[:-1]] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@given(st.lists(st.integers(0, 299), max_size=30))
def test_pieces_of_any_bytes_join_to_the_whole_text(ids: list[int]) -> None:
    detokenizer = Detokenizer(decode_bytes)
    assert "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()]) == decode_bytes(ids)


def test_spaces_that_depend_on_the_neighbour_survive() -> None:
    words = ["▁The", "▁cat", "▁", "▁sat", "s", ".", "▁"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[index] for index in ids).replace("▁", " ").removeprefix(" ")

    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(index) for index in range(len(words))]
    assert "".join([*pieces, detokenizer.flush()]) == decode(range(len(words)))


@pytest.mark.parametrize("size", range(1, 6))
def test_a_stop_string_across_tokens_and_takes_never_shows(size: int) -> None:
    text, pushed = stream_text(b"one END two", ["END"], [index % size == 0 for index in range(11)])
    assert text == "one "
    assert pushed == len("one END")


def test_the_beginning_of_a_stop_string_is_held_and_let_go() -> None:
    stream = TextStream(decode_bytes, ["###"])
    for byte in b"a##":
        assert not stream.push(byte)
    assert stream.take() == "a"
    assert not stream.push(ord("b"))
    assert stream.take() == "##b"


def test_a_stop_string_may_begin_inside_another_beginning() -> None:
    assert stream_text(b"xaaab", ["aab"], [True] * 5) == ("xa", 5)
    assert stream_text(b"ababac", ["abac"], [True] * 6) == ("ab", 6)


def test_the_earliest_of_several_stop_strings_in_one_token_counts() -> None:
    stream = TextStream(lambda ids: "".join(["left ", "right middle"][index] for index in ids), ["middle", "right"])
    assert not stream.push(0)
    assert stream.push(1)
    assert stream.take(last=True) == "left "
    assert stream.stopped


def test_nothing_is_taken_in_after_a_stop_string() -> None:
    stream = TextStream(decode_bytes, ["b"])
    assert [stream.push(byte) for byte in b"abc"] == [False, True, True]
    assert stream.take(last=True) == "a"
    assert stream.take(last=True) == ""


def test_a_stop_string_of_several_bytes_to_a_character_is_found() -> None:
    assert stream_text("pronto 終わり, mais".encode(), ["終わり"]) == ("pronto ", len("pronto 終わり".encode()))


@given(
    text=st.text("ab€", max_size=14),
    stop=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3),
    takes=st.lists(st.booleans(), max_size=42),
)
def test_stop_strings_cut_at_the_first_character_that_completes_one(
    text: str, stop: list[str], takes: list[bool]
) -> None:
    expected, end = text, len(text)
    for end in range(len(text) + 1):
        found = [text.index(string) for string in stop if string in text[:end]]
        if found:
            expected = text[: min(found)]
            break
    else:
        end = len(text)
    assert stream_text(text.encode(), stop, takes) == (expected, len(text[:end].encode()))
