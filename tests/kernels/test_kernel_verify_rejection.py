"""``verify_rejection``: the plain code's verdict from the same uniform numbers, and the law that this code keeps."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from kernel_cases import BF16, F16, F32, name_of
from torch import Tensor
from triton_dflash import forced, verify_rejection
from triton_dflash.verify_rejection import fused, naive

BARELY_ONE = 1 - 2**-53


def both(
    device: str, logits: Tensor, drafted: list[int], q: Tensor | None, uniforms: Tensor, temperature: float = 1.0
) -> list[int]:
    """The verdict, which kernel and plain code agree on."""
    tokens = torch.tensor(drafted, dtype=torch.int64)
    expected = naive(logits, tokens, q, uniforms, temperature).tolist()
    on_device = [None if x is None else x.to(device) for x in (logits, tokens, q, uniforms)]
    assert fused(*on_device, temperature).tolist() == expected
    return expected


def uniforms_of(accept: list[float], draw: float) -> Tensor:
    return torch.tensor([[*accept, 0.5], [draw] * (len(accept) + 1)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("n", "vocabulary", "dtype", "temperature", "sampled"),
    [
        (1, 257, F32, 1.0, False), (2, 97, BF16, 0.7, True), (5, 9001, F32, 1.3, True), (16, 1025, F16, 0.8, True),
        (5, 4096, BF16, 0.6, False), (16, 257, F32, 1.0, False), (3, 49_153, F16, 1.0, True),
    ],
    ids=name_of,
)  # fmt: skip
def test_the_verdict(
    n: int, vocabulary: int, dtype: torch.dtype, temperature: float, sampled: bool, device: str
) -> None:
    """Accepted throughout, by chance, and with a draft in mid-block that is likelier to q than to p."""
    torch.manual_seed(vocabulary)
    for uniform in (0.0, None, BARELY_ONE):
        logits = (2 * torch.randn(n, vocabulary)).to(dtype)
        p = (logits[:-1].float() / temperature).softmax(-1)
        q = (p.log() + torch.randn(n - 1, vocabulary) / 3).softmax(-1)
        tokens = torch.multinomial(q, 1)[:, 0] if n > 1 else torch.empty(0, dtype=torch.int64)
        uniforms = torch.rand(2, n, dtype=torch.float32 if uniform is None else torch.float64)
        if uniform is not None:
            uniforms[0] = 0
        middle = n // 2
        if uniform and n > 1:
            uniforms[0, middle - 1] = uniform
            tokens[middle - 1] = (q / p)[middle - 1].argmax()
        accepted = both(device, logits, tokens.tolist(), q if sampled else None, uniforms, temperature)[0]
        if uniform is not None:
            assert accepted == (middle - 1 if uniform and n > 1 else n - 1)


def test_a_token_that_cannot_be_is_never_accepted(device: str) -> None:
    """Not by a uniform number of 0, and not where q is sure of it; nor is one drawn."""
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf], [0.0, 1.0, 2.0, 3.0]])
    sure = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    for q in (sure, None):
        for draw, token in ((0.0, 0), (0.49, 0), (0.51, 2), (BARELY_ONE, 2)):
            assert both(device, logits, [1], q, uniforms_of([0.0], draw))[:3] == [0, token, 1]
    # too unlikely for float32, though not −∞
    assert both(device, torch.tensor([[200.0, 0.0], [0.0, 0.0]]), [1], None, uniforms_of([0.0], 0.0))[:2] == [0, 0]


def test_what_is_certain_is_accepted(device: str) -> None:
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf], [-torch.inf, 0.0, 0.0]])
    assert both(device, logits, [0], None, uniforms_of([BARELY_ONE], 0.6))[:2] == [1, 2]
    assert both(device, logits, [0], torch.tensor([[0.25, 0.75, 0.0]]), uniforms_of([BARELY_ONE], 0.4))[:2] == [1, 1]


def test_an_empty_residual_gives_way_to_p(device: str) -> None:
    """q is nowhere below p, which only rounding brings about; the draw then follows p."""
    logits = torch.zeros(2, 4)
    above = torch.full((1, 4), 0.26)
    for draw, token in ((0.1, 0), (0.3, 1), (0.6, 2), (BARELY_ONE, 3)):
        assert both(device, logits, [2], above, uniforms_of([0.999], draw))[:3] == [0, token, 1]


@pytest.mark.parametrize("vocabulary", [97, 9001])
def test_the_correction_comes_from_the_residual(vocabulary: int, device: str) -> None:
    """p − q is positive for two tokens, which lie far apart; the draw goes to them in their proportion."""
    logits = torch.full((2, vocabulary), -torch.inf)
    logits[0, [3, 40, vocabulary - 2]] = torch.tensor([0.5, 0.3, 0.2]).log()
    q = torch.zeros(1, vocabulary)
    q[0, [3, 40, vocabulary - 2]] = torch.tensor([0.8, 0.1, 0.1])
    for draw, token in ((0.0, 40), (0.65, 40), (0.68, vocabulary - 2), (BARELY_ONE, vocabulary - 2)):
        assert both(device, logits, [3], q, uniforms_of([0.63], draw))[:2] == [0, token]
    assert both(device, logits, [3], q, uniforms_of([0.62], 0.5))[0] == 1, "0.62 < 0.5 / 0.8"


@pytest.mark.parametrize("vocabulary", [97, 9001])
def test_a_draw_that_rounds_to_one_takes_the_last_that_can_be(vocabulary: int, device: str) -> None:
    logits = torch.full((2, vocabulary), -torch.inf)
    logits[0, [3, 5, 7]] = 0.0
    logits[1, [2, 4]] = 0.0
    for drafted, token in ((5, 7), (7, 5)):
        assert both(device, logits, [drafted], None, uniforms_of([0.9], 1.0))[:2] == [0, token]
    assert both(device, logits, [3], None, uniforms_of([0.1], 1.0))[:2] == [1, 4]


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e38])
def test_extreme_temperatures(temperature: float, device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 5.0]])
    accepted, token, finite, _ = both(device, logits, [1], None, uniforms_of([0.3], 0.75), temperature)
    assert (accepted, token, finite) == (1, 2, 1)
    logits[1, 2] = -torch.inf
    assert both(device, logits, [1], None, uniforms_of([0.3], BARELY_ONE), temperature)[1] == int(temperature > 1)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter is numpy
@pytest.mark.parametrize("row", [0, 3])
@pytest.mark.parametrize("broken", ["nan", "inf", "all -inf"])
def test_numbers_that_are_none_are_reported(broken: str, row: int, device: str) -> None:
    logits = torch.randn(4, 300)
    if broken == "all -inf":
        logits[row] = -torch.inf
    else:
        logits[row, 200] = float(broken)
    arguments = [x.to(device) for x in (logits, torch.zeros(3).long(), torch.full((3, 300), 1 / 300), torch.rand(2, 4))]
    for verify in (fused, naive):
        accepted, token, finite, *_ = verify(*arguments, 1.0).tolist()
        assert finite == 0 and 0 <= accepted <= 3 and 0 <= token < 300


def test_the_law() -> None:
    """A token drafted from q, corrected or followed by a bonus, follows p, by a chi-square test on a vocabulary of
    four. So it does where the draft is taken for a certain one; with a q that it was not drawn from it does not."""
    torch.manual_seed(11)
    vocabulary, rounds = 4, 2000
    logits, near = torch.randn(2, vocabulary), torch.randn(1, vocabulary)
    p, q = logits.double().softmax(-1), near.softmax(-1)
    drafts = torch.multinomial(q.expand(rounds, -1), 1)
    uniforms = torch.rand(rounds, 2, 2, dtype=torch.float64)

    def statistic(given: Tensor | None) -> float:
        seen: Counter[tuple[int, ...]] = Counter()
        for tokens, numbers in zip(drafts, uniforms, strict=True):
            accepted, token, *_ = verify_rejection(logits, tokens, given, numbers, 1.0).tolist()
            seen[(int(tokens[0]), token) if accepted else (token,)] += 1
        first = [sum(count for output, count in seen.items() if output[0] == token) for token in range(vocabulary)]
        bonus = [sum(c for output, c in seen.items() if len(output) == 2 and output[1] == t) for t in range(vocabulary)]
        return sum(
            float((torch.tensor(found) - law * sum(found)).square().div(law * sum(found)).sum())
            for found, law in ((first, p[0]), (bonus, p[1]))
        )

    with forced(False):
        # six degrees of freedom: 22.5 is passed once in a thousand, 45 once in two hundred million
        assert statistic(q) < 22.5 and statistic(None) < 22.5
        assert statistic(torch.full_like(q, 0.25)) > 45


def test_the_share_of_accepted_drafts_is_the_overlap(device: str) -> None:
    """Σ min(p, q) of the drafts are accepted: counted by the kernel over a grid of uniform numbers."""
    torch.manual_seed(4)
    p, q = torch.randn(8).softmax(-1), torch.randn(8).softmax(-1)
    grid = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    logits = torch.stack((p.log(), p.log())).to(device)
    for token in range(0, 8, 3):
        arguments = logits, torch.tensor([token], device=device), q[None].to(device)
        counted = sum(int(fused(*arguments, uniforms_of([u], 0.5).to(device), 1.0)[0]) for u in grid.tolist())
        assert math.isclose(counted / 8, min(1.0, float(p[token] / q[token])), abs_tol=1 / 8)
