import pytest
import torch

from flowrl.core import Batch, Totals, lookup, masked_mean, masked_quantile

from .tables import tensor

X = torch.tensor([[1.0, 2.0, torch.nan], [4.0, torch.inf, torch.inf]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("token_mean", 7 / 3), ("seq_mean_token_mean", (1.5 + 4) / 2), ("seq_sum_const", 7 / (2 * 10))],
)
def test_aggregations(name, expected):
    class cfg:
        agg_const = 10

    batch = Batch(mask=MASK, reward=torch.zeros(2), group_id=torch.zeros(2).long())
    assert lookup("aggregate", name)(X, MASK, MASK, X, batch, cfg).item() == pytest.approx(expected)
    half = Batch(mask=MASK, reward=torch.zeros(2), group_id=torch.zeros(2).long(), totals=Totals(4, 6, tensor(4, 2)))
    halved = {"seq_mean_token_mean": (3 / 4 + 4 / 2) / 4}.get(name, expected / 2)
    assert lookup("aggregate", name)(X, MASK, MASK, X, half, cfg).item() == pytest.approx(halved)
    empty = torch.zeros_like(MASK)
    assert lookup("aggregate", name)(X, empty, empty, X, batch, cfg) == 0


def test_masked_mean_never_reads_padding():
    assert masked_mean(X, MASK).item() == pytest.approx(7 / 3)
    assert masked_mean(X, MASK, dim=1).tolist() == [1.5, 4]
    assert masked_mean(X, MASK, dim=0).tolist() == [2.5, 2, 0]


def test_masked_quantile_is_that_of_the_units_inside():
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(5, 9, generator=rng, dtype=torch.float64)
    mask = torch.rand(5, 9, generator=rng) < 0.6
    mask[4] = False
    for q in (0.0, 0.3, 0.5, 1.0):
        expected = [torch.quantile(row[keep], q) for row, keep in zip(x[:4], mask[:4], strict=True)]
        out = masked_quantile(torch.where(mask, x, torch.nan), mask, q)
        torch.testing.assert_close(out, torch.stack([*expected, torch.zeros_like(expected[0])]))
