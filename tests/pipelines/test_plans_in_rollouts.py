"""Every plan through real pipelines: SD3 without and with guidance, and FLUX, each tiny with random weights.

Numbers such as 10.16 refer to the specification of flow policy gradients.
"""

import math

import pytest
import torch

from flowrl import CPS, AllSteps, FlowSDE, Merged, RandomSteps, SlidingWindow, Window, noise
from flowrl.rollout import Rollout
from flowrl.samplers import CPWS

T = 6
# Rounding of fp32 matrix products in batches of another shape, over six steps.
BATCH_SHAPE = {"atol": 5e-5, "rtol": 0}
PLANS = {
    "all steps": AllSteps(),
    "window": Window(2, (0, 4)),
    "window per sample": Window(2, (0, 5), scope="sample"),
    "branching window": Window(2, (0, 5), scope="prompt", branch=True),
    "random steps": RandomSteps(2, (0, 5)),
    "sliding window": SlidingWindow(2, period=1),
    "flash": SlidingWindow(2, period=2, compression=0.5),
    "branching flash": SlidingWindow(1, period=1, compression=0.7, branch=True),
    "merged": Merged((0, 2), (1, 2)),
    "granular": Merged((0, 2), tau=2.5, scale=1.2, granularities=(1, 2)),
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
each_kernel = pytest.mark.parametrize("kind", [FlowSDE, CPS])


def batches(rollout: Rollout, unit: int) -> list[list[int]]:
    """The rows whose column `unit` was sampled by one forward."""
    found: dict = {}
    for i, plan in enumerate(rollout.plans):
        shared = unit == 0 and plan.anchor is not None  # by the anchors of all prompts: one row of each
        found.setdefault(rollout.members[i] if shared else (plan.path, plan.stochastic), []).append(i)
    return list(found.values())


def naive(policy, sampler, rollout: Rollout, i: int) -> torch.Tensor:
    """Sample i step by step from its plan alone, in a batch of its own and without any sharing."""
    plan, part, grid = rollout.plans[i], rollout.rows([i]), rollout.sigmas.double()
    member = rollout.members[i] if plan.noise_member is None else plan.noise_member

    def draw(member, step):
        keys = {"seed": 5, "iteration": 2, "prompt": part.prompts[0].index, "member": member, "step": step}
        return noise.normal(part.latents.shape[1:], **keys)[None]

    x = draw(member if plan.anchor is None else 0, noise.INITIAL)
    last = max((k for k, s in enumerate(plan.stochastic) if s), default=-1)
    before = None
    for k, (start, end) in enumerate(plan.intervals):
        t, t_next = grid[start].item(), grid[end].item()
        v = policy.velocity(x, grid[start].float(), part)
        clean = x - t * v
        if plan.stochastic[k]:
            A, C, std = (c.item() for c in sampler.coefficients(grid[start], grid[end], grid[1]))
            x = A * x + C * v + std * draw(member, start)
        elif plan.solver == "dpm2" and k > last and t_next > 0 and before is not None and before[0] < 1:
            lam = [math.log((1 - s) / s) for s in (before[0], t, t_next)]
            h, r = lam[2] - lam[1], (lam[1] - lam[0]) / (lam[2] - lam[1])
            x = t_next / t * x - (1 - t_next) * math.expm1(-h) * (clean + (clean - before[1]) / (2 * r))
        else:
            x = x - (t - t_next) * v
        before = t, clean
    return x[0]


def of_groups(rollout: Rollout) -> list[list[int]]:
    indices = [p.index for p in rollout.prompts]
    return [[i for i, index in enumerate(indices) if index == group] for group in dict.fromkeys(indices)]


# ---------------------------------------------------------------------------------------------- what a rollout holds


@each_plan
def test_a_rollout_follows_its_plans(generator, plan, perturb, make_rows):
    policy, sampler = perturb(generator.policy(True)), generator.sampler(steps=T, plan=plan)
    prompts, members = rows = make_rows(2, 4)
    rollout = generator.sample(policy, rows, sampler)
    assert rollout.plans == sampler.draw_plans(policy.sigmas(sampler), 5, 2, [p.index for p in prompts], members)
    assert rollout.units == len(rollout.plans[0].trained_steps) > 0
    with torch.no_grad():
        for i in (0, 3, 6):
            torch.testing.assert_close(rollout.latents[i], naive(policy, sampler, rollout, i), atol=2e-4, rtol=1e-4)


@each_plan
@each_kernel
def test_ratio_is_exactly_one_before_an_update(generator, kind, plan, perturb, make_rows):  # 10.8
    policy, sampler = perturb(generator.policy(True)), generator.sampler(kind, steps=T, plan=plan)
    rollout = generator.sample(policy, make_rows(2, 4), sampler)
    with torch.no_grad():
        for u in range(rollout.units):
            for rows in batches(rollout, u):
                again = policy.evaluate(rollout.rows(rows), u, sampler)
                assert torch.equal(again.log_prob, rollout.log_prob[rows, u])
                assert torch.equal(again.distribution.mean, rollout.means[rows, u])
            # All rows at once, each with its own step: to rounding.
            together = policy.evaluate(rollout, u, sampler).log_prob
            torch.testing.assert_close(together, rollout.log_prob[:, u], atol=5e-6, rtol=0)


@each_plan
def test_ratio_is_exactly_one_in_half_precision(generator, plan, perturb, make_rows):
    policy = perturb(generator.policy(True, dtype=torch.bfloat16))
    sampler = generator.sampler(steps=T, plan=plan)
    rollout = generator.sample(policy, make_rows(2, 4), sampler)
    assert {t.dtype for t in (rollout.latents, rollout.states, rollout.actions)} == {torch.bfloat16}
    assert {t.dtype for t in (rollout.means, rollout.log_prob)} == {torch.float32}
    with torch.no_grad():
        for u in range(rollout.units):
            for rows in batches(rollout, u):
                assert torch.equal(policy.evaluate(rollout.rows(rows), u, sampler).log_prob, rollout.log_prob[rows, u])


@each_plan
def test_any_batch_size_and_order_give_the_same_samples(generator, plan, make_rows):
    policy, sampler = generator.policy(), generator.sampler(steps=T, plan=plan)
    prompts, members = make_rows(2, 4)
    whole = generator.sample(policy, (prompts, members), sampler)
    order = [5, 0, 7, 2, 1, 4, 3, 6]
    mixed = [prompts[i] for i in order], [members[i] for i in order]
    parts = generator.sample(policy, mixed, sampler, batch_size=3)
    expected = whole.rows(order)
    for name in ("latents", "states", "actions", "means", "log_prob"):
        torch.testing.assert_close(getattr(parts, name), getattr(expected, name), **BATCH_SHAPE)
    assert (parts.plans, parts.prompts, parts.members) == (expected.plans, expected.prompts, expected.members)
    assert torch.equal(parts.steps, expected.steps)


@pytest.mark.parametrize("plan", ["window per sample", "branching flash", "granular"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_noise_zero_latents_are_the_stock_pipelines(generator, plan, dtype, make_rows):
    policy, rows = generator.policy(dtype=dtype), make_rows()
    rollout = generator.sample(policy, rows, generator.sampler(steps=T, plan=PLANS[plan], noise_level=0.0))
    assert torch.equal(rollout.latents, generator.stock(policy.pipe, rows, steps=T))
    assert rollout.units == 0


# ------------------------------------------------------------------------------------------------------------ shared


@each_plan
def test_forwards_are_as_many_as_the_plan_says(generator, plan, make_rows):
    policy, sampler = generator.policy(), generator.sampler(steps=T, plan=plan)
    rows = []
    hook = lambda module, args, kwargs: rows.append(len(kwargs["hidden_states"]))  # noqa: E731
    handle = policy.module.register_forward_pre_hook(hook, with_kwargs=True)
    rollout = generator.sample(policy, make_rows(2, 4), sampler, batch_size=3)
    handle.remove()
    branches = 2 if generator.guidance == 4.5 else 1
    anchors = [p.anchor for p in rollout.plans if p.anchor is not None]
    shared = 2 * (max(anchors) + 1) if anchors else 0  # two prompts, up to and with the last step that leaves
    own = sum(len(p.intervals) - (0 if p.anchor is None else p.anchor + 1) for p in rollout.plans)
    assert sum(rows) == branches * (shared + own)
    assert max(rows) <= branches * 3


@pytest.mark.parametrize("plan", ["branching window", "branching flash"])
def test_a_branching_group_parts_at_the_window(generator, plan, make_rows):
    policy, sampler = generator.policy(), generator.sampler(steps=T, plan=PLANS[plan])
    rollout = generator.sample(policy, make_rows(2, 3), sampler)
    groups = of_groups(rollout)
    for rows in groups:
        for tensor in (rollout.states, rollout.means):
            assert all(torch.equal(tensor[i, 0], tensor[rows[0], 0]) for i in rows)
        assert (rollout.actions[rows[0], 0] - rollout.actions[rows[1], 0]).abs().max() > 0.1
        assert (rollout.latents[rows[0]] - rollout.latents[rows[1]]).abs().max() > 0.1
    assert (rollout.states[0, 0] - rollout.states[3, 0]).abs().max() > 0.1  # another prompt, another trajectory


@pytest.mark.parametrize("plan", ["merged", "granular"])
def test_every_branch_leaves_the_same_ode_trajectory(generator, plan, make_rows):  # 10.16
    policy, sampler = generator.policy(), generator.sampler(steps=T, plan=PLANS[plan])
    rollout = generator.sample(policy, make_rows(2, 8), sampler)
    grid = rollout.sigmas
    for rows in of_groups(rollout):
        first, x, anchor = rollout.rows(rows[:1]), None, {}
        with torch.no_grad():  # the ODE from the group's one noise
            index = first.prompts[0].index
            draw = {"seed": 5, "iteration": 2, "prompt": index, "member": 0, "step": noise.INITIAL}
            x = noise.normal(first.latents.shape[1:], **draw)[None]
            for i in range(T):
                anchor[i] = x[0]
                x = x + (grid[i + 1] - grid[i]) * policy.velocity(x, grid[i], first)
        by_step: dict[int, list[int]] = {}
        for i in rows:
            by_step.setdefault(rollout.plans[i].anchor, []).append(i)
        assert set(by_step) == set(sampler.plan.active)
        for step, leaving in by_step.items():
            one = leaving[0]
            torch.testing.assert_close(rollout.states[one, 0], anchor[step], **BATCH_SHAPE)
            assert all(torch.equal(rollout.states[i, 0], rollout.states[one, 0]) for i in leaving)
            assert all(torch.equal(rollout.means[i, 0], rollout.means[one, 0]) for i in leaving)


def test_strides_of_one_branch_take_one_action(generator, make_rows):
    policy, sampler = generator.policy(), generator.sampler(steps=T, plan=PLANS["granular"])
    rollout = generator.sample(policy, make_rows(1, 8), sampler)
    for fine, coarse in ((0, 2), (1, 3), (4, 6), (5, 7)):  # branches 0 1 leave at 0 and 2, 2 3 again with stride 2
        assert torch.equal(rollout.actions[fine], rollout.actions[coarse])
        assert (rollout.latents[fine] - rollout.latents[coarse]).abs().max() > 1e-3
    for other in (1, 4):
        assert (rollout.actions[0] - rollout.actions[other]).abs().max() > 0.1


@pytest.mark.parametrize("plan", ["branching window", "merged"])
def test_a_shared_trajectory_does_not_depend_on_the_others(generator, plan, make_rows):
    """A process that holds some members of a group makes the same anchor as one that holds all."""
    policy, sampler = generator.policy(), generator.sampler(steps=T, plan=PLANS[plan])
    prompts, members = make_rows(2, 4)
    every = generator.sample(policy, (prompts, members), sampler)
    mine = [1, 6]
    some = generator.sample(policy, ([prompts[i] for i in mine], [members[i] for i in mine]), sampler)
    torch.testing.assert_close(some.latents, every.latents[mine], **BATCH_SHAPE)
    torch.testing.assert_close(some.log_prob, every.log_prob[mine], **BATCH_SHAPE)


# -------------------------------------------------------------------------------------------------- flash, gradients


def test_flash_is_not_euler_on_the_same_path(generator, make_rows, monkeypatch):
    policy, rows = generator.policy(), make_rows(1, 2)
    sampler = generator.sampler(steps=T, plan=PLANS["flash"])
    flash = generator.sample(policy, rows, sampler)
    assert flash.plans[0].path == (0, 1, 2, 3, 4, 6) and flash.plans[0].solver == "dpm2"
    for plan in flash.plans:
        object.__setattr__(plan, "solver", "euler")
    monkeypatch.setattr(FlowSDE, "draw_plans", lambda *args: flash.plans)
    euler = generator.sample(policy, rows, sampler)
    assert torch.equal(euler.actions, flash.actions)
    assert (euler.latents - flash.latents).abs().max() > 1e-3


@pytest.mark.parametrize("plan", ["window per sample", "merged"])
def test_a_micro_batch_of_many_plans_has_the_gradient_of_its_rows(generator, plan, perturb, make_rows, gradients):
    policy, sampler = perturb(generator.policy(True)), generator.sampler(steps=T, plan=PLANS[plan])
    rollout = generator.sample(policy, make_rows(2, 2), sampler)
    assert len({p.trained_intervals for p in rollout.plans}) > 1
    u = rollout.units - 1
    whole = gradients(policy, policy.evaluate(rollout, u, sampler).log_prob.sum())
    parts = [gradients(policy, policy.evaluate(rollout.rows([i]), u, sampler).log_prob.sum()) for i in range(4)]
    for name, gradient in whole.items():
        total = sum(part[name] for part in parts)
        torch.testing.assert_close(gradient, total, atol=1e-4 * float(total.abs().max()) + 1e-6, rtol=1e-3)
    assert any(gradient.any() for gradient in whole.values())


def test_rows_keep_their_own_intervals(generator, make_rows):
    policy, sampler = generator.policy(), generator.sampler(steps=T, plan=PLANS["merged"])
    rollout = generator.sample(policy, make_rows(2, 2), sampler)
    start, end = rollout.interval(0)
    assert start.tolist() == [0, 2, 0, 2] and end.tolist() == [1, 4, 1, 4]
    assert rollout.rows([1, 3]).interval(0) == (2, 4)  # equal steps are plain integers
    assert rollout.steps.tolist() == [[0], [2], [0], [2]]
    joined = Rollout.cat([rollout.rows([3]), rollout.rows([0])])
    assert joined.plans == [rollout.plans[3], rollout.plans[0]] and joined.interval(0)[1].tolist() == [4, 1]


def test_a_plan_that_does_not_suit_the_grid_says_so_before_a_forward(generator, make_rows):
    policy = generator.policy()
    sampler = generator.sampler(CPWS, steps=T, plan=Window(2, (1, 5)))
    policy.module.forward = None  # would fail if called
    with pytest.raises(ValueError, match=r"start_range \(1, 5\) contains steps"):
        generator.sample(policy, make_rows(), sampler)
