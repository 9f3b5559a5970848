"""Rounds as lines: told apart without colour, every white space visible, never too wide; figures with denominators."""

import pytest

from dflash.cli.render import ASCII, UNICODE, comparison_lines, marks_for, step_lines, summary_lines
from dflash.comparison import Comparison
from dflash.metrics import Metrics
from dflash.types import GenerationResult, StepEvent


def step(kind="round", drafted=(11, 12, 13, 14), accepted=2, committed=(11, 12, 99), next_kind="correction", index=3):
    return StepEvent(kind, index, 20, 10, drafted, accepted, committed, next_kind, 0.25, 0.5, 0.25)


def result(*steps, ids=(), finish="stop", seconds=2.0):
    metrics = Metrics.from_steps(steps, num_prompt_tokens=7, ttft=0.5, total_seconds=seconds, peak_memory=2_000_000)
    return GenerationResult(list(ids), "text", finish, list(steps), metrics)


def words(before, token):
    return {10: "ten", 11: " the", 12: "\n", 13: "\tx", 14: "end", 99: " a b"}[token]


def plain(event, marks=UNICODE, piece=words, width=100):
    return [line.plain for line in step_lines(event, piece, marks, width)]


def test_a_correction_has_its_four_kinds_of_tokens_told_apart_without_colour():
    assert plain(step()) == ["   3  2/4     ✓␣the ✓⏎ ✗⇥x ·end →␣a␣b"]


def test_ascii_marks_say_the_same():
    assert plain(step(), ASCII) == ["   3  2/4     +_the +\\n x\\tx .end >_a_b"]


def test_a_bonus_has_no_rejected_token():
    assert plain(step(accepted=4, committed=(11, 12, 13, 14, 99), next_kind="bonus")) == [
        "   3  4/4     ✓␣the ✓⏎ ✓⇥x ✓end ★␣a␣b"
    ]


def test_what_lies_behind_a_cut_is_discarded_and_not_called_rejected():
    assert plain(step(accepted=2, committed=(11, 12), next_kind=None)) == ["   3  2/4     ✓␣the ✓⏎ ·⇥x ·end"]


def test_nothing_accepted():
    assert plain(step(accepted=0, committed=(99,))) == ["   3  0/4     ✗␣the ·⏎ ·⇥x ·end →␣a␣b"]


def test_prefill_and_plain_steps_have_lines_too():
    assert plain(step("prefill", (), 0, (11,), None, 0)) == ["   0  prefill of 21 tokens, then ␣the"]
    assert plain(step("plain", (), 0, (11,), None, 5)) == ["   5  plain   ␣the"]


@pytest.mark.parametrize("accepted", [0, 3, 15])
@pytest.mark.parametrize("wide", ["abcdefgh", "日本語の"])
def test_no_line_is_wider_than_the_terminal_and_no_committed_token_is_lost(accepted, wide):
    drafted = tuple(range(100, 115))
    kind = "bonus" if accepted == 15 else "correction"
    event = step(drafted=drafted, accepted=accepted, committed=(*drafted[:accepted], 7), next_kind=kind)
    lines = step_lines(event, lambda before, token: f"{wide}{token}", UNICODE, 100)
    assert all(line.cell_len <= 100 for line in lines)
    text = " ".join(line.plain for line in lines)
    assert text.count("✓") == accepted and text.count("✗") == (accepted < 15) and text.count("→") == (accepted < 15)
    assert (text.count("·") < 14 - accepted) == ("…" in text)  # the discarded tail is what makes room
    assert len(lines) == 1 or accepted


def test_control_characters_are_visible():
    assert UNICODE.visible("a\r\x1b[0m\u200b") == "a\\r\\x1b[0m\\u200b"


def test_the_stream_s_encoding_chooses_the_marks():
    assert marks_for("utf-8") is UNICODE
    assert all(marks_for(name) is ASCII for name in ("ascii", "latin-1", None, "no-such-encoding"))
    assert "".join(vars(ASCII).values()).isascii()


def test_a_summary_names_every_denominator():
    ended = result(step("prefill", (), 0, (1,), None, 0), step(), step(accepted=0, committed=(99,)))
    text = "\n".join(summary_lines(ended))
    assert "τ 2.00 (4 tokens ÷ 2 rounds)" in text
    assert "2/8 = 25.0% accepted" in text
    assert "1: 0.50  2: 0.50  3: 0.00  4: 0.00 (rounds that accepted it ÷ rounds that drafted it)" in text
    assert "draft 25% · verify 50% · rest 25%" in text
    assert "peak 2 MB" in text and "first token 0.500 s" in text and "finish      stop" in text


def test_a_summary_of_nothing_has_no_figures_to_divide():
    assert not any("τ" in line for line in summary_lines(result()))


def steps(count):
    return [step("plain", (), 0, (1,), None) for _ in range(count)]


def compared(speculative, plain, dtype="float32"):
    return Comparison(speculative, plain, dtype)


def test_a_comparison_says_speedup_break_even_and_that_the_tokens_agree():
    comparison = compared(result(step(), ids=[1, 2], seconds=1.0), result(*steps(3), ids=[1, 2], seconds=3.0))
    assert comparison_lines(comparison) == [
        "plain       3.00 s · speculative 1.00 s · speedup 3.00 × end to end",
        "break-even  τ 1.00: a round takes as long as 1.00 plain steps (measured τ 3.00)",
        "identical to plain decoding: yes",
    ]
    assert comparison.to_dict()["identical"] is True


def test_a_slower_speculation_says_so():
    comparison = compared(result(step(), ids=[1], seconds=4.0), result(*steps(3), ids=[1], seconds=3.0))
    assert any("speculation is slower than plain decoding here" in line for line in comparison_lines(comparison))


@pytest.mark.parametrize(("other", "at"), [([1, 5, 3], 2), ([1, 2], 3), ([1, 2, 3, 4], 4), ([], 1)])
def test_the_first_difference_is_named(other, at):
    comparison = compared(result(step(), ids=[1, 2, 3]), result(*steps(3), ids=other))
    assert comparison_lines(comparison)[-1] == f"identical to plain decoding: no (first difference at token {at})"
    assert comparison.to_dict()["first_difference"] == at


def test_sixteen_bit_equality_is_not_promised():
    same = compared(result(step(), ids=[1]), result(*steps(3), ids=[1]), "bfloat16")
    other = compared(result(step(), ids=[1]), result(*steps(3), ids=[2]), "float16")
    assert "yes (this output; bfloat16 arithmetic promises it up to near-ties only)" in comparison_lines(same)[-1]
    assert "16-bit arithmetic breaks near-ties, see README" in comparison_lines(other)[-1]
