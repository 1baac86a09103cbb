"""The kernels: published tables, marginals, densities, and bit equality with the stock Euler step.

Numbered tests refer to section 10 of the specification of flow policy gradients.
"""

import itertools
import json
import math
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowrl.distributions import Gaussian
from flowrl.samplers import (
    CPS,
    CPWS,
    ODE,
    DanceSDE,
    Explicit,
    FlowSampler,
    FlowSDE,
    SchedulerConfig,
    SingleShift,
    SlidingWindow,
    Window,
)
from flowrl.samplers.flow import dpm2_step

STOCHASTIC = [FlowSDE(), DanceSDE(), CPS(), CPWS()]
ALL = [ODE(), *STOCHASTIC]
SD3 = SchedulerConfig({"shift": 3.0})
SHAPE = (3, 4, 5, 5)

each_sampler = pytest.mark.parametrize("sampler", ALL, ids=lambda s: type(s).__name__)
each_stochastic = pytest.mark.parametrize("sampler", STOCHASTIC, ids=lambda s: type(s).__name__)


def randn(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def kernel(sampler: FlowSampler, sigmas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(A, C, std) of all steps of a grid, as formulas: including a noisy last step."""
    return sampler.coefficients(sigmas[:-1], sigmas[1:], sigmas[1])


def stds(sampler: FlowSampler, sigmas: Tensor) -> list[float]:
    return kernel(sampler, sigmas)[2].tolist()


def rounded(published: list[float], digits: int = 3):
    return pytest.approx(published, abs=0.5001 * 10**-digits)


# Analytic world: data N(M, s0²) per dimension, whose velocity is affine in x, so that a transition
# maps the (mean, variance) of a Gaussian state exactly.
M = 0.7


def propagate(sampler: FlowSampler, sigmas: Tensor, s0: float, start: tuple[float, float], sde=None):
    """(mean, variance) of the state after each step; `sde` says per step whether noise is injected."""
    mean, variance = start
    states = [start]
    for i, (A, C, std) in enumerate(zip(*(c.tolist() for c in kernel(sampler, sigmas)), strict=True)):
        t, t_next = sigmas[i].item(), sigmas[i + 1].item()
        if sde is not None and not sde[i]:
            A, C, std = 1.0, t_next - t, 0.0
        k = (t - (1 - t) * s0**2) / ((1 - t) ** 2 * s0**2 + t**2)
        gain, offset = A + C * k, -C * (k * (1 - t) * M + M)
        mean, variance = gain * mean + offset, gain**2 * variance + std**2
        states.append((mean, variance))
    return states


def marginal(t: float, s0: float) -> tuple[float, float]:
    return (1 - t) * M, (1 - t) ** 2 * s0**2 + t**2


# --- 10.1 noise 0 is the Euler ODE, and means are preserved


@each_sampler
@pytest.mark.parametrize("schedule", [SD3, SingleShift()], ids=["double", "single"])
def test_noise_zero_is_bit_equal_to_the_stock_scheduler(sampler, schedule):
    stock = FlowMatchEulerDiscreteScheduler(shift=3.0)
    sampler = sampler.with_(schedule=schedule)
    sigmas = sampler.sigmas()
    stock.set_timesteps(10)
    stock.sigmas = sigmas
    x = randn(*SHAPE, dtype=torch.float32)
    for step, t in enumerate(stock.timesteps):
        v = randn(*SHAPE, seed=step + 1, dtype=torch.float32)
        expected = stock.step(v, t, x).prev_sample
        for silent in (
            sampler.with_(noise_level=0.0).transition(x, v, sigmas, step),
            sampler.transition(x, v, sigmas, step, stochastic=False),
        ):
            assert silent.deterministic and torch.equal(silent.mean, expected)
        x = expected


@each_sampler
def test_noise_zero_is_euler_in_both_precisions(sampler):
    silent, sigmas = sampler.with_(noise_level=0.0), SingleShift()(10)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-7)):
        x, v = randn(*SHAPE, dtype=dtype), randn(*SHAPE, seed=1, dtype=dtype)
        for step in range(10):
            euler = x.double() + (sigmas[step + 1].double() - sigmas[step].double()) * v.double()
            mean = silent.transition(x, v, sigmas, step).mean
            assert mean.dtype == dtype
            torch.testing.assert_close(mean.double(), euler, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [FlowSDE, DanceSDE, CPS, CPWS])
def test_the_formulas_themselves_reach_euler_at_noise_zero(kind):
    sigmas = SingleShift()(10).double()
    A, C, std = kernel(kind(noise_level=0.0), sigmas)
    torch.testing.assert_close(A, torch.ones_like(A), rtol=0, atol=1e-14)
    torch.testing.assert_close(C, sigmas.diff(), rtol=0, atol=1e-14)
    assert (std == 0).all()


@each_sampler
def test_means_are_preserved(sampler):
    sigmas = torch.linspace(0.9, 0.1, 401, dtype=torch.float64)
    mean, _ = propagate(sampler, sigmas, 0.5, marginal(0.9, 0.5))[-1]
    assert mean == pytest.approx(marginal(0.1, 0.5)[0], abs=1e-12)


# --- 10.2 marginals


def variance_error(sampler: FlowSampler, steps: int) -> float:
    sigmas = torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64)
    _, variance = propagate(sampler, sigmas, 0.5, marginal(0.9, 0.5))[-1]
    return variance / marginal(0.1, 0.5)[1] - 1


@pytest.mark.parametrize(
    ("sampler", "slope"),
    [
        (ODE(), -1.96),
        (FlowSDE(noise_level=0.7), -0.737),
        (DanceSDE(noise_level=0.3), -1.664),
        (DanceSDE(noise_level=1.0), 0.194),
        (CPWS(noise_level=0.7), -2.51),
    ],
)
def test_variance_error_vanishes_like_one_over_steps(sampler, slope):
    errors = {steps: variance_error(sampler, steps) for steps in (400, 800)}
    for steps, error in errors.items():
        assert steps * error == pytest.approx(slope, rel=0.05)
    assert errors[400] / errors[800] == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(("eta", "error"), [(0.8, -0.338), (0.2, -0.027)])
def test_cps_does_not_preserve_the_marginal(eta, error):
    """By construction, not by mistake: its coefficients suit point masses."""
    assert variance_error(CPS(noise_level=eta), 800) == rounded(error)


def test_cps_error_settles_at_a_constant():
    assert variance_error(CPS(noise_level=0.2), 20_000) == pytest.approx(-0.025, abs=0.002)


# --- 10.3 point mass


def noise_ratios(sampler: FlowSampler, schedule, last_is_ode: bool) -> tuple[list[float], float]:
    sigmas = schedule(10).double()
    sde = [True] * 9 + [not last_is_ode]
    states = propagate(sampler, sigmas, 0.0, (0.0, 1.0), sde)
    ratios = [state[1] / s.item() ** 2 for state, s in zip(states[1:-1], sigmas[1:-1], strict=True)]
    return ratios, states[-1][1]


@pytest.mark.parametrize("sampler", [ODE(), CPS(noise_level=0.2), CPS(), CPS(noise_level=1.0)])
@pytest.mark.parametrize("schedule", [SD3, SingleShift()], ids=["double", "single"])
def test_cps_and_ode_keep_the_noise_level_of_a_point_mass(sampler, schedule):
    ratios, final = noise_ratios(sampler, schedule, last_is_ode=False)
    assert ratios == pytest.approx([1.0] * 9, abs=1e-12)
    assert final == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("sampler", "first", "last", "kept"),
    [
        (FlowSDE(), [1.0834, 1.1613, 1.1596], [1.2718, 1.6621], 0.0519),
        (DanceSDE(), [1.0001], [1.0245, 1.1337], 0.0248),
    ],
)
def test_score_sdes_are_too_noisy_for_a_point_mass(sampler, first, last, kept):
    ratios, final = noise_ratios(sampler, SingleShift(), last_is_ode=False)
    assert ratios[: len(first)] == rounded(first, 4)
    assert ratios[-2:] == rounded(last, 4)
    assert final == rounded(kept, 4)
    assert noise_ratios(sampler, SingleShift(), last_is_ode=True)[1] == pytest.approx(0, abs=1e-12)


def test_score_sdes_explode_at_the_end_of_the_double_shift():
    assert noise_ratios(FlowSDE(), SD3, False)[0][-1] == pytest.approx(777, abs=0.5)
    dance, final = noise_ratios(DanceSDE(), SD3, False)
    assert dance[-1] == pytest.approx(321, abs=0.5)
    assert final == pytest.approx(0.65, abs=0.005)


# --- 10.4, 10.5 and the std tables


@pytest.mark.parametrize("a", [0.1, 0.7, 1.2])
@pytest.mark.parametrize("schedule", [SD3, SingleShift()], ids=["double", "single"])
def test_flow_sde_coefficients(a, schedule):
    sigmas = schedule(10).double()
    D = -sigmas.diff()
    A, C, std = kernel(FlowSDE(noise_level=a), sigmas)
    assert std[0].item() == pytest.approx(a, rel=1e-14)
    assert A[0].item() == pytest.approx(1 - a**2 / 2, rel=1e-14)
    assert C[0].item() == -D[0].item()
    torch.testing.assert_close(C[1:], -D[1:] * (1 + a**2 / 2), rtol=1e-12, atol=0)
    t = sigmas[-2]
    assert std[-1].item() == pytest.approx((a * (t**2 / (1 - t)).sqrt()).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("sampler", "sigmas", "published", "digits"),
    [
        (FlowSDE(), SD3(10), [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225], 3),
        # Step 7 is sqrt(.49 (.5625 / .4375) (.5625 - 3/7)) = .29047; the specification prints .291.
        (FlowSDE(), SingleShift()(10), [0.7, 0.738, 0.532, 0.441, 0.388, 0.35, 0.32, 0.290, 0.256, 0.202], 3),
        (CPS(), SD3(10), [0.913, 0.869, 0.816, 0.752, 0.673, 0.573, 0.442, 0.264], 3),
    ],
)
def test_published_std_tables(sampler, sigmas, published, digits):
    assert stds(sampler, sigmas)[: len(published)] == rounded(published, digits)


def test_published_std_of_the_last_steps():
    assert stds(FlowSDE(), SD3(10))[9] == rounded(0.0063, 4)
    assert stds(CPS(), SD3(10))[8:] == rounded([0.0085, 0.0], 4)


def test_dance_std_grows_along_the_trajectory():
    std = stds(DanceSDE(), SingleShift()(16))
    assert (std[0], std[-1]) == (rounded(0.044), rounded(0.122))
    assert all(a < b for a, b in itertools.pairwise(std))


def test_flow_sde_entropy_table():
    """E-GRPO: sqrt(2πe) std on the single-shift grid of 16 steps."""
    scaled = [math.sqrt(2 * math.pi * math.e) * std for std in stds(FlowSDE(), SingleShift()(16))]
    assert scaled[:10] == rounded([2.893, 2.989, 2.137, 1.763, 1.542, 1.392, 1.281, 1.193, 1.120, 1.056])


def test_flow_sde_gradient_factors():
    """TempFlow-GRPO: |C| / std per trained step, and 1 / mean(std) = 2.2522."""
    _, C, std = kernel(FlowSDE(), SD3(10))
    factors = (C.abs() / std)[:9].tolist()
    assert factors == rounded([0.057, 0.078, 0.129, 0.188, 0.264, 0.371, 0.536, 0.825, 1.487])
    assert 1 / std[:9].mean().item() == rounded(2.2522, 4)


@each_stochastic
def test_noise_bookkeeping(sampler):
    """10.5: the noise power after a step, in excess of t'²."""
    sigmas = SingleShift()(10).double()
    t, t_next, D = sigmas[:-1], sigmas[1:], -sigmas.diff()
    A, C, std = kernel(sampler, sigmas)
    x1_coefficient = t * A + C  # x = (1 - t) X0 + t X1 and v = X1 - X0
    torch.testing.assert_close((1 - t) * A - C, 1 - t_next, rtol=0, atol=1e-14)
    excess = x1_coefficient**2 + std**2 - t_next**2
    if isinstance(sampler, FlowSDE | DanceSDE):
        rate = std**2 / D
        expected = rate * D**2 / t + rate**2 * D**2 / (4 * t**2)
    else:
        expected = torch.zeros_like(excess)
    torch.testing.assert_close(excess, expected, rtol=1e-12, atol=1e-14)


# --- feasibility


@each_stochastic
def test_the_last_step_is_always_an_ode_step(sampler):
    sigmas = SingleShift()(10)
    x, v = randn(*SHAPE), randn(*SHAPE, seed=1)
    feasible = sampler.feasible(sigmas)
    assert feasible.dtype == torch.bool and feasible.shape == (10,) and not feasible[-1]
    last = sampler.transition(x, v, sigmas, 9)
    assert last.deterministic
    torch.testing.assert_close(last.mean, x - sigmas[9].double() * v, rtol=0, atol=1e-15)


def test_feasible_steps():
    nine = [True] * 9 + [False]
    for sampler in (FlowSDE(), DanceSDE(), CPS(), CPS(noise_level=1.0)):
        assert sampler.feasible(SD3(10)).tolist() == nine
    assert CPWS().feasible(SD3(10)).tolist() == [True] * 7 + [False] * 3
    assert not ODE().feasible(SD3(10)).any()
    assert not any(s.with_(noise_level=0.0).feasible(SD3(10)).any() for s in STOCHASTIC)


def test_cpws_is_euler_where_its_noise_exceeds_the_target():
    sigmas, x, v = SD3(10), randn(*SHAPE, dtype=torch.float32), randn(*SHAPE, seed=1, dtype=torch.float32)
    for step in (7, 8, 9):
        transition = CPWS().transition(x, v, sigmas, step)
        assert transition.deterministic
        assert torch.equal(transition.mean, ODE().transition(x, v, sigmas, step).mean)
    flow = stds(FlowSDE(), sigmas)
    assert all((flow[i] > sigmas[i + 1]) == (i >= 7) for i in range(10))


# --- 10.6 log-probabilities


@each_stochastic
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 0.0), (torch.float32, 1e-6)])
def test_log_prob_is_the_normal_density(sampler, dtype, tolerance):
    sigmas, x, v = SingleShift()(10), randn(*SHAPE, dtype=dtype), randn(*SHAPE, seed=1, dtype=dtype)
    for step in sampler.feasible(sigmas).nonzero()[:, 0].tolist():
        transition = sampler.transition(x, v, sigmas, step)
        x_next = transition.sample(randn(*SHAPE, seed=2))
        expected = Normal(transition.mean.double(), transition.std.double()).log_prob(x_next.double())
        difference = sampler.log_prob(transition, x_next).double() - expected.flatten(1).mean(1)
        assert difference.abs().max().item() <= tolerance


