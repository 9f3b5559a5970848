"""The decode loop: prefill, then propose → verify → accept → commit, until the output ends.

Terms. The **anchor** is the newest token: committed, not yet through the target. A **round** drafts a block after it,
the target verifies the block in one pass, the first ``accepted`` drafted tokens stand, and one more token comes from
the target itself: the **correction** where it disagreed, the **bonus** where it never did. The loop knows token ids
only; text, chat templates and stop strings are layered on it.
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal

from dflash.controller import Controller
from dflash.detokenizer import TextStream
from dflash.errors import PromptError, UsageError
from dflash.fallback import Fallback
from dflash.generation import Generation, OnDevice
from dflash.interfaces import Backend, Clock, Drafter, Target, Verifier
from dflash.stopping import Stopper, all_stop_ids
from dflash.tokenizer import Prompt, Tokenizer
from dflash.types import DRAFT_POLICIES, GenerationResult, SamplingParams, StepEvent
from dflash.uniforms import Uniforms

DEFAULT_MAX_NEW_TOKENS = 256


@dataclass
class Request:
    """One request as the loop sees it: ids, and what judges and ends them."""

    prompt: list[int]
    stopper: Stopper
    verifier: Verifier
    sampling: SamplingParams
    block_size: int
    speculate: bool
    detail: bool
    fallback: Fallback | None = None
    controller: Controller | None = None
    draws: Uniforms | None = None  # what slots are sampled with; None: their likeliest tokens are taken


class Engine:
    """A target and a drafter on a backend, ready to generate. Made by ``dflash.load``.

    ``prefill_chunk`` tokens of a prompt go through the target at a time. ``check`` asserts the state's invariants in
    every round. ``fallback`` lets a request go on without the drafter where drafting measures slower than not."""

    def __init__(
        self,
        backend: Backend,
        target: Target,
        drafter: Drafter,
        tokenizer: Tokenizer | None = None,
        *,
        prefill_chunk: int = 512,
        check: bool = False,
        fallback: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        if prefill_chunk < 1:
            raise UsageError(f"prefill_chunk is {prefill_chunk}; it must be at least 1")
        self.backend, self.target, self.drafter, self.tokenizer = backend, target, drafter, tokenizer
        self.prefill_chunk, self.check, self.fallback = prefill_chunk, check, fallback
        self.facts = dict(facts or {})
        self.notes: list[str] = []
        self._running: Generation | None = None
        self._controller: Controller | None = None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The model's own stop ids, by its configuration and by its tokenizer."""
        return all_stop_ids(self.target.info.stop_token_ids, self.tokenizer)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        block_size: int | Literal["auto"] | None = None,
        verify: str | None = None,
        draft_policy: str = "argmax",
        speculate: bool = True,
        detail: bool = False,
        raw: bool = False,
    ) -> GenerationResult:
        """Generate to the end; everything is as in ``stream``, which it drains."""
        return self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            block_size=block_size,
            verify=verify,
            draft_policy=draft_policy,
            speculate=speculate,
            detail=detail,
            raw=raw,
        ).result()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        block_size: int | Literal["auto"] | None = None,
        verify: str | None = None,
        draft_policy: str = "argmax",
        speculate: bool = True,
        detail: bool = False,
        raw: bool = False,
    ) -> Generation:
        """A generation to iterate over. A new one ends the one before it, if that is still running.

        ``prompt``: a text (one user message where the tokenizer has a chat template; ``raw``: as it is), messages, or
        token ids. ``stop`` strings and ``stop_token_ids`` add to the model's own stop ids; ``ignore_eos`` leaves those
        out. ``block_size`` counts the anchor (default: the drafter's; ``auto``: chosen each round by measured costs and
        recent acceptance promise, a plain step where that is faster). ``verify``: a rule of the backend
        (default: ``greedy`` at temperature 0, else ``match``; at temperature 0 every rule is ``greedy``).
        ``draft_policy``: what the drafter puts forward, its likeliest tokens (``argmax``) or, at temperature > 0, a
        ``sample`` of its distribution, shaped by ``sampling`` like the target's. ``detail`` adds probabilities to the
        events.
        Raises ``UsageError`` or ``PromptError``."""
        sampling, run = sampling or SamplingParams(), self.backend.run
        rule = self._rule(verify, sampling)
        if draft_policy not in DRAFT_POLICIES:
            raise UsageError(f"draft_policy is {draft_policy!r}; there are {', '.join(DRAFT_POLICIES)}")
        strings = [stop] if isinstance(stop, str) else list(stop or ())
        notes = list(self.notes)
        ids = self._prompt_ids(prompt, raw)
        budget = self._budget(ids, max_new_tokens, notes)
        auto = speculate and block_size == "auto"
        block = self._block_size(None if block_size == "auto" else block_size, notes)
        if strings and (self.tokenizer is None or not all(strings)):
            raise UsageError("stop strings need a tokenizer, and none of them may be empty")
        text = TextStream(self.tokenizer.decode, strings) if self.tokenizer else None
        stop_ids = (
            *(() if ignore_eos else self.stop_token_ids),
            *_token_ids(() if stop_token_ids is None else stop_token_ids, "stop_token_ids"),
        )
        stopper = Stopper(stop_ids, budget, text.push if text else None)
        request = Request(
            prompt=ids,
            stopper=stopper,
            verifier=run(lambda: self.backend.verifier(rule, sampling, self.target, detail=detail)),
            sampling=sampling,
            block_size=block,
            speculate=speculate,
            detail=detail,
            fallback=Fallback(notes) if self.fallback and speculate and not auto else None,
            controller=self._controlled() if auto else None,
            draws=Uniforms(sampling.seed, "draft") if draft_policy == "sample" and not sampling.greedy else None,
        )
        self.end_running()
        run(lambda: self.backend.reset_peak_memory(self.target))
        self._running = Generation(
            OnDevice(self._decode(request), run),
            prompt_ids=ids,
            stopper=stopper,
            text=text,
            notes=notes,
            peak_memory=lambda: run(lambda: self.backend.peak_memory(self.target)),
        )
        return self._running

    def end_running(self) -> None:
        """End a generation that is still running: the models' caches serve one at a time."""
        if self._running is not None:
            self._running.close()

    # The loop ------------------------------------------------------------------------------------------------

    def _decode(self, request: Request) -> Generator[StepEvent]:
        if not request.stopper.left:
            return
        clock = self.backend.clock(self.target, exact=request.detail)
        yield (event := self._prefill(request, clock))
        position, index = len(request.prompt), 1
        controller = request.controller
        if controller:
            controller.begin()
        while request.stopper.reason is None:
            plan = controller.plan(position, request.stopper.left) if controller else None
            count = min(plan.draft if plan else self._draft_length(request), request.stopper.left)
            event = replace(self._round(request, clock, event.committed[-1], count), index=index, position=position)
            position, index = position + len(event.committed), index + 1
            if self.check:
                self._check(position)
            if controller and plan:
                controller.learn(event, plan)
                event = replace(event, plan=plan.to_dict())
            if (plan and not plan.observe) or (request.fallback and request.fallback.has_lost(event)):
                self.target.tapping = False
            yield event

    def _controlled(self) -> Controller:
        """What plans the rounds of all requests: costs and acceptance that it has seen outlive one."""
        if self._controller is None:
            self._controller = Controller(self.drafter.config.block_size - 1)
        return self._controller

    def _draft_length(self, request: Request) -> int:
        """How many slots to draft where no controller decides; 0 for a plain step."""
        plain = not self.target.tapping or (request.fallback and request.fallback.wants_plain())
        return 0 if plain else request.block_size - 1

    def _prefill(self, request: Request, clock: Clock) -> StepEvent:
        """The prompt through the target in chunks, its features into the drafter, and the first token."""
        begun = clock.now()
        self.target.reset()
        self.drafter.reset()
        self.target.tapping = request.speculate
        for start in range(0, len(request.prompt), self.prefill_chunk):
            chunk = request.prompt[start : start + self.prefill_chunk]
            output = self.target.forward(chunk, last_only=True)
            self.target.keep(range(len(chunk)))
            if request.speculate:
                self.drafter.observe(output.features, len(chunk))
        anchor = request.prompt[-1]
        verdict = request.verifier.verify(self.backend.proposal([anchor], self.target), output)
        seconds = clock.now() - begun
        committed = request.stopper.cut((verdict.next_token,))
        return StepEvent("prefill", 0, len(request.prompt) - 1, anchor, (), 0, committed, None, 0.0, seconds, 0.0)

    def _round(self, request: Request, clock: Clock, anchor: int, count: int) -> StepEvent:
        """One round of the paper with ``count`` slots; without any, one plain step."""
        target, drafter, stopper = self.target, self.drafter, request.stopper
        begun, before_draft = clock.now(), clock.mark()
        if count:
            proposal = drafter.propose(
                anchor, count, request.sampling, detail=request.detail, **self._drawing(request, count)
            )
        else:
            proposal = self.backend.proposal([anchor], target)
        after_draft = clock.mark()
        output = target.forward(proposal.block)
        verdict = request.verifier.verify(proposal, output)
        verified = clock.now()

        accepted = verdict.accepted
        committed = stopper.cut((*verdict.drafted[:accepted], verdict.next_token))
        kept = len(committed)  # the anchor and what follows it, all but the newest token: the next round's anchor
        target.keep(range(kept))
        if target.tapping:
            drafter.observe(output.features, kept)
        draft_seconds = clock.seconds(before_draft, after_draft) if count else 0.0
        return StepEvent(
            kind="round" if count else "plain",
            index=0,
            position=0,
            anchor=anchor,
            drafted=verdict.drafted,
            accepted=min(accepted, kept),
            committed=committed,
            next_kind=verdict.kind if count and kept > accepted else None,
            draft_seconds=draft_seconds,
            verify_seconds=verified - begun - draft_seconds,
            overhead_seconds=clock.now() - verified,
            draft_probs=verdict.draft_probs,
            target_probs=verdict.target_probs,
        )

    def _drawing(self, request: Request, count: int) -> dict[str, Any]:
        """What a drafter needs to sample the next ``count`` slots; nothing where it need not."""
        if request.draws is None:
            return {}
        first = self.target.length - len(request.prompt) + 1  # output position of slot 1; the anchor's is one less
        return {"uniforms": request.draws.range(first, first + count)}

    def _check(self, newest: int) -> None:
        """All committed tokens but the newest, at index ``newest``, are in the target and in the drafter's context."""
        assert self.target.length == newest, f"the target holds {self.target.length} tokens, not {newest}"
        if self.target.tapping:
            assert self.drafter.length == newest, f"the drafter's context holds {self.drafter.length}, not {newest}"

    # What a request may ask ------------------------------------------------------------------------------------

    def _prompt_ids(self, prompt: Prompt, raw: bool) -> list[int]:
        messages = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not isinstance(prompt, str) and not messages:
            ids = _token_ids(prompt, "the prompt")
        elif self.tokenizer is None:
            raise PromptError("this target has no tokenizer; give the prompt as a list of token ids")
        else:
            ids = self.tokenizer.encode(prompt, raw=raw)
        if not ids or (isinstance(prompt, str) and not prompt.strip()):
            raise PromptError("the prompt is empty; give at least one token")
        vocabulary = self.target.info.vocab_size
        if wrong := [token for token in ids if not 0 <= token < vocabulary]:
            raise PromptError(f"the prompt holds the id {wrong[0]}; the target's ids are 0 to {vocabulary - 1}")
        if len(ids) >= (most := self.target.info.max_positions):
            raise PromptError(f"the prompt has {len(ids)} tokens; the target's context holds {most}, output included")
        return ids

    def _budget(self, ids: Sequence[int], max_new_tokens: int, notes: list[str]) -> int:
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
            raise UsageError(f"max_new_tokens is {max_new_tokens!r}; it must be a whole number, 0 or above")
        room = self.target.info.max_positions - len(ids)
        if max_new_tokens > room:
            notes.append(f"the target's context leaves room for {room} of the {max_new_tokens} tokens asked for")
        return int(min(max_new_tokens, room))

    def _block_size(self, block_size: int | str | None, notes: list[str]) -> int:
        made_for = self.drafter.config.block_size
        if block_size is None:
            return made_for
        if not isinstance(block_size, Integral) or block_size < 2:
            raise UsageError(f"block_size is {block_size!r}; a block is the anchor and at least one slot, so 2 or more")
        if block_size > made_for:
            notes.append(
                f"block_size {block_size} is above the {made_for} this drafter was made for; expect less of it"
            )
        return int(block_size)

    def _rule(self, verify: str | None, sampling: SamplingParams) -> str:
        rule = verify or ("greedy" if sampling.greedy else "match")
        if rule not in self.backend.rules:
            raise UsageError(f"verify is {rule!r}; the {self.backend.name} backend has {', '.join(self.backend.rules)}")
        if rule == "greedy" and not sampling.greedy:
            raise UsageError(f"verify 'greedy' needs temperature 0, and it is {sampling.temperature}; 'match' samples")
        return rule


def _token_ids(ids: Any, what: str) -> list[int]:
    """``ids`` as plain ints: a list, a tuple, a flat array or tensor of them."""
    try:
        return [operator.index(token) for token in ids]
    except TypeError:
        parts = ids if hasattr(ids, "__iter__") else ()
        wrong = next((part for part in parts if not hasattr(part, "__index__")), ids)
        raise PromptError(f"{what} must be a flat list of token ids; it holds {wrong!r}") from None
