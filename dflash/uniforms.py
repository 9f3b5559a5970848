"""The random numbers that sampling uses up: for each purpose one for each output position, the same on every backend.

They belong to positions and not to rounds, so a seed gives the same tokens with any drafter or none (``match``). The
raw 64-bit stream of PCG64 is used because numpy keeps it from release to release, which it does not promise of its
generators.

**Exactness.** A number may be used again as long as no committed token has depended on it. A round that accepts a of
its drafted tokens commits position a + 1 of its block too, so

- ``accept``: the numbers of the accepted slots and of the rejected one are used up with their positions. Those behind
  the rejection, or of slots that were never verified, decided nothing.
- ``draft``: all slots are drawn at once, each from a distribution that no other slot's draw has a part in. Those
  behind the last committed position have touched nothing that was committed; they may come again, from new
  distributions. The slot at the rejection is never drafted again.
- ``target``: a committed position has one correction, bonus or plain token. Under ``match`` the sample of a row behind
  the rejection was compared with nothing that counts.

So given everything committed, the numbers that come again are uniform and independent of it, and of one another: the
purposes' streams are. It holds for blocks that are cut before they are verified too, if neither the cut nor the wish to
draft depends on tokens drawn for the block."""

from __future__ import annotations

import secrets
from typing import Literal

import numpy as np

Purpose = Literal["target", "accept", "draft"]
_STREAMS: dict[Purpose, tuple[int, ...]] = {"target": (), "accept": (1,), "draft": (2,)}


class Uniforms:
    """Numbers in [0, 1) of a seed's output positions for one ``purpose``, drawn as far as asked for; those of different
    purposes are independent. ``seed`` None draws a fresh one.

    ``target``: the target's own token; ``accept``: whether a drafted token stands; ``draft``: a slot's token."""

    def __init__(self, seed: int | None, purpose: Purpose = "target") -> None:
        entropy = secrets.randbits(63) if seed is None else int(seed)
        self._stream = np.random.PCG64(np.random.SeedSequence(entropy, spawn_key=_STREAMS[purpose]))
        self._drawn = np.empty(0)

    def range(self, start: int, end: int) -> np.ndarray:
        """The numbers of positions start … end−1, float64."""
        if (missing := end - len(self._drawn)) > 0:
            raw = self._stream.random_raw(max(missing, 256))
            self._drawn = np.concatenate((self._drawn, (raw >> 11) * 2.0**-53))
        return self._drawn[start:end]