@each_stochastic
def test_unnormalised_log_prob(sampler):
    sigmas, x, v = SingleShift()(10), randn(*SHAPE), randn(*SHAPE, seed=1)
    transition = sampler.transition(x, v, sigmas, 3)
    x_next = transition.sample(randn(*SHAPE, seed=2))
    bare = sampler.with_(logprob="unnormalised").log_prob(transition, x_next)
    torch.testing.assert_close(bare, -((x_next - transition.mean) ** 2).flatten(1).mean(1))
    std = transition.std
    full = bare / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(sampler.log_prob(transition, x_next), full, rtol=1e-12, atol=1e-12)


@each_sampler
@pytest.mark.parametrize("logprob", ["gaussian", "unnormalised"])
def test_ode_steps_have_no_log_prob(sampler, logprob):
    sampler = sampler.with_(logprob=logprob)
    x, v = randn(*SHAPE), randn(*SHAPE, seed=1)
    transition = sampler.transition(x, v, sampler.sigmas(), 2, stochastic=False)
    with pytest.raises(ValueError, match="no density"):
        sampler.log_prob(transition, x)


@each_stochastic
def test_log_prob_gradient_reaches_the_velocity_and_not_the_action(sampler):
    """d lp / d v = C (x' - mean) / (std² d)."""
    sigmas, x = SingleShift()(10), randn(*SHAPE)
    v = randn(*SHAPE, seed=1).requires_grad_()
    transition = sampler.transition(x, v, sigmas, 3)
    x_next = transition.sample(randn(*SHAPE, seed=2))  # not detached by the caller
    sampler.log_prob(transition, x_next).sum().backward()
    C = kernel(sampler, sigmas)[1][3]
    residual = (x_next - transition.mean).detach()
    expected = C * residual / (transition.std**2 * x[0].numel())
    torch.testing.assert_close(v.grad, expected, rtol=1e-9, atol=1e-12)


