"""Flow-DPPO's loss against the formula written out, its divergence against torch.distributions and its mask against
the table, in float64 on a linear velocity and on tiny SD3 and FLUX policies. Numbers refer to the specification of flow
policy gradients."""

from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowrl import CPS, CPWS, ODE, DanceSDE, FlowDPPO, FlowSDE, RandomSteps, Trainer, TrainingArguments
from flowrl.core import AdvOut, Batch
from flowrl.distributions import Gaussian
from flowrl.objectives import Micro
from flowrl.policy import Transition
from flowrl.samplers import Explicit, SingleShift
from flowrl.training.recipe import evaluation_sampler, load_recipe

GRID = (1.0, 0.8, 0.55, 0.25, 0.0)
REWARDS = (1.0, 2.0, 5.0, 0.0, 0.3, 0.9)
KERNELS = [FlowSDE, DanceSDE, CPS, CPWS]
BIG = 3e-3  # between the divergences of `off_policy`


def advantages(rewards, groups):
    """Group mean, std of all rewards with divisor n - 1, 1e-8: section 6."""
    r = torch.tensor(rewards, dtype=torch.float64)
    mean = torch.stack([r[[k for k, g in enumerate(groups) if g == mine]].mean() for mine in groups])
    return (r - mean) / (r.std() + 1e-8)


def groups_of(rollout):
    return [p.index for p in rollout.prompts]


def steps(policy, rollout, sampler):
    """(mean, std, old mean, log r, D) of every column, with torch's Normal; gradient through the policy."""
    for u in range(rollout.units):
        x, action, old = rollout.states[:, u], rollout.actions[:, u], rollout.means[:, u]
        A, C, std = sampler.coefficients(*rollout.sigmas[[u, u + 1, 1]])
        mean = A * x + C * policy.velocity(x, rollout.sigmas[u], rollout)
        log_ratio = Normal(mean, std).log_prob(action).flatten(1).mean(1) - rollout.log_prob[:, u]
        divergence = kl_divergence(Normal(old, std), Normal(mean, std)).flatten(1).mean(1)
        yield mean, std, old, log_ratio, divergence.detach()


def written_out(policy, rollout, sampler, adv, delta, rule="ratio", kl=0.0):
    """(loss, share of masked units) of section 6."""
    loss, masked, units = 0.0, 0, rollout.units
    for u, (mean, std, _, log_ratio, divergence) in enumerate(steps(policy, rollout, sampler)):
        ratio = log_ratio.exp()
        if rule == "ratio":
            outwards = ((adv > 0) & (ratio > 1)) | ((adv < 0) & (ratio < 1))
        else:
            outwards = torch.sign(adv * (log_ratio - divergence)) > 0
        M = ~((divergence >= delta) & outwards)
        loss = loss + torch.where(M, -adv * ratio, 0).mean() / units
        masked += (~M).sum().item()
        if kl:
            w, b = (policy.weights["reference"][n] for n in "wb")
            A, C, _ = sampler.coefficients(*rollout.sigmas[[u, u + 1, 1]])
            x = rollout.states[:, u]
            reference = A * x + C * (w * x + b * rollout.sigmas[u].double())
            loss = loss + kl * kl_divergence(Normal(mean, std), Normal(reference, std)).mean() / units
    return loss, masked / (units * len(adv))


@pytest.fixture
def off_policy(linear, linear_rollout):
    """A moved policy, and a rollout of its former self: D from 5e-4 to 2e-2."""
    rollout = linear_rollout(linear)
    return linear.move(0.1), rollout


def oracle(policy, loss):
    named = policy.trainable()
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


# --------------------------------------------------------------------------------------------------- the whole formula


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", ["ratio", "predicted"])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_loss_and_gradient_are_the_formula(linear, linear_rollout, update, close, kernel, rule, kl):
    sampler = kernel(steps=4, schedule=Explicit(GRID))
    rollout = linear_rollout(linear, sampler)
    linear.move(0.1)
    delta = torch.cat([d for *_, d in steps(linear, rollout, sampler)]).median().item() * (1 + 1e-9)
    loss, grads, metrics = update(
        FlowDPPO(delta=delta, divergence_rule=rule, kl=kl), linear, rollout, sampler, rewards=REWARDS
    )
    adv = advantages(REWARDS, groups_of(rollout))
    expected, masked = written_out(linear, rollout, sampler, adv, delta, rule, kl)
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    close(grads, oracle(linear, expected), rtol=1e-8)
    assert metrics["drop_frac"] == pytest.approx(masked, rel=1e-6) and 0.1 < masked < 0.6
    assert metrics["kl_loss"] == pytest.approx(kl * metrics["kl"]) and bool(metrics["kl"]) == bool(kl)


