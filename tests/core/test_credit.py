from dataclasses import replace

import pytest
import torch

from flowrl.core import PRESETS, Algorithm, Batch, diff_boundary, gather_seg, segment_mean, suffix_sum

from .tables import tensor

SEG = torch.tensor([[0, 0, 1, -1], [1, -1, 1, 1]])


def test_gather_and_mean_are_inverse_on_constant_segments():
    values = tensor(1, 2, 3, 4).reshape(2, 2)
    units = gather_seg(values, SEG)
    assert units.tolist() == [[1, 1, 2, 0], [4, 0, 4, 4]]
    assert segment_mean(units, SEG, 2).tolist() == [[1, 2], [0, 4]]


def test_segment_mean_does_not_read_outside():
    x = torch.tensor([[1.0, 3.0, 5.0, torch.nan], [1.0, torch.inf, 2.0, 3.0]])
    assert segment_mean(x, SEG, 3).tolist() == [[2, 5, 0], [0, 2, 0]]


def test_suffix_sum_and_diff_boundary():
    # text_variants_b 101 and 153
    gain = diff_boundary(tensor(0.2, 0.5, 0.4, 1.0)[None])
    torch.testing.assert_close(gain, tensor(0.3, -0.1, 0.6)[None])
    torch.testing.assert_close(suffix_sum(gain), tensor(0.8, 0.5, 0.6)[None])


def weighted(mask, std, length, reward=None, **fields):
    preset = replace(PRESETS["grpo"], advantage=("centre",), credit=("broadcast", "step_weight"))
    reward = tensor(1, -1) if reward is None else reward
    extra = {"std": torch.as_tensor(std), "length": torch.as_tensor(length)}
    batch = Batch(mask=mask, reward=reward, group_id=torch.zeros(len(mask)).long(), extra=extra, **fields)
    return Algorithm(preset).advantages(batch).adv


def test_step_weights_are_sigma_over_its_mean_in_the_row():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]])
    length = tensor(0.04, 0.09, 0.25, 0.01).expand(2, 4)
    sigma = tensor(1, 2, 6, 50, 9, 1, 3, 9).reshape(2, 4)
    adv = weighted(mask, sigma * length.sqrt(), length)
    torch.testing.assert_close(adv, tensor(1 / 3, 2 / 3, 2, 0, 0, -0.5, -1.5, 0).reshape(2, 4), rtol=1e-7, atol=0)
    spoiled = torch.where(mask != 0, sigma * length.sqrt(), torch.nan)
    assert torch.equal(weighted(mask, spoiled, torch.where(mask != 0, length, 0)), adv)


def test_step_weights_have_mean_one():
    rng = torch.Generator().manual_seed(0)
    mask = torch.rand(6, 9, generator=rng) < 0.7
    std, length = (torch.rand(6, 9, generator=rng, dtype=torch.float64) + 0.01 for _ in range(2))
    reward = torch.arange(6, dtype=torch.float64)
    adv = weighted(mask, std, length, reward)
    u = adv / (reward - reward.mean())[:, None]
    torch.testing.assert_close(u.sum(1) / mask.sum(1), torch.ones(6).double(), rtol=1e-7, atol=0)
    assert u.std() > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_sigma_leaves_every_bit(dtype):
    """std and length were rounded, and so is the mean of equal numbers: 1 must come out all the same."""
    rng = torch.Generator().manual_seed(1)
    for steps in (1, 3, 7, 10):
        length = torch.rand(2, steps, generator=rng, dtype=torch.float64)
        mask, reward = torch.ones(2, steps), torch.tensor([0.1, 0.7], dtype=dtype)
        adv = weighted(mask, 0.3 * length.sqrt(), length, reward)
        assert torch.equal(adv, (reward - reward.mean())[:, None].expand(2, steps))


def test_step_weights_refuse_a_unit_without_noise():
    mask = torch.tensor([[1, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"step_weight.*std > 0 and length > 0, 1 units"):
        weighted(mask, tensor(1, 0, 1, 0).reshape(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="needs 'std'"):
        Algorithm("superflow").advantages(Batch(mask=mask, reward=tensor(1, 0), group_id=torch.zeros(2).long()))


def test_segment_advantages_reach_their_units():
    preset = replace(PRESETS["grpo"], advantage=("centre",), credit=("gather_seg",))
    batch = Batch(
        mask=torch.ones(2, 4),
        reward=tensor(1, 0, 0, 3).reshape(2, 2),
        group_id=torch.zeros(2).long(),
        seg=SEG,
    )
    adv = Algorithm(preset).advantages(batch).adv
    assert adv.tolist() == [[0.5, 0.5, -1.5, 0], [1.5, 0, 1.5, 1.5]]
    with pytest.raises(ValueError, match="'gather_seg' needs 'seg'"):
        Algorithm(preset).advantages(replace(batch, seg=None))
    with pytest.raises(ValueError, match=r"\[B,K\]"):
        Algorithm(preset).advantages(replace(batch, reward=tensor(1, 0)))
    with pytest.raises(ValueError, match="broadcast"):
        Algorithm("grpo").advantages(batch)
