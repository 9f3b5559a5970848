"""``block_attention``: a block's queries over a long cache, in all its kinds of sight."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from kernel_cases import BF16, F16, F32, assert_as_good, at, bits_of, name_of
from torch import Tensor
from torch_dflash.stack import Sight, attention
from triton_dflash import block_attention
from triton_dflash.block_attention import cut, fused, most_stretches, naive
from triton_dflash.language import jit, tl

CASES: list[tuple[int, int, int, int, int, torch.dtype, str, int | None]] = [
    # h heads, g groups, n queries, S keys with the block's own, d, type, sight of the block, window
    (4, 2, 5, 97, 64, F32, "all", None),
    (3, 1, 16, 257, 80, BF16, "causal", None),
    (2, 2, 7, 1025, 128, F16, "causal", 100),
    (4, 1, 16, 97, 96, F32, "tree", None),
    (5, 1, 1, 1025, 128, BF16, "causal", None),
    (6, 1, 2, 257, 256, F16, "all", None),
    (7, 1, 9, 97, 64, BF16, "tree", 30),
    (8, 1, 4, 257, 128, F32, "all", 9),
    (1, 1, 64, 257, 96, F16, "tree", None),
    (2, 1, 33, 97, 256, BF16, "causal", 40),
    (1, 1, 1, 1, 80, F32, "all", None),
    (2, 1, 16, 16, 64, F16, "causal", None),
    (4, 4, 3, 97, 80, BF16, "all", None),
    (4, 2, 5, 97, 8, F32, "causal", None),
    (1, 1, 64, 97, 64, BF16, "all", 1),
]


def exactly(q: Tensor, keys: Tensor, values: Tensor, sees: Tensor, scale: float) -> Tensor:
    """Each head by itself, in float64."""
    ratio = len(q) // len(keys)
    out = []
    for head, query in enumerate(q.double()):
        scores = query @ keys[head // ratio].double().T * scale
        out.append(scores.masked_fill(~sees, -torch.inf).softmax(-1) @ values[head // ratio].double())
    return torch.stack(out)


def sight(kind: str, n: int, window: int | None) -> tuple[Tensor, Tensor]:
    """What each query sees of the block, bool [n, n], and its depth [n]."""
    chain = torch.arange(n)
    if kind == "tree":
        kin, depth = torch.eye(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int32)
        for node in range(1, n):  # the child of an earlier one; the last is the root's
            parent = int(torch.randint(0, node, ())) if node < n - 1 else 0
            kin[node] |= kin[parent]
            depth[node] = depth[parent] + 1
    else:
        kin, depth = torch.ones(n, n, dtype=torch.bool), chain.int()
        kin = kin.tril() if kind == "causal" else kin
    if window is not None:
        kin = kin & ((depth[:, None] - depth).abs() < window)
    return kin, depth


def visibility(kin: Tensor, depth: Tensor, start: int, window: int | None) -> Tensor:
    """[n, S], written down once more: key by key."""
    n = len(kin)
    sees = torch.zeros(n, start + n, dtype=torch.bool)
    for i in range(n):
        for j in range(start + n):
            near = window is None or start + int(depth[i]) - j < window
            sees[i, j] = near if j < start else kin[i, j - start]
    return sees


@pytest.mark.parametrize(("heads", "groups", "n", "S", "d", "dtype", "kind", "window"), CASES, ids=name_of)
def test_attended(
    heads: int, groups: int, n: int, S: int, d: int, dtype: torch.dtype, kind: str, window: int | None, device: str
) -> None:
    torch.manual_seed(S + n)
    scale = 0.3 if n == 2 else d**-0.5
    cache = torch.full((2, groups, S + 40, d), torch.nan, dtype=dtype)
    cache[:, :, :S] = torch.randn(2, groups, S, d).to(dtype)
    q = torch.randn(n, heads, d).to(dtype).transpose(0, 1)  # as a product leaves it
    kin, depth = sight(kind, n, window)
    exact = exactly(q, *cache[:, :, :S], visibility(kin, depth, S - n, window), scale)
    given = bits_of(kin), window, depth if kind == "tree" else None, None if n != 2 else scale
    plain = naive(q, *cache, at(S - n), *given)
    on_device = (x.to(device) if isinstance(x, Tensor) else x for x in given)
    found = fused(q.to(device), *cache.to(device), at(S - n, device), *on_device)
    assert found.transpose(0, 1).is_contiguous() and plain.transpose(0, 1).is_contiguous(), "as the next product has it"
    assert_as_good(found.cpu(), plain, exact)


@pytest.mark.parametrize("programs", [1, 2, 7, 64])
def test_the_number_of_stretches_changes_nothing(programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stretch and no second launch; few; more than are averaged at once, the last of them shorter; stretches of
    which a query in the window sees nothing; and all of them again where the same launch finds another ``start``."""
    torch.manual_seed(1)
    n, q, cache = 6, torch.randn(2, 6, 64), torch.randn(2, 1, 1195, 64)
    module, asked = sys.modules["triton_dflash.block_attention"], []
    monkeypatch.setattr(module, "programs_worth", lambda _: programs)
    monkeypatch.setattr(module, "most_stretches", lambda *given: asked.append(given) or most_stretches(*given))
    start = at(0, device)
    for context, window, scale in ((1189, None, 100.0), (700, 5, None), (0, None, None)):
        start.fill_(context)
        written = cache.clone()
        written[:, :, context + n :] = torch.nan
        kin, depth = sight("causal", n, window)
        found = fused(q.to(device), *written.to(device), start, bits_of(kin).to(device), window, None, scale).cpu()
        sees = visibility(kin, depth, context, window)
        exact = exactly(q, *cache[:, :, : context + n], sees, scale or 64**-0.5)
        plain = naive(q, *written, at(context), bits_of(kin), window, None, scale)
        if scale is None:
            assert_as_good(found, plain, exact)
        else:  # scores in the thousands, whose roundings are all of the error, the plain code's as well
            assert max((one - exact).abs().max() for one in (found, plain)) < 1e-3
    assert [(keys, worth) for keys, _, _, worth in asked] == [(keys, programs) for keys in (1195, 5, 1195)]


