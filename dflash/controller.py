"""How much to draft and to verify next: the plan that is believed to commit the most tokens a second on this machine.

A plan is worth T − R·t: the tokens it is expected to commit less what its seconds t would bring at the rate R of the
best plan (renewal reward, solved as Dinkelbach does: at the right R the best plan is worth 0). Plans are a plain step,
a chain of each length, and rounds that ask for the drafter's confidence before they settle how much of a chain or of a
tree to verify. ``dflash.costs`` believes the seconds, ``dflash.acceptance`` the tokens.

**Exactness.** A plan depends on past steps and on the current proposal, never on what the target is about to draw.
Where the target draws without regard to the draft (``greedy``, ``match``, trees) that is enough. Under rejection
sampling, whether a slot is tested may not depend on the token that was drawn there either: its confidence must be a
figure of the drafter's whole distribution (its largest probability), not the probability of the drawn token.

**Probes.** What is not run goes stale. A plan that may be better than the best, as far as its doubt goes, is tried when
the seconds it is believed to lose fit an account that gets ``PROBE_SHARE`` of the rounds' time, and when its wait is
over, which doubles with each try. While plain decoding is best, ``PROBE_SHARE`` of its time is saved up for one round,
after each try in vain for longer. The drafter's context is fed meanwhile, until ``HOPELESS`` tries were in vain.

**Caution.** A request that has lost ``LOSS_SHARE`` of its time against plain decoding goes on with rounds only if they
would pay with an acceptance somewhat below the one believed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

from dflash.acceptance import Acceptance
from dflash.costs import Costs
from dflash.errors import UsageError
from dflash.types import StepEvent

Reason = Literal["best", "plain is faster", "probe", "last token", "hopeless"]

LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 15, 19, 23, 31)  # slots of a blind chain; the most there may be is one too
BUDGETS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 255)  # nodes of a tree
PROBE_SHARE = 0.01
SAVED_MOST = 1.0  # plain steps that an account holds at most, or owes at most
WAITS = (16, 1024)  # steps between two probes of a plan: at first, at most
AGAIN = 4  # steps until what was worked out for a plan is worked out anew
OPTIMISM = 1.0  # standard deviations that a probe may hope for
RARER = 1.25  # what each try of a round in vain makes the next one dearer by
HOPELESS = 12
LOSS_SHARE, LOSS_TOKENS = 0.015, 64  # of the request so far, or of this many tokens
CAUTION = 0.75  # standard deviations below the acceptance believed
MARGIN = 1.02  # a round must be this much faster than plain decoding to be taken up again
STALL = 1.5  # times the seconds expected that are put down to a plan; more is the machine's fault
RECENT, FEW, UNSEEN = 8, 3, 0.1  # rounds that tell what asking gains; with fewer, tokens that it is believed to gain
HOPE = 0.3  # tokens that a probe of asking may hope for


@dataclass(frozen=True)
class Decision:
    """One step's plan, and what it was believed to bring.

    ``kind``: ``round`` or ``plain``. ``draft`` slots are drafted, the first ``verify`` of them verified; ``nodes`` > 0:
    a tree of that many nodes instead, ``verify`` deep. ``asks``: the drafter's confidence is wanted before verifying,
    and ``cut`` (or ``branch``, for a tree) then settles how much; ``confidences`` are those of the drafted slots,
    ``coverage`` that in each depth of a tree. ``observe``: the drafter's context is fed; once it is not, this request
    needs no drafter any more. ``plain_seconds`` is what a plain step was believed to take."""

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
    before a step and ``learn`` after it. ``most`` slots are drafted at most. ``asks``: chains may ask for the drafter's
    confidence. ``nodes``: trees of up to so many may be planned. Raises ``UsageError`` where these cannot be."""

    def __init__(self, most: int, *, nodes: int = 0, asks: bool = False) -> None:
        self.costs, self.acceptance = Costs(most, nodes), Acceptance(most)
        self.most, self.nodes, self.asks = most, nodes, asks
        self.rate = 0.0  # tokens a second of the best plan
        self._here, self._context = self.costs.at(0), 0
        self._lengths = [n for n in LENGTHS if n < most]
        self._sizes = np.array([*(n for n in BUDGETS if n < nodes), nodes] if nodes else [], np.int64)
        self._chains_seen, self._trees_seen = _Recent(most, 0), _Recent(most, len(self._sizes))
        self._account = 0.0  # seconds that probes may lose
        self._step = 0
        self._waits: dict[int | str, tuple[int, int]] = {}  # of a plan: the step it may be probed at, and the next wait
        self.begin()

    def begin(self) -> None:
        """A new request. Costs and what is known of the drafter stay; how hard this text is, is not known yet."""
        self.acceptance.begin()
        self._resting, self._saved, self._tries, self._observing = False, 0.0, 0, True
        self._tokens, self._lost = 0, 0.0  # tokens so far, and plain steps lost against plain decoding
        self._rests, self._steps, self._forgone = 0, 0, (1.0, 1.0)

    def plan(self, context: int, left: int) -> Decision:
        """The next step after ``context`` tokens, where ``left`` tokens may still be committed."""
        here, most = self.costs.at(context), min(self.most, left - 1)
        self._here, self._context, self._step = here, context, self._step + 1
        plain = _Plan(0, 1.0, here.plain)
        if most < 1 or not self._observing:
            return self._decide(plain, "hopeless" if most > 0 else "last token")
        chances = self.acceptance.survival(most)
        chains = self._chains(chances)
        asking = self._asking(chances, max(chains, key=_rate))
        best = max((*chains, *asking), key=_rate)
        self.rate = max(best.rate, 1 / here.plain)
        pace, trials = best.rate * here.plain, chains
        if self._lost > LOSS_SHARE * max(LOSS_TOKENS, self._tokens):
            careful = self.acceptance.survival(most, optimism=-CAUTION)
            pace *= sum(careful[: best.verify + 1]) / sum(chances[: best.verify + 1])
            trials = self._chains(self.acceptance.survival(most, optimism=-CAUTION / 2))
        if pace > (MARGIN if self._resting else 1.0):
            self._resting, self._tries = False, 0
            probe = self._probe(chances, (plain, *asking, *(() if best.asks else chains)), best)
            return self._decide(probe, "probe") if probe else self._decide(best, "best")
        self._resting, self._forgone = True, (best.tokens, best.seconds / here.plain)
        trial = max(trials, key=self._worth)
        price = -self._worth(trial) / self.rate
        if min(price * RARER**self._tries, SAVED_MOST * here.plain) <= self._saved:
            return self._decide(trial, "probe")
        return self._decide(plain, "plain is faster")

    def cut(self, decision: Decision, confidences: Sequence[float]) -> Decision:
        """How many of the drafted slots to verify, given the drafter's confidence in each. Raises ``UsageError``."""
        if len(confidences) != decision.draft or not decision.asks:
            raise UsageError(
                f"{len(confidences)} confidences for a plan of {decision.draft} slots that asks for as many"
            )
        tokens = list(accumulate(self.acceptance.survival_given(confidences)))
        seconds = self._here.chain
        verify = max(range(1, len(tokens)), key=lambda slots: tokens[slots] - self.rate * seconds[slots])
        self._chains_seen.add(confidences)
        return replace(
            decision,
            verify=verify,
            expected_tokens=tokens[verify],
            expected_seconds=self._here.asked[decision.draft] + seconds[verify],
            confidences=tuple(map(float, confidences)),
        )

    def branch(self, decision: Decision, log_probs: np.ndarray, depths: np.ndarray) -> Decision:
        """How many nodes of a drafted tree to verify. ``log_probs`` and ``depths`` [n], the anchor left out, best first
        as ``dflash.tree.best_first`` has them: the drafter's log-probability of the prefix that ends in each node, and
        its depth, 1 for slot 1. Raises ``UsageError``."""
        fits = decision.nodes and 1 <= len(depths) <= self.nodes and len(depths) == len(log_probs)
        if not fits or depths.max() > decision.draft:
            raise UsageError(
                f"a tree of {len(depths)} nodes; this plan takes 1 to {self.nodes if decision.nodes else 0}, "
                f"{decision.draft} deep at most"
            )
        reach = np.zeros((len(depths), 1 + self.most))
        reach[np.arange(len(depths)), depths] = np.exp(log_probs)
        sizes = np.minimum(self._sizes, len(depths))
        reach = reach.cumsum(0)[sizes - 1]  # [sizes, 1 + most]: the drafter's probability that a walk gets so deep
        reach[:, 0] = 1.0
        coverage = (reach[:, 1:] / np.maximum(reach[:, :-1], 1e-9)).clip(0.0, 1.0)
        tokens = 1 + self.acceptance.survivals_given(coverage).sum(1)
        seconds = np.array(self._here.tree)[sizes]
        hoped = seconds
        if decision.reason == "probe":
            hoped = seconds * np.exp(-OPTIMISM * self.costs.tree_doubt(decision.verify, self._context)[sizes])
        chosen = int((tokens - self.rate * hoped).argmax())
        deepest = int((coverage[chosen] > 0).sum())
        firsts = log_probs[[int(np.argmax(depths == depth)) for depth in range(1, 1 + int(depths.max()))]]
        chain = np.exp(np.diff(firsts, prepend=0.0))  # the first of each depth follow each other
        self._trees_seen.add(chain, coverage)
        return replace(
            decision,
            verify=deepest,
            nodes=int(sizes[chosen]),
            expected_tokens=float(tokens[chosen]),
            expected_seconds=self._here.asked[decision.draft] + float(seconds[chosen]),
            confidences=tuple(chain.tolist()),
            coverage=tuple(coverage[chosen, :deepest].tolist()),
        )

    def learn(self, event: StepEvent, decision: Decision) -> None:
        """Take in the step that ``decision`` led to. A prefill teaches nothing."""
        if event.kind == "prefill":
            return
        self.costs.learn(event, drafted=decision.draft, nodes=decision.nodes, asked=decision.asks)
        self.acceptance.learn(event, decision.confidences, decision.coverage)
        tokens, seconds = len(event.committed), min(event.seconds, STALL * decision.expected_seconds)
        self._tokens, self._steps = self._tokens + tokens, self._steps + 1
        most = SAVED_MOST * decision.plain_seconds
        if event.kind == "round":
            self._lost += seconds / decision.plain_seconds - tokens
        if not self._resting:
            self._account = min(self._account + PROBE_SHARE * seconds, most)
            if decision.reason == "probe":  # how lucky its tokens were is not the probe's price
                self._account = max(self._account - seconds + decision.expected_tokens / self.rate, -most)
        elif event.kind == "plain":
            self._rests += 1
            self._saved = min(self._saved + PROBE_SHARE * seconds, most)
        else:
            self._saved = 0.0
            self._tries = 0 if event.accepted else self._tries + 1
            self._observing = self._tries < HOPELESS

    @property
    def note(self) -> str | None:
        """A sentence for the user where most of this request's steps were plain because that was faster."""
        if 2 * self._rests <= self._steps:
            return None
        tokens, cost = self._forgone
        return (
            f"{self._rests} of {self._steps} steps were taken without the drafter: a round was expected to bring "
            f"{tokens:.2f} tokens and costs as much as {cost:.2f} plain steps here"
        )

    # Plans ---------------------------------------------------------------------------------------------------

    def _decide(self, plan: _Plan, reason: Reason) -> Decision:
        return Decision(
            kind="round" if plan.verify else "plain",
            draft=plan.draft or plan.verify,
            verify=plan.verify,
            nodes=plan.nodes,
            expected_tokens=plan.tokens,
            expected_seconds=plan.seconds,
            plain_seconds=self._here.plain,
            reason=reason,
            observe=self._observing,
            asks=plan.asks,
        )

    def _chains(self, chances: Sequence[float]) -> list[_Plan]:
        """A blind chain of each length, with these probabilities that its first slots are accepted."""
        draft, chain, most = self._here.draft, self._here.chain, len(chances) - 1
        tokens = list(accumulate(chances))
        return [_Plan(n, tokens[n], draft[n] + chain[n]) for n in self._lengths if n < most] + [
            _Plan(most, tokens[most], draft[most] + chain[most])
        ]

    def _asking(self, chances: Sequence[float], chain: _Plan) -> list[_Plan]:
        """Rounds that ask for the drafter's confidence, by what that would have gained in the last of them: ``chain``,
        worth so many tokens more."""
        here, draft, slots, plans = self._here, len(chances) - 1, chain.verify, []
        if self.nodes:
            gain = self._gain(self._trees_seen, chain, np.array(here.tree)[self._sizes])
            plans.append(_Plan(slots, chain.tokens + gain, here.asked[draft] + here.chain[slots], draft, 1, True))
        if self.asks:
            while draft > slots and chances[draft] < chain.rate * (here.asked[draft] - here.asked[draft - 1]):
                draft -= 1
            gain = self._gain(self._chains_seen, chain, np.array(here.chain[1:]))
            plans.append(_Plan(slots, chain.tokens + gain, here.asked[draft] + here.chain[slots], draft, 0, True))
        return plans

    def _gain(self, seen: _Recent, chain: _Plan, seconds: np.ndarray) -> float:
        """Tokens by which the rounds ``seen`` would have been worth more than ``chain``, had they been cut (or grown)
        best; ``seconds`` are those after the draft, by what may be verified."""
        if seen.count < FEW:
            return UNSEEN
        if self._step < seen.due:
            return seen.gain
        count = min(seen.count, RECENT)
        survivals = self.acceptance.survivals_given(seen.confidences[:count])
        blind = 1 + survivals[:, : chain.verify].sum(1) - chain.rate * self._here.chain[chain.verify]
        if seen.coverage.size:
            flat = seen.coverage[:count].reshape(-1, self.most)
            tokens = 1 + self.acceptance.survivals_given(flat).sum(1).reshape(count, -1)
        else:
            tokens = 1 + survivals.cumsum(1)
        seen.gain = float(((tokens - chain.rate * seconds).max(1) - blind).mean())
        seen.due = self._step + AGAIN
        return seen.gain

    # Probes --------------------------------------------------------------------------------------------------

    def _worth(self, plan: _Plan) -> float:
        return plan.tokens - self.rate * plan.seconds

    def _probe(self, chances: Sequence[float], plans: Sequence[_Plan], best: _Plan) -> _Plan | None:
        """One of ``plans`` that may be better than the best, as far as its doubt goes, and is due and cheap enough."""
        hopeful: list[float] | None = None
        for plan in plans:
            name = plan.verify if not plan.asks else "tree" if plan.nodes else "chain"
            due, wait = self._waits.get(name, (0, WAITS[0]))
            # To probe the tree that is the best already means to try other sizes.
            if due > self._step or (plan is best and not plan.nodes):
                continue
            if -self._worth(plan) > self._account * self.rate or self._account <= 0:
                continue
            tokens, doubt = plan.tokens, 0.0
            if plan.asks:
                tokens += HOPE
            else:
                doubt = self.costs.doubt(plan.verify, best.verify, self._context)
                if plan.verify > best.verify:  # there are slots beyond those that are being tried
                    hopeful = hopeful or self.acceptance.survival(len(chances) - 1, optimism=OPTIMISM)
                    beyond = sum(hopeful[best.verify + 1 : plan.verify + 1])
                    tokens = best.tokens + chances[best.verify] / hopeful[best.verify] * beyond
            if tokens > self.rate * plan.seconds * math.exp(-OPTIMISM * doubt):
                self._waits[name] = (self._step + wait, min(2 * wait, WAITS[1]))
                return plan
            self._waits[name] = (self._step + AGAIN, wait)
        return None


class _Plan(NamedTuple):
    """``verify`` slots of a blind chain, or asking for confidences first; 0: a plain step."""

    verify: int
    tokens: float
    seconds: float
    draft: int = 0
    nodes: int = 0
    asks: bool = False

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class _Recent:
    """What the drafter was confident of in the last rounds that asked: ``confidences`` [RECENT, slots] of a chain, and
    ``coverage`` [RECENT, sizes, depths] of trees; 0 where nothing was drafted."""

    def __init__(self, most: int, sizes: int) -> None:
        self.count, self.gain, self.due = 0, 0.0, 0  # ``gain`` is up to date until the step ``due``
        self.confidences, self.coverage = np.zeros((RECENT, most)), np.zeros((RECENT, sizes, most))

    def add(self, confidences: Sequence[float] | np.ndarray, coverage: np.ndarray | None = None) -> None:
        place = self.count % RECENT
        self.confidences[place] = 0.0
        self.confidences[place, : len(confidences)] = confidences
        if coverage is not None:
            self.coverage[place] = coverage
        self.count += 1


def _rate(plan: _Plan) -> float:
    return plan.rate
