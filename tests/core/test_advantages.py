from dataclasses import replace

import pytest
import torch

from flowrl.core import PRESETS, Algorithm, Batch, combine_channels

from .tables import tensor

GRPO = PRESETS["grpo"]
ONE = torch.zeros(4, dtype=torch.int64)


def advantage(links, reward, gid=None, valid=None, in_loss=None, **cfg):
    gid = torch.zeros(len(reward), dtype=torch.int64) if gid is None else gid
    batch = Batch(mask=torch.ones(len(reward), 2), reward=reward, group_id=gid, valid=valid, in_loss=in_loss)
    return Algorithm(replace(GRPO, advantage=links), **cfg).advantages(batch).adv[:, 0]


def test_z():
    close = torch.testing.assert_close
    close(advantage(("z",), tensor(1, 0, 0, 1)), tensor(1, -1, -1, 1) * 0.75**0.5, atol=2e-6, rtol=0)
    close(advantage(("z",), tensor(1, 0, 0, 0), eps=0.0), tensor(1.5, -0.5, -0.5, -0.5))
    close(advantage(("z",), tensor(1, 0, 0, 1), eps=0.0, ddof=0), tensor(1, -1, -1, 1))


def test_global_std_of_the_flow_spec():
    reward, gid = tensor(1, 2, 3, 4, 4, 4), torch.tensor([0, 0, 0, 1, 1, 1])
    expected = tensor(-1, 0, 1, 0, 0, 0) / (4 / 3 + 0) ** 0.5
    out = advantage(("global_std",), reward, gid)
    torch.testing.assert_close(out, tensor(-0.86595, 0, 0.86595, 0, 0, 0), atol=1e-5, rtol=0)
    torch.testing.assert_close(advantage(("global_std",), reward, gid, eps=0.0), expected)
    out = advantage(("global_std",), reward, gid, eps=0.0, global_std=False)
    torch.testing.assert_close(out, tensor(-1, 0, 1, 0, 0, 0) * 1.5**0.5)


def test_global_std_is_exactly_zero_without_spread():
    for reward in (torch.full((6,), 0.1), torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.5])):
        out = advantage(("global_std", "clip"), reward, torch.tensor([0, 0, 0, 1, 1, 1]))
        assert torch.equal(out[:3], torch.zeros(3))


def test_beta_baseline_is_the_distance_to_the_tracked_value_standardised_over_the_batch():
    reward, gid = tensor(1, 0, 0.5, 0.25), torch.tensor([3, 3, 9, 4])
    batch = Batch(mask=torch.ones(4, 2), reward=reward, group_id=gid)
    algorithm = Algorithm(replace(GRPO, advantage=("beta_baseline",)))
    algorithm.state["tracker"] = {3: [3.0, 1.0], 9: [1.0, 4.0]}  # 0.75 and 0.2; 4 was never seen: 0.5
    gap = reward - tensor(0.75, 0.75, 0.2, 0.5)
    expected = (gap - gap.mean()) / (gap.std(correction=0) + 1e-4)
    out = algorithm.advantages(batch).adv
    torch.testing.assert_close(out, expected[:, None].expand(4, 2), rtol=1e-14, atol=0)
    assert algorithm.state["tracker"] == {3: [3.0, 1.0], 9: [1.0, 4.0]}  # reading teaches it nothing
    valid = torch.tensor([True, True, False, True])
    out = algorithm.advantages(replace(batch, valid=valid, reward=torch.where(valid, reward, torch.nan))).adv[:, 0]
    gap = gap[valid]
    torch.testing.assert_close(out[valid], (gap - gap.mean()) / (gap.std(correction=0) + 1e-4))
    assert out[2] == 0
    with pytest.raises(ValueError, match=r"'beta_baseline' needs a reward \[B\]"):
        algorithm.advantages(replace(batch, reward=torch.zeros(4, 2)))


def test_beta_baseline_gives_zero_never_nan_when_the_tracker_was_right():
    algorithm = Algorithm(replace(GRPO, advantage=("beta_baseline",)))
    algorithm.state["tracker"] = {0: [1.0, 3.0], 1: [3.0, 1.0]}
    for dtype in (torch.float32, torch.float64):
        reward = torch.tensor([0.25, 0.25, 0.75, 0.75], dtype=dtype)
        batch = Batch(mask=torch.ones(4, 2), reward=reward, group_id=torch.tensor([0, 0, 1, 1]))
        assert torch.equal(algorithm.advantages(batch).adv, torch.zeros(4, 2, dtype=dtype))
        nearly = algorithm.advantages(replace(batch, reward=reward + torch.tensor([0, 1e-6, 0, 0], dtype=dtype))).adv
        assert nearly.abs().max() < 0.02  # rounding is not blown up to one: std + 1e-4