def cut_into(start, n, window, stretches, found, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    begin, each, used = cut(tl.load(start), n, window, stretches, WINDOW, KEYS)
    tl.store(found, begin)
    tl.store(found + 1, each)
    tl.store(found + 2, used)


def test_stretches_cover_the_keys_evenly(device: str) -> None:
    """However long the context is, of the programs that the capacity was worth as many work as two steps of keys are
    there for, and none has more than a step more than its share."""
    found, kernel = torch.zeros(3, dtype=torch.int32, device=device), jit(cut_into)
    for capacity, others in ((1025, 8), (40_960, 8), (40_960, 300), (64, 1)):
        most = most_stretches(capacity, others, 64, 264)
        assert 1 <= most <= 64 and most * others <= max(264, others)
        for start in (0, 1, 63, 129, 1000, 128 * most - 11, 40_000):  # the last but one: five keys more than fit evenly
            for window in (None, 500):
                kernel[(1,)](
                    at(start, device), 16, window or 0, most, found, WINDOW=window is not None, KEYS=64
                )  # fmt: skip
                begin, each, used = found.tolist()
                keys = start + 16 - begin
                assert begin == (0 if window is None else max(0, start - window + 1))
                assert each % 64 == 0 and each >= 128 and (used - 1) * each < keys <= used * each and used <= most
                assert each == 128 or each < keys / most + 64
    assert most_stretches(40_960, 8, 64, 264) == 33 and most_stretches(200, 8, 64, 264) == 2


def test_the_backends_stack_attends_the_same(device: str) -> None:
    """What the plain stack computes under its masks: a target's, and a drafter's in both kinds of layer."""
    torch.manual_seed(2)
    q, keys, values = torch.randn(4, 5, 64), torch.randn(2, 40, 64), torch.randn(2, 40, 64)
    for kind, window in (("causal", None), ("all", None), ("all", 8), ("causal", 8)):
        expected = attention(q, keys, values, Sight(kind == "causal", window).mask(5, 40, torch.device("cpu")))
        bits = bits_of(sight(kind, 5, window)[0])
        given = (x.to(device) for x in (q, keys, values, at(35), bits))
        torch.testing.assert_close(block_attention(*given, window).cpu(), expected)


@pytest.mark.parametrize(
    ("q", "keys", "bits", "window", "message"),
    [
        ((3, 4, 64), (2, 9, 64), torch.ones(4).long(), None, "do not fit"),
        ((2, 4, 64), (2, 3, 64), torch.ones(4).long(), None, "do not fit"),
        ((2, 4, 64), (2, 9, 80), torch.ones(4).long(), None, "do not fit"),
        ((2, 65, 64), (2, 90, 64), torch.ones(65).long(), None, "n ≤ 64"),
        ((2, 4, 64), (2, 9, 64), torch.ones(3).long(), None, "must be .4. int64"),
        ((2, 4, 64), (2, 9, 64), torch.ones(4, 4).bool(), None, "must be .4. int64"),
        ((2, 4, 64), (2, 9, 64), torch.ones(4).long(), 0, "at least itself"),
    ],
)
@pytest.mark.parametrize("attend", [fused, naive])
def test_what_does_not_fit_is_refused(attend, q, keys, bits: Tensor, window: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(torch.zeros(q), torch.zeros(keys), torch.zeros(keys), at(3), bits, window)
