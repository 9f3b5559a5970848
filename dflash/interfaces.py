"""What a backend must provide. The core decides; a backend turns decisions into tensors.

Shapes: n tokens in a pass, V vocabulary, K tapped layers, H hidden size, B block size, ``count`` drafted tokens
(B−1, or fewer near the end). ``Array`` is the backend's own tensor; the core passes it along and never looks inside.

State invariant between rounds: ``target.length == drafter.length == committed tokens − 1``; the newest token, the next
round's anchor, has not been through the target yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from dflash.checkpoint import DraftConfig
from dflash.types import Array, Proposal, SamplingParams, TargetInfo, TargetOutput, Verdict


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

    def propose(self, anchor: int, count: int, sampling: SamplingParams, *, detail: bool = False) -> Proposal:
        """Draft ``count`` tokens after ``anchor``. ``detail`` adds the drafter's probability of each."""
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
        """Device seconds between two marks that both lie before a verdict."""
        ...


class Backend(Protocol):
    """A tensor library and the devices it reaches. Found through the entry-point group ``dflash.backends``."""

    name: str
    rules: tuple[str, ...]
    """The verification rules it offers, by name."""

    def load_target(self, folder: Path, *, device: str, dtype: str, layer_ids: Sequence[int]) -> Target: ...

    def load_drafter(self, folder: Path, config: DraftConfig, target: Target) -> Drafter:
        """Weights into the drafter, next to ``target``'s embedding and head; its context holds
        ``target.info.max_positions`` tokens at most."""
        ...

    def verifier(
        self, rule: str, sampling: SamplingParams, target: Target, *, max_new_tokens: int, detail: bool = False
    ) -> Verifier: ...

    def plain_proposal(self, anchor: int, target: Target) -> Proposal:
        """The proposal that drafts nothing: a block of the anchor alone."""
        ...

    def clock(self, target: Target) -> Clock: ...

    def peak_memory(self, target: Target) -> int:
        """Bytes at most in use on the device since ``reset_peak_memory`` (on a CPU: of the process)."""
        ...

    def reset_peak_memory(self, target: Target) -> None: ...

    def convert_gguf(self, source: Path, folder: Path, progress: Callable[[float], None]) -> None:
        """A GGUF file into a safetensors folder with tokenizer and chat template."""
        ...

    def versions(self) -> dict[str, str]: ...
