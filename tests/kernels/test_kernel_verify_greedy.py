"""``verify_greedy``: the same verdict as the plain code and as the backend's verifier."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import BF16, F16, F32, name_of
from torch import Tensor
from torch_dflash.verify import MatchVerifier
from triton_dflash import verify_greedy
from triton_dflash.verify_greedy import fused, naive

from dflash.types import Proposal, SamplingParams, TargetOutput


def drafts(logits: Tensor, wrong_at: int | None) -> Tensor:
    """Drafted tokens that are right up to slot ``wrong_at``, and right again after it."""
    tokens = logits.argmax(-1)[:-1].clone()
    if wrong_at is not None:
        tokens[wrong_at] = (tokens[wrong_at] + 1) % logits.shape[1]
    return tokens


@pytest.mark.parametrize(
    ("n", "vocabulary", "dtype", "wrong_at"),
    [
        (1, 97, F32, None), (2, 257, F16, 0), (5, 1025, BF16, 3), (16, 9001, F32, 7), (16, 49_152, BF16, None),
        (3, 70_001, F16, 1), (64, 4097, BF16, 62), (65, 97, F32, 20),
    ],
    ids=name_of,
)  # fmt: skip
def test_the_verdict(n: int, vocabulary: int, dtype: torch.dtype, wrong_at: int | None, device: str) -> None:
    torch.manual_seed(n)
    wide = torch.full((n, vocabulary + 5), torch.nan)
    wide[:, :-5] = torch.randn(n, vocabulary)
    logits = wide.to(dtype)[:, :-5]  # what lies between the rows is no number
    drafted = drafts(logits, wrong_at)
    expected = naive(logits, drafted)
    assert expected[0] == (n - 1 if wrong_at is None else wrong_at) and expected[2] == 1
    found = fused(wide.to(dtype).to(device)[:, :-5], drafted.to(device))
    assert found.dtype == torch.int64 and found.tolist() == expected.tolist()


@pytest.mark.parametrize("vocabulary", [97, 9001, 70_001])
def test_the_lowest_of_equals_wins(vocabulary: int, device: str) -> None:
    """Also where they lie in different parts of the vocabulary."""
    torch.manual_seed(0)
    logits = torch.randint(0, 3, (4, vocabulary)).float()
    logits[1] = 0
    logits[2, :-1] = -torch.inf
    drafted = torch.tensor([int((logits[0] == 2).nonzero()[0]), 0, vocabulary - 1])
    found = fused(logits.to(device), drafted.to(device)).tolist()
    assert found == [3, int((logits[3] == 2).nonzero()[0]), 1, *drafted.tolist()]


@pytest.mark.parametrize("row", [0, 4])
@pytest.mark.parametrize("broken", ["nan", "inf", "all -inf"])
def test_numbers_that_are_none_are_reported(broken: str, row: int, device: str) -> None:
    logits = torch.randn(5, 5000)
    if broken == "all -inf":
        logits[row] = -torch.inf
    else:
        logits[row, 4500] = float(broken)
    drafted = torch.zeros(4, dtype=torch.int64)
    accepted, token, finite, *_ = fused(logits.to(device), drafted.to(device)).tolist()
    assert finite == 0 == naive(logits, drafted)[2]
    assert 0 <= accepted <= 4 and 0 <= token < 5000, "void, but nobody is led astray by it"


def test_some_tokens_may_be_ruled_out(device: str) -> None:
    logits = torch.randn(3, 300)
    logits[:, ::2] = -torch.inf
    assert fused(logits.to(device), torch.tensor([0, 1], device=device))[2] == 1


def test_the_backends_verifier_says_the_same(device: str) -> None:
    torch.manual_seed(5)
    logits = torch.randn(6, 1025)
    for wrong_at in (None, 0, 2):
        drafted = drafts(logits, wrong_at)
        block = torch.cat((torch.zeros(1, dtype=torch.int64), drafted))
        verifier = MatchVerifier(SamplingParams(), device=torch.device("cpu"))
        verdict = verifier.verify(Proposal(drafted, block, 5), TargetOutput(logits, None))
        found = verify_greedy(logits.to(device), drafted.to(device)).tolist()
        assert found == [verdict.accepted, verdict.next_token, 1, *verdict.drafted]
