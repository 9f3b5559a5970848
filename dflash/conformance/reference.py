"""The oracle: target and drafter straight from their formulas, in float64, without a cache or a fused product.

A drafter's layer is a decoder layer (arXiv 2602.06036) whose keys and values also come from the context; the target's
layers have no context. RoPE's frequencies are the core's, ``dflash.rope``.

Shapes: n tokens or slots, S positions (context and block), H hidden size, K taps, h query heads, g key/value heads, d
head size, V vocabulary, ``count`` drafted tokens.
"""

from __future__ import annotations

import numpy as np

from dflash.conformance.cases import DRAFT_EPS, MASK_ID, TARGET_EPS, Case
from dflash.conformance.checkpoints import Weights, draft_weights, target_weights
from dflash.rope import RopeConfig
from dflash.types import SamplingParams

Array = np.ndarray


class Reference:
    """Both models of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.target_weights, self.draft_weights = target_weights(case), draft_weights(case)
        self.embedding = self.target_weights["model.embed_tokens.weight"]
        self.head = self.embedding if case.tied else self.target_weights["lm_head.weight"]

    def target(self, tokens: list[int]) -> tuple[list[Array], Array]:
        """Each decoder layer's output [n, H], before any final norm, and the logits [n, V]."""
        case, n = self.case, len(tokens)
        x, states = self.embedding[tokens], []
        no_context = np.empty((0, case.hidden))
        for index in range(case.layers):
            weights = under(self.target_weights, f"model.layers.{index}.")
            x = layer(x, no_context, weights, visible(n, n, causal=True), case.heads.size, case.rope, TARGET_EPS)
            states.append(x)
        return states, rms_norm(x, self.target_weights["model.norm.weight"], TARGET_EPS) @ self.head.T

    def context(self, features: Array) -> Array:
        """The conditioning projection: features [n, K*H] → [n, H]."""
        projected = features @ self.draft_weights["fc.weight"].T
        return rms_norm(projected, self.draft_weights["hidden_norm.weight"], DRAFT_EPS)

    def draft(self, context: Array, anchor: int, count: int) -> tuple[list[Array], Array]:
        """A block after ``anchor``: each draft layer's output [1 + count, H] and the draft logits [count, V]."""
        case, n = self.case, 1 + count
        x, states = self.embedding[[anchor] + [MASK_ID] * count], []
        for index, (causal, window) in enumerate(zip(case.causality, case.windows, strict=True)):
            weights = under(self.draft_weights, f"layers.{index}.")
            sees = visible(n, len(context) + n, causal=causal, window=window)
            x = layer(x, context, weights, sees, case.draft_heads.size, case.draft_rope, DRAFT_EPS)
            states.append(x)
        return states, rms_norm(x[1:], self.draft_weights["norm.weight"], DRAFT_EPS) @ self.head.T

    def attention(self, context: Array, anchor: int, count: int) -> list[Array]:
        """A block after ``anchor``: each draft layer's attention weights [1 + count, S], averaged over the heads."""
        case, n, averages = self.case, 1 + count, []
        states, _ = self.draft(context, anchor, count)
        inputs = [self.embedding[[anchor] + [MASK_ID] * count], *states[:-1]]
        for index, (causal, window) in enumerate(zip(case.causality, case.windows, strict=True)):
            weights = under(self.draft_weights, f"layers.{index}.")
            q, k, _ = heads(inputs[index], context, weights, case.draft_heads.size, case.draft_rope, DRAFT_EPS)
            sees = visible(n, len(context) + n, causal=causal, window=window)
            averages.append(attention_weights(q, k, sees).mean(axis=0))
        return averages


def layer(
    x: Array, context: Array, weights: Weights, sees: Array, head_dim: int, rope: RopeConfig, eps: float
) -> Array:
    """One layer over ``x`` [n, H], the last n of S positions, of which the first are ``context`` [S−n, H]."""
    q, k, v = heads(x, context, weights, head_dim, rope, eps)
    x = x + linear(attention(q, k, v, sees), weights, "self_attn.o_proj")
    normed = rms_norm(x, weights["post_attention_layernorm.weight"], eps)
    gate, up = linear(normed, weights, "mlp.gate_proj"), linear(normed, weights, "mlp.up_proj")
    return x + linear(gate / (1 + np.exp(-gate)) * up, weights, "mlp.down_proj")


