"""Noise depends on its indices and on nothing else."""

import itertools

import pytest
import torch

from flowrl import noise

KEYS = {"seed": 42, "iteration": 7, "prompt": 3, "member": 5, "step": 2}


def test_values_are_pinned():
    """A change here silently changes every experiment and breaks exact resume."""
    initial = noise.normal((3,), seed=0, iteration=0, prompt=0, member=0, step=noise.INITIAL)
    torch.testing.assert_close(initial, torch.tensor([-0.4511050284, 0.3746298552, -0.7257777452]))
    row = noise.normal((4, 4), **KEYS)[0]
    torch.testing.assert_close(row, torch.tensor([0.5968738198, 1.4898433685, 1.8194894791, 0.2229517549]))
    assert noise.permutation(8, 1, 2).tolist() == [2, 3, 1, 4, 7, 0, 5, 6]
    assert [noise.integers(0, 100, 1, i) for i in range(6)] == [16, 88, 66, 56, 22, 9]
    assert noise.generator(5, 6).initial_seed() == 12903242658589716876


def test_batches_are_stacked_samples_in_any_order_and_composition():
    prompts, members = [0, 0, 1, 9], [0, 1, 0, 4]
    batch = noise.batch_normal((4, 8, 8), 1, 2, prompts, members, 3)
    assert batch.shape == (4, 4, 8, 8) and batch.dtype == torch.float32
    torch.randn(100)  # the global generator plays no part
    order = [2, 0, 3, 1]
    shuffled = noise.batch_normal((4, 8, 8), 1, 2, [prompts[i] for i in order], [members[i] for i in order], 3)
    assert torch.equal(shuffled, batch[order])
    for i, (prompt, member) in enumerate(zip(prompts, members, strict=True)):
        alone = noise.normal((4, 8, 8), seed=1, iteration=2, prompt=prompt, member=member, step=3)
        assert torch.equal(alone, batch[i])


def test_batch_is_drawn_in_float32_then_cast():
    batch = noise.batch_normal((16,), 1, 2, [0, 1], [0, 0], 3)
    cast = noise.batch_normal((16,), 1, 2, torch.tensor([0, 1]), [0, 0], 3, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(cast, batch.bfloat16())


def test_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    noise.normal((8,), **KEYS)
    noise.permutation(8, 0)
    noise.integers(0, 8, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_index_matters():
    base = noise.normal((32,), **KEYS)
    for name in KEYS:
        assert not torch.equal(noise.normal((32,), **KEYS | {name: KEYS[name] + 1}), base)
    grid = itertools.product(range(2), range(3), range(5), range(6), range(-1, 5))
    draws = {
        noise.normal((4,), seed=s, iteration=i, prompt=p, member=m, step=t).numpy().tobytes() for s, i, p, m, t in grid
    }
    assert len(draws) == 2 * 3 * 5 * 6 * 6


def test_purposes_and_key_lengths_are_independent():
    assert noise.generator(1).initial_seed() != noise.generator(1, 0).initial_seed()
    draw = torch.randperm(50, generator=noise.generator(3, 4))
    assert not torch.equal(draw, noise.permutation(50, 3, 4))


def test_moments_across_samples():
    """Mean, variance and correlation between neighbouring members, within five standard errors."""
    n, d = 500, 400
    batch = noise.batch_normal((d,), 0, 0, [0] * n, range(n), 0).double()
    assert abs(batch.mean().item()) < 5 / (n * d) ** 0.5
    assert abs(batch.var().item() - 1) < 5 * (2 / (n * d)) ** 0.5
    assert abs((batch[1:] * batch[:-1]).mean().item()) < 5 / (n * d) ** 0.5


def test_integers_are_uniform_and_half_open():
    draws = torch.tensor([noise.integers(2, 6, 0, i) for i in range(2000)])
    counts = torch.bincount(draws, minlength=6)
    assert counts[:2].sum() == 0 and len(counts) == 6
    assert ((counts[2:] - 500).abs() < 5 * (2000 * 0.25 * 0.75) ** 0.5).all()


def test_permutation_permutes():
    assert sorted(noise.permutation(100, 0, 1).tolist()) == list(range(100))
    assert not torch.equal(noise.permutation(100, 0, 1), noise.permutation(100, 0, 2))


def test_bad_arguments_raise():
    with pytest.raises(ValueError, match="equally long"):
        noise.batch_normal((2,), 0, 0, [0, 1], [0], 0)
    with pytest.raises(ValueError, match="at least 1"):
        noise.batch_normal((2,), 0, 0, [], [], 0)
    with pytest.raises(ValueError, match="no integer"):
        noise.integers(3, 3, 0)
    with pytest.raises(ValueError, match="64 bits"):
        noise.generator(2**63)
    with pytest.raises(TypeError):
        noise.generator(0.5)
