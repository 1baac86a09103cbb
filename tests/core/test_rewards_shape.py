import pytest
import torch

from flowrl.core import bt_fit, vote

from .tables import tensor


def test_vote():
    gid = torch.tensor([0, 0, 0, 0, 7, 7, 3])
    answers = ["A", "A", "B", None, "B", "A", None]
    assert vote(answers, gid) == ["A"] * 4 + ["B"] * 2 + [None]
    # text_variants_b 113: confidence outweighs the count
    weights = [1, 1, 3, 0.5]
    assert vote(["A", "A", "B", "B"], torch.zeros(4).long(), weights) == ["B"] * 4


def test_bradley_terry_of_the_text_spec():
    # text_variants_b 74: 0 beats 1, 1 beats 2, ridge .1
    b = bt_fit(torch.tensor([[0, 1], [1, 2]]), tensor(1, 1), n=3, lam=0.1)
    torch.testing.assert_close(b, tensor(1.1775, 0, -1.1775), atol=1e-4, rtol=0)


def test_bradley_terry_ends_where_the_gradient_is_zero():
    rng = torch.Generator().manual_seed(0)
    pairs = torch.tensor([[i, j] for i in range(6) for j in range(6) if i != j])
    y = torch.rand(len(pairs), generator=rng).double().round(decimals=1)
    b = bt_fit(pairs, y, n=6, lam=1e-3).requires_grad_()
    gap = b[pairs[:, 0]] - b[pairs[:, 1]]
    loss = -(y * gap.sigmoid().log() + (1 - y) * (-gap).sigmoid().log()).sum() + 1e-3 * b @ b
    (gradient,) = torch.autograd.grad(loss, b)
    assert gradient.abs().max() < 1e-9


def test_bradley_terry_needs_a_ridge():
    with pytest.raises(ValueError, match="lam"):
        bt_fit(torch.tensor([[0, 1]]), tensor(1), n=2, lam=0)