@each_stochastic
def test_replayed_log_prob_is_bit_equal_in_any_batch(sampler):
    sigmas = SD3(10)
    x, v = randn(*SHAPE, dtype=torch.float32), randn(*SHAPE, seed=1, dtype=torch.float32)
    rolled = sampler.transition(x, v, sigmas, 4)
    x_next = rolled.sample(randn(*SHAPE, seed=2))
    log_prob = sampler.log_prob(rolled, x_next)
    for rows in ([0, 1, 2], [2], [1, 0]):
        again = sampler.log_prob(sampler.transition(x[rows], v[rows], sigmas, 4), x_next[rows])
        assert torch.equal(again, log_prob[rows])


@each_stochastic
def test_rounding_a_stored_state_after_scoring_is_seen(sampler):
    """10.8's guard: bf16 storage must be rounded before scoring, or the ratio is not one."""
    sigmas = SD3(10)
    x, v = randn(*SHAPE, dtype=torch.float32), randn(*SHAPE, seed=1, dtype=torch.float32)
    transition = sampler.transition(x, v, sigmas, 4)
    x_next = transition.sample(randn(*SHAPE, seed=2))
    stored = x_next.bfloat16()
    assert not torch.equal(sampler.log_prob(transition, x_next), sampler.log_prob(transition, stored))


