"""How much to draft and to verify next: the plan that is believed to commit the most tokens a second on this machine.

A plan is worth T − R·t: the tokens it is expected to commit less the seconds it takes, at the rate R of the best plan
(renewal reward, solved as Dinkelbach does: at the right R the best plan is worth 0). Before drafting, plans are a plain
step, chains of each length, and rounds that ask for the drafter's confidence and then verify what it deserves, of a
chain or of a tree. ``dflash.costs`` believes the seconds and ``dflash.acceptance`` the tokens.

**Exactness.** A plan depends on past steps and on the current proposal, never on what the target is about to draw.
Where the target's token is drawn without regard to the draft (``greedy``, ``match``, ``tree``) that is enough. Under
rejection sampling a slot may be tested or not only for reasons that do not look at the token drawn there: its
confidence must be a figure of the drafter's whole distribution (its largest probability), not the probability of the
token that was drawn.

**Probing.** What is not run goes stale. A plan that may be better than the best, as far as its doubt goes, is tried
when its price (the seconds it is believed to lose) fits an account that gets ``PROBE_SHARE`` of the time, and each try
that does not make it the best doubles the wait for the next. While plain decoding is best the same goes for rounds;
meanwhile the drafter's context is still fed, until ``HOPELESS`` tries in a row were in vain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from dflash.acceptance import Acceptance
from dflash.costs import Costs, Passes
from dflash.types import StepEvent

Reason = Literal["best", "plain is faster", "probe", "last token", "hopeless"]

PROBE_SHARE = 0.015  # of the time
ACCOUNT_MOST = 1.0  # plain steps that the account holds at most
OPTIMISM = 1.0  # standard deviations that a probe may hope for
WAITS = (16, 1024)  # steps between two probes of a length: at first, at most
HOPELESS = 12
RARER = 1.25
DEBT = 1.0
LOSS_SHARE, LOSS_TOKENS = 0.01, 64
CAUTION = 0.75
MARGIN = 1.02  # a round must be this much faster than plain decoding to be taken up again
LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 15, 19, 23, 31)  # slots of a chain; blocks of 2, 3, 4, 5, 6, 8 …
BUDGETS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)  # nodes of a tree
FOLLOW = 1 / 16  # share of the newest round in what asking is believed to bring


@dataclass(frozen=True)
class Decision:
    """One step's plan, and what it was believed to bring.

    ``kind``: ``round`` or ``plain``. ``draft`` slots are drafted, the first ``verify`` of them verified; ``nodes`` > 0:
    a tree of that many nodes instead. ``asks``: the drafter's confidence is wanted before verifying (``cut`` or
    ``branch`` then settles ``verify`` or ``nodes``); ``confidences`` are those of the drafted slots, and ``coverage``
    the confidence in each depth of a tree.
    ``observe``: the drafter's context is fed; where it is not, this request needs no drafter any more."""

    kind: Literal["round", "plain"]
    draft: int
    verify: int
    nodes: int
    expected_tokens: float
    expected_seconds: float
    plain_seconds: float
    reason: Reason
    observe: bool = True
    asks: bool = False
    confidences: tuple[float, ...] = ()
    coverage: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Decision:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        return cls(**values)


