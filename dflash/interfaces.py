"""What a backend must provide. The core decides; a backend turns decisions into tensors.

Shapes: n tokens in a pass, V vocabulary, K tapped layers, H hidden size, B block size, ``count`` drafted tokens
(B−1, or fewer near the end). ``Array`` is the backend's own tensor; the core passes it along and never looks inside.

State invariant between rounds: ``target.length == drafter.length == committed tokens − 1``; the newest token, the next
round's anchor, has not been through the target yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from dflash.checkpoint import DraftConfig
from dflash.types import Array, Proposal, SamplingParams, TargetInfo, TargetOutput, Verdict

T = TypeVar("T")


class Target(Protocol):
    """The model whose distribution must be kept, with its cache."""

    info: TargetInfo
    length: int
    """Tokens whose keys and values are committed."""
    tapping: bool
    """Whether forwards hand out features; off while decoding without a drafter."""

    def forward(
        self, tokens: Array | Sequence[int], *, parents: Sequence[int] | None = None, last_only: bool = False
    ) -> TargetOutput:
        """Append n tokens to the cache. ``last_only``: logits of the last row alone (prefill). ``parents`` makes the
        tokens a tree; a target that cannot take one raises ``BackendError``. ``keep`` must follow."""
        ...

    def keep(self, path: Sequence[int]) -> None:
        """Keep these of the last forward's tokens, in order, and forget the rest."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


class ConditioningProjection(Protocol):
    """Features [n, K*H] → context [n, H]."""

    def __call__(self, features: Array) -> Array: ...


class Drafter(Protocol):
    """Proposes the tokens after the anchor in one pass."""

    config: DraftConfig
    projection: ConditioningProjection
    length: int
    """Tokens whose features are in the context."""

    def observe(self, features: Array, token_count: int) -> None:
        """The first ``token_count`` rows of ``features`` [n, K*H] belong to committed tokens: take them in."""
        ...

    def propose(
        self,
        anchor: int,
        count: int,
        sampling: SamplingParams,
        *,
        detail: bool = False,
        uniforms: np.ndarray | None = None,
    ) -> Proposal:
        """Draft ``count`` tokens after ``anchor``: the likeliest of each slot, or with ``uniforms``, float64 [count] in
        [0, 1), a sample of each by its number, from the draft logits after ``sampling``'s temperature (above 0), top-k
        and top-p; the proposal then carries these distributions as ``q``.

        ``detail`` adds the drafter's probability of each token: of a sample ``q``'s, else before any ``sampling``."""
        ...

    def logits(self, anchor: int, count: int) -> Array:
        """What ``propose`` chooses from: draft logits [count, V] of the slots after ``anchor``."""
        ...

    def layer_states(self, anchor: int, count: int) -> list[Array]:
        """The block's hidden states [1 + count, H] behind each draft layer, to find where two backends part."""
        ...

    def attention(self, anchor: int, count: int) -> list[Array]:
        """Where the block after ``anchor`` looks: for each draft layer the attention weights
        [1 + count, length + 1 + count] of every row of the block, the anchor's first, over the context's tokens and
        then the block's own. They are averaged over the heads; a row sums to 1 and is 0 where the layer's causality or
        window forbids to look."""
        ...

    def reset(self) -> None: ...


class Verifier(Protocol):
    """One request's judge. It is made per request because the seed's random stream is state."""

    def verify(self, proposal: Proposal, output: TargetOutput) -> Verdict:
        """Judge ``proposal`` by ``output`` (logits [1 + count, V]). The one place of a round that waits for the
        device."""
        ...


class Clock(Protocol):
    """A round's time without extra synchronisation. The verdict waits for the device, so that the host's ``now`` after
    it is the device's too; marks in between are placed without waiting and read after it."""

    def now(self) -> float:
        """Seconds on the host."""
        ...

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float:
        """Device seconds between two marks that both lie before a verdict; 0 where only a wait could tell and the clock
        is not an exact one."""
        ...


class Backend(Protocol):
    """A tensor library and the devices it reaches. Found through the entry-point group ``dflash.backends``."""

    name: str
    rules: tuple[str, ...]
    """The verification rules it offers, by name."""
    draft_bits: tuple[int, ...]
    """What it can quantise a drafter's weights to."""

    def run(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, called on the one thread that may use the device; where any may, on this one. The
        engine and ``dflash.load`` go through it; code that uses targets and drafters by itself does too."""
        ...

    def load_target(self, folder: Path, *, device: str, dtype: str, layer_ids: Sequence[int]) -> Target: ...

    def load_drafter(self, folder: Path, config: DraftConfig, target: Target, *, bits: int | None = None) -> Drafter:
        """Weights into the drafter, next to ``target``'s embedding and head; its context holds
        ``target.info.max_positions`` tokens at most. ``bits``, one of ``draft_bits``, quantises the drafter's products;
        the output stays the target's."""
        ...

    def verifier(self, rule: str, sampling: SamplingParams, target: Target, *, detail: bool = False) -> Verifier: ...

    def proposal(self, block: Sequence[int], target: Target) -> Proposal:
        """The proposal of known tokens, the anchor first; the anchor alone drafts nothing."""
        ...

    def numpy(self, array: Array) -> np.ndarray:
        """An array on the host: float32, or whole numbers as they are."""
        ...

    def clock(self, target: Target, *, exact: bool = False) -> Clock:
        """``exact``: marks may wait for the device where there is no other way to tell drafting from verifying."""
        ...

    def peak_memory(self, target: Target) -> int:
        """Bytes at most in use on the device since ``reset_peak_memory``: of the backend's allocator, or of the process
        where there is none to ask (PyTorch on a CPU)."""
        ...

    def reset_peak_memory(self, target: Target) -> None: ...

    def versions(self) -> dict[str, str]: ...