# --- 10.7 KL


def closed_form_kl(sampler: FlowSampler, t: float, t_next: float) -> float:
    """KL per unit of ||dv||²."""
    D, a = t - t_next, sampler.noise_level
    if isinstance(sampler, FlowSDE):
        if t == 1:
            return D**2 / (2 * a**2)
        sigma_t = a * math.sqrt(t / (1 - t))
        paper = D / 2 * (1 / sigma_t + sigma_t * (1 - t) / (2 * t)) ** 2
        closed = (1 + a**2 / 2) ** 2 * D * (1 - t) / (2 * a**2 * t)
        assert closed == pytest.approx(paper, rel=1e-12)
        return closed
    if isinstance(sampler, DanceSDE):
        return D * (1 + a**2 * (1 - t) / (2 * t)) ** 2 / (2 * a**2)
    if isinstance(sampler, CPS):
        cos, sin = math.cos(a * math.pi / 2), math.sin(a * math.pi / 2)
        return (t * (1 - t_next) - t_next * (1 - t) * cos) ** 2 / (2 * t_next**2 * sin**2)
    variance = a**2 if t == 1 else a**2 * t / (1 - t) * D
    weight = math.sqrt(t_next**2 - variance)
    return (t * (1 - t_next) - (1 - t) * weight) ** 2 / (2 * variance)