def test_without_a_region_it_is_the_unclipped_policy_gradient(off_policy, sde, update, close):
    policy, rollout = off_policy
    loss, grads, metrics = update(FlowDPPO(delta=float("inf")), policy, rollout, sde)
    adv = advantages(REWARDS, groups_of(rollout))
    plain = sum(-(adv * log_ratio.exp()).mean() / 3 for *_, log_ratio, _ in steps(policy, rollout, sde))
    assert loss == pytest.approx(plain.item(), rel=1e-12) and metrics["drop_frac"] == 0
    close(grads, oracle(policy, plain))
    assert metrics["log_ratio_max"] > 0.05  # far beyond any published clip


def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(linear, linear_rollout, sde, update, close):  # 10.9
    rollout = linear_rollout(linear)
    loss, grads, metrics = update(FlowDPPO(), linear, rollout, sde)
    adv = advantages(REWARDS, groups_of(rollout))
    plain = sum(-(adv * linear.evaluate(rollout, u, sde).log_prob).mean() / 3 for u in range(3))
    close(grads, oracle(linear, plain))
    assert loss == pytest.approx(0, abs=1e-12) and metrics["divergence"] == metrics["drop_frac"] == 0


def test_gradient_is_a_finite_difference(off_policy, sde, update):
    policy, rollout = off_policy
    objective = FlowDPPO(delta=BIG, kl=0.2)
    _, grads, metrics = update(objective, policy, rollout, sde)
    assert metrics["drop_frac"] > 0.1
    h = 1e-6
    for name, p in policy.trainable().items():
        values = []
        for shift in (h, -2 * h):
            with torch.no_grad():
                p[1] += shift
            values.append(update(objective, policy, rollout, sde)[0])
        with torch.no_grad():
            p[1] += h
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(grads[name][1].item(), rel=1e-5, abs=1e-8)


# -------------------------------------------------------------------------------------------------------- coefficients


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [0.1, -0.1])
def test_mask_table(off_policy, sde, outside, advantage, log_ratio):  # 10.11
    policy, rollout = off_policy
    part = rollout.rows([0, 1])
    unit = 1
    now = policy.evaluate(part, unit, sde)
    part = replace(part, log_prob=now.log_prob.detach()[:, None].expand(2, 3) - log_ratio)
    objective = FlowDPPO()
    divergence = objective.measure(now, part, unit)["divergence"]
    objective = FlowDPPO(delta=divergence.min().item() * 0.9 if outside else divergence.max().item() * 1.1)
    batch = Batch(mask=torch.ones(2, 1, dtype=torch.bool), reward=torch.zeros(2), group_id=part.group_id)
    micro = Micro(part, unit, batch.slice(), AdvOut(torch.full((2, 1), advantage, dtype=torch.float64)))
    loss, metrics = objective.loss(policy, sde, micro)
    masked = outside and advantage * log_ratio > 0
    assert metrics["drop_frac"] == float(masked)
    grads = torch.autograd.grad(loss, list(policy.trainable().values()))
    assert all(bool(g.any()) == (not masked) for g in grads)
    assert loss.item() == pytest.approx(0 if masked else -advantage * torch.tensor(log_ratio).exp().item(), rel=1e-6)


def test_a_smaller_region_masks_more(off_policy, sde, update, close):
    policy, rollout = off_policy
    adv = advantages(REWARDS, groups_of(rollout))
    shares = []
    for delta in (1e-6, 1e-3, 3e-3, 1e-2, 1.0):
        loss, grads, metrics = update(FlowDPPO(delta=delta), policy, rollout, sde)
        expected, masked = written_out(policy, rollout, sde, adv, delta)
        assert loss == pytest.approx(expected.item(), rel=1e-10)
        close(grads, oracle(policy, expected))
        assert metrics["drop_frac"] == pytest.approx(masked, rel=1e-6)
        shares.append(masked)
    assert shares == sorted(shares, reverse=True) and len(set(shares)) > 3 and shares[-1] == 0


def test_kl_adds_its_multiple_to_loss_and_gradient(off_policy, sde, update, close):
    policy, rollout = off_policy
    runs = {b: update(FlowDPPO(delta=BIG, kl=b), policy, rollout, sde) for b in (0.0, 0.2, 0.6)}
    value = runs[0.2][2]["kl"]
    assert value > 1e-5
    for b in (0.2, 0.6):
        assert runs[b][0] - runs[0.0][0] == pytest.approx(b * value, rel=1e-9)
    once = {n: (runs[0.2][1][n] - g) * 3 for n, g in runs[0.0][1].items()}
    close(once, {n: runs[0.6][1][n] - g for n, g in runs[0.0][1].items()}, rtol=1e-8)
    assert all(g.abs().max() > 1e-4 for g in once.values())


