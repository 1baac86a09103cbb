"""DiffusionNFT: the closed forms of its loss in float64, and the objective on a linear and on tiny real policies.

Numbers refer to section 1 of the specification of forward-process objectives, "invariant" to its 1.9.
"""

from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch

from flowrl import DiffusionNFT, FlowSDE, noise
from flowrl.objectives.diffusion_nft import MODES, nft_loss, old_decay, optimality

BETAS = [0.1, 1.0, 2.0]
REWARDS = (1.0, 2.0, 5.0, 0.0, 0.3, 0.9)
UNWEIGHTED = {"adaptive": False, "adv_clip_max": 1.0}  # before or after /beta is `form`


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Point:
    """A random place: x0, eps, v_old `[n, d]`, t, r `[n]`, and gradients of the summed loss there."""

    def __init__(self, n=4, d=6, seed=0):
        self.x0, self.eps, self.v_old, self.noise = randn(4, n, d, seed=seed)
        self.t = torch.linspace(0.1, 1.0, n, dtype=torch.float64)
        self.r = torch.linspace(0.05, 0.9, n, dtype=torch.float64)
        self.target = self.eps - self.x0
        self.e = self.v_old - self.target

    def loss(self, v, r=None, **kw):
        return nft_loss(v, self.v_old, self.x0, self.eps, self.t, self.r if r is None else r, **kw)

    def gradient(self, v, r=None, **kw):
        v = v.detach().clone().requires_grad_()
        return torch.autograd.grad(self.loss(v, r, **kw).sum(), v)[0]


def column(x):
    return x[:, None]


# --------------------------------------------------------------------------------------------------- the loss, float64


@pytest.mark.parametrize(("beta", "loss", "gradient"), [(1.0, 2.75, 2.5), (0.1, 25.25, 2.5)])
def test_worked_example_of_the_shipped_loss(beta, loss, gradient):  # invariant 1
    v = f64([1.2]).requires_grad_()
    zero = f64([0.0])
    value = nft_loss(v, f64([1.0]), zero, zero, f64(0.5), f64(0.75), nft_beta=beta)
    assert value.item() == pytest.approx(loss, rel=1e-14)
    assert torch.autograd.grad(value.sum(), v)[0].item() == pytest.approx(gradient, rel=1e-13)


def test_worked_example_of_the_papers_loss():  # invariant 1
    v = f64([1.2]).requires_grad_()
    zero = f64([0.0])
    value = nft_loss(v, f64([1.0]), zero, zero, f64(0.5), f64(0.75), form="paper")
    assert value.item() == pytest.approx(1.24, rel=1e-14)
    assert torch.autograd.grad(value.sum(), v)[0].item() == pytest.approx(1.4, rel=1e-14)