@each_stochastic
@pytest.mark.parametrize("schedule", [SD3, SingleShift()], ids=["double", "single"])
def test_kl_three_ways(sampler, schedule):
    sigmas = schedule(10).double()
    x, v, v_ref = randn(*SHAPE), randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    squared = ((v - v_ref) ** 2).flatten(1).sum(1)
    for step in sampler.feasible(sigmas).nonzero()[:, 0].tolist():
        _, C, std = (c[step] for c in kernel(sampler, sigmas))
        policy, reference = (sampler.transition(x, u, sigmas, step) for u in (v, v_ref))
        kl = policy.kl(reference, reduce="sum")
        theirs = kl_divergence(Normal(policy.mean, policy.std), Normal(reference.mean, reference.std))
        closed = closed_form_kl(sampler, sigmas[step].item(), sigmas[step + 1].item()) * squared
        for expected in (C**2 * squared / (2 * std**2), theirs.flatten(1).sum(1), closed):
            torch.testing.assert_close(kl, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(reference.kl(policy, "sum"), kl, rtol=1e-12, atol=0)
        torch.testing.assert_close(policy.kl(reference), kl / x[0].numel(), rtol=1e-12, atol=0)


@each_stochastic
def test_monte_carlo_of_the_log_ratio(sampler):
    n, sigmas = 200_000, SingleShift()(10)
    x, v = randn(1, 4), randn(1, 4, seed=1)
    C, std = (c[4].item() for c in kernel(sampler, sigmas)[1:])
    shift = 0.22 * std / abs(C) * torch.tensor([[0.5, -0.5, 0.5, 0.5]], dtype=torch.float64)
    old, new = (sampler.transition(x, u, sigmas, 4) for u in (v, v + shift))
    kl = old.kl(new, "sum").item()
    assert kl == pytest.approx(0.22**2 / 2, rel=1e-6)
    actions = old.sample(randn(n, 4, seed=5))
    log_ratio = new.log_prob(actions, "sum") - old.log_prob(actions, "sum")
    deviation = (log_ratio - log_ratio.mean()) ** 2
    for value, expected in ((log_ratio, -kl), (deviation, 2 * kl), (log_ratio.exp(), 1.0)):
        assert abs(value.mean().item() - expected) < 5 * value.std().item() / math.sqrt(n)


# --- precision, per-sample steps


@each_sampler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_upcast_first(sampler, dtype):
    x, v, sigmas = randn(*SHAPE, dtype=dtype), randn(*SHAPE, seed=1, dtype=dtype), SD3(10)
    for stochastic in (True, False):
        half = sampler.transition(x, v, sigmas, 3, stochastic)
        assert half.mean.dtype == half.std.dtype == torch.float32
        assert torch.equal(half.mean, sampler.transition(x.float(), v.float(), sigmas, 3, stochastic).mean)
    assert sampler.clean_estimate(x, v, sigmas, 3).dtype == torch.float32


@each_sampler
def test_one_step_index_per_sample(sampler):
    sigmas = SingleShift()(10)
    steps = torch.tensor([0, 4, 9])
    x, v = randn(*SHAPE, dtype=torch.float32), randn(*SHAPE, seed=1, dtype=torch.float32)
    together = sampler.transition(x, v, sigmas, steps)
    for i, step in enumerate(steps.tolist()):
        alone = sampler.transition(x[i : i + 1], v[i : i + 1], sigmas, step)
        assert torch.equal(together.mean[i], alone.mean[0])
        assert together.std[i] == alone.std


@each_sampler
@pytest.mark.parametrize("step", [-1, 10, torch.tensor([0, 3, 10])])
def test_steps_outside_the_grid_raise(sampler, step):
    with pytest.raises(ValueError, match="outside the 10 steps"):
        sampler.transition(randn(*SHAPE), randn(*SHAPE), SingleShift()(10), step)


def test_mismatched_shapes_raise():
    with pytest.raises(ValueError, match="one shape"):
        FlowSDE().transition(randn(2, 3), randn(1, 3), SD3(10), 0)


# --- dpm2 (forward-process specification, 1.1 and 1.9 item 9)


def solve(solver: str, sigmas: Tensor, x: float, s0: float) -> float:
    state, previous = torch.tensor([x], dtype=torch.float64), None
    for step, t in enumerate(sigmas[:-1].double()):
        k = (t - (1 - t) * s0**2) / ((1 - t) ** 2 * s0**2 + t**2)
        v = k * (state - (1 - t) * M) - M
        transition = ODE().transition(state, v, sigmas, step, previous=previous if solver == "dpm2" else None)
        previous = t.item(), ODE().clean_estimate(state, v, sigmas, step)
        state = transition.mean
    return state.item()


@pytest.mark.parametrize(("steps", "dpm2", "euler"), [(10, 0.1212, 0.1694), (20, 0.0196, 0.0890), (40, 0.0055, 0.0459)])
def test_solver_errors_on_a_gaussian(steps, dpm2, euler):
    """From x(1) = 1.3 the exact end point is m + s0 x(1) = 1.35."""
    for solver, error in (("dpm2", dpm2), ("euler", euler)):
        end = solve(solver, SingleShift()(steps), 1.3, 0.5)
        assert abs(end - 1.35) == rounded(error, 4)


@pytest.mark.parametrize("sigmas", [SD3(10), SingleShift()(7), Explicit((0.9, 0.5, 0.45, 0.02, 0.0))(4)])
def test_dpm2_integrates_a_point_mass_exactly(sigmas):
    assert solve("dpm2", sigmas, 1.3, 0.0) == pytest.approx(M, abs=1e-12)


@pytest.mark.parametrize(("step", "end"), [(5, None), (5, 8)])
def test_dpm2_is_the_published_update(step, end):
    sigmas = SingleShift()(10)
    x, v, previous = randn(*SHAPE), randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    r, s, t = sigmas.double()[[step - 1, step, end or step + 1]].tolist()
    lam = [math.log((1 - u) / u) for u in (r, s, t)]
    h, h_prev = lam[2] - lam[1], lam[1] - lam[0]
    D0 = x - s * v
    D1 = (D0 - previous) / (h_prev / h)
    decay = (1 - t) * (math.exp(-h) - 1)
    expected = t / s * x - decay * D0 - 0.5 * decay * D1
    transition = ODE().transition(x, v, sigmas, step, end=end, previous=(r, previous))
    torch.testing.assert_close(transition.mean, expected, rtol=1e-12, atol=1e-12)
    assert transition.deterministic


def test_dpm2_drops_to_euler_where_lambda_is_infinite_and_without_history():
    sigmas, x, v, previous = SingleShift()(10), randn(*SHAPE), randn(*SHAPE, seed=1), randn(*SHAPE, seed=2)
    for step, history in ((0, None), (1, (1.0, previous)), (5, None), (9, (sigmas[8].item(), previous))):
        euler = ODE().transition(x, v, sigmas, step)
        torch.testing.assert_close(
            ODE().transition(x, v, sigmas, step, previous=history).mean, euler.mean, rtol=1e-14, atol=1e-14
        )
    with pytest.raises(ValueError, match="int"):
        ODE().transition(x, v, sigmas, torch.tensor([1, 2, 3]), previous=(0.9, previous))


def diffusers_solver(grid: Tensor, order: int = 2) -> DPMSolverMultistepScheduler:
    """diffusers' solver for flows on our grid, about to take its first step."""
    scheduler = DPMSolverMultistepScheduler(
        solver_order=order, prediction_type="flow_prediction", use_flow_sigmas=True, solver_type="midpoint"
    )
    scheduler.set_timesteps(len(grid) - 1)
    scheduler.sigmas = grid
    scheduler.set_begin_index(0)
    return scheduler


FLASH = SlidingWindow(period=1, compression=0.4)
GRIDS = {
    "sd3": SD3(10),
    "single shift": SingleShift()(7),
    "from the middle": Explicit((0.9, 0.5, 0.45, 0.02, 0.0))(4),
    "long": SingleShift()(30),
    "compressed": SingleShift()(25)[list(FLASH.draw(0, 5, 25, [True] * 24 + [False]).path)],
    "very uneven": SingleShift()(25)[[0, 1, 2, 12, 13, 24, 25]],
}


numpy_copies = pytest.mark.filterwarnings("ignore:__array__")  # in diffusers' set_timesteps


@numpy_copies
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_dpm2_is_diffusers_solver(grid):
    """Whole trajectories: the first order first and last step, and steps of very different length between."""
    scheduler = diffusers_solver(grid)
    ours = theirs = randn(2, 5, dtype=torch.float32)
    previous, network = None, randn(5, 5, seed=1, dtype=torch.float32)
    for step, t in enumerate(grid[:-1]):
        v = torch.tanh(ours @ network + t)
        theirs = scheduler.step(torch.tanh(theirs @ network + t), scheduler.timesteps[step], theirs).prev_sample
        transition = ODE().transition(ours, v, grid, step, previous=previous)
        previous = t.item(), ODE().clean_estimate(ours, v, grid, step)
        ours = transition.mean
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours, previous[1], rtol=1e-6, atol=1e-6)  # the last step returns the clean estimate


