"""Flow-GRPO's loss against the formula written out with torch.distributions, in float64 on a linear velocity and in
float32 on tiny SD3 and FLUX policies. Numbers refer to the specification of flow policy gradients."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowrl import CPS, CPWS, ODE, DanceSDE, DiffusionNFT, FlowGRPO, FlowSDE
from flowrl.core import AdvOut, Batch
from flowrl.distributions import Gaussian
from flowrl.objectives import Micro
from flowrl.objectives.flow_grpo import transition_kl
from flowrl.policy import Transition
from flowrl.samplers import Explicit

A_NOISE = 0.7
GRID = (1.0, 0.8, 0.55, 0.25, 0.0)
REWARDS = (1.0, 2.0, 5.0, 0.0, 0.3, 0.9)
FORMS = ["flow_grpo", "exact_mean", "exact_sum", "v_mse"]


def scored(distribution, velocity):
    """A transition without an action."""
    return Transition(distribution, torch.zeros(len(velocity)), velocity)


def step_of(i, grid=GRID, a=A_NOISE):
    """(A, C, std, sigma_t^2, D) of step i in plain floats, section 1.1."""
    t, D = grid[i], grid[i] - grid[i + 1]
    sigma2 = a * a * t / (1 - (grid[1] if t == 1 else t))
    return 1 - sigma2 * D / (2 * t), -D * (1 + sigma2 * (1 - t) / (2 * t)), math.sqrt(sigma2 * D), sigma2, D


def advantages(rewards, groups, clip=5.0, global_std=True):
    """Section 1.3 by hand."""
    r = torch.tensor(rewards, dtype=torch.float64)
    out = torch.zeros_like(r)
    for g in set(groups):
        rows = torch.tensor([i for i, x in enumerate(groups) if x == g])
        std = r.std(correction=0) if global_std else r[rows].std(correction=0)
        out[rows] = (r[rows] - r[rows].mean()) / (std + 1e-4)
    return out.clamp(-clip, clip)


def written_out(velocity, reference, rollout, adv, *, clip, kl=0.0, form="flow_grpo", grid=GRID, a=A_NOISE):
    """Mean over samples and steps of the clipped surrogate + kl KL: section 1.2, with torch's Normal."""
    loss = 0.0
    units = rollout.log_prob.shape[1]
    for u in range(units):
        A, C, std, sigma2, _ = step_of(u, grid, a)
        x, action = rollout.states[:, u], rollout.actions[:, u]
        mean = A * x + C * velocity(u)
        lp = Normal(mean, std).log_prob(action).flatten(1).mean(1)
        r = (lp - rollout.log_prob[:, u]).exp()
        pg = torch.maximum(-adv * r, -adv * r.clamp(1 - clip, 1 + clip))
        penalty = 0.0
        if kl:
            gap = (mean - (A * x + C * reference(u))).flatten(1) ** 2
            penalty = {
                "flow_grpo": gap.mean(1) / (2 * sigma2),
                "exact_mean": gap.mean(1) / (2 * std**2),
                "exact_sum": gap.sum(1) / (2 * std**2),
                "v_mse": gap.mean(1) / C**2,
            }[form]
        loss = loss + (pg + kl * penalty).sum() / (len(x) * units)
    return loss


def groups_of(rollout):
    return [p.index for p in rollout.prompts]


@pytest.fixture
def off_policy(linear, linear_rollout):
    """A moved policy, and a rollout of its former self with scattered log-probs: ratios from 0.8 to 1.2."""
    rollout = linear_rollout(linear, spread=0.1)
    return linear.move(0.05), rollout


def velocities(policy, rollout):
    live = lambda u: policy.velocity(rollout.states[:, u], rollout.sigmas[u], rollout)  # noqa: E731

    def reference(u):
        w, b = (policy.weights["reference"][n] for n in "wb")
        return w * rollout.states[:, u] + b * rollout.sigmas[u].double()

    return live, reference