def heads(
    x: Array, context: Array, weights: Weights, head_dim: int, rope: RopeConfig, eps: float
) -> tuple[Array, Array, Array]:
    """Queries [n, h, d] of a layer's input ``x`` [n, H], keys and values [S, g, d] of ``context`` and ``x``; queries
    and keys are normed and rotated."""
    normed = rms_norm(x, weights["input_layernorm.weight"], eps)
    source = np.concatenate((context, normed))
    q = linear(normed, weights, "self_attn.q_proj").reshape(len(x), -1, head_dim)
    k = linear(source, weights, "self_attn.k_proj").reshape(len(source), -1, head_dim)
    v = linear(source, weights, "self_attn.v_proj").reshape(len(source), -1, head_dim)
    if "self_attn.q_norm.weight" in weights:
        q = rms_norm(q, weights["self_attn.q_norm.weight"], eps)
        k = rms_norm(k, weights["self_attn.k_norm.weight"], eps)
    positions = np.arange(len(source))
    return rotate(q, positions[-len(x) :], rope), rotate(k, positions, rope), v


def attention(q: Array, k: Array, v: Array, sees: Array) -> Array:
    """``q`` [n, h, d] over ``k`` and ``v`` [S, g, d] where ``sees`` [n, S]; the result is [n, h*d]."""
    v = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    attended = attention_weights(q, k, sees) @ v.transpose(1, 0, 2)
    return attended.transpose(1, 0, 2).reshape(len(q), -1)


def attention_weights(q: Array, k: Array, sees: Array) -> Array:
    """By what each query mixes values: [h, n, S], for ``q`` [n, h, d], ``k`` [S, g, d] and ``sees`` [n, S]."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) / q.shape[-1] ** 0.5
    return softmax(np.where(sees, scores, -np.inf))


def visible(n: int, total: int, *, causal: bool, window: int | None = None) -> Array:
    """Whether each of the last n of ``total`` positions sees each of them: bool [n, total]."""
    distance = np.arange(total - n, total)[:, None] - np.arange(total)
    sees = np.full(distance.shape, True)
    if causal:
        sees &= distance >= 0
    if window is not None:
        sees &= np.abs(distance) < window
    return sees


def rotate(x: Array, positions: Array, rope: RopeConfig) -> Array:
    """RoPE on ``x`` [n, heads, d]: channel i and channel i + r/2 of the first r turn together."""
    frequencies, factor = rope.frequencies(x.shape[-1])
    angles, half = np.outer(positions, frequencies)[:, None], len(frequencies)
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def linear(x: Array, weights: Weights, name: str) -> Array:
    return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0)


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def under(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def choose(logits: Array, sampling: SamplingParams, uniform: float) -> tuple[int, float]:
    """The target's own token for a row of ``logits`` [V], and how clear the choice is: by how much of the largest logit
    every logit may move before another token could come out.

    Greedy is the argmax. Else temperature, top-k and top-p shape the distribution, in this order (top-p: the smallest
    set of likeliest tokens that reaches it), and ``uniform`` inverts its cumulative sum."""
    order = np.argsort(-logits, kind="stable")
    ranked, temperature = logits[order], sampling.temperature
    borders: list[int] = []  # between places that must not change sides
    moves: list[float] = []
    if sampling.greedy:
        borders, token = [1], int(order[0])
    else:
        kept = len(order)
        if 0 < sampling.top_k < kept:
            borders.append(kept := sampling.top_k)
        probs = softmax(ranked[:kept] / temperature)
        if sampling.top_p < 1:
            before = np.cumsum(probs) - probs
            borders.append(kept := int((before < sampling.top_p).sum()))
            moves.append(_odds_apart(before, sampling.top_p))
            probs = probs[:kept] / probs[:kept].sum()
        sums = np.zeros(len(logits))
        sums[order[:kept]] = probs
        sums = np.cumsum(sums)
        token = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
        moves.append(_odds_apart(sums, uniform))
    leads = [(ranked[border - 1] - ranked[border]) / 2 for border in borders if border < len(ranked)]
    return token, float(min(leads + [temperature * move for move in moves]) / np.abs(logits).max())


def _odds_apart(sums: Array, at: float) -> float:
    """How far all scores may move, some up and some down, before one of ``sums`` of their probabilities passes ``at``:
    the log-odds of a sum move by at most twice as much."""
    inner = sums[(sums > 0) & (sums < 1 - 1e-12)]
    apart = np.abs(np.log(inner / (1 - inner)) - np.log(at / (1 - at)))
    return float(apart.min(initial=np.inf) / 2)
