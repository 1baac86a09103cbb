import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.core import (
    gnorm,
    group_count,
    group_max,
    group_mean,
    group_median,
    group_std,
    loo,
    rank_in_group,
    refine_groups,
    zero_spread_share,
)

from .tables import tensor

ONE = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ((1, 0, 0, 1), (0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5)),
        ((1, 0, 0, 0), (1.5, -0.5, -0.5, -0.5)),
    ],
)
def test_gnorm_of_the_text_specs(x, expected):
    torch.testing.assert_close(gnorm(tensor(*x), ONE, eps=0.0), tensor(*expected))


def test_gnorm_with_a_floor():
    # text_variants_b 108: s = [.1,.2,.3,.2] times .01
    x = tensor(0.1, 0.2, 0.3, 0.2) * 0.01
    torch.testing.assert_close(gnorm(x, ONE, floor=0.1), tensor(-0.01, 0, 0.01, 0))
    torch.testing.assert_close(gnorm(x, ONE, scale=False), tensor(-0.001, 0, 0.001, 0))
    torch.testing.assert_close(gnorm(x, ONE, eps=0.0), tensor(-1.5, 0, 1.5, 0) * (2 / 3) ** 0.5)


def test_a_pair_depends_on_ddof():
    x, gid = tensor(1, 0), torch.zeros(2, dtype=torch.int64)
    torch.testing.assert_close(gnorm(x, gid, eps=0.0), tensor(0.5**0.5, -(0.5**0.5)))
    torch.testing.assert_close(gnorm(x, gid, eps=0.0, ddof=0), tensor(1, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 24])
def test_constant_rewards_give_exactly_zero(dtype, size):
    x, gid = torch.full((size,), 0.1, dtype=dtype), torch.zeros(size, dtype=torch.int64)
    for out in (gnorm(x, gid), gnorm(x, gid, scale=False), gnorm(x, gid, eps=0.0), loo(x, gid)):
        assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(group_std(x, gid), torch.zeros_like(group_std(x, gid)))


def test_loo_is_the_reward_minus_the_mean_of_the_others():
    x, gid = tensor(1, 2, 6, 5), torch.tensor([0, 0, 0, 9])
    torch.testing.assert_close(loo(x, gid), tensor(-3, -1.5, 4.5, 0))


def test_zero_spread_share():
    gid = torch.tensor([0, 0, 1, 1, 2, 5])
    x = tensor(1, 2, 3, 3, 4, float("nan"))
    valid = torch.tensor([True] * 5 + [False])
    torch.testing.assert_close(zero_spread_share(x, gid, valid), tensor(2 / 3)[0])
    two = torch.stack([tensor(1, 1, 3, 4, 0, 0), tensor(1, 2, 0, 0, 0, 0)], 1)
    torch.testing.assert_close(zero_spread_share(two, gid), tensor(0.5)[0])


def test_refine_groups_ignores_order_and_labels():
    gid = torch.tensor([5, 5, 5, -1, -1])
    a, b = torch.tensor([1, 1, 2, 1, 1]), tensor(0, 0, 0, 0, 7)
    pairs = torch.stack([a.double(), b], 1)
    for new in (refine_groups(gid, a, b), refine_groups(gid, b, a), refine_groups(gid * 10, pairs)):
        same = new[:, None] == new
        expected = torch.block_diag(torch.ones(2, 2), torch.ones(1, 1), torch.eye(2)) > 0
        assert torch.equal(same, expected)


def test_rank_in_group():
    x = tensor(3, 1, 3, 2, 7, 7)
    gid = torch.tensor([4, 4, 4, 4, 2, 2])
    valid = torch.tensor([True, True, True, True, True, False])
    torch.testing.assert_close(rank_in_group(x, gid, valid=valid), tensor(3.5, 1, 3.5, 2, 1, 0))
    torch.testing.assert_close(rank_in_group(x, gid, ties="dense"), tensor(3, 1, 3, 2, 1, 1))
    torch.testing.assert_close(rank_in_group(x, gid, ties="order"), tensor(3, 1, 4, 2, 1, 2))
    torch.testing.assert_close(rank_in_group(x, gid, descending=True), tensor(1.5, 4, 1.5, 3, 1.5, 1.5))
    # text_variants_b 93: linear in the descending rank, within +-2
    rank = rank_in_group(tensor(0.1, 0.9, 0.5, 0.3), ONE, descending=True)
    torch.testing.assert_close(2 - 4 * (rank - 1) / 3, tensor(-2, 2, 2 / 3, -2 / 3))
    with pytest.raises(ValueError, match="ties"):
        rank_in_group(x, gid, ties="min")


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="B = 4"):
        group_mean(tensor(1, 2), ONE)


rows = st.lists(
    st.tuples(
        st.sampled_from([0.1, 0.1, -2.0, 3.5, 1.25, 7.0]),
        st.sampled_from([-3, 0, 8, 2**40]),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=80, deadline=None)
@given(rows)
def test_group_statistics_against_a_loop(rows):
    values, labels, flags = (list(column) for column in zip(*rows, strict=True))
    gid, valid = torch.tensor(labels), torch.tensor(flags)
    x = torch.where(valid, tensor(*values), torch.nan)
    table = torch.stack([x, -2 * x], 1)
    expected = {name: [] for name in ("count", "mean", "std", "max", "median", "z", "loo", "rank", "dense")}
    for value, label, ok in rows:
        group = [v for v, g, k in rows if g == label and k]
        many = len(group) > 1
        mean = statistics.fmean(group) if group else 0.0
        flat = not group or max(group) == min(group)
        std = statistics.stdev(group) if many and not flat else 0.0
        others = [v for v in group]
        if ok:
            others.remove(value)
        expected["count"].append(len(group))
        expected["mean"].append(mean)
        expected["std"].append(std)
        expected["max"].append(max(group, default=0.0))
        expected["median"].append(statistics.median(group) if group else 0.0)
        expected["z"].append(0.0 if flat or not ok else (value - mean) / (std + 1e-6))
        expected["loo"].append(0.0 if flat or not ok else value - statistics.fmean(others))
        below, ties = sum(v < value for v in group), group.count(value)
        expected["rank"].append(below + (ties + 1) / 2 if ok else 0)
        expected["dense"].append(len({v for v in group if v <= value}) if ok else 0)
    expected = {name: tensor(*column) for name, column in expected.items()}

    torch.testing.assert_close(group_count(gid, valid).double(), expected["count"])
    for name, fn in (
        ("mean", group_mean),
        ("std", group_std),
        ("max", group_max),
        ("median", group_median),
        ("loo", loo),
    ):
        torch.testing.assert_close(fn(x, gid, valid), expected[name])
    torch.testing.assert_close(gnorm(x, gid, valid=valid), expected["z"])
    torch.testing.assert_close(rank_in_group(x, gid, valid=valid), expected["rank"])
    torch.testing.assert_close(rank_in_group(x, gid, ties="dense", valid=valid), expected["dense"])
    assert torch.equal((gnorm(x, gid, valid=valid) == 0), (expected["z"] == 0))
    two = torch.stack([expected["mean"], -2 * expected["mean"]], 1)
    torch.testing.assert_close(group_mean(table, gid, valid), two)
    torch.testing.assert_close(group_median(table, gid, valid)[:, 1], -2 * expected["median"])
    torch.testing.assert_close(group_std(table, gid, valid)[:, 1], 2 * expected["std"])