def test_centre_loo_and_clip():
    torch.testing.assert_close(advantage(("centre",), tensor(1, 0, 0, 1)), tensor(0.5, -0.5, -0.5, 0.5))
    torch.testing.assert_close(advantage(("loo",), tensor(1, 0, 0, 1)), tensor(2, -2, -2, 2) / 3)
    out = advantage(("centre", "clip"), tensor(10, 0, 0, 0), adv_clip_max=2.5)
    torch.testing.assert_close(out, tensor(2.5, -2.5, -2.5, -2.5))


@pytest.mark.parametrize("link", ["z", "global_std", "centre", "loo"])
def test_invalid_rows_leave_the_statistics_and_borrowed_rows_do_not(link):
    reward = tensor(1, 0, 0.3, 0.8, float("nan"))
    valid = torch.tensor([True] * 4 + [False])
    out = advantage((link,), reward, valid=valid)
    torch.testing.assert_close(out[:4], advantage((link,), reward[:4]))
    assert out[4] == 0
    out = advantage((link,), reward[:4], in_loss=valid[1:])
    assert out[3] == 0
    torch.testing.assert_close(out[:3], advantage((link,), reward[:4])[:3])


def test_borrowed_row_of_the_text_spec():
    # text_variants_b 94: centred on the full group, no gradient for the borrowed row
    out = advantage(("z",), tensor(0, 0, 0, 1), in_loss=torch.tensor([True, True, True, False]), eps=0.0)
    torch.testing.assert_close(out, tensor(-0.5, -0.5, -0.5, 0))


A = tensor(1, 0, 1, 0)


@pytest.mark.parametrize(
    ("mode", "channels", "weights", "expected"),
    [
        ("sum_then_norm", (A, tensor(10, 20, 30, 40)), (1, 1), (-1.1451, -0.4344, 0.4344, 1.1451)),
        ("norm_then_sum", (A, tensor(10, 20, 30, 40)), (1, 1), (-0.2959, -1.2533, 1.2533, 0.2959)),
        (
            "norm_sum_whiten",
            (tensor(1, 1, 0, 0), tensor(1, 0, 0, 0)),
            (1, 1),
            (1.3321, 0.2061, -0.7691, -0.7691),
        ),
        (
            "std_weighted",
            (A, tensor(0.1, 0.2, 0.3, 0.4)),
            (0.5, 0.5),
            (0.4954, -0.7785, 0.7785, -0.4954),
        ),
        ("sum_then_norm", (A, tensor(0.1, 0.2, 0.3, 0.4)), (0.5, 0.5), (0.6575, -1.0333, 1.0333, -0.6575)),
        ("norm_then_sum", (A, tensor(0.1, 0.2, 0.3, 0.4)), (0.5, 0.5), (-0.1479, -0.6267, 0.6267, 0.1479)),
    ],
)
def test_combine_channels_of_the_text_spec(mode, channels, weights, expected):
    out = combine_channels(torch.stack(channels, 1), tensor(*weights), mode, ONE)
    torch.testing.assert_close(out, tensor(*expected), atol=1e-3, rtol=0)


@pytest.mark.parametrize("mode", ["sum_then_norm", "norm_then_sum", "std_weighted"])
def test_one_channel_is_plain_grpo(mode):
    x = tensor(0.3, 0.9, 0.2, 0.2)
    out = combine_channels(x[:, None], tensor(1), mode, ONE)
    torch.testing.assert_close(out, advantage(("z",), x))


@pytest.mark.parametrize("mode", ["sum_then_norm", "norm_then_sum", "norm_sum_whiten", "std_weighted"])
def test_constant_channels_give_zero_and_invalid_rows_do_not_leak(mode):
    x = torch.full((4, 2), 0.1, dtype=torch.float64)
    assert torch.equal(combine_channels(x, tensor(1, 1), mode, ONE), torch.zeros(4, dtype=torch.float64))
    x = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)).double()
    valid = torch.tensor([True] * 4 + [False])
    part = combine_channels(x[:4], tensor(1, 2), mode, ONE)
    out = combine_channels(torch.where(valid[:, None], x, torch.nan), tensor(1, 2), mode, torch.zeros(5).long(), valid)
    torch.testing.assert_close(out[:4], part)
    assert out[4] == 0