# ------------------------------------------------------------------------------------------------------ the divergence


def measured(old, new, std):
    """D `[b]` as the objective measures it."""
    transition = Transition(Gaussian(new, std), torch.zeros(len(new)), new)
    return FlowDPPO().measure(transition, _Recorded(old[:, None]), 0)["divergence"][:, 0]


class _Recorded:
    def __init__(self, means):
        self.means = means


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_divergence_is_the_kl_with_the_samplers_own_std(kernel, step):  # 10.7
    sampler = kernel(steps=4, schedule=Explicit(GRID), noise_level=0.3)
    x, v, v_new = torch.randn(3, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    sigmas = sampler.sigmas()
    old, new = (sampler.transition(x, u, sigmas, step) for u in (v, v_new))
    D = measured(old.mean, new.mean, new.std)
    _, C, std = sampler.coefficients(*sigmas[[step, step + 1, 1]])
    torch.testing.assert_close(
        D, kl_divergence(Normal(old.mean, std), Normal(new.mean, std)).mean(1), rtol=1e-10, atol=0
    )
    torch.testing.assert_close(D, C**2 * ((v - v_new) ** 2).mean(1) / (2 * std**2), rtol=1e-10, atol=0)
    if kernel in (DanceSDE, CPS):  # the release once took Flow-SDE's std for all
        assert std.item() != pytest.approx(
            FlowSDE(noise_level=0.3).coefficients(*sigmas[[step, step + 1, 1]])[2].item()
        )


def test_means_in_half_precision_would_drown_it():  # 0.2
    rng = torch.Generator().manual_seed(0)
    d, std = 65536, 0.743  # SD3's second step
    old = torch.randn(4, d, generator=rng)
    for true, read in ((1.8e-8, 4.1e-7), (1.8e-6, 4.8e-6)):
        step = std * (2 * true) ** 0.5 * torch.randn(4, d, generator=rng, dtype=torch.float64)
        new = (old.double() + step).float()
        exact = measured(old.double(), old.double() + step, std)
        torch.testing.assert_close(measured(old, new, std).double(), exact, rtol=2e-3, atol=0)
        rounded = measured(old.bfloat16(), new.bfloat16(), std)
        assert rounded.mean().item() == pytest.approx(read, rel=0.2)
        assert (exact < 2e-6).all() and (rounded > 2 * exact).all()


# ------------------------------------------------------------------------------------------------------- real policies


@pytest.fixture
def real(make_sd3_policy, make_flux_policy, make_rows, perturb):
    """(kind, kernel, dtype) -> (policy, sampler, rollout of groups 2 x 2), after some training."""

    def make(kind, kernel=FlowSDE, dtype=torch.float32, **kw):
        policy = perturb({"sd3": make_sd3_policy, "flux": make_flux_policy}[kind](True, dtype=dtype), scale=0.03)
        guidance = {"sd3": 4.5, "flux": 3.5}[kind]
        sampler = kernel.from_config(policy.pipe.scheduler.config, steps=4, guidance_scale=guidance, **kw)
        prompts, members = make_rows()
        return policy, sampler, policy.sample(prompts, members, sampler, seed=1, iteration=0, batch_size=4)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_before_an_update_the_divergence_is_exactly_zero(real, update, kind, dtype):
    policy, sampler, rollout = real(kind, dtype=dtype)
    assert rollout.means.dtype == torch.float32
    assert not torch.equal(rollout.means, rollout.means.bfloat16().float())  # float32 for real, not by cast
    _, grads, metrics = update(FlowDPPO(delta=1e-12), policy, rollout, sampler)
    assert metrics["divergence"] == metrics["drop_frac"] == 0
    assert any(g.any() for g in grads.values())


@pytest.mark.parametrize("kernel", KERNELS)
def test_real_policy_divergence_and_mask(real, perturb, update, kernel):
    policy, sampler, rollout = real("sd3", kernel)
    perturb(policy, scale=0.01, seed=5)
    values = []
    for u in range(rollout.units):
        start, end = rollout.interval(u)
        with torch.no_grad():
            v = policy.velocity(rollout.states[:, u], rollout.sigmas[start], rollout)
        A, C, std = sampler.coefficients(*rollout.sigmas[[start, end, 1]])
        mean = A * rollout.states[:, u].double() + C * v.double()
        values.append(kl_divergence(Normal(rollout.means[:, u].double(), std), Normal(mean, std)).flatten(1).mean(1))
    D = torch.stack(values, 1)
    _, _, metrics = update(FlowDPPO(delta=D.min().item() / 2), policy, rollout, sampler)
    assert metrics["divergence"] == pytest.approx(D.mean().item(), rel=1e-3)
    ratio = torch.stack([policy.evaluate(rollout, u, sampler).log_prob for u in range(rollout.units)], 1)
    outwards = advantages(REWARDS[:4], groups_of(rollout))[:, None] * (ratio - rollout.log_prob) > 0
    assert metrics["drop_frac"] == pytest.approx(outwards.double().mean().item(), abs=1e-6)
    assert 0 < metrics["drop_frac"] < 1


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_add_up_to_the_update(real, perturb, update, close, size):
    policy, sampler, rollout = real("sd3")
    perturb(policy, scale=0.01, seed=5)
    objective = FlowDPPO(delta=1e-5, kl=0.05)
    loss, grads, metrics = update(objective, policy, rollout, sampler)
    parts = update(objective, policy, rollout, sampler, size=size)
    assert parts[0] == pytest.approx(loss, abs=1e-5)
    for name in ("drop_frac", "divergence"):
        assert parts[2][name] == pytest.approx(metrics[name], rel=1e-4)
    scale = max(g.abs().max().item() for g in grads.values())
    close(parts[1], grads, rtol=1e-3, atol=1e-4 * scale)


def test_it_trains_with_two_updates_of_which_the_second_meets_the_mask(make_sd3_policy, tmp_path):
    trainer = Trainer(
        make_sd3_policy(True),
        FlowDPPO(delta=1e-9),
        FlowSDE(steps=5, schedule=SingleShift(1.5), plan=RandomSteps(2, (0, 4))),
        lambda images, prompts: images.flatten(1).mean(1),
        ["red square", "a green cat"],
        args=TrainingArguments(
            output_dir=str(tmp_path),
            iterations=1,
            prompts_per_iteration=2,
            group_size=4,
            updates_per_iteration=2,
            learning_rate=3e-3,
            log_with=(),
        ),
    )
    rollout, batch, advantage, _ = trainer.rollout(0)
    assert batch.mask.shape == (8, 2) and len(set(rollout.plans)) == 1
    first, second = (trainer.update(rollout, batch, advantage, 0, u) for u in range(2))
    assert first["divergence"] < 1e-12 and first["drop_frac"] == 0
    assert second["divergence"] > 1e-9 and 0 < second["drop_frac"] < 1


# -------------------------------------------------------------------------------------------- arguments and interface


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"delta": 0.0}, "delta must be positive, got 0.0"),
        ({"delta": -1.0}, "delta must be positive"),
        ({"delta": float("nan")}, "delta must be positive"),
        ({"divergence_rule": "angle"}, "unknown divergence_rule 'angle': one of ratio, predicted"),
        ({"kl": -0.1}, "kl must not be negative"),
        ({"kl_form": "k3"}, "unknown kl_form 'k3'"),
    ],
)
def test_arguments_out_of_range_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        FlowDPPO(**bad)