# --------------------------------------------------------------------------------------------------- the whole formula


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_loss_and_gradient_are_the_formula(off_policy, sde, update, close, kl, form):
    policy, rollout = off_policy
    objective = FlowGRPO(clip_range=0.03, kl=kl, kl_form=form)
    loss, grads, metrics = update(objective, policy, rollout, sde)
    live, reference = velocities(policy, rollout)
    adv = advantages(REWARDS, groups_of(rollout))
    # The sampler reads the float32 grid.
    grid = rollout.sigmas.double().tolist()
    expected = written_out(live, reference, rollout, adv, clip=0.03, kl=kl, form=form, grid=grid)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-12)
    oracle = torch.autograd.grad(expected, list(policy.trainable().values()))
    close(grads, dict(zip(grads, oracle, strict=True)))
    assert metrics["clip_frac_high"] > 0.1 and metrics["clip_frac_low"] > 0.1


def test_gradient_is_a_finite_difference(off_policy, sde, update):
    policy, rollout = off_policy
    objective = FlowGRPO(clip_range=0.03, kl=0.2)
    _, grads, _ = update(objective, policy, rollout, sde)
    h = 1e-6
    for name, p in policy.trainable().items():
        for i in range(len(p)):
            values = []
            for shift in (h, -2 * h):
                with torch.no_grad():
                    p[i] += shift
                values.append(update(objective, policy, rollout, sde)[0])
            with torch.no_grad():
                p[i] += h
            assert (values[0] - values[1]) / (2 * h) == pytest.approx(grads[name][i].item(), rel=1e-5, abs=1e-8)


def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(linear, linear_rollout, sde, update, close):  # 10.9
    rollout = linear_rollout(linear)
    loss, grads, metrics = update(FlowGRPO(), linear, rollout, sde)
    adv = advantages(REWARDS, groups_of(rollout))
    plain = 0.0
    for u in range(3):
        plain = plain - (adv * linear.evaluate(rollout, u, sde).log_prob).mean() / 3
    oracle = torch.autograd.grad(plain, list(linear.trainable().values()))
    close(grads, dict(zip(grads, oracle, strict=True)))
    assert loss == pytest.approx(0, abs=1e-12)  # centred advantages, ratios of one
    assert metrics["log_ratio_max"] < 1e-12 and metrics["clip_frac_high"] == metrics["clip_frac_low"] == 0


# ------------------------------------------------------------------------------------------------------- coefficients


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "flows"),
    [(1.0, 0.1, False), (1.0, -0.1, True), (-1.0, -0.1, False), (-1.0, 0.1, True)],
)
def test_clip_truth_table(linear, linear_rollout, sde, shift_log_prob, advantage, log_ratio, flows):  # 10.10
    rollout = shift_log_prob(linear_rollout(linear, groups=1, size=2), log_ratio)
    batch = Batch(mask=torch.ones(2, 1, dtype=torch.bool), reward=torch.zeros(2), group_id=rollout.group_id)
    micro = Micro(rollout, 1, batch.slice(), AdvOut(torch.full((2, 1), advantage, dtype=torch.float64)))
    loss, _ = FlowGRPO(clip_range=0.05).loss(linear, sde, micro)
    grads = torch.autograd.grad(loss, list(linear.trainable().values()))
    assert all(bool(g.any()) == flows for g in grads)
    bound = math.exp(log_ratio) if flows else 1 + math.copysign(0.05, log_ratio)
    assert loss.item() == pytest.approx(-advantage * bound, rel=1e-12)


