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
