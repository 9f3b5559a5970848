"""``block_attention``: a block's queries over a long cache, in all its kinds of visibility."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from kernel_cases import BF16, F16, F32, assert_as_good, name_of
from torch import Tensor
from torch_dflash.drafter import attention_masks, grouped_attention
from triton_dflash import block_attention
from triton_dflash.block_attention import fused, naive, stretch_of

CASES: list[tuple[int, int, int, int, int, torch.dtype, dict[str, Any]]] = [
    # h heads, g groups, n queries, S keys, d, type, kind
    (4, 2, 5, 97, 64, F32, {}),
    (3, 1, 16, 257, 80, BF16, {"causal": True}),
    (2, 2, 7, 1025, 128, F16, {"causal": True, "window": 100}),
    (4, 1, 16, 97, 96, F32, {"tree": True}),
    (5, 1, 1, 1025, 128, BF16, {"causal": True}),
    (6, 1, 2, 257, 256, F16, {"scale": 0.3}),
    (7, 1, 9, 97, 64, BF16, {"tree": True}),
    (8, 1, 4, 257, 128, F32, {"window": 9}),
    (1, 1, 64, 257, 96, F16, {"tree": True}),
    (2, 1, 33, 97, 256, BF16, {"causal": True, "window": 40}),
    (1, 1, 1, 1, 80, F32, {}),
    (2, 1, 16, 16, 64, F16, {"causal": True}),
    (4, 4, 3, 97, 80, BF16, {}),
    (4, 2, 5, 97, 8, F32, {"causal": True}),
]


def exactly(q: Tensor, keys: Tensor, values: Tensor, sees: Tensor, scale: float) -> Tensor:
    """Each head by itself, in float64."""
    ratio = len(q) // len(keys)
    out = []
    for head, query in enumerate(q.double()):
        scores = query @ keys[head // ratio].double().T * scale
        out.append(scores.masked_fill(~sees, -torch.inf).softmax(-1) @ values[head // ratio].double())
    return torch.stack(out)


def visibility(n: int, S: int, kind: dict[str, Any]) -> Tensor:
    """[n, S], written down once more: by position, key by key."""
    sees = torch.zeros(n, S, dtype=torch.bool)
    for i in range(n):
        for j in range(S):
            at = S - n + i
            if "ancestors" in kind:
                sees[i, j] = j < S - n or bool(kind["ancestors"][i, j - (S - n)])
            else:
                sees[i, j] = (j <= at or not kind.get("causal")) and abs(at - j) < kind.get("window", S + 1)
    return sees


def random_tree(n: int) -> Tensor:
    """Ancestors of n nodes, each the child of an earlier one or, like the first and the last, of none."""
    kin = torch.eye(n, dtype=torch.bool)
    for node in range(1, n - 1):
        kin[node] |= kin[int(torch.randint(0, node, ()))]
    return kin


@pytest.mark.parametrize(("heads", "groups", "n", "S", "d", "dtype", "kind"), CASES, ids=name_of)
def test_attended(
    heads: int, groups: int, n: int, S: int, d: int, dtype: torch.dtype, kind: dict[str, Any], device: str
) -> None:
    torch.manual_seed(S + n)
    kind = dict(kind)
    if kind.pop("tree", False):
        kind["ancestors"] = random_tree(n)
    cache = torch.full((2, groups, S + 40, d), torch.nan, dtype=dtype)
    cache[:, :, :S] = torch.randn(2, groups, S, d).to(dtype)
    q = torch.randn(n, heads, d).to(dtype).transpose(0, 1)  # as a product leaves it
    exact = exactly(q, *cache[:, :, :S], visibility(n, S, kind), kind.get("scale", d**-0.5))
    plain = naive(q, *cache[:, :, :S], **kind)
    on_device = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in kind.items()}
    found = fused(q.to(device), *cache.to(device)[:, :, :S], **on_device)
    assert_as_good(found.cpu(), plain, exact)


@pytest.mark.parametrize("programs", [1, 2, 7, 64])
def test_the_number_of_stretches_changes_nothing(programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stretch and no second launch; few; more than are averaged at once, the last of them shorter; and stretches
    of which a query in the window sees nothing."""
    torch.manual_seed(1)
    q, cache = torch.randn(2, 12, 64), torch.randn(2, 1, 1201, 64)
    monkeypatch.setattr(sys.modules["triton_dflash.block_attention"], "programs_worth", lambda _: programs)
    kinds: list[dict[str, Any]] = [
        {"causal": True},
        {"causal": True, "window": 5},
        {"scale": 100.0},
    ]  # and weights far apart
    for kind in kinds:
        found = fused(q.to(device), *cache.to(device), **kind).cpu()
        exact = exactly(q, *cache, visibility(12, 1201, kind), kind.get("scale", 64**-0.5))
        assert_as_good(found, naive(q, *cache, **kind), exact)


def test_stretches_cover_the_keys_evenly() -> None:
    for keys in (1, 63, 64, 129, 1025, 40_960):
        for others in (1, 8, 300):
            stretch = stretch_of(keys, others, 64, 264)
            count = -(-keys // stretch)
            assert stretch % 64 == 0 and 1 <= count <= 64 and count * others <= max(264, others)
    assert stretch_of(40_960, 8, 64, 264) == 1280, "33 stretches wanted, 32 of equal length made"


def test_the_drafter_attends_the_same(device: str) -> None:
    """What ``grouped_attention`` computes under the masks of a drafter's layers."""
    from tiny_models import make_config

    torch.manual_seed(2)
    q, cache = torch.randn(1, 4, 5, 64), torch.randn(2, 2, 40, 64)
    kinds = {"full_attention": {}, "sliding_attention": {"causal": True, "window": 8}}
    for layer_type, kind in kinds.items():
        config = make_config(
            layer_types=(layer_type,) * 2, sliding_window=8, causal=(layer_type == "sliding_attention",) * 2
        )
        mask = attention_masks(config, 5, 40, torch.device("cpu"))[0]
        expected = grouped_attention(q, cache[:1], cache[1:], mask)[0]
        found = block_attention(q[0].to(device), *cache.to(device), **kind).cpu()
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("q", "keys", "kind", "message"),
    [
        ((3, 4, 64), (2, 9, 64), {}, "do not fit"),
        ((2, 4, 64), (2, 3, 64), {}, "do not fit"),
        ((2, 4, 64), (2, 9, 80), {}, "do not fit"),
        ((2, 4, 64), (2, 9, 64), {"ancestors": torch.eye(3).bool()}, "must be"),
        ((2, 4, 64), (2, 9, 64), {"ancestors": torch.eye(4).bool(), "causal": True}, "exclude"),
        ((2, 4, 64), (2, 9, 64), {"window": 0}, "at least itself"),
    ],
)
@pytest.mark.parametrize("attend", [fused, naive])
def test_what_does_not_fit_is_refused(attend, q, keys, kind: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(torch.zeros(q), torch.zeros(keys), torch.zeros(keys), **kind)
