"""The chunked cross-entropy against the dense one, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch_dflash.training.loss import chunked_cross_entropy

SLOTS, HIDDEN, VOCAB = 37, 16, 97


def case(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(SLOTS, HIDDEN, generator=generator),
        "head": torch.randn(VOCAB, HIDDEN, generator=generator),
        "labels": torch.randint(0, VOCAB, (SLOTS,), generator=generator),
        "weights": torch.rand(SLOTS, generator=generator),
        "teacher": torch.randn(SLOTS, HIDDEN, generator=generator),
    }


def dense(hidden, head, labels, weights, teacher, soft):
    logits = hidden @ head.T
    loss = (1 - soft) * F.cross_entropy(logits, labels, reduction="none")
    aim = (teacher @ head.T).softmax(-1)
    loss = loss - soft * (aim * logits.log_softmax(-1)).sum(-1)
    return (weights * loss).sum()


def both(parts, chunk, soft):
    results = []
    for name in ("chunked", "dense"):
        hidden = parts["hidden"].clone().requires_grad_(True)
        rest = {key: parts[key] for key in ("head", "labels", "weights", "teacher")}
        loss = (
            chunked_cross_entropy(hidden, **rest, chunk=chunk, soft=soft)
            if name == "chunked"
            else dense(hidden, **rest, soft=soft)
        )
        (3.0 * loss).backward()
        results.append((loss.detach(), hidden.grad))
    return results


@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [1, 7, 37, 64])
def test_chunked_equals_dense(chunk, soft):
    (loss, gradient), (dense_loss, dense_gradient) = both(case(), chunk, soft)
    torch.testing.assert_close(loss, dense_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, dense_gradient, rtol=1e-5, atol=1e-5)


def test_a_reduced_vocabulary_is_the_dense_softmax_over_its_rows():
    parts = case()
    seen = torch.arange(0, VOCAB, 3)
    rows = torch.zeros(VOCAB, dtype=torch.long)
    rows[seen] = torch.arange(len(seen))
    parts["labels"] = seen[parts["labels"] % len(seen)]
    reduced = parts | {"head": parts["head"][seen], "labels": rows[parts["labels"]]}
    (loss, gradient), (dense_loss, dense_gradient) = both(reduced, 8, 0.4)
    torch.testing.assert_close(loss, dense_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, dense_gradient, rtol=1e-5, atol=1e-5)
    hidden, head = parts["hidden"], parts["head"].clone()
    masked = (hidden @ head.T).index_fill(1, torch.tensor([t for t in range(VOCAB) if t % 3]), -torch.inf)
    by_mask = (parts["weights"] * F.cross_entropy(masked, parts["labels"], reduction="none")).sum()
    hard = chunked_cross_entropy(hidden, reduced["head"], reduced["labels"], parts["weights"])
    torch.testing.assert_close(hard, by_mask, rtol=1e-5, atol=1e-5)


def test_low_precision_errs_no_more_than_the_dense_loss_in_low_precision():
    parts = case()
    exact = dense(*(parts[key] for key in ("hidden", "head", "labels", "weights", "teacher")), soft=0.0)
    low = {key: parts[key].bfloat16() for key in ("hidden", "head")}
    ours = chunked_cross_entropy(low["hidden"], low["head"], parts["labels"], parts["weights"], chunk=5)
    theirs = (
        parts["weights"] * F.cross_entropy(low["hidden"] @ low["head"].T, parts["labels"], reduction="none")
    ).sum()
    assert ours.dtype == torch.float32
    assert abs(ours - exact) <= 2 * abs(theirs.float() - exact) + 1e-2


def test_slots_without_weight_change_nothing():
    parts = case()
    parts["weights"][5:9] = 0
    (loss, gradient), _ = both(parts, 6, 0.0)
    assert not gradient[5:9].any()
    parts["hidden"][5:9] = 1e4
    (again, _), _ = both(parts, 6, 0.0)
    torch.testing.assert_close(again, loss)


def test_no_slots_at_all_is_zero():
    empty = torch.zeros(0, HIDDEN, requires_grad=True)
    loss = chunked_cross_entropy(empty, torch.randn(VOCAB, HIDDEN), torch.zeros(0, dtype=torch.long), torch.zeros(0))
    loss.backward()
    assert loss.item() == 0