def test_clip_range_moves_the_loss_by_the_clipped_advantages(off_policy, sde, update):
    policy, rollout = off_policy
    c, h = 0.03, 1e-6
    losses = [update(FlowGRPO(clip_range=x), policy, rollout, sde)[0] for x in (c + h, c - h)]
    adv = advantages(REWARDS, groups_of(rollout))
    slope, clipped = 0.0, 0
    for u in range(3):
        r = (policy.evaluate(rollout, u, sde).log_prob - rollout.log_prob[:, u]).exp()
        outward = ((adv > 0) & (r > 1 + c)) | ((adv < 0) & (r < 1 - c))
        slope -= (adv.abs() * outward).sum().item() / 18
        clipped += int(outward.sum())
    assert 2 < clipped < 16
    assert (losses[0] - losses[1]) / (2 * h) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_kl_adds_its_multiple_to_loss_and_gradient(off_policy, sde, update, close, form):
    policy, rollout = off_policy
    runs = {b: update(FlowGRPO(kl=b, kl_form=form), policy, rollout, sde) for b in (0.0, 0.2, 0.6)}
    value = runs[0.2][2]["kl"]
    assert value > 1e-5 and runs[0.6][2]["kl"] == pytest.approx(value, rel=1e-12)
    assert runs[0.2][0] - runs[0.0][0] == pytest.approx(0.2 * value, rel=1e-9)
    assert runs[0.6][0] - runs[0.0][0] == pytest.approx(0.6 * value, rel=1e-9)
    once = {n: (runs[0.2][1][n] - g) * 3 for n, g in runs[0.0][1].items()}
    close(once, {n: runs[0.6][1][n] - g for n, g in runs[0.0][1].items()}, rtol=1e-8)
    assert all(g.abs().max() > 1e-4 for g in once.values())


def test_without_kl_the_reference_is_not_run(off_policy, sde, update):
    policy, rollout = off_policy
    update(FlowGRPO(), policy, rollout, sde)
    assert policy.used == []
    update(FlowGRPO(kl=0.1), policy, rollout, sde)
    assert policy.used == ["reference"] * 3


def test_adv_clip_max_bounds_the_gradient(linear, linear_rollout, sde, update, close):
    rollout = linear_rollout(linear)
    gradient = lambda c: update(FlowGRPO(adv_clip_max=c), linear, rollout, sde)[1]  # noqa: E731
    for c in (0.1, 0.5, 5.0):
        adv = advantages(REWARDS, groups_of(rollout), clip=c)
        plain = sum(-(adv * linear.evaluate(rollout, u, sde).log_prob).mean() / 3 for u in range(3))
        oracle = torch.autograd.grad(plain, list(linear.trainable().values()))
        close(gradient(c), dict(zip(linear.trainable(), oracle, strict=True)))
    # Below the smallest |A| the clip keeps only the sign, so the gradient is linear in it.
    close(gradient(0.02), {n: 2 * g for n, g in gradient(0.01).items()}, rtol=1e-9)
    assert not torch.allclose(gradient(0.5)["w"], gradient(5.0)["w"])


@pytest.mark.parametrize("global_std", [True, False])
def test_global_std_chooses_the_scale_of_the_advantage(linear, linear_rollout, table, global_std):
    objective = FlowGRPO(global_std=global_std)
    rollout = linear_rollout(linear)
    _, out = table(objective, rollout)
    ours = out.adv[:, 0]
    expected = advantages(REWARDS, groups_of(rollout), global_std=global_std)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=0)
    assert torch.equal(out.adv, ours[:, None].expand(6, 3))


def test_global_std_changes_the_gradient(linear, linear_rollout, sde, update):
    rollout = linear_rollout(linear)
    one = update(FlowGRPO(global_std=True), linear, rollout, sde)[1]["w"]
    other = update(FlowGRPO(global_std=False), linear, rollout, sde)[1]["w"]
    assert (one - other).abs().max() > 1e-3


# ----------------------------------------------------------------------------------------------------------- KL forms