@pytest.mark.parametrize("beta", BETAS)
def test_papers_loss_is_equation_5(beta):
    p = Point()
    v = p.v_old + 0.3 * p.noise
    positive, negative = (1 - beta) * p.v_old + beta * v, (1 + beta) * p.v_old - beta * v
    one, other = ((x - p.target).square().mean(1) for x in (positive, negative))
    torch.testing.assert_close(p.loss(v, form="paper", nft_beta=beta), p.r * one + (1 - p.r) * other)
    # and the closed form of 1.4
    delta = v - p.v_old
    closed = p.e.square() + beta**2 * delta.square() + 2 * beta * column(2 * p.r - 1) * p.e * delta
    torch.testing.assert_close(p.loss(v, form="paper", nft_beta=beta), closed.mean(1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("c", [1.0, 5.0])
def test_unweighted_code_loss_is_the_papers_times_c_over_beta(beta, c):
    p = Point()
    v = p.v_old + 0.3 * p.noise
    code = p.loss(v, adaptive=False, nft_beta=beta, adv_clip_max=c)
    torch.testing.assert_close(code, c * p.loss(v, form="paper", nft_beta=beta) / beta, rtol=1e-12, atol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_adaptive_loss_is_the_weighted_clean_space_distance(beta):
    p = Point()
    v = p.v_old + 0.3 * p.noise
    x = (1 - column(p.t)) * p.x0 + column(p.t) * p.eps
    mixed = 0.0
    for sign, share in ((1, p.r), (-1, 1 - p.r)):
        implicit = p.v_old + sign * beta * (v - p.v_old)
        clean = x - column(p.t) * implicit
        weight = (clean - p.x0).abs().mean(1).clamp(min=1e-5)
        mixed = mixed + share * (clean - p.x0).square().mean(1) / weight
    torch.testing.assert_close(p.loss(v, nft_beta=beta), 5 * mixed / beta, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kw", [{}, {"adaptive": False}, {"form": "paper"}], ids=["adaptive", "plain", "paper"])
def test_an_even_sample_gives_no_gradient_at_the_old_policy(kw):  # invariant 2
    p = Point()
    assert p.gradient(p.v_old, r=torch.full((4,), 0.5, dtype=torch.float64), **kw).abs().max() < 1e-15


@pytest.mark.parametrize("kw", [{}, {"adaptive": False}, {"form": "paper"}], ids=["adaptive", "plain", "paper"])
def test_flipping_the_reward_flips_the_gradient_at_the_old_policy(kw):  # invariant 2
    p = Point()
    torch.testing.assert_close(p.gradient(p.v_old, **kw), -p.gradient(p.v_old, r=1 - p.r, **kw), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("beta", BETAS)
def test_unweighted_gradient(beta):  # invariant 3
    p = Point()
    delta = 0.3 * p.noise
    found = p.gradient(p.v_old + delta, nft_beta=beta, **UNWEIGHTED)
    expected = (2 * beta * delta + 2 * column(2 * p.r - 1) * p.e) / 6
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    best = -column(2 * p.r - 1) * p.e / beta
    assert p.gradient(p.v_old + best, nft_beta=beta, **UNWEIGHTED).abs().max() < 1e-13


@pytest.mark.parametrize(("beta", "optimum"), [(0.1, -5.8), (1.0, -0.13), (2.0, 0.185)])
def test_the_theorem_on_three_points(beta, optimum):  # invariant 4
    target, p, r, v_old = f64(-1, 2, 0.5), f64(0.3, 0.3, 0.4), f64(0.9, 0.2, 0.6), 0.5

    def slope(v):
        v = v.clone().requires_grad_()
        rows = nft_loss(
            v.expand(3)[:, None],
            torch.full((3, 1), v_old, dtype=torch.float64),
            -target[:, None],
            torch.zeros(3, 1, dtype=torch.float64),
            torch.full((3,), 0.4, dtype=torch.float64),
            r,
            nft_beta=beta,
            **UNWEIGHTED,
        )
        return torch.autograd.grad((p * rows).sum(), v)[0]

    at, ahead = slope(f64(0.0)), slope(f64(1.0))  # the loss is quadratic: one secant finds its minimum
    assert (at / (at - ahead)).item() == pytest.approx(optimum, rel=1e-10)
    # v_old + (2 / beta) Delta with Delta from the good samples and from the bad ones.
    alpha = (p * r).sum()
    good, bad = (p * r * target).sum() / alpha, (p * (1 - r) * target).sum() / (1 - alpha)
    for Delta in (alpha * (good - v_old), (1 - alpha) * (v_old - bad)):
        assert (v_old + 2 / beta * Delta).item() == pytest.approx(optimum, rel=1e-10)


def test_small_beta():  # invariant 5
    p = Point()
    delta = 0.3 * p.noise
    loss = p.loss(p.v_old + delta, nft_beta=1e-7, form="paper")
    torch.testing.assert_close(loss, p.e.square().mean(1), rtol=1e-6, atol=0)
    found = p.gradient(p.v_old + delta, nft_beta=1e-7, **UNWEIGHTED)
    torch.testing.assert_close(found, 2 * column(2 * p.r - 1) * p.e / 6, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("beta", BETAS)
def test_adaptive_gradient(beta):  # 1.4
    p = Point()
    v = p.v_old + 0.2 * p.noise
    plus, minus = (p.v_old + s * beta * (v - p.v_old) - p.target for s in (1, -1))
    m_plus, m_minus = (d.abs().mean(1, keepdim=True) for d in (plus, minus))
    r, t = column(p.r), column(p.t)
    expected = 5 / 6 * 2 * t * (r * plus / m_plus - (1 - r) * minus / m_minus)
    torch.testing.assert_close(p.gradient(v, nft_beta=beta), expected, rtol=1e-9, atol=1e-12)
    at_old = 2 * 5 * t * (2 * r - 1) / 6 * p.e / p.e.abs().mean(1, keepdim=True)
    torch.testing.assert_close(p.gradient(p.v_old, nft_beta=beta), at_old, rtol=1e-9, atol=1e-12)


def test_the_adaptive_pull_vanishes_along_the_error():  # invariant 6
    p = Point()
    even, good = torch.full((4,), 0.5, dtype=torch.float64), torch.full((4,), 0.75, dtype=torch.float64)
    assert p.gradient(p.v_old + 0.3 * p.e, r=even).abs().max() < 1e-14
    torch.testing.assert_close(
        p.gradient(p.v_old - 0.5 * p.e, r=good), p.gradient(p.v_old, r=good), rtol=1e-10, atol=1e-14
    )
    # Across the error it survives and points back.
    across = p.noise - (p.noise * p.e).sum(1, keepdim=True) / p.e.square().sum(1, keepdim=True) * p.e
    pull = p.gradient(p.v_old + 0.3 * across, r=even)
    assert ((pull * across).sum(1) > 0).all()


@pytest.mark.parametrize("kw", [{}, {"adaptive": False}, {"form": "paper"}], ids=["adaptive", "plain", "paper"])
def test_gradient_reaches_the_policys_velocity_only(kw):  # invariant 7
    p = Point()
    v = (p.v_old + 0.2 * p.noise).requires_grad_()
    old = p.v_old.clone().requires_grad_()
    loss = nft_loss(v, old, p.x0, p.eps, p.t, p.r, **kw).sum()
    found = torch.autograd.grad(loss, [v, old], allow_unused=True)
    assert found[0].abs().max() > 0 and found[1] is None


def test_the_adaptive_weight_is_held_fixed():  # invariant 7
    # With a gradient through w the loss would be |d|_2^2 / |d|_1, whose gradient is another one.
    p = Point()
    v = p.v_old + 0.2 * p.noise
    free = v.clone().requires_grad_()
    d = column(p.t) * (free - p.target)
    through = torch.autograd.grad((5 * d.square().mean(1) / d.abs().mean(1)).sum(), free)[0]
    ones = torch.ones(4, dtype=torch.float64)
    assert (p.gradient(v, r=ones) - through).abs().max() > 1e-2
    detached = column(p.t) ** 2 * (v - p.target) * 2 / (column(p.t) * (v - p.target)).abs().mean(1, keepdim=True)
    torch.testing.assert_close(p.gradient(v, r=ones), 5 * detached / 6, rtol=1e-10, atol=1e-13)


def test_permuting_the_batch_permutes_losses_and_gradients():  # invariant 7
    p, order = Point(), [2, 0, 3, 1]
    v = p.v_old + 0.2 * p.noise
    q = Point()
    q.x0, q.eps, q.v_old, q.t, q.r = (x[order] for x in (p.x0, p.eps, p.v_old, p.t, p.r))
    assert torch.equal(q.loss(v[order]), p.loss(v)[order])
    assert torch.equal(q.gradient(v[order]), p.gradient(v)[order])


@pytest.mark.parametrize("k", [0.5, 3.0])
def test_scaling(k):  # invariant 7
    p, q = Point(), Point()
    v = p.v_old + 0.2 * p.noise
    q.x0, q.eps, q.v_old = k * p.x0, k * p.eps, k * p.v_old
    torch.testing.assert_close(q.loss(k * v), k * p.loss(v), rtol=1e-10, atol=0)
    for kw in ({"adaptive": False}, {"form": "paper"}):
        torch.testing.assert_close(q.loss(k * v, **kw), k**2 * p.loss(v, **kw), rtol=1e-10, atol=0)


def test_the_weight_has_a_floor():
    zero, v = f64([0.0, 0.0]), f64([1e-7, -1e-7]).requires_grad_()
    loss = nft_loss(v, zero, zero, zero, f64(1.0), f64(1.0))
    assert loss.item() == pytest.approx(5 * 1e-14 / 1e-5)
    assert torch.isfinite(torch.autograd.grad(loss.sum(), v)[0]).all()


@pytest.mark.parametrize("c", [1.0, 2.0, 5.0])
def test_c_scales_loss_and_gradient(c):
    p = Point()
    v = p.v_old + 0.2 * p.noise
    torch.testing.assert_close(p.loss(v, adv_clip_max=c), c * p.loss(v, adv_clip_max=1.0))
    torch.testing.assert_close(p.gradient(v, adv_clip_max=c), c * p.gradient(v, adv_clip_max=1.0))


def test_the_value_at_the_old_policy_does_not_know_the_reward():  # 1.4
    p = Point()
    torch.testing.assert_close(p.loss(p.v_old), p.loss(p.v_old, r=1 - p.r), rtol=1e-12, atol=0)


@pytest.mark.parametrize("advantage", [-5.0, -1.2, 0.0, 2.5, 7.0])
def test_on_policy_the_direction_is_the_familys(advantage):  # 0.3, NFT row
    p, N, D, c = Point(), 4, 6, 5.0
    A = torch.full((N,), advantage, dtype=torch.float64)
    r = optimality(A, c)
    found = p.gradient(p.v_old, r=r, adaptive=False, adv_clip_max=c) / N  # the loss is a mean over samples
    torch.testing.assert_close(found, 2 * c * column(2 * r - 1) * p.e / (N * D), rtol=1e-10, atol=1e-14)
    # c (2r - 1) is the clipped advantage: AWM's direction with uniform weight, and CRD's with mean r = 1/2.
    torch.testing.assert_close(found, 2 * column(A.clamp(-c, c)) * p.e / (N * D), rtol=1e-10, atol=1e-14)


def test_float32_losses_stay_float32_and_images_are_averaged_over_all_elements():
    x0, eps, v_old, v = torch.randn(4, 2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    t, r = torch.tensor([0.3, 0.8]), torch.tensor([0.2, 0.9])
    loss = nft_loss(v, v_old, x0, eps, t, r)
    flat = nft_loss(*(x.flatten(1) for x in (v, v_old, x0, eps)), t, r)
    assert loss.dtype == torch.float32 and loss.shape == (2,)
    torch.testing.assert_close(loss, flat)


# ---------------------------------------------------------------------------------------- optimality and the old copy


def test_optimality_of_the_released_code():  # 1.2
    A = f64(-7, -5, -1, 0, 1, 2.5, 5)
    torch.testing.assert_close(optimality(A), f64(0, 0, 0.4, 0.5, 0.6, 0.75, 1))


def test_optimality_of_the_paper_clips_at_one_std():
    A = f64(-7, -1, -0.5, 0, 0.5, 1, 3)
    torch.testing.assert_close(optimality(A, z_mult=1.0), f64(0, 0, 0.25, 0.5, 0.75, 1, 1))


@pytest.mark.parametrize("z", [0.5, 1.0, 2.0, 5.0])
def test_z_mult_is_the_slope(z):
    A = f64(0.1).requires_grad_()
    assert torch.autograd.grad(optimality(A, 5.0, z).sum(), A)[0].item() == pytest.approx(1 / (2 * z))


def test_adv_clip_max_bounds_before_the_division():
    torch.testing.assert_close(optimality(f64(-4, -1, 3), 2.0, z_mult=4.0), f64(0.25, 0.375, 0.75))
    torch.testing.assert_close(optimality(f64(-4, -1, 3), 2.0), f64(0, 0.25, 1))


def test_modes():  # 1.2: they act before the division by 5
    A = f64(-7, -1, 0, 2, 6)
    expected = {
        "all": (0, 0.4, 0.5, 0.7, 1),
        "positive_only": (0.5, 0.5, 0.5, 0.7, 1),
        "negative_only": (0, 0.4, 0.5, 0.5, 0.5),
        "one_only": (0.5, 0.5, 0.5, 0.6, 0.6),
        "binary": (0.4, 0.4, 0.5, 0.6, 0.6),
    }
    assert set(expected) == set(MODES)
    for mode, r in expected.items():
        torch.testing.assert_close(optimality(A, mode=mode), f64(*r))


@pytest.mark.parametrize(
    ("schedule", "at", "expected"),
    [
        (0, (0, 1, 100, 10_000), (0, 0, 0, 0)),
        (1, (0, 1, 100, 500, 900), (0, 0.001, 0.1, 0.5, 0.5)),
        (2, (0, 75, 76, 100, 208, 209, 5000), (0, 0, 0.0075, 0.1875, 0.9975, 0.999, 0.999)),
    ],
)
def test_decay_of_the_old_copy(schedule, at, expected):  # invariant 8
    assert [old_decay(i, schedule) for i in at] == pytest.approx(expected)


class Copies:
    def __init__(self):
        self.calls = []

    def blend(self, name, decay):
        self.calls.append((name, decay))


def test_after_an_iteration_the_old_copy_follows():
    copies = Copies()
    for iteration in (0, 100, 900):
        DiffusionNFT().after_update(copies, iteration, {})
    DiffusionNFT(old_schedule=0).after_update(copies, 900, {})
    assert copies.calls == [("old", 0.0), ("old", 0.1), ("old", 0.5), ("old", 0.0)]


def test_with_decay_zero_the_old_copy_is_the_policy_bit_by_bit(make_sd3_policy, perturb, give_copies):  # invariant 8
    policy = make_sd3_policy(True)
    copies = give_copies(policy, "old")
    perturb(policy)
    before = {n: p.detach().clone() for n, p in policy.trainable().items()}
    DiffusionNFT().after_update(copies, 0, {})
    with policy.use("old"):
        assert all(torch.equal(p, before[n]) for n, p in policy.trainable().items())
    start = {n: p.detach().clone() for n, p in policy.trainable().items()}
    perturb(policy, seed=3)
    DiffusionNFT().after_update(copies, 100, {})
    with policy.use("old"):
        old = {n: p.detach().clone() for n, p in policy.trainable().items()}
    for n, p in policy.trainable().items():
        torch.testing.assert_close(old[n], 0.1 * start[n] + 0.9 * p.detach(), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------- the objective on a linear policy


@pytest.fixture
def watched(linear, linear_rollout):
    """(policy with old and live weights apart, its rollout, list of (weights in use, x, t, v) of every pass)."""
    rollout = linear_rollout(linear)
    linear.weights["old"] = linear.move(0.2, seed=1)._values()
    linear.move(0.1, seed=2)
    passes, stock, use = [], linear.velocity, linear.use

    def velocity(x, sigma, of):
        v = stock(x, sigma, of)
        passes.append((linear.used[-1] if linear.busy else "policy", x, sigma, v))
        return v

    @contextmanager
    def used(weights):
        with use(weights):
            linear.busy = True
            try:
                yield
            finally:
                linear.busy = False

    linear.busy, linear.velocity, linear.use = False, velocity, used
    return linear, rollout, passes


def test_training_times_are_the_rollouts_grid_in_an_order_of_their_own(watched, sde, update):
    policy, rollout, passes = watched
    objective = DiffusionNFT(kl=0.0, timestep_fraction=1.0)
    assert objective.columns(rollout) == 4
    update(objective, policy, rollout, sde)
    times = torch.stack([t for who, _, t, _ in passes if who == "policy"], 1)  # [rows, columns]
    grid = rollout.sigmas[:-1]
    assert all(torch.equal(row.sort(descending=True).values, grid) for row in times)
    assert len({tuple(row.tolist()) for row in times}) > 1


def test_each_sample_and_time_has_fresh_noise(watched, sde, update):
    policy, rollout, passes = watched
    update(DiffusionNFT(kl=0.0), policy, rollout, sde)
    eps = []
    for _, x, t, _ in [p for p in passes if p[0] == "policy"]:
        t = t.double()[:, None]
        eps.append((x - (1 - t) * rollout.latents) / t)
    eps = torch.stack(eps, 1)  # [rows, columns, d]
    distance = torch.cdist(eps.flatten(0, 1), eps.flatten(0, 1)) + 9 * torch.eye(18, dtype=torch.float64)
    assert distance.min() > 0.3
    assert eps.mean().abs() < 4 / 90**0.5 and 0.6 < eps.std() < 1.4


def test_the_noise_is_not_the_rollouts(watched, sde, update):
    policy, rollout, passes = watched
    update(DiffusionNFT(kl=0.0), policy, rollout, sde)
    index = [p.index for p in rollout.prompts]
    used = [
        noise.batch_normal((5,), rollout.seed, rollout.iteration, index, rollout.members, step) for step in range(-1, 4)
    ]
    for _, x, t, _ in [p for p in passes if p[0] == "policy"]:
        t = t.double()[:, None]
        eps = (x - (1 - t) * rollout.latents) / t
        assert all((eps - u).abs().amax(1).min() > 1e-2 for u in used)


@pytest.mark.parametrize("kw", [{}, {"adaptive": False}, {"form": "paper"}, {"nft_beta": 0.1}, {"z_mult": 1.0}])
def test_the_objective_is_the_mean_of_the_loss(watched, sde, update, kw):
    policy, rollout, passes = watched
    objective = DiffusionNFT(kl=0.3, **kw)
    loss, _, metrics = update(objective, policy, rollout, sde)
    # Everything the formula needs is what the policy was asked and what it answered.
    by = defaultdict(list)
    for who, x, t, v in passes:
        by[who].append((x, t, v.detach()))
    assert [len(by[w]) for w in ("policy", "old", "reference")] == [3, 3, 3]
    r = torch.tensor(REWARDS, dtype=torch.float64)
    A = torch.cat([(g - g.mean()) / (r.std(correction=0) + 1e-4) for g in r.split(3)])
    total = pull = moved = 0.0
    for (x, t, v), (x_old, t_old, v_old), (_, _, v_ref) in zip(by["policy"], by["old"], by["reference"], strict=True):
        assert torch.equal(x, x_old) and torch.equal(t, t_old)
        t = t.double()
        x0 = rollout.latents
        eps = (x - (1 - t[:, None]) * x0) / t[:, None]
        options = {"nft_beta": objective.nft_beta, "form": objective.form, "adaptive": objective.adaptive}
        total += nft_loss(v, v_old, x0, eps, t, optimality(A, z_mult=objective.z_mult), **options).mean() / 3
        pull += (v - v_ref).square().mean() / 3
        moved += (v - v_old).square().mean() / 3
    assert metrics["pg_loss"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(pull.item(), rel=1e-5)
    assert metrics["old_distance"] == pytest.approx(moved.item(), rel=1e-5)
    assert loss == metrics["loss"] == pytest.approx((total + 0.3 * pull).item(), rel=1e-5)


def test_gradient_is_a_finite_difference(watched, sde, update):
    # Without the adaptive weight, which is held fixed and so is no derivative of the value.
    policy, rollout, _ = watched
    objective = DiffusionNFT(kl=0.5, adaptive=False)
    _, grads, _ = update(objective, policy, rollout, sde)
    h = 1e-5
    for name, p in policy.trainable().items():
        values = []
        for shift in (h, -2 * h):
            with torch.no_grad():
                p[2] += shift
            values.append(update(objective, policy, rollout, sde)[0])
        with torch.no_grad():
            p[2] += h
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(grads[name][2].item(), rel=1e-6, abs=1e-8)


def test_kl_adds_its_multiple(watched, sde, update, close):
    policy, rollout, _ = watched
    runs = {b: update(DiffusionNFT(kl=b), policy, rollout, sde) for b in (0.0, 0.2, 0.6)}
    value = runs[0.2][2]["kl"]
    assert value > 1e-4 and "kl" not in runs[0.0][2]
    assert runs[0.6][0] - runs[0.0][0] == pytest.approx(0.6 * value, rel=1e-7)
    once = {n: (runs[0.2][1][n] - g) * 3 for n, g in runs[0.0][1].items()}
    close(once, {n: runs[0.6][1][n] - g for n, g in runs[0.0][1].items()}, rtol=1e-6)
    assert all(g.abs().max() > 1e-4 for g in once.values())


def test_the_passes_with_gradients_come_last(watched, sde, micros, table):
    policy, rollout, passes = watched
    objective = DiffusionNFT(kl=0.1)
    micro = next(iter(micros(rollout, *table(objective, rollout))))
    objective.loss(policy, sde, micro)
    assert [who for who, *_ in passes] == ["old", "reference", "policy"]
    assert [v.requires_grad for *_, v in passes] == [False, False, True]


def test_the_old_weights_matter(watched, sde, update, close):
    policy, rollout, _ = watched
    far = update(DiffusionNFT(kl=0.0), policy, rollout, sde)
    policy.weights["old"] = policy._values()
    near = update(DiffusionNFT(kl=0.0), policy, rollout, sde)
    assert near[2]["old_distance"] == 0 < far[2]["old_distance"] and near[0] != far[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up_to_the_update(watched, sde, update, close, size):
    policy, rollout, _ = watched
    objective = DiffusionNFT(kl=0.2)
    loss, grads, metrics = update(objective, policy, rollout, sde)
    parts = update(objective, policy, rollout, sde, size=size, order=[4, 1, 5, 0, 2, 3])
    assert parts[0] == pytest.approx(loss, rel=1e-12)
    close(parts[1], grads)
    for name, value in metrics.items():
        assert parts[2][name] == pytest.approx(value, rel=1e-10), name


def test_invalid_rows_give_no_gradient(watched, sde, update, close):
    policy, rollout, _ = watched
    rewards = (1.0, 2.0, float("nan"), 0.0, 0.3, 0.9)
    valid = [True, True, False, True, True, True]
    loss, grads, _ = update(DiffusionNFT(kl=0.2), policy, rollout, sde, rewards=rewards, valid=valid)
    kept = [0, 1, 3, 4, 5]
    without = update(DiffusionNFT(kl=0.2), policy, rollout.rows(kept), sde, rewards=[rewards[i] for i in kept])
    assert loss == pytest.approx(without[0], rel=1e-12)
    close(grads, without[1])


def test_without_spread_only_the_pull_to_the_old_policy_is_left(watched, sde, update):  # 14.3
    policy, rollout, _ = watched
    flat = (0.3,) * 3 + (0.8,) * 3
    assert any(g.any() for g in update(DiffusionNFT(kl=0.0), policy, rollout, sde, rewards=flat)[1].values())
    policy.weights["old"] = policy._values()
    grads = update(DiffusionNFT(kl=0.0), policy, rollout, sde, rewards=flat)[1]
    assert max(g.abs().max().item() for g in grads.values()) < 1e-15


@pytest.mark.parametrize("mode", MODES)
def test_modes_reach_the_loss(watched, sde, update, mode):
    policy, rollout, _ = watched
    policy.weights["old"] = policy._values()
    run = lambda m: update(DiffusionNFT(kl=0.0, mode=m), policy, rollout, sde)[1]["w"]  # noqa: E731
    assert run(mode).any()
    if mode != "all":
        assert (run(mode) - run("all")).abs().max() > 1e-4
    # At the old policy the gradient is linear in 2r - 1: both sides together are the whole.
    torch.testing.assert_close(run("positive_only") + run("negative_only"), run("all"), rtol=1e-5, atol=1e-9)


# ------------------------------------------------------------------------------------------------------- real policies


@pytest.fixture(params=["sd3-lora", "sd3-full", "flux-lora"])
def real(request, make_sd3_policy, make_flux_policy, make_rows, perturb, give_copies):
    """(policy, sampler, rollout of 2 x 2 by the old weights); policy, old and reference all differ."""
    kind, peft = request.param.split("-")
    policy = {"sd3": make_sd3_policy, "flux": make_flux_policy}[kind](True if peft == "lora" else None)
    copies = give_copies(policy, *([] if peft == "lora" else ["reference"]))
    perturb(policy, scale=0.03)
    copies.capture("old")
    sampler = FlowSDE.from_config(policy.pipe.scheduler.config, steps=4, guidance_scale={"sd3": 1.0, "flux": 3.5}[kind])
    prompts, members = make_rows()
    with policy.use("old"):
        rollout = policy.sample(prompts, members, sampler, seed=1, iteration=0, batch_size=4)
    return perturb(policy, scale=0.01, seed=4), sampler, rollout


def test_real_policy_trains_on_any_split(real, update, close):
    policy, sampler, rollout = real
    objective = DiffusionNFT(kl=0.1)
    weights = {n: p.detach().clone() for n, p in policy.module.named_parameters()}
    loss, grads, metrics = update(objective, policy, rollout, sampler)
    scale = max(g.abs().max().item() for g in grads.values())
    assert scale > 1e-4 and metrics["kl"] > metrics["old_distance"] > 0
    for size in (1, 3):
        parts = update(objective, policy, rollout, sampler, size=size, order=[2, 0, 3, 1])
        assert parts[0] == pytest.approx(loss, rel=1e-4)
        close(parts[1], grads, rtol=1e-2, atol=1e-3 * scale)
    assert all(torch.equal(p, weights[n]) for n, p in policy.module.named_parameters())


def test_real_policy_gradient_is_the_formulas(real, update, close):
    policy, sampler, rollout = real
    objective = DiffusionNFT(kl=0.1, adaptive=False)
    _, grads, _ = update(objective, policy, rollout, sampler)
    r = torch.tensor(REWARDS[:4])
    A = torch.cat([(g - g.mean()) / (r.std(correction=0) + 1e-4) for g in r.split(2)])
    index, x0 = [p.index for p in rollout.prompts], rollout.latents
    seen, stock = [], policy.velocity
    policy.velocity = lambda x, t, of: seen.append(t) or stock(x, t, of)
    update(objective, policy, rollout, sampler)
    del policy.velocity
    parameters = list(policy.trainable().values())
    oracle = [torch.zeros_like(p) for p in parameters]
    for u in range(3):
        t = seen[3 * u]
        eps = noise.batch_normal(x0.shape[1:], rollout.seed, rollout.iteration, index, rollout.members, 4 + u)
        time = t.reshape(-1, *[1] * (x0.ndim - 1))
        x = (1 - time) * x0 + time * eps
        with torch.no_grad():
            with policy.use("old"):
                v_old = policy.velocity(x, t, rollout)
            with policy.use("reference"):
                v_ref = policy.velocity(x, t, rollout)
        v = policy.velocity(x, t, rollout)
        delta, e = v - v_old, v_old - (eps - x0)
        rows = lambda y: y.flatten(1).mean(1)  # noqa: E731
        c, s = 5.0, (A / 5).clamp(-1, 1)
        policy_loss = c * (rows(e**2) + rows(delta**2) + 2 * s * rows(e * delta))  # 1.4 with beta 1
        expected = (policy_loss + 0.1 * rows((v - v_ref) ** 2)).mean() / 3
        oracle = [a + b for a, b in zip(oracle, torch.autograd.grad(expected, parameters), strict=True)]
    scale = max(g.abs().max().item() for g in oracle)
    close(grads, dict(zip(grads, oracle, strict=True)), rtol=1e-2, atol=1e-3 * scale)


def test_real_policy_first_iteration_has_no_distance_to_its_old_self(make_sd3_policy, make_rows, give_copies, update):
    policy = make_sd3_policy(True)
    give_copies(policy, "old")
    sampler = FlowSDE(steps=3)
    prompts, members = make_rows()
    rollout = policy.sample(prompts, members, sampler, seed=1, iteration=0, batch_size=4)
    _, grads, metrics = update(DiffusionNFT(), policy, rollout, sampler)
    assert metrics["old_distance"] == metrics["kl"] == 0  # B of a new adapter is zero
    assert any(g.any() for g in grads.values())
    flat = update(DiffusionNFT(), policy, rollout, sampler, rewards=(0.3,) * 4)[1]
    assert max(g.abs().max().item() for g in flat.values()) < 1e-7 * max(g.abs().max().item() for g in grads.values())


@pytest.mark.parametrize("lora", [True, False])
def test_on_policy_the_old_pass_is_saved_and_changes_no_bit(
    make_sd3_policy, make_rows, give_copies, perturb, update, lora
):
    policy = make_sd3_policy(lora or None)
    copies = give_copies(policy, "old", *(() if lora else ("reference",)))
    perturb(policy)
    sampler, objective = FlowSDE(steps=3), DiffusionNFT(kl=0.1, old_schedule=0)
    objective.after_update(copies, 7, {})
    prompts, members = make_rows()
    rollout = policy.sample(prompts, members, sampler, seed=1, iteration=0, batch_size=4)
    calls = []
    policy.module.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    assert policy.equals("old") and policy.equals("policy") and not policy.equals("reference")
    loss, grads, metrics = update(objective, policy, rollout, sampler)
    assert calls == [False, True] * objective.columns(rollout)  # reference, policy
    calls.clear()
    policy.equals = lambda weights: False
    again = update(objective, policy, rollout, sampler)
    assert calls == [False, False, True] * objective.columns(rollout)
    assert loss == again[0] and metrics == again[2]
    assert all(torch.equal(grads[n], again[1][n]) for n in grads)


# -------------------------------------------------------------------------------------------- arguments and interface


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        ({"nft_beta": 0.0}, "nft_beta"),
        ({"nft_beta": -1.0}, "nft_beta"),
        ({"kl": -0.1}, "kl"),
        ({"adv_clip_max": 0.0}, "adv_clip_max"),
        ({"old_schedule": 3}, r"unknown old_schedule 3.*\[0, 1, 2\]"),
        ({"form": "draft"}, "unknown form 'draft'.*'code'.*'paper'"),
        ({"mode": "positive"}, "unknown mode 'positive'.*'positive_only'"),
        ({"z_mult": 0.0}, "z_mult"),
        ({"z_mult": -1.0}, "z_mult"),
        ({"timestep_fraction": 0.0}, "timestep_fraction"),
        ({"timestep_fraction": 1.1}, "timestep_fraction"),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(bad, names):
    with pytest.raises(ValueError, match=names):
        DiffusionNFT(**bad)


def test_requirements_and_behaviour():
    assert DiffusionNFT().requires == {"old", "reference"} and DiffusionNFT(kl=0.0).requires == {"old"}
    assert DiffusionNFT().behaviour == "old" and DiffusionNFT().state_dict() == {}


@pytest.mark.parametrize(("steps", "fraction", "columns"), [(10, 0.99, 9), (25, 0.99, 24), (10, 0.5, 5), (1, 0.99, 1)])
def test_columns(linear, linear_rollout, steps, fraction, columns):  # 1.5
    rollout = linear_rollout(linear, FlowSDE(steps=steps))
    assert DiffusionNFT(timestep_fraction=fraction).columns(rollout) == columns


def test_published_defaults():
    o = DiffusionNFT()
    assert (o.nft_beta, o.kl, o.adv_clip_max, o.old_schedule, o.timestep_fraction) == (1.0, 1e-4, 5.0, 1, 0.99)


def test_advantages_are_flow_grpos(linear, linear_rollout, table):  # 0.2
    rollout = linear_rollout(linear)
    _, out = table(DiffusionNFT(), rollout, rewards=(1, 2, 3, 4, 4, 4))
    torch.testing.assert_close(out.adv[:, 0], f64(-0.86595, 0, 0.86595, 0, 0, 0), atol=1e-5, rtol=0)
    assert torch.equal(out.adv[3:], torch.zeros(3, 3, dtype=torch.float64))
