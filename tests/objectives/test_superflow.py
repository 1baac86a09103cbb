"""SuperFlow's loss against the formula written out in float64, its reduction to Flow-GRPO, and what every trajectory
objective does with `allocation="variance"`. Numbers refer to the specification; the method is derived."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch.distributions import Normal

from flowrl import objectives
from flowrl.core import PRESETS, Batch, largest_remainder
from flowrl.objectives import FlowGRPO, SuperFlow
from flowrl.objectives.trajectory import TrajectoryObjective
from flowrl.rollout import Prompt
from flowrl.samplers import CPS, DanceSDE, Explicit, FlowSDE, Merged, Window

GRID = (1.0, 0.8, 0.55, 0.25, 0.0)
REWARDS = (1.0, 0.25, 0.5, 0.0, 0.3, 0.9)
GROUPS = (10, 10, 10, 10, 13, 13)  # unequal
DANCE = DanceSDE(steps=4, noise_level=0.3, schedule=Explicit(GRID))
METHODS = [
    cls
    for cls in vars(objectives).values()
    if inspect.isclass(cls) and issubclass(cls, TrajectoryObjective) and cls is not TrajectoryObjective
]


@pytest.fixture
def run(micros, total):
    """(objective, policy, rollout, sampler) -> (loss, gradients, metrics), on a batch with the sampler's unit table."""

    def go(objective, policy, rollout, sampler, rewards=REWARDS, groups=GROUPS, size=None):
        batch = table(rollout, sampler, rewards, groups)
        return total(objective, policy, sampler, micros(rollout, batch, objective.advantages(batch), size))

    return go


def table(rollout, sampler, rewards=REWARDS, groups=GROUPS, valid=None, dtype=torch.float64):
    return Batch(
        mask=torch.ones(rollout.log_prob.shape, dtype=torch.bool),
        reward=torch.tensor(rewards, dtype=dtype),
        group_id=torch.tensor(groups),
        valid=valid,
        extra=sampler.unit_table(rollout.sigmas, rollout.plans),
    )


@pytest.fixture
def off_policy(linear, linear_rollout):
    rollout = linear_rollout(linear, spread=0.1)
    return linear.move(0.05), rollout


def noise_of(i, grid, a=0.7):
    """(A, C, std, sigma_t) of Flow-SDE's step i in plain floats."""
    t, D = grid[i], grid[i] - grid[i + 1]
    sigma2 = a * a * t / (1 - (grid[1] if t == 1 else t))
    return 1 - sigma2 * D / (2 * t), -D * (1 + sigma2 * (1 - t) / (2 * t)), (sigma2 * D) ** 0.5, sigma2**0.5


def written_out(policy, rollout, adv, clip, kl=0.0, weighted=True):
    """Sections 3.1 and 3.2: mean over samples of the mean over steps."""
    grid = rollout.sigmas.double().tolist()
    sigma = [noise_of(u, grid)[3] for u in range(3)]
    loss = 0.0
    for u in range(3):
        A, C, std, s = noise_of(u, grid)
        x = rollout.states[:, u]
        v = policy.velocity(x, rollout.sigmas[u], rollout)
        lp = Normal(A * x + C * v, std).log_prob(rollout.actions[:, u]).mean(1)
        r = (lp - rollout.log_prob[:, u]).exp()
        a = adv * (s / (sum(sigma) / 3) if weighted else 1.0)
        loss = loss + torch.maximum(-a * r, -a * r.clamp(1 - clip, 1 + clip)).sum() / 18
        if kl:
            w, b = (policy.weights["reference"][n] for n in "wb")
            gap = C * (v - (w * x + b * rollout.sigmas[u].double()))
            loss = loss + kl * (gap**2).mean(1).sum() / (2 * s * s) / 18
    return loss


def standardised(gap, clip=5.0):
    return ((gap - gap.mean()) / (gap.std(correction=0) + 1e-4)).clamp(-clip, clip)