@pytest.mark.parametrize("step", [0, 1, 2])
def test_kl_forms_of_flow_sde(sde, step):  # 0.5, 1.1, 1.2, 10.7
    generator = torch.Generator().manual_seed(step)
    x, v, v_ref = (torch.randn(4, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    sigmas = sde.sigmas()
    grid = sigmas.double().tolist()
    _, C, std, sigma2, D = step_of(step, grid)
    policy, reference = (sde.transition(x, u, sigmas, step) for u in (v, v_ref))
    released, mean, total, v_mse = (
        transition_kl(scored(policy, v), scored(reference, v_ref), f, sde, D) for f in FORMS
    )
    torch.testing.assert_close(v_mse, ((v - v_ref) ** 2).mean(1), rtol=1e-12, atol=0)
    oracle = kl_divergence(Normal(policy.mean, std), Normal(reference.mean, std)).sum(1)
    torch.testing.assert_close(total, oracle, rtol=1e-10, atol=0)
    torch.testing.assert_close(total, C**2 * ((v - v_ref) ** 2).sum(1) / (2 * std**2), rtol=1e-10, atol=0)
    torch.testing.assert_close(total, 7 * mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(released, D * mean, rtol=1e-12, atol=0)
    gap = ((policy.mean - reference.mean) ** 2).mean(1)
    torch.testing.assert_close(released, gap / (2 * sigma2), rtol=1e-10, atol=0)


def test_kl_forms_of_the_other_kernels():
    grid = Explicit(GRID)
    x, v, v_ref = torch.randn(3, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    D = float(grid(4)[1] - grid(4)[2])

    def forms(sampler):
        a, b = (sampler.transition(x, u, sampler.sigmas(), 1) for u in (v, v_ref))
        gap = ((a.mean - b.mean) ** 2).mean(1)
        return gap, [transition_kl(scored(a, v), scored(b, v_ref), f, sampler, D) for f in FORMS[:3]]

    gap, (released, mean, total) = forms(DanceSDE(steps=4, schedule=grid, noise_level=0.4))
    torch.testing.assert_close(released, gap / (2 * 0.4**2), rtol=1e-10, atol=0)
    torch.testing.assert_close(total, 7 * mean, rtol=1e-12, atol=0)
    _, (released, mean, _) = forms(CPWS(steps=4, schedule=grid, noise_level=0.3))
    torch.testing.assert_close(released, D * mean, rtol=1e-12, atol=0)
    _, (released, mean, _) = forms(CPS(steps=4, schedule=grid))  # no sigma_t there
    assert torch.equal(released, mean)


def test_kl_gradient_flows_through_the_policy_only():
    mean = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    other = torch.zeros(2, 3, dtype=torch.float64)
    for form in FORMS:
        policy, reference = (scored(Gaussian(m, 0.5), m) for m in (mean, other))
        kl = transition_kl(policy, reference, form, FlowSDE(), 0.1)
        assert torch.autograd.grad(kl.sum(), mean)[0].abs().min() > 0


# --------------------------------------------------------------------------------------------- rows, columns, validity


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_micro_batches_add_up_to_the_update(off_policy, sde, update, close, size):
    policy, rollout = off_policy
    objective = FlowGRPO(clip_range=0.03, kl=0.2)
    loss, grads, metrics = update(objective, policy, rollout, sde)
    parts = update(objective, policy, rollout, sde, size=size, order=[4, 1, 5, 0, 2, 3])
    assert parts[0] == pytest.approx(loss, rel=1e-12)
    close(parts[1], grads)
    for name in ("pg_loss", "kl", "kl_loss", "approx_kl", "ratio_mean", "clip_frac_high"):
        assert parts[2][name] == pytest.approx(metrics[name], rel=1e-10), name


def test_groups_without_spread_give_exactly_no_gradient(off_policy, sde, update):
    policy, rollout = off_policy
    loss, grads, _ = update(FlowGRPO(), policy, rollout, sde, rewards=(0.1,) * 3 + (0.7,) * 3)
    assert loss == 0 and not any(g.any() for g in grads.values())


def test_a_group_without_spread_leaves_the_other_groups_gradient(linear, linear_rollout, sde, update, close):
    rollout = linear_rollout(linear)
    rewards = (0.0, 1.0, 2.0, 0.7, 0.7, 0.7)
    _, grads, _ = update(FlowGRPO(global_std=False), linear, rollout, sde, rewards=rewards)
    first = update(FlowGRPO(global_std=False), linear, rollout.rows([0, 1, 2]), sde, rewards=rewards[:3])[1]
    close(grads, {n: g / 2 for n, g in first.items()})  # half of the rows


@pytest.mark.parametrize("junk", [0.0, float("nan"), float("inf")])
def test_invalid_rows_give_no_gradient(off_policy, sde, update, close, junk):
    policy, rollout = off_policy
    objective = FlowGRPO(kl=0.2)
    valid = [True, True, False, True, True, True]
    rewards = (1.0, 2.0, junk, 0.0, 0.3, 0.9)
    loss, grads, _ = update(objective, policy, rollout, sde, rewards=rewards, valid=valid)
    kept = [0, 1, 3, 4, 5]
    without = update(objective, policy, rollout.rows(kept), sde, rewards=[rewards[i] for i in kept])
    assert loss == pytest.approx(without[0], rel=1e-12)
    close(grads, without[1])


def test_the_order_of_samples_does_not_matter(off_policy, sde, update, close):
    policy, rollout = off_policy
    order = [2, 5, 0, 3, 1, 4]
    loss, grads, _ = update(FlowGRPO(kl=0.1), policy, rollout, sde)
    other = update(FlowGRPO(kl=0.1), policy, rollout.rows(order), sde, rewards=[REWARDS[i] for i in order])
    assert other[0] == pytest.approx(loss, rel=1e-12)
    close(other[1], grads)


# ------------------------------------------------------------------------------------------------------- real policies

KINDS = ["sd3", "flux"]


@pytest.fixture
def real(make_sd3_policy, make_flux_policy, make_rows, perturb):
    """(kind, peft) -> (policy, sampler, rollout of groups 2 x 2), after some training."""

    def make(kind, peft=True):
        policy = perturb({"sd3": make_sd3_policy, "flux": make_flux_policy}[kind](peft), scale=0.03)
        guidance = {"sd3": 4.5, "flux": 3.5}[kind]
        sampler = FlowSDE.from_config(policy.pipe.scheduler.config, steps=4, guidance_scale=guidance)
        prompts, members = make_rows()
        return policy, sampler, policy.sample(prompts, members, sampler, seed=1, iteration=0, batch_size=4)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_real_policy_gradient_is_the_formulas(real, perturb, update, close, kind):
    policy, sampler, rollout = real(kind)
    perturb(policy, scale=0.01, seed=5)
    objective = FlowGRPO(clip_range=1e-3, kl=0.05)
    loss, grads, metrics = update(objective, policy, rollout, sampler, size=2)
    adv = advantages(REWARDS[:4], groups_of(rollout)).float()

    def live(u):
        return policy.velocity(rollout.states[:, u], rollout.sigmas[u], rollout)

    with torch.no_grad(), policy.use("reference"):
        base = [live(u) for u in range(3)]
    expected = written_out(
        live, lambda u: base[u], rollout, adv, clip=1e-3, kl=0.05, grid=rollout.sigmas.double().tolist()
    )
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    oracle = torch.autograd.grad(expected, list(policy.trainable().values()))
    scale = max(g.abs().max().item() for g in oracle)
    close(grads, dict(zip(grads, oracle, strict=True)), rtol=1e-3, atol=1e-4 * scale)
    assert scale > 1e-4 and metrics["kl"] > 0 and metrics["log_ratio_max"] > 1e-4


@pytest.mark.parametrize("peft", [True, None], ids=["lora", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_real_policy_at_ratio_one(real, update, close, kind, peft):
    policy, sampler, rollout = real(kind, peft)
    _, grads, metrics = update(FlowGRPO(), policy, rollout, sampler)
    assert metrics["log_ratio_max"] == metrics["approx_kl"] == 0
    assert metrics["ratio_min"] == metrics["ratio_max"] == 3  # the sum over three micro-batches of exactly one
    adv = advantages(REWARDS[:4], groups_of(rollout)).float()
    plain = sum(-(adv * policy.evaluate(rollout, u, sampler).log_prob).mean() / 3 for u in range(3))
    oracle = torch.autograd.grad(plain, list(policy.trainable().values()))
    scale = max(g.abs().max().item() for g in oracle)
    close(grads, dict(zip(grads, oracle, strict=True)), rtol=1e-3, atol=1e-4 * scale)
    assert scale > 1e-4


@pytest.mark.parametrize("size", [1, 3])
def test_real_policy_micro_batches_add_up(real, update, close, size):
    policy, sampler, rollout = real("sd3")
    objective = FlowGRPO(kl=0.05)
    loss, grads, _ = update(objective, policy, rollout, sampler)
    parts = update(objective, policy, rollout, sampler, size=size)
    assert parts[0] == pytest.approx(loss, abs=1e-5)
    scale = max(g.abs().max().item() for g in grads.values())
    close(parts[1], grads, rtol=1e-3, atol=1e-4 * scale)


def test_real_policy_without_spread_or_with_an_adapter_at_its_start(make_sd3_policy, real, update):
    policy, sampler, rollout = real("sd3")
    _, grads, _ = update(FlowGRPO(), policy, rollout, sampler, rewards=(0.4,) * 4)
    assert not any(g.any() for g in grads.values())
    # At LoRA init the KL is 0 and so is its gradient (10.19).
    fresh = make_sd3_policy(True)
    rollout = fresh.sample(rollout.prompts, rollout.members, sampler, seed=1, iteration=0, batch_size=4)
    _, grads, metrics = update(FlowGRPO(kl=1.0), fresh, rollout, sampler, rewards=(0.4,) * 4)
    assert metrics["kl"] == 0 and not any(g.any() for g in grads.values())


# -------------------------------------------------------------------------------------------- arguments and interface


@pytest.mark.parametrize("bad", [{"clip_range": 0.0}, {"clip_range": -1.0}, {"kl": -0.1}, {"adv_clip_max": 0.0}])
def test_arguments_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        FlowGRPO(**bad)


def test_an_unknown_kl_form_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown kl_form 'k3'.*flow_grpo.*exact_mean.*exact_sum"):
        FlowGRPO(kl_form="k3")


def test_requirements_and_columns(linear, linear_rollout):
    assert FlowGRPO().requires == {"log_prob"} and FlowGRPO(kl=0.1).requires == {"log_prob", "reference"}
    assert FlowGRPO().behaviour == "policy" and FlowGRPO().columns(linear_rollout(linear)) == 3


@pytest.mark.parametrize(
    "sampler", [ODE(), FlowSDE(noise_level=0.0), FlowSDE(steps=1)], ids=["ode", "noise 0", "1 step"]
)
def test_a_sampler_without_stochastic_steps_is_refused(sampler):
    with pytest.raises(ValueError, match=r"FlowGRPO scores stochastic steps.*noise_level > 0"):
        FlowGRPO().check(sampler)
    DiffusionNFT().check(sampler)  # needs none


def test_a_sampler_with_stochastic_steps_is_accepted():
    for sampler in (FlowSDE(), DanceSDE(), CPS(), CPWS()):
        FlowGRPO().check(sampler)


def test_published_defaults():
    assert (FlowGRPO().clip_range, FlowGRPO().adv_clip_max, FlowGRPO().global_std) == (1e-4, 5.0, True)
    assert FlowGRPO().kl_form == "flow_grpo"
    assert FlowGRPO(clip_range=1e-5) == FlowGRPO(clip_range=1e-5) != FlowGRPO()


def test_state_survives_a_round_trip():
    one, other = FlowGRPO(), FlowGRPO()
    one.algorithm.state["beta"] = 0.25
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict() and other.algorithm.beta == 0.25
    with pytest.raises(ValueError, match="preset"):
        other.load_state_dict({"state": {}})
