"""The values that travel between engine, backend and user.

Shapes: B block size, V vocabulary. Token ids are plain ``int`` on the user's side of the engine; on the backend's
side they are the backend's own array type, which the core passes along and never looks into.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from dflash.errors import UsageError

if TYPE_CHECKING:
    from dflash.metrics import Metrics

Array = Any  # the backend's tensor type

StepKind = Literal["prefill", "round", "plain"]
NextKind = Literal["correction", "bonus"]
FinishReason = Literal["stop", "length", "cancelled"]

DRAFT_POLICIES = ("argmax", "sample")
"""How a drafter chooses a slot's token: its likeliest one, or a sample of its distribution, shaped as the target's."""


@dataclass(frozen=True)
class SamplingParams:
    """How the target's distribution is shaped before a token is drawn from it.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off; both are applied after the temperature, top-k
    first. ``seed`` None draws a fresh one for each request. Raises ``UsageError`` for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, Real) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"temperature is {self.temperature!r}; it must be 0 (greedy) or above")
        if not (isinstance(self.top_k, Integral) and self.top_k >= 0):
            raise UsageError(f"top_k is {self.top_k!r}; it must be 0 (off) or a positive whole number")
        if not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise UsageError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1 (off)")
        if self.seed is not None and not (isinstance(self.seed, Integral) and 0 <= self.seed < 2**63):
            raise UsageError(f"seed is {self.seed!r}; it must be a whole number between 0 and 2**63 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class TargetInfo:
    """What the core needs to know of a target."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    stop_token_ids: tuple[int, ...]
    dtype: str
    device: str
    model_type: str = ""


@dataclass(frozen=True)
class TargetOutput:
    """One target pass over n tokens: ``logits`` [n, V] ([1, V] where only the last row was asked for) and ``features``
    [n, K*H], the hidden states of the K tapped layers, concatenated (None while tapping is off)."""

    logits: Array
    features: Array | None


@dataclass(frozen=True)
class Proposal:
    """What a drafter puts forward for one round.

    ``tokens`` [count] the drafted ids; ``block`` [1 + count] the anchor followed by them, which is what the target
    verifies. ``probs`` [count] the drafter's probability of each drafted token (only when asked for). ``q`` [count, V]
    are the distributions that the tokens were really drawn from, for rejection sampling; None where chance had no part
    in them. ``candidates`` is room for trees.
    """

    tokens: Array
    block: Array
    count: int
    probs: Array | None = None
    q: Array | None = None
    candidates: Array | None = None


@dataclass(frozen=True)
class Verdict:
    """What the target decided, on the host: ``drafted`` is the proposal, of which the first ``accepted`` stand;
    ``next_token`` is the correction at the first rejected slot, or the bonus after a fully accepted block."""

    drafted: tuple[int, ...]
    accepted: int
    next_token: int
    draft_probs: tuple[float, ...] | None = None
    target_probs: tuple[float, ...] | None = None

    @property
    def kind(self) -> NextKind:
        return "bonus" if self.accepted == len(self.drafted) else "correction"


@dataclass(frozen=True)
class StepEvent:
    """One step of a generation, as it is streamed.

    ``kind``: ``prefill`` (the prompt, which yields the first token), ``round`` (drafted and verified) or ``plain``
    (one token without a draft). ``index`` counts steps from 0 (the prefill); ``position`` is the anchor's index in
    prompt + output. ``committed`` are the ids this step added to the output, cut at a stop or at the budget.
    ``next_kind`` is None when that cut came before the correction or bonus. ``plan`` is what a controller decided and
    believed (``dflash.controller.Decision``), where one did. Times are seconds; ``draft_seconds`` is 0, and part of
    ``verify_seconds``, where only a wait could have told (MLX without ``detail``).
    """

    kind: StepKind
    index: int
    position: int
    anchor: int
    drafted: tuple[int, ...]
    accepted: int
    committed: tuple[int, ...]
    next_kind: NextKind | None
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float
    draft_probs: tuple[float, ...] | None = None
    target_probs: tuple[float, ...] | None = None
    text: str = ""
    plan: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.overhead_seconds

    def to_dict(self) -> dict[str, Any]:
        record = asdict(self)
        return record if self.plan is not None else {key: value for key, value in record.items() if key != "plan"}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> StepEvent:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation. ``token_ids`` excludes the prompt and includes the stop id when it was one; ``text``
    includes neither the stop id nor the stop string. ``notes`` are sentences the user should see."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    steps: list[StepEvent]
    metrics: Metrics
    prompt_ids: list[int] = field(repr=False, default_factory=list)
    notes: tuple[str, ...] = ()