class Controller:
    """Plans one engine's steps: ``begin`` each request, then ``plan`` (and ``cut`` or ``branch`` where the plan asks)
    before a step and ``learn`` after it. ``most`` slots are drafted at most; trees of up to ``nodes`` nodes may be
    planned; ``asks`` where chains may ask for the drafter's confidence. Raises ``UsageError``."""

    def __init__(self, most: int, *, nodes: int = 0, asks: bool = False) -> None:
        self.costs, self.acceptance = Costs(most, nodes), Acceptance(most)
        self.most, self.nodes, self.asks = most, nodes, asks
        self.rate = 0.0  # tokens a second of the best plan
        self._account = 0.0  # seconds that probes may lose
        self._gain = 0.1  # tokens that cutting by confidence is worth a round, before what asking costs
        self._tree: _Tree | None = None
        self._step = 0
        self._waits: dict[int, tuple[int, int]] = {}  # of a length: the step it may be probed at, and the next wait
        self.begin()

    def begin(self) -> None:
        """A new request. Costs and what is known of the drafter stay; how hard this text is, is not known yet."""
        self.acceptance.begin()
        if self._tree:
            self._tree.begin()
        self._resting, self._tries, self._saved = False, 0, 0.0
        self._observing = True
        self._tokens, self._lost = 0, 0.0  # of this request, and plain steps lost in it against plain decoding

    def plan(self, context: int, left: int) -> Decision:
        """The next step after ``context`` tokens, where ``left`` tokens may still be committed."""
        here, most = self.costs.at(context), min(self.most, left - 1)
        self._here, self._step = here, self._step + 1
        if most < 1 or not self._observing:
            return self._plain(here, "hopeless" if most > 0 else "last token")
        chances = self.acceptance.survival(most)
        chains = self._chains(here, chances)
        chain = max(chains, key=_rate)
        best = max((chain, *self._asking(here, chances, chain)), key=_rate)
        self.rate = max(_rate(best), 1 / here.plain)
        pace, trials = _rate(best) * here.plain, chains
        if self._lost > LOSS_SHARE * max(LOSS_TOKENS, self._tokens):
            careful = self.acceptance.survival(most, optimism=-CAUTION)
            pace *= sum(careful[: best.verify + 1]) / sum(chances[: best.verify + 1])
            trials = self._chains(here, careful)
        if pace > (MARGIN if self._resting else 1.0):
            self._resting, self._tries = False, 0
            return self._probe(here, chances, chains, best, context) or best
        self._resting = True
        trial = max(trials, key=self._worth)
        price = -self._worth(trial) / self.rate
        if min(price * RARER**self._tries, ACCOUNT_MOST * here.plain) <= self._saved:
            return replace(trial, reason="probe")
        return self._plain(here, "plain is faster")

    def cut(self, decision: Decision, confidences: Sequence[float]) -> Decision:
        """How much of a drafted chain to verify, given the drafter's confidence in each slot."""
        chances, chain = self.acceptance.survival_given(confidences), self._here.chain
        tokens, worth, expected = 0.0, [], []
        for slots, chance in enumerate(chances):
            tokens += chance
            expected.append(tokens)
            worth.append(tokens - self.rate * chain[slots])
        verify = max(range(1, len(worth)), key=worth.__getitem__)
        self._gain += FOLLOW * (worth[verify] - worth[min(decision.verify, len(worth) - 1)] - self._gain)
        return replace(
            decision,
            verify=verify,
            expected_tokens=expected[verify],
            expected_seconds=self._here.asked[decision.draft] + chain[verify],
            confidences=tuple(map(float, confidences)),
        )

    def branch(self, decision: Decision, log_probs: np.ndarray, depths: np.ndarray) -> Decision:
        """How many nodes of a drafted tree to verify. ``log_probs`` and ``depths`` [n], without the anchor, best first:
        the drafter's logarithmic probability of the branch that ends in each node, and its depth (1 is slot 1)."""
        sizes = np.array([*(n for n in BUDGETS if n < len(depths)), len(depths)])
        reach = np.zeros((len(depths), int(depths.max()) + 1))
        reach[np.arange(len(depths)), depths] = np.exp(log_probs)
        reach = reach.cumsum(0)[sizes - 1]
        reach[:, 0] = 1.0
        coverage = (reach[:, 1:] / np.maximum(reach[:, :-1], 1e-9)).clip(0.0, 1.0)
        tokens = 1 + self.acceptance.survivals_given(coverage).sum(1)
        seconds = np.array(self._here.tree)[sizes]
        chosen = int((tokens - self.rate * seconds).argmax())
        asked = self._here.asked[decision.draft]
        self._tree = self._tree or _Tree(float(tokens[chosen]), float(seconds[chosen]))
        self._tree.follow(float(tokens[chosen]), float(seconds[chosen]))
        deepest = int((coverage[chosen] > 0).sum())
        firsts = log_probs[[int(np.argmax(depths == depth)) for depth in range(1, deepest + 1)]]
        chain = tuple(np.exp(np.diff(firsts, prepend=0.0)).tolist())
        return replace(
            decision,
            verify=deepest,
            nodes=int(sizes[chosen]),
            expected_tokens=float(tokens[chosen]),
            expected_seconds=asked + float(seconds[chosen]),
            confidences=chain,
            coverage=tuple(coverage[chosen, :deepest].tolist()),
        )

    def learn(self, event: StepEvent, decision: Decision) -> None:
        """Take in the step that ``decision`` led to."""
        self.costs.learn(event, nodes=decision.nodes, asked=decision.asks)
        if event.kind == "prefill":
            return
        self.acceptance.learn(event, decision.confidences, decision.coverage)
        seconds = min(event.seconds, 3 * decision.expected_seconds)  # a stalled pass is not the probe's fault
        most = 1.001 * ACCOUNT_MOST * decision.plain_seconds
        if self._resting:
            self._saved = min(self._saved + PROBE_SHARE * seconds, most)
        else:
            self._account = min(self._account + PROBE_SHARE * seconds, most)
        self._tokens += len(event.committed)
        self._lost += seconds / decision.plain_seconds - len(event.committed)
        if decision.reason == "probe" and not self._resting:  # what luck made of it is no price
            lost = seconds - decision.expected_tokens / self.rate
            self._account = max(self._account - lost, -DEBT * decision.plain_seconds)
        elif decision.reason == "probe" and event.kind == "round":
            self._saved = 0.0
            self._tries = 0 if event.accepted else self._tries + 1
            self._observing = self._tries < HOPELESS

    # Plans ---------------------------------------------------------------------------------------------------

    def _plain(self, here: Passes, reason: Reason) -> Decision:
        return Decision("plain", 0, 0, 0, 1.0, here.plain, here.plain, reason, self._observing)

    def _chains(self, here: Passes, chances: Sequence[float]) -> list[Decision]:
        """A blind chain of each length."""
        most, tokens = len(chances) - 1, list(accumulate(chances))
        return [
            Decision("round", n, n, 0, tokens[n], here.draft[n] + here.chain[n], here.plain, "best")
            for n in (*(n for n in LENGTHS if n < most), most)
        ]

    def _asking(self, here: Passes, chances: Sequence[float], chain: Decision) -> Iterator[Decision]:
        """Rounds that ask for the drafter's confidence, and what they brought of late."""
        rate, most, slots = _rate(chain), len(chances) - 1, chain.verify
        if self.asks:
            draft = most
            while draft > slots and chances[draft] < rate * (here.asked[draft] - here.asked[draft - 1]):
                draft -= 1
            # A cut saves rows, or lets in slots that a blind chain leaves out: no more than all of these.
            bound = rate * (here.chain[slots] - here.chain[1]) + sum(chances[slots + 1 : draft + 1])
            yield replace(
                chain,
                draft=draft,
                expected_tokens=chain.expected_tokens + min(self._gain, bound),
                expected_seconds=here.asked[draft] + here.chain[slots],
                asks=True,
            )
        if self.nodes:
            tree = self._tree or _Tree(1.2 * chain.expected_tokens, here.chain[slots])
            seconds = here.asked[most] + tree.seconds
            yield replace(chain, draft=most, nodes=1, expected_tokens=tree.tokens, expected_seconds=seconds, asks=True)

    # Probes --------------------------------------------------------------------------------------------------

    def _worth(self, plan: Decision) -> float:
        return plan.expected_tokens - self.rate * plan.expected_seconds

    def _costs_little(self, plan: Decision) -> bool:
        return -self._worth(plan) <= self._account * self.rate

    def _probe(
        self, here: Passes, chances: Sequence[float], chains: Sequence[Decision], best: Decision, context: int
    ) -> Decision | None:
        """A plan that may be better than the best, as far as its doubt goes, and is due and cheap enough."""
        if self._account <= 0:
            return None
        hopeful = self.acceptance.survival(len(chances) - 1, optimism=OPTIMISM)
        for plan in (self._plain(here, "probe"), *(() if best.asks else chains)):
            if plan.verify == best.verify:
                continue
            due, wait = self._waits.get(plan.verify, (0, WAITS[0]))
            if due > self._step or not self._costs_little(plan):
                continue
            tokens = plan.expected_tokens
            if plan.verify > best.verify:  # the slots beyond those that are being tried
                scale = chances[best.verify] / hopeful[best.verify]
                tokens = best.expected_tokens + scale * sum(hopeful[best.verify + 1 : plan.verify + 1])
            doubt = self.costs.doubt(plan.verify, best.verify, context)
            if tokens > self.rate * plan.expected_seconds * math.exp(-OPTIMISM * doubt):
                self._waits[plan.verify] = (self._step + wait, min(2 * wait, WAITS[1]))
                return replace(plan, reason="probe")
        return None


class _Tree:
    """What trees bring: tokens, and seconds after the draft; of the last rounds, and of all requests."""

    def __init__(self, tokens: float, seconds: float) -> None:
        self.tokens, self.seconds = self._usual = tokens, seconds

    def begin(self) -> None:
        self.tokens, self.seconds = self._usual

    def follow(self, tokens: float, seconds: float) -> None:
        self.tokens += FOLLOW * (tokens - self.tokens)
        self.seconds += FOLLOW * (seconds - self.seconds)
        usual_tokens, usual_seconds = self._usual
        slow = FOLLOW / 8
        self._usual = usual_tokens + slow * (tokens - usual_tokens), usual_seconds + slow * (seconds - usual_seconds)


def _rate(plan: Decision) -> float:
    return plan.expected_tokens / plan.expected_seconds
