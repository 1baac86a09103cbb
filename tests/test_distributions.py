"""Densities against torch.distributions, and the identities policy gradients rest on."""

import math

import pytest
import torch
from torch.distributions import kl_divergence

from flowrl.distributions import Categorical, Gaussian

SHAPE = (5, 3, 4, 2)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def per_sample_std() -> torch.Tensor:
    return torch.linspace(0.1, 0.9, SHAPE[0], dtype=torch.float64)


@pytest.fixture(params=["scalar", "per_sample"])
def gaussian(request) -> tuple[Gaussian, torch.distributions.Normal]:
    std = torch.tensor(0.7, dtype=torch.float64) if request.param == "scalar" else per_sample_std()
    mean = randn(*SHAPE)
    return Gaussian(mean, std), torch.distributions.Normal(mean, std.reshape(-1, 1, 1, 1))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_gaussian_agrees_with_torch_exactly(gaussian, reduce):
    ours, theirs = gaussian
    x = randn(*SHAPE, seed=1)
    expected = getattr(theirs.log_prob(x).flatten(1), reduce)(1)
    assert torch.equal(ours.log_prob(x, reduce=reduce), expected)
    expected = getattr(theirs.entropy().expand(SHAPE).flatten(1), reduce)(1)
    torch.testing.assert_close(ours.entropy(reduce=reduce), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("same_std", [True, False])
def test_gaussian_kl_agrees_with_torch(gaussian, reduce, same_std):
    ours, theirs = gaussian
    mean, std = randn(*SHAPE, seed=2), ours.std if same_std else ours.std * 1.7
    other = torch.distributions.Normal(mean, std.reshape(-1, 1, 1, 1))
    expected = getattr(kl_divergence(theirs, other).flatten(1), reduce)(1)
    torch.testing.assert_close(ours.kl(Gaussian(mean, std), reduce), expected, rtol=1e-12, atol=1e-12)


def test_gaussian_in_float32_is_close_and_tiny_kl_is_not_lost():
    mean, x = randn(*SHAPE), randn(*SHAPE, seed=1)
    exact, single = Gaussian(mean, per_sample_std()), Gaussian(mean.float(), per_sample_std())
    assert single.mean.dtype == single.std.dtype == torch.float32
    torch.testing.assert_close(single.log_prob(x).double(), exact.log_prob(x), rtol=1e-6, atol=1e-6)
    std, shift = 0.5, 1e-4
    moved = Gaussian(torch.full(SHAPE, shift), std).kl(Gaussian(torch.zeros(SHAPE), std))
    torch.testing.assert_close(moved, torch.full((5,), shift**2 / (2 * std**2)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast(dtype):
    gaussian = Gaussian(randn(*SHAPE).to(dtype), torch.tensor(0.3, dtype=dtype))
    assert gaussian.log_prob(randn(*SHAPE).to(dtype)).dtype == torch.float32
    assert Categorical(randn(4, 7).to(dtype)).entropy().dtype == torch.float32


def test_gaussian_sample_is_mean_plus_std_noise(gaussian):
    ours, theirs = gaussian
    noise = randn(*SHAPE, seed=3)
    assert torch.equal(ours.sample(noise), theirs.loc + theirs.scale * noise)
    assert torch.equal(Gaussian(theirs.loc, 0.0).sample(noise), theirs.loc)


def test_gaussian_rows_do_not_depend_on_the_batch(gaussian):
    ours, _ = gaussian
    x = randn(*SHAPE, seed=1)
    for i in range(SHAPE[0]):
        alone = Gaussian(ours.mean[i : i + 1], ours.std if ours.std.ndim == 0 else ours.std[i : i + 1])
        assert torch.equal(alone.log_prob(x[i : i + 1])[0], ours.log_prob(x)[i])


def test_gaussian_of_vectors_without_inner_dimensions():
    mean = randn(5)
    expected = torch.distributions.Normal(mean, per_sample_std()).log_prob(torch.zeros(5))
    torch.testing.assert_close(Gaussian(mean, per_sample_std()).log_prob(torch.zeros(5)), expected)


@pytest.mark.parametrize("std", [0.0, torch.tensor([0.5, 0.0, 0.5, 0.5, 0.5])])
def test_a_deterministic_step_has_no_density(std):
    ode, other = Gaussian(randn(*SHAPE), std), Gaussian(randn(*SHAPE), 1.0)
    assert ode.deterministic and not other.deterministic
    for call in (lambda: ode.log_prob(ode.mean), ode.entropy, lambda: ode.kl(other), lambda: other.kl(ode)):
        with pytest.raises(ValueError, match="no density"):
            call()


def test_gaussian_rejects_bad_shapes_and_reductions():
    with pytest.raises(ValueError, match="one per sample"):
        Gaussian(randn(*SHAPE), torch.ones(3))
    with pytest.raises(ValueError, match="batch dimension"):
        Gaussian(torch.tensor(1.0), 1.0)
    with pytest.raises(ValueError, match="reduce"):
        Gaussian(randn(*SHAPE), 1.0).log_prob(randn(*SHAPE), reduce="max")


def test_gaussian_log_prob_gradient():
    mean = randn(*SHAPE).requires_grad_()
    x = randn(*SHAPE, seed=1)
    Gaussian(mean, per_sample_std()).log_prob(x, "sum").sum().backward()
    expected = (x - mean.detach()) / per_sample_std().reshape(-1, 1, 1, 1) ** 2
    torch.testing.assert_close(mean.grad, expected, rtol=1e-12, atol=1e-12)


def test_log_ratio_moments_follow_from_the_kl():
    """Spec 10.7: under the old policy log r has mean -KL and variance 2 KL, and r has mean 1."""
    n, d, std = 200_000, 4, 0.5
    old = Gaussian(torch.zeros(1, d, dtype=torch.float64), std)
    new = Gaussian(torch.tensor([[0.05, -0.07, 0.06, 0.03]], dtype=torch.float64), std)
    kl = old.kl(new, "sum").item()
    assert new.kl(old, "sum").item() == pytest.approx(kl, rel=1e-12)
    x = old.sample(randn(n, d))
    log_ratio = new.log_prob(x, "sum") - old.log_prob(x, "sum")
    deviation = (log_ratio - log_ratio.mean()) ** 2
    for value, expected in ((log_ratio, -kl), (deviation, 2 * kl), (log_ratio.exp(), 1.0)):
        assert abs(value.mean().item() - expected) < 5 * value.std().item() / math.sqrt(n)


def test_mean_form_log_ratio_scale_at_image_size():
    """Spec 0.5: at d = 65536 and KLmean = 1e-4 the log ratio sits at -1e-4 with std 5.5e-5."""
    d, std, kl_mean = 65536, 0.5, 1e-4
    old = Gaussian(torch.zeros(1, d, dtype=torch.float64), std)
    new = Gaussian(torch.full((1, d), std * math.sqrt(2 * kl_mean), dtype=torch.float64), std)
    assert old.kl(new).item() == pytest.approx(kl_mean, rel=1e-9)
    x = old.sample(randn(200, d))
    log_ratio = new.log_prob(x) - old.log_prob(x)
    expected_std = math.sqrt(2 * kl_mean / d)
    assert expected_std == pytest.approx(5.5e-5, rel=0.01)
    assert log_ratio.mean().item() == pytest.approx(-kl_mean, abs=5 * expected_std / math.sqrt(200))
    assert log_ratio.std().item() == pytest.approx(expected_std, rel=0.25)


def test_categorical_agrees_with_torch():
    p, q = randn(6, 3, 9), randn(6, 3, 9, seed=1)
    p[..., 2] = -math.inf
    ours, theirs = Categorical(p), torch.distributions.Categorical(logits=p)
    index = torch.randint(3, 9, (6, 3))
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(ours.log_prob(index), theirs.log_prob(index), **close)
    torch.testing.assert_close(ours.entropy(), theirs.entropy(), **close)
    expected = kl_divergence(theirs, torch.distributions.Categorical(logits=q))
    torch.testing.assert_close(ours.kl(Categorical(q)), expected, **close)
    assert torch.isinf(Categorical(q).kl(ours)).all()
    assert torch.equal(ours.kl(Categorical(p)), torch.zeros(6, 3, dtype=torch.float64))


def test_categorical_gradients_are_finite_with_excluded_classes():
    logits = randn(4, 5)
    logits[:, 1] = -math.inf
    logits.requires_grad_()
    p = Categorical(logits)
    (
        p.entropy() + p.kl(Categorical(randn(4, 5, seed=1))) + p.log_prob(torch.zeros(4, dtype=torch.long))
    ).sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_categorical_samples_follow_the_probabilities():
    probabilities = torch.tensor([0.0, 0.1, 0.2, 0.0, 0.65, 0.05, 0.0], dtype=torch.float64)
    n = 100_000
    index = Categorical(probabilities.log().expand(n, -1)).sample(randn(n))
    share = torch.bincount(index, minlength=7) / n
    error = (probabilities * (1 - probabilities) / n).sqrt()
    assert ((share - probabilities).abs() <= 5 * error).all()


def test_categorical_extreme_noise_stays_on_possible_classes():
    logits = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]]).expand(2, -1)
    assert Categorical(logits).sample(torch.tensor([-40.0, 40.0])).tolist() == [1, 2]
