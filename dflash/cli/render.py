"""Rounds and figures as people read them: pure functions from events and results to lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash.metrics import Metrics
from dflash.token_texts import Piece
from dflash.types import GenerationResult, StepEvent

if TYPE_CHECKING:
    from rich.text import Text

    from dflash.comparison import Comparison

NONE = "–"
WIDTH = 100  # columns of a round where no terminal says how wide it is

# Blue and orange stay apart for every common kind of colour blindness; weight and strike say the same again.
STYLES = {
    "accepted": "#56b4e9",
    "rejected": "strike #d55e00",
    "discarded": "dim",
    "correction": "bold #e69f00",
    "bonus": "bold #cc79a7",
}


@dataclass(frozen=True)
class Marks:
    """How each kind of token is marked, and how white space inside tokens is shown."""

    accepted: str
    rejected: str
    discarded: str
    correction: str
    bonus: str
    space: str
    newline: str
    tab: str
    more: str

    def visible(self, text: str) -> str:
        """``text`` on one line, nothing of it invisible."""
        known = {" ": self.space, "\n": self.newline, "\t": self.tab}
        return "".join(known.get(char) or (char if char.isprintable() else ascii(char)[1:-1]) for char in text)

    def legend(self) -> Text:
        """One line that explains the marks."""
        from rich.text import Text

        words = {
            "accepted": "accepted draft token",
            "rejected": "first rejected",
            "discarded": "discarded",
            "correction": "correction",
            "bonus": "bonus",
        }
        parts = [(f"{getattr(self, kind)} {word}", STYLES[kind]) for kind, word in words.items()]
        return Text("   ").join(Text(text, style) for text, style in parts)


UNICODE = Marks("✓", "✗", "·", "→", "★", "␣", "⏎", "⇥", "…")
ASCII = Marks("+", "x", ".", ">", "*", "_", "\\n", "\\t", "...")


def marks_for(encoding: str | None) -> Marks:
    """The marks that a stream of this encoding can carry."""
    try:
        "".join(vars(UNICODE).values()).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def step_lines(event: StepEvent, piece: Piece, marks: Marks, width: int = WIDTH) -> list[Text]:
    """One step as a line of at most ``width`` columns; more lines only where what was committed needs them."""
    from rich.text import Text

    if event.kind != "round":
        only = marks.visible("".join(piece(event.anchor, token) for token in event.committed))
        what = f"prefill of {event.position + 1} tokens, then" if event.kind == "prefill" else "plain"
        return [Text.assemble((f"{event.index:>4}  {what:<7} ", "dim"), only)]

    stands, discarded, closing = _parts(event, piece, marks)
    count = f"{event.accepted}/{len(event.drafted)}"
    head = Text(f"{event.index:>4}  {count:<7}", "dim")
    # What was discarded matters least: where the line is too long, its end makes room for an ellipsis.
    kept, more = list(discarded), [Text(f" {marks.more}", STYLES["discarded"])]
    ellipsis: list[Text] = []
    while kept and head.cell_len + _cells([*stands, *kept, *ellipsis, *closing]) > width:
        kept.pop()
        ellipsis = more
    lines = [head]
    for part in (*stands, *kept, *ellipsis, *closing):
        if lines[-1].cell_len + part.cell_len > width and lines[-1].cell_len > head.cell_len:
            lines.append(Text(" " * head.cell_len))
        lines[-1] = lines[-1] + part
    return lines


def _parts(event: StepEvent, piece: Piece, marks: Marks) -> tuple[list[Text], list[Text], list[Text]]:
    """A round's marked tokens: those accepted and the first rejected; the discarded rest; correction or bonus.

    A round cut by a stop or the budget has no correction, and what lies behind the cut was never judged: it counts as
    discarded, none of it as rejected."""
    from rich.text import Text

    before = (event.anchor, *event.drafted)

    def part(kind: str, at: int, token: int) -> Text:
        return Text(f" {getattr(marks, kind)}{marks.visible(piece(before[at], token))}", STYLES[kind])

    stands, discarded = [], []
    for at, token in enumerate(event.drafted):
        if at < event.accepted:
            stands.append(part("accepted", at, token))
        elif at == event.accepted and event.next_kind == "correction":
            stands.append(part("rejected", at, token))
        else:
            discarded.append(part("discarded", at, token))
    closing = [part(event.next_kind, event.accepted, event.committed[-1])] if event.next_kind else []
    return stands, discarded, closing


def _cells(parts: Sequence[Text]) -> int:
    return sum(part.cell_len for part in parts)


# Figures --------------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def share(part: int, whole: int) -> str:
    """``21/140 = 15.0 %``; never a share without its denominator."""
    return f"{part}/{whole} = {part / whole:.1%}" if whole else f"{part}/{whole}"


def acceptance_length(metrics: Metrics) -> str:
    """τ with what it is made of."""
    committed, rounds = sum(metrics.per_step_committed), metrics.num_spec_steps
    return f"τ {number(metrics.mean_acceptance_length)} ({committed} tokens ÷ {rounds} rounds)"


def by_position(metrics: Metrics) -> str:
    """``1: 0.52  2: 0.21`` and so on."""
    return "  ".join(f"{slot}: {rate:.2f}" for slot, rate in enumerate(metrics.acceptance_rate_per_position, 1))


def brief(metrics: Metrics) -> str:
    """One line after an answer."""
    parts = [f"{metrics.num_tokens} tokens"]
    if metrics.num_spec_steps:
        parts.append(acceptance_length(metrics))
    return " · ".join([*parts, f"{number(metrics.decode_tokens_per_second, 1)} tok/s decode"])


def summary_lines(result: GenerationResult) -> list[str]:
    """The figures of one generation, every ratio with its denominator."""
    metrics = result.metrics
    rows = [("tokens", f"{metrics.num_tokens} after a prompt of {metrics.num_prompt_tokens}")]
    if metrics.num_spec_steps:
        steps = f", and {metrics.num_plain_steps} plain steps" if metrics.num_plain_steps else ""
        rows += [
            ("rounds", f"{metrics.num_spec_steps}{steps} · mean acceptance length {acceptance_length(metrics)}"),
            ("drafted", f"{share(metrics.num_accepted_draft_tokens, metrics.num_draft_tokens)} accepted"),
            ("by slot", f"{by_position(metrics)} (rounds that accepted it ÷ rounds that drafted it)"),
        ]
    speed = f"decode {number(metrics.decode_tokens_per_second, 1)} tok/s · end to end "
    speed += f"{number(metrics.end_to_end_tokens_per_second, 1)} tok/s"
    rows.append(("speed", f"first token {number(metrics.ttft, 3)} s · {speed} · {metrics.total_seconds:.2f} s in all"))
    if spent := metrics.draft_seconds + metrics.verify_seconds + metrics.overhead_seconds:
        apart = {"draft": metrics.draft_seconds, "verify": metrics.verify_seconds}
        together = {"draft and verify": metrics.verify_seconds}  # a clock that does not wait cannot tell them apart
        shares = (apart if metrics.draft_seconds else together) | {"rest": metrics.overhead_seconds}
        rows.append(("round time", " · ".join(f"{name} {seconds / spent:.0%}" for name, seconds in shares.items())))
    rows.append(("memory", f"peak {metrics.peak_memory / 1e6:,.0f} MB"))
    rows.append(("finish", result.finish_reason))
    return [f"{name:<11} {text}" for name, text in rows]


def comparison_lines(comparison: Comparison) -> list[str]:
    """A comparison in words."""
    ours, plain = comparison.speculative.metrics, comparison.plain.metrics
    speedup, needed, tau = comparison.speedup, comparison.break_even, ours.mean_acceptance_length
    lines = []
    if speedup is not None:
        lines.append(
            f"plain       {plain.total_seconds:.2f} s · speculative {ours.total_seconds:.2f} s · "
            f"speedup {speedup:.2f} × end to end"
        )
    if needed is not None:
        lines.append(
            f"break-even  τ {needed:.2f}: a round takes as long as {needed:.2f} plain steps (measured τ {number(tau)})"
        )
    if speedup is not None and speedup < 1 and needed is not None:
        lines.append(
            f"speculation is slower than plain decoding here: a round brings {number(tau)} tokens "
            f"and costs as much as {needed:.2f} plain ones"
        )
    return [*lines, f"identical to plain decoding: {comparison.verdict}"]