def test_requirements_and_defaults():
    assert FlowDPPO().requires == {"log_prob", "mean"}
    assert FlowDPPO(kl=0.1).requires == {"log_prob", "mean", "reference"}
    assert (FlowDPPO().delta, FlowDPPO().divergence_rule, FlowDPPO().kl_form) == (1e-6, "ratio", "exact_mean")
    assert FlowDPPO().algorithm.cfg.ddof == 1 and FlowDPPO().algorithm.cfg.eps == 1e-8


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_sampler_with_stochastic_steps_is_accepted(kernel):
    FlowDPPO().check(kernel())
    FlowDPPO().check(kernel(logprob="unnormalised"))  # as the released runs with CPS
    with pytest.raises(ValueError, match=r"FlowDPPO scores stochastic steps.*noise_level > 0"):
        FlowDPPO().check(kernel(noise_level=0.0))


def test_what_it_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="FlowDPPO scores stochastic steps, and ODE"):
        FlowDPPO().check(ODE())
    with pytest.raises(ValueError, match=r"'predicted' subtracts D from log r.*logprob='gaussian'"):
        FlowDPPO(divergence_rule="predicted").check(CPS(logprob="unnormalised"))


def test_recipes():
    shapes, sd35 = load_recipe("shapes-flow-dppo"), load_recipe("sd35-flow-dppo")
    assert isinstance(shapes.objective, FlowDPPO) and shapes.training.updates_per_iteration > 1
    assert sd35.objective == FlowDPPO(delta=1e-5)
    assert sd35.sampler == FlowSDE(steps=10, noise_level=0.7, schedule=SingleShift(3.0), plan=RandomSteps(3, (0, 5)))
    assert (sd35.lora.rank, sd35.lora.alpha) == (32, 64) and evaluation_sampler(sd35).guidance_scale == 1.0
    t = sd35.training
    assert (t.prompts_per_iteration, t.group_size, t.updates_per_iteration, t.learning_rate) == (48, 16, 2, 3e-4)
    assert t.weight_decay == 0 and "not run by us" in sd35.description