@numpy_copies
@pytest.mark.parametrize("step", [1, 4, 6])
def test_dpm2_from_the_middle_is_diffusers_solver_with_that_history(step):
    grid = GRIDS["compressed"]
    x, v, clean = (randn(*SHAPE, seed=i, dtype=torch.float32) for i in range(3))
    scheduler = diffusers_solver(grid)
    scheduler.set_begin_index(step)
    scheduler.model_outputs, scheduler.lower_order_nums = [None, clean], 1
    theirs = scheduler.step(v, scheduler.timesteps[step], x).prev_sample
    t_previous, t, t_next = grid[step - 1 : step + 2].tolist()
    torch.testing.assert_close(dpm2_step(x, v, t, t_next, (t_previous, clean)), theirs, rtol=1e-5, atol=1e-5)


@numpy_copies
def test_first_order_dpm_is_euler():
    """Spec 10.15: uncompressed, the first-order solver's steps are Euler steps."""
    grid, x, v = SingleShift()(25), randn(*SHAPE, dtype=torch.float32), randn(*SHAPE, seed=1, dtype=torch.float32)
    for step in range(25):
        scheduler = diffusers_solver(grid, order=1)
        scheduler.set_begin_index(step)
        theirs = scheduler.step(v, scheduler.timesteps[step], x).prev_sample
        torch.testing.assert_close(theirs, ODE().transition(x, v, grid, step).mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_ode_plans_name_its_solver(solver):
    sampler = ODE(solver=solver)
    plans = sampler.draw_plans(sampler.sigmas(), 0, 0, [1, 1], [0, 1])
    assert [plan.solver for plan in plans] == [solver] * 2 and not any(plans[0].stochastic)


# --- configuration


def test_published_defaults():
    levels = {type(s).__name__: s.noise_level for s in ALL}
    assert levels == {"ODE": 0.0, "FlowSDE": 0.7, "DanceSDE": 0.3, "CPS": 0.8, "CPWS": 0.7}


@each_sampler
def test_from_config_takes_the_scheduler_s_grid(sampler):
    stock = FlowMatchEulerDiscreteScheduler(shift=3.0)
    made = type(sampler).from_config(stock.config, steps=28, guidance_scale=4.5)
    stock.set_timesteps(28)
    assert torch.equal(made.sigmas(), stock.sigmas)
    assert (made.steps, made.guidance_scale, made.noise_level) == (28, 4.5, sampler.noise_level)
    with pytest.raises(ValueError, match="Did you mean 'noise_level'"):
        type(sampler).from_config(stock.config, noise_levl=0.5)


@each_sampler
@pytest.mark.parametrize(
    "schedule",
    [
        SingleShift(2.0),
        Explicit(SingleShift()(10)),
        SchedulerConfig(FlowMatchEulerDiscreteScheduler(shift=3.0).config, linspace=True),
    ],
)
def test_save_and_load(sampler, schedule, tmp_path):
    sampler = sampler.with_(schedule=schedule, plan=Window(3, (0, 5)), logprob="unnormalised")
    sampler.save_pretrained(tmp_path / "nested")
    for kind in (FlowSampler, type(sampler)):
        loaded = kind.from_pretrained(tmp_path / "nested")
        assert loaded == sampler and type(loaded) is type(sampler)
        assert torch.equal(loaded.sigmas(), sampler.sigmas())
    json.loads((tmp_path / "nested" / "sampler_config.json").read_text())


def test_solver_is_saved(tmp_path):
    ODE(solver="dpm2").save_pretrained(tmp_path)
    assert FlowSampler.from_pretrained(tmp_path) == ODE(solver="dpm2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": "FlowSDEE"}, "Did you mean 'FlowSDE'"),
        ({"class": None}, "not a FlowSampler"),
        ({"noise": 1.0}, "FlowSDE has no parameter 'noise'. Did you mean 'noise_level'"),
        ({"plan": {"class": "Windo"}}, "'Windo' is not a Plan. Did you mean 'Window'"),
        ({"schedule": {"class": "SingleShift", "shft": 3.0}}, "Did you mean 'shift'"),
    ],
)
def test_unknown_keys_and_classes_raise_with_a_suggestion(change, message, tmp_path):
    FlowSDE().save_pretrained(tmp_path)
    path = tmp_path / "sampler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        FlowSampler.from_pretrained(tmp_path)


