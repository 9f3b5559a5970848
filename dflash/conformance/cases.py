"""The matrix: one tiny pair a case, each named by what it tests.

It is no cross product. Every value of every setting is in it, and settings that meet in one piece of code (windows and
causality in a mask, chunks and rewinds in a cache, biases and grouped heads in a fused product) also meet in a case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dflash.rope import RopeConfig
from dflash.types import SamplingParams

Family = Literal["llama", "qwen2", "qwen3"]
MASK_ID, STOP_ID, MAX_POSITIONS = 3, 1, 1024
TARGET_EPS, DRAFT_EPS = 1e-3, 4e-3  # large and unequal, so that one taken for the other shows
TOLERANCES = {"float32": 1e-4, "float16": 1.5e-2, "bfloat16": 8e-2}
"""How far an array may be from the reference's, relative to its largest number. The worst that was measured, on CPUs,
over the torch backend, the same through transformers, and the mlx backend: 2.9e-5, 5.5e-3 and 5.3e-2."""

_PLAIN = RopeConfig(10_000.0, max_positions=MAX_POSITIONS)


@dataclass(frozen=True)
class Heads:
    """Attention's heads: ``queries`` of them share ``keys`` key/value heads of ``size`` channels."""

    queries: int = 4
    keys: int = 2
    size: int = 8


_GROUPED = Heads()


@dataclass(frozen=True)
class Case:
    """One pair and one request of it. ``dtype`` is what it runs in, ``stored`` what its files hold (default: the same).

    Target: ``nested`` writes its RoPE as transformers 5 does (``rope_parameters``), else flat (``rope_theta`` and
    ``rope_scaling``); ``bias`` and ``mlp_bias`` add biases (Qwen2's queries, keys and values always have them).
    Drafter: ``sliding`` says which layers have a ``window``; ``causal`` None follows from that.
    Request: ``prompt`` tokens, ``chunk`` of them at a time (0: all); ``sampling`` decides the rule.
    """

    name: str
    what: str
    family: Family
    seed: int
    dtype: str = "float32"
    stored: str | None = None
    vocab: int = 64
    hidden: int = 32
    layers: int = 4
    heads: Heads = _GROUPED
    tied: bool = False
    bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig = _PLAIN
    nested: bool = False
    taps: tuple[int, ...] = (1, 2)
    block: int = 5
    draft_layers: int = 2
    draft_heads: Heads = _GROUPED
    draft_bias: bool = False
    draft_rope: RopeConfig = _PLAIN
    sliding: tuple[bool, ...] = ()
    window: int | None = None
    causal: bool | None = None
    prompt: int = 20
    chunk: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)

    @property
    def count(self) -> int:
        """Tokens drafted a round."""
        return self.block - 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each draft layer."""
        sliding = self.sliding or (False,) * self.draft_layers
        return tuple(self.window if slides else None for slides in sliding)

    @property
    def causality(self) -> tuple[bool, ...]:
        """Whether each draft layer's slots see earlier slots only."""
        if self.causal is not None:
            return (self.causal,) * self.draft_layers
        return self.sliding or (False,) * self.draft_layers


def _rope(kind: str = "default", theta: float = 10_000.0, partial: float = 1.0, **numbers: float) -> RopeConfig:
    return RopeConfig(theta, kind, partial, tuple(sorted(numbers.items())), MAX_POSITIONS)