# --------------------------------------------------------------------------------------------------- the whole formula


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_loss_and_gradient_are_the_formula(off_policy, sde, run, close, kl, weighted):
    policy, rollout = off_policy
    objective = SuperFlow(clip_range=0.03, kl=kl, step_weights=weighted)
    objective.algorithm.state["tracker"] = {10: [3.0, 1.0]}
    loss, grads, metrics = run(objective, policy, rollout, sde)
    value = torch.tensor([0.75] * 4 + [0.5] * 2, dtype=torch.float64)
    adv = standardised(torch.tensor(REWARDS, dtype=torch.float64) - value)
    expected = written_out(policy, rollout, adv, 0.03, kl, weighted)
    assert loss == pytest.approx(expected.item(), rel=1e-6)  # u is rounded to float32
    oracle = torch.autograd.grad(expected, list(policy.trainable().values()))
    close(grads, dict(zip(grads, oracle, strict=True)), rtol=1e-6, atol=1e-9)
    assert metrics["clip_frac_high"] > 0.1 and metrics["clip_frac_low"] > 0.1


def test_gradient_is_a_finite_difference(off_policy, sde, run):
    policy, rollout = off_policy
    fresh = lambda: SuperFlow(clip_range=0.03, kl=0.2)  # noqa: E731  every evaluation starts with an empty tracker
    _, grads, _ = run(fresh(), policy, rollout, sde)
    h = 1e-6
    for name, p in policy.trainable().items():
        for i in (0, 3):
            values = []
            for shift in (h, -2 * h):
                with torch.no_grad():
                    p[i] += shift
                values.append(run(fresh(), policy, rollout, sde)[0])
            with torch.no_grad():
                p[i] += h
            assert (values[0] - values[1]) / (2 * h) == pytest.approx(grads[name][i].item(), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(
    "change",
    [{"clip_range": 0.2}, {"kl": 0.5}, {"adv_clip_max": 0.5}, {"step_weights": False}, {"baseline": "group"}],
    ids=lambda c: next(iter(c)),
)
def test_every_coefficient_changes_the_gradient(off_policy, sde, run, change):
    policy, rollout = off_policy
    base = {"clip_range": 0.03, "kl": 0.1}
    one = run(SuperFlow(**base), policy, rollout, sde)[1]
    other = run(SuperFlow(**base | change), policy, rollout, sde)[1]
    assert max((one[n] - other[n]).abs().max() / one[n].abs().max() for n in one) > 1e-3


@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_add_up(off_policy, sde, run, close, size):
    policy, rollout = off_policy
    loss, grads, _ = run(SuperFlow(kl=0.1), policy, rollout, sde)
    parts = run(SuperFlow(kl=0.1), policy, rollout, sde, size=size)
    assert parts[0] == pytest.approx(loss, rel=1e-12)
    close(parts[1], grads)


def test_the_mean_is_over_samples_not_over_groups(off_policy, sde, run):
    policy, rollout = off_policy
    objective = SuperFlow(clip_range=0.03, baseline="group", step_weights=False)
    loss, _, _ = run(objective, policy, rollout, sde)
    r = torch.tensor(REWARDS, dtype=torch.float64)
    centred = torch.cat([r[:4] - r[:4].mean(), r[4:] - r[4:].mean()])
    adv = centred / (r.std(correction=0) + 1e-4)
    assert loss == pytest.approx(written_out(policy, rollout, adv, 0.03, weighted=False).item(), rel=1e-12)
    per_group = adv * torch.tensor([6 / 8] * 4 + [6 / 4] * 2)
    assert loss != pytest.approx(written_out(policy, rollout, per_group, 0.03, weighted=False).item(), rel=1e-2)


# ---------------------------------------------------------------------------------------------------------- reductions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [GROUPS, (10, 10, 10, 13, 13, 13)], ids=["unequal", "equal"])
def test_neutral_superflow_is_flow_grpo_bit_for_bit(linear, linear_rollout, micros, total, dtype, groups):  # 3.4.2
    rollout = linear_rollout(linear, DANCE, spread=0.1)
    linear.move(0.05)
    batch = table(rollout, DANCE, groups=groups, dtype=dtype)
    results = []
    for objective in (SuperFlow(clip_range=0.03, kl=0.2, baseline="group"), FlowGRPO(clip_range=0.03, kl=0.2)):
        adv = objective.advantages(batch)
        results.append((adv.adv, total(objective, linear, DANCE, micros(rollout, batch, adv))))
    (adv, (loss, grads, metrics)), (adv2, (loss2, grads2, metrics2)) = results
    assert torch.equal(adv, adv2) and adv.any() and adv.dtype == dtype
    assert loss == loss2 and metrics == metrics2
    assert all(torch.equal(grads[n], grads2[n]) and grads[n].any() for n in grads)


def test_equal_weights_give_equal_groups():
    prompts = [Prompt(i, "x") for i in (4, 9, 2, 7)]
    assert SuperFlow().allocate(prompts, 96) == FlowGRPO().allocate(prompts, 96) == [24] * 4  # nothing seen yet


@pytest.mark.parametrize("sampler", [FlowSDE(steps=6), DANCE, CPS(steps=5)], ids=lambda s: type(s).__name__)
def test_step_weights_of_the_samplers_have_mean_one(sampler):  # 3.4.3
    sigmas = sampler.sigmas(1024)
    plans = sampler.draw_plans(sigmas, 0, 0, [0, 0], [0, 1])
    extra = sampler.unit_table(sigmas, plans)
    batch = Batch(
        mask=torch.ones(extra["std"].shape),
        reward=torch.tensor([0.0, 1.0]).double(),
        group_id=torch.zeros(2).long(),
        extra=extra,
    )
    u = SuperFlow().advantages(batch).adv / SuperFlow(step_weights=False).advantages(batch).adv
    torch.testing.assert_close(u.mean(1), torch.ones(2).double(), rtol=1e-7, atol=0)
    assert torch.equal(u, torch.ones_like(u)) == isinstance(sampler, DanceSDE)


# --------------------------------------------------------------------------------------------- tracker and allocation


def test_the_baseline_is_read_before_the_tracker_sees_the_batch(linear, linear_rollout, sde):
    rollout, rewards = linear_rollout(linear), (1.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    objective, groups = SuperFlow(step_weights=False), (10, 10, 10, 13, 13, 13)
    first = objective.advantages(table(rollout, sde, rewards, groups)).adv[:, 0]
    torch.testing.assert_close(first, standardised(torch.tensor(rewards).double() - 0.5))
    assert objective.algorithm.state["tracker"][10] == pytest.approx([2.439, 1.729])  # 3.4.4
    second = objective.advantages(table(rollout, sde, rewards, groups)).adv[:, 0]
    a, b = 0.9**3 + 0.9**2, 0.9**3 + 0.9 + 1
    value = torch.tensor([0.585173] * 3 + [a / (a + b)] * 3).double()
    torch.testing.assert_close(second, standardised(torch.tensor(rewards).double() - value), rtol=0, atol=1e-5)


def test_a_tracker_that_was_right_gives_zero(linear, linear_rollout, sde):  # 3.4.6
    objective = SuperFlow()
    objective.algorithm.state["tracker"] = {10: [1.0, 3.0], 13: [3.0, 1.0]}
    adv = objective.advantages(table(linear_rollout(linear), sde, (0.25,) * 4 + (0.75,) * 2)).adv
    assert torch.equal(adv, torch.zeros_like(adv))


def test_invalid_rows_teach_the_tracker_nothing(linear, linear_rollout, sde):
    rollout, objective = linear_rollout(linear), SuperFlow()
    valid = torch.tensor([True, True, False, True, False, False])
    adv = objective.advantages(table(rollout, sde, (1.0, 1.0, float("nan"), 0.0, 7.0, 0.0), valid=valid)).adv
    assert adv.isfinite().all() and not adv[~valid].any()
    assert objective.algorithm.state["tracker"] == {10: pytest.approx([2.439, 1.729])}


@pytest.mark.parametrize("bad", [-0.1, 5.0])
@pytest.mark.parametrize("objective", [SuperFlow(), FlowGRPO(allocation="variance")], ids=["superflow", "flow_grpo"])
def test_rewards_outside_the_unit_interval_are_refused(linear, linear_rollout, sde, objective, bad):
    with pytest.raises(ValueError, match=r"rewards in \[0, 1\].*affine"):
        objective.advantages(table(linear_rollout(linear), sde, (*REWARDS[:5], bad)))
    FlowGRPO().advantages(table(linear_rollout(linear), sde, (*REWARDS[:5], bad)))  # others take any
    SuperFlow(baseline="group", allocation="fixed").advantages(table(linear_rollout(linear), sde, (*REWARDS[:5], bad)))


@pytest.mark.parametrize("method", METHODS, ids=lambda cls: cls.__name__)
def test_any_trajectory_objective_takes_the_allocation(method):
    objective = method(allocation="variance", rho=1.0, m_min=2, m_max=30)
    cfg = objective.algorithm.cfg
    assert objective.algorithm.preset.sampler == "variance"
    assert (cfg.rho, cfg.m_min, cfg.m_max) == (1.0, 2, 30) and objective.tracks
    prompts = [Prompt(i, "x") for i in (4, 9, 2)]
    objective.algorithm.state["tracker"] = {4: [99.0, 1.0], 9: [1.0, 1.0]}
    sizes = objective.allocate(prompts, 36)
    assert sizes == largest_remainder(36, [(0.0099 + 1e-6) ** 0.5, *[(0.25 + 1e-6) ** 0.5] * 2], 2, 30)
    assert sum(sizes) == 36 and sizes[0] < 12 < min(sizes[1:])
    assert method(allocation="fixed").allocate(prompts, 36) == [12, 12, 12]


def test_the_allocation_follows_the_rewards_and_survives_a_checkpoint(linear, linear_rollout, sde, tmp_path):
    rollout, prompts = linear_rollout(linear), [Prompt(10, "x"), Prompt(13, "y"), Prompt(14, "z")]
    for make in (SuperFlow, lambda: FlowGRPO(allocation="variance")):
        one, other = make(), make()
        one.advantages(table(rollout, sde, (1.0, 1.0, 1.0, 1.0, 1.0, 0.0)))
        sizes = one.allocate(prompts, 36)
        assert sum(sizes) == 36 and sizes[0] < min(sizes[1:])  # 10 is solved
        torch.save(one.state_dict(), tmp_path / "state.pt")
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert other.allocate(prompts, 36) == sizes != make().allocate(prompts, 36)
        batch = table(rollout, sde)
        assert torch.equal(one.advantages(batch).adv, other.advantages(batch).adv)
        assert one.state_dict() == other.state_dict()


def test_without_need_nothing_is_tracked(linear, linear_rollout, sde):
    for objective in (FlowGRPO(), SuperFlow(baseline="group", allocation="fixed")):
        objective.advantages(table(linear_rollout(linear), sde))
        assert objective.algorithm.state == {} and not objective.tracks
    assert SuperFlow(allocation="fixed").tracks and SuperFlow(baseline="group").tracks


# ------------------------------------------------------------------------------------------------ arguments and checks


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"clip_range": 0.0}, "clip_range"),
        ({"adv_clip_max": -1.0}, "adv_clip_max"),
        ({"kl": -0.1}, "kl"),
        ({"rho": 0.0}, r"rho must lie in \(0, 1\]"),
        ({"rho": 1.1}, "rho"),
        ({"m_min": 1}, "2 <= m_min"),
        ({"m_min": 9, "m_max": 8}, "m_max 8"),
        ({"baseline": "value"}, "unknown baseline 'value': one of beta_tracker, group"),
        ({"allocation": "tiers"}, "unknown allocation 'tiers': one of fixed, variance"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_arguments_out_of_range_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        SuperFlow(**bad)


def test_a_budget_out_of_bounds_is_refused():
    prompts = [Prompt(0, "x"), Prompt(1, "y")]
    with pytest.raises(ValueError, match=r"6 samples cannot give 2 groups at least 4.*m_min"):
        SuperFlow().allocate(prompts, 6)
    with pytest.raises(ValueError, match=r"100 samples exceed 2 groups of at most 48.*m_max"):
        FlowGRPO(allocation="variance").allocate(prompts, 100)


def test_a_plan_of_branches_is_refused_with_the_reason():
    branched = FlowSDE(steps=8, plan=Merged(active=(0, 1), merge=(1, 1)))
    for objective in (SuperFlow(), FlowGRPO(allocation="variance")):
        with pytest.raises(ValueError, match=r"Merged splits every group into 2 equal parts.*allocation='fixed'"):
            objective.check(branched)
        objective.check(FlowSDE(steps=8, plan=Window(2, (0, 4), branch=True)))  # shares a start, of any number
    SuperFlow(allocation="fixed").check(branched)


def test_the_derived_status_is_visible():
    assert PRESETS["superflow"].formula_status == "derived"
    assert "DERIVED, not verified" in SuperFlow.__doc__ and "DERIVED" in TrajectoryObjective.__doc__


def test_proposed_defaults():
    objective = SuperFlow()
    assert (objective.rho, objective.m_min, objective.m_max, objective.clip_range) == (0.9, 4, 48, 1e-4)
    assert (objective.baseline, objective.allocation, objective.step_weights) == ("beta_tracker", "variance", True)
    assert objective.requires == {"log_prob"} and replace(objective) == objective