def test_loading_another_kind_of_sampler_raises(tmp_path):
    CPS().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'CPS' is not a FlowSDE"):
        FlowSDE.from_pretrained(tmp_path)


def test_with_changes_a_copy():
    sampler = FlowSDE()
    assert sampler.with_(steps=4).steps == 4 and sampler.steps == 10
    with pytest.raises(ValueError, match="Did you mean 'steps'"):
        sampler.with_(step=4)
    with pytest.raises(ValueError, match="noise_level"):
        sampler.with_(noise_level=-1.0)
    with pytest.raises(FrozenInstanceError):
        sampler.steps = 3


@pytest.mark.parametrize(
    ("kind", "bad", "message"),
    [
        (FlowSDE, {"steps": 0}, "steps"),
        (FlowSDE, {"steps": 2.5}, "steps"),
        (FlowSDE, {"noise_level": -0.1}, "noise_level"),
        (DanceSDE, {"noise_level": math.nan}, "noise_level"),
        (CPWS, {"noise_level": math.inf}, "noise_level"),
        (CPS, {"noise_level": 1.1}, r"\[0, 1\]"),
        (CPS, {"noise_level": -0.1}, "noise_level"),
        (ODE, {"noise_level": 0.1}, "injects no noise"),
        (ODE, {"solver": "dpm3"}, "Did you mean 'dpm2'"),
        (ODE, {"guidance_scale": -1.0}, "guidance_scale"),
        (FlowSDE, {"logprob": "gausian"}, "Did you mean 'gaussian'"),
    ],
)
def test_invalid_values_raise(kind, bad, message):
    with pytest.raises(ValueError, match=message):
        kind(**bad)


def test_a_new_sampler_is_its_three_coefficients(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Brownian(FlowSampler):
        noise_level: float = 0.1

        def coefficients(self, t, t_next, sigma_1):
            return torch.ones_like(t), t_next - t, torch.full_like(t, self.noise_level)

    sampler = Brownian(steps=4)
    transition = sampler.transition(randn(2, 3), randn(2, 3, seed=1), sampler.sigmas(), 1)
    assert isinstance(transition, Gaussian) and transition.std == 0.1
    sampler.save_pretrained(tmp_path)
    assert FlowSampler.from_pretrained(tmp_path) == sampler