_LINEAR = _rope("linear", 5_000.0, factor=4.0)
_YARN = _rope("yarn", 20_000.0, factor=8.0, original_max_position_embeddings=128)
_LLAMA3 = _rope(
    "llama3", 500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
_PARTIAL = _rope(partial=0.5)
_MULTI, _SHARED, _WIDE = Heads(4, 4), Heads(4, 1), Heads(4, 2, 16)
_S, _F = True, False  # layers with sliding and with full attention

CASES = (
    # Target families, heads, biases, and how their config.json spells RoPE.
    Case("llama", "Llama, grouped-query, untied", "llama", 1),
    Case("llama-multi-head-tied", "multi-head, tied head, prefill by 4", "llama", 2, heads=_MULTI, tied=True, chunk=4),
    Case("llama-biases", "biases everywhere, one key/value head, prefill by 1", "llama", 3, heads=_SHARED, bias=True,
         mlp_bias=True, chunk=1),
    Case("llama-wide-heads", "heads wider than the hidden size", "llama", 4, heads=_WIDE, tied=True),
    Case("llama-theta-flat", "RoPE base 500,000, flat", "llama", 5, rope=_rope(theta=5e5)),
    Case("llama-theta-nested", "RoPE base 500,000, nested as transformers 5 writes it", "llama", 5,
         rope=_rope(theta=5e5), nested=True),
    Case("llama-linear-flat", "linear RoPE, flat, prefill by 4", "llama", 6, rope=_LINEAR, chunk=4),
    Case("llama-linear-nested", "linear RoPE, nested, prefill by 4", "llama", 6, rope=_LINEAR, nested=True, chunk=4),
    Case("llama-llama3-flat", "Llama 3.1 RoPE, flat, tied head", "llama", 107, rope=_LLAMA3, tied=True),
    Case("llama-llama3-nested", "Llama 3.1 RoPE, nested, biases", "llama", 108, rope=_LLAMA3, nested=True, bias=True),
    Case("llama-yarn-flat", "YaRN, flat, prefill by 1", "llama", 9, rope=_YARN, chunk=1),
    Case("llama-yarn-nested", "YaRN, nested, multi-head", "llama", 10, rope=_YARN, nested=True, heads=_MULTI),
    Case("qwen2", "Qwen2 with its biases, grouped-query, untied", "qwen2", 11, rope=_rope(theta=2_000.0)),
    Case("qwen2-nested-tied", "Qwen2, nested base 2,000, multi-head, tied head, prefill by 4", "qwen2", 212,
         rope=_rope(theta=2_000.0), nested=True, heads=_MULTI, tied=True, chunk=4),
    Case("qwen2-linear-nested", "Qwen2, linear RoPE, nested, one key/value head", "qwen2", 13, rope=_LINEAR,
         nested=True, heads=_SHARED),
    Case("qwen2-yarn-flat", "Qwen2, YaRN, flat, tied head", "qwen2", 14, rope=_YARN, tied=True),
    Case("qwen3", "Qwen3 with its head norms, grouped-query, untied", "qwen3", 15, rope=_rope(theta=2_000.0)),
    Case("qwen3-nested-tied", "Qwen3, nested base 2,000, multi-head, tied head, prefill by 1", "qwen3", 16,
         rope=_rope(theta=2_000.0), nested=True, heads=_MULTI, tied=True, chunk=1),
    Case("qwen3-biases", "Qwen3, biases, heads wider than the hidden size, linear RoPE, nested", "qwen3", 117,
         rope=_LINEAR, nested=True, heads=_WIDE, bias=True),
    Case("qwen3-yarn-nested", "Qwen3, YaRN, nested, one key/value head, prefill by 4", "qwen3", 18, rope=_YARN,
         nested=True, heads=_SHARED, chunk=4),
    Case("qwen3-llama3-flat", "Qwen3, Llama 3.1 RoPE, flat, tied head", "qwen3", 19, rope=_LLAMA3, tied=True),
    # Taps.
    Case("taps-first-last", "taps of the first and the last layer", "llama", 121, taps=(0, 3), block=8),
    Case("taps-last-tied", "one tap, of the last layer, tied head, prefill by 1", "qwen3", 22, taps=(3,), tied=True,
         chunk=1),
    Case("taps-all-unordered", "every layer of six tapped, out of order", "qwen2", 23, layers=6,
         taps=(5, 0, 3, 1, 4, 2), hidden=48, heads=Heads(6, 3), draft_layers=3, chunk=4),
    # The drafter's heads, biases and RoPE, which are its own and not the target's.
    Case("draft-biases", "drafter's biases, multi-head, three layers", "llama", 31, draft_bias=True, draft_heads=_MULTI,
         draft_layers=3, block=8),
    Case("draft-wide-heads", "drafter's heads wide and shared, one layer, biases", "qwen2", 32, draft_bias=True,
         draft_heads=Heads(4, 1, 16), draft_layers=1, chunk=4),
    Case("draft-linear", "drafter with linear RoPE, target without", "qwen3", 233, draft_rope=_LINEAR, block=8),
    Case("draft-yarn", "drafter with YaRN, target with Llama 3.1 RoPE", "llama", 34, draft_rope=_YARN, rope=_LLAMA3,
         nested=True, block=8),
    Case("draft-llama3", "drafter with Llama 3.1 RoPE, target with YaRN, prefill by 1", "qwen3", 135,
         draft_rope=_LLAMA3, rope=_YARN, nested=True, chunk=1),
    Case("draft-partial", "drafter that rotates half of each head", "llama", 36, draft_rope=_PARTIAL, block=8, chunk=4),
    Case("draft-partial-yarn", "drafter with YaRN on half of each wide head, biases", "qwen2", 137,
         draft_rope=_rope("yarn", 20_000.0, 0.5, factor=8.0, original_max_position_embeddings=128), draft_heads=_WIDE,
         draft_bias=True),
    # What a slot sees.
    Case("sliding", "sliding draft layers, causal by default, window of 8 in a longer context", "llama", 41,
         sliding=(_S, _S), window=8, block=8),
    Case("sliding-narrowest", "window of the block's size, one layer, prefill by 1", "qwen3", 42, sliding=(_S,),
         window=5, draft_layers=1, chunk=1),
    Case("sliding-full", "a sliding, a full and a sliding layer, prefill by 4", "qwen2", 443, sliding=(_S, _F, _S),
         window=9, draft_layers=3, block=8, chunk=4),
    Case("sliding-bidirectional", "sliding and full layers, both bidirectional", "qwen3", 44, sliding=(_S, _F),
         window=8, causal=False, block=8),
    Case("sliding-grouped-yarn", "sliding causal layers with one key/value head, YaRN and biases", "llama", 245,
         sliding=(_F, _S), window=16, draft_heads=_SHARED, draft_rope=_YARN, draft_bias=True, block=16, chunk=4),
    Case("full-causal", "full attention, causal inside the block", "llama", 246, causal=True, block=8),
    Case("sliding-long-window", "window longer than the context at first, then shorter", "qwen3", 47, sliding=(_S, _S),
         window=24, causal=True, block=16, prompt=9),
    # Blocks and prompts.
    Case("block-2", "block of 2", "qwen3", 51, block=2),
    Case("block-2-sliding", "block of 2, sliding bidirectional, prefill by 1", "llama", 52, block=2, sliding=(_S, _S),
         window=4, causal=False, chunk=1),
    Case("block-16", "block of 16, prefill by 4", "llama", 53, block=16, chunk=4),
    Case("block-32", "block of 32", "qwen3", 54, block=32, tied=True),
    Case("block-32-sliding", "block of 32 in a window of 33, causal, prefill by 1", "qwen2", 55, block=32,
         sliding=(_S, _F), window=33, chunk=1, prompt=40),
    Case("prompt-1", "prompt of one token", "qwen2", 56, prompt=1, block=8),
    Case("context-512", "caches that outgrow their first 512 positions, vocabulary 300", "llama", 157, prompt=500,
         chunk=128, sliding=(_F, _S), window=64, vocab=300, layers=3, taps=(0, 2)),
    # Sampling: the rule match, whose random numbers belong to output positions.
    Case("match", "match at temperature 0.8", "llama", 461, block=8,
         sampling=SamplingParams(temperature=0.8, seed=5)),
    Case("match-top-k", "match at temperature 1.5 over the 7 likeliest", "qwen2", 362, block=5, chunk=4,
         sampling=SamplingParams(temperature=1.5, top_k=7, seed=6)),
    Case("match-top-p", "match at temperature 1 over the likeliest 80 %", "qwen3", 1063, block=16, chunk=1,
         sampling=SamplingParams(temperature=1.0, top_p=0.8, seed=7)),
    Case("match-top-k-top-p", "match at temperature 0.9, 20 likeliest, 90 % of those, vocabulary 300", "llama", 1164,
         block=8, vocab=300, tied=True, sampling=SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=2**62 + 1)),
    # Number formats. A vocabulary of 24 leaves enough choices clear in bfloat16.
    Case("stored-bfloat16", "weights in bfloat16, run in float32", "qwen3", 71, stored="bfloat16", block=8),
    Case("stored-float16", "weights in float16, run in float32, prefill by 4", "llama", 72, stored="float16", chunk=4),
    Case("bfloat16", "bfloat16, Llama", "llama", 5773, "bfloat16", vocab=24, block=8),
    Case("bfloat16-qwen2", "bfloat16, Qwen2, biases, tied head, sliding draft layers, prefill by 4", "qwen2", 2674,
         "bfloat16", vocab=24, tied=True, draft_bias=True, sliding=(_S, _F), window=8, chunk=4),
    Case("bfloat16-qwen3", "bfloat16, Qwen3, YaRN in both models, prefill by 1", "qwen3", 2775, "bfloat16", vocab=24,
         rope=_YARN, nested=True, draft_rope=_YARN, chunk=1),
    Case("float16", "float16, Llama, prefill by 4", "llama", 176, "float16", block=8, chunk=4),
    Case("float16-qwen2", "float16, Qwen2, biases, partial RoPE in the drafter", "qwen2", 177, "float16",
         draft_bias=True, draft_rope=_PARTIAL),
    Case("float16-qwen3", "float16, Qwen3, tied head, sliding causal draft layers, block of 16", "qwen3", 278,
         "float16", tied=True, sliding=(_S, _S), window=16, block=16),
)  # fmt: skip