def test_scaling_or_shifting_a_channel():
    rng = torch.Generator().manual_seed(2)
    x, w = torch.rand(4, 2, generator=rng, dtype=torch.float64), tensor(1, 1)
    moved = x * tensor(3, 1) + tensor(5, 0)
    for mode, same in (("norm_then_sum", True), ("norm_sum_whiten", True), ("std_weighted", False)):
        a, b = (combine_channels(value, w, mode, ONE, eps=0.0) for value in (x, moved))
        assert torch.allclose(a, b) is same


def shared(links, reward, gid, transition, valid=None, **cfg):
    batch = Batch(mask=torch.ones(len(reward), 2), reward=reward, group_id=torch.tensor(gid), valid=valid)
    batch = replace(batch, extra={"transition": torch.tensor(transition)})
    return Algorithm(replace(GRPO, advantage=links), **cfg).advantages(batch).adv[:, 0]


def test_rows_of_one_action_get_the_sum_of_their_advantages():
    # two granularities: rows 0 1 2 and 3 4 5 are compared apart, rows k and k + 3 are one action
    reward, gid, transition = tensor(1, 2, 6, 5, 5.5, 4), [0, 0, 0, 7, 7, 7], [40, -1, 9, 40, -1, 9]
    apart = shared(("centre",), reward, gid, transition)
    torch.testing.assert_close(apart, tensor(-2, -1, 3, 1 / 6, 2 / 3, -5 / 6))
    total = apart[:3] + apart[3:]
    torch.testing.assert_close(shared(("centre", "sum_shared"), reward, gid, transition), total.repeat(2))
    clipped = shared(("centre", "sum_shared", "clip"), reward, gid, transition, adv_clip_max=1.9)
    torch.testing.assert_close(clipped, total.clamp(-1.9, 1.9).repeat(2))  # the sum is clipped, not its terms
    valid = torch.tensor([True, True, True, False, True, True])
    broken = torch.where(valid, reward, torch.nan)
    out = shared(("centre", "sum_shared"), broken, gid, transition, valid)
    torch.testing.assert_close(out, tensor(-2, -1 + 0.75, 3 - 0.75, 0, -1 + 0.75, 3 - 0.75))


def test_rows_of_their_own_keep_their_advantage():
    reward, gid = tensor(0.1, 0.7, 0.3, 0.2), [0, 0, 1, 1]
    out = shared(("z", "sum_shared"), reward, gid, [3, 2, 1, 0])
    assert torch.equal(out, shared(("z",), reward, gid, [3, 2, 1, 0]))
    with pytest.raises(ValueError, match="'sum_shared' needs 'transition'"):
        advantage(("z", "sum_shared"), reward)


def test_combine_channels_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="mode"):
        combine_channels(torch.zeros(4, 2), torch.ones(2), "mean", ONE)
    with pytest.raises(ValueError, match="weights"):
        combine_channels(torch.zeros(4, 2), torch.ones(3), "norm_then_sum", ONE)


def test_gdpo_link_is_the_text_specs_and_reads_the_rewards_not_their_sum():
    rewards = torch.stack([tensor(1, 1, 0, 0), tensor(1, 0, 0, 0)], 1)
    gid = torch.zeros(4, dtype=torch.int64)

    def out(rewards, weights=(1.0, 1.0), valid=None):
        extra = {"rewards": rewards, "reward_weights": weights}
        rows, total = len(rewards), torch.full((len(rewards),), 7.0, dtype=torch.float64)
        batch = Batch(mask=torch.ones(rows, 2), reward=total, group_id=gid[:rows], valid=valid, extra=extra)
        return Algorithm("gdpo").advantages(batch).adv[:, 0]

    torch.testing.assert_close(out(rewards), tensor(1.3321, 0.2061, -0.7691, -0.7691), atol=1e-4, rtol=0)
    torch.testing.assert_close(out(rewards * 100 - 3), out(rewards), atol=1e-5, rtol=0)
    ranks = out(rewards, (1.0, 0.0))  # a weight of 0 logs only
    torch.testing.assert_close(ranks, tensor(1, 1, -1, -1) * 0.75**0.5, atol=1e-5, rtol=0)
    valid = torch.tensor([True, True, True, False])
    torch.testing.assert_close(out(torch.where(valid[:, None], rewards, torch.nan), valid=valid)[:3], out(rewards[:3]))
    alone = Algorithm("gdpo").advantages(Batch(mask=torch.ones(4, 2), reward=rewards, group_id=gid))
    torch.testing.assert_close(alone.adv[:, 0], out(rewards))
