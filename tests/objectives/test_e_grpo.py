"""E-GRPO: entropies and merges against the specification of flow policy gradients (5.1), branches of tiny SD3 and FLUX
policies against trajectories walked by hand, and the loss against the formula written out in float64."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowrl import EGRPO, ODE, DanceSDE, FlowSDE, Merged, Trainer, TrainingArguments, Window, noise
from flowrl.core import Batch
from flowrl.rollout import Prompt, Rollout
from flowrl.samplers import Explicit, SingleShift
from flowrl.training.recipe import load_recipe
from flowrl.training.trainer import _actions

A_NOISE = 0.7
SIXTEEN = FlowSDE(steps=16, noise_level=A_NOISE, schedule=SingleShift(3.0))
BRANCHES = Merged(active=(0, 1, 2), merge=(1, 1, 2))
FIVE = FlowSDE(steps=5, noise_level=A_NOISE, schedule=SingleShift(1.5), plan=BRANCHES)


def kernel(t, t_next, sigma_1, a=A_NOISE):
    """(A, C, std) of section 1.1 in plain floats."""
    D = t - t_next
    s2 = a * a * t / (1 - (sigma_1 if t == 1 else t))
    return 1 - s2 * D / (2 * t), -D * (1 + s2 * (1 - t) / (2 * t)), math.sqrt(s2 * D)


def entropy(sampler, start, length):
    """E = sqrt(2 pi e) std."""
    return math.sqrt(2 * math.pi * math.e) * sampler.std(sampler.sigmas(), start, start + length)


# --------------------------------------------------------------------------------------------- entropies and merging


def test_entropies_and_the_merges_they_ask_for():  # 5.1, T=16, s=3, a=.7
    table = [2.893, 2.989, 2.137, 1.763, 1.542, 1.392, 1.281, 1.193, 1.120, 1.056]
    assert [entropy(SIXTEEN, i, 1) for i in range(10)] == pytest.approx(table, abs=5e-4)
    auto = SIXTEEN.with_(plan=Merged(active=tuple(range(10)), tau=2.2))
    intervals = [p.trained_intervals[0] for p in auto.draw_plans(auto.sigmas(), 0, 0, [0] * 10, range(10))]
    lengths = [end - start for start, end in intervals]
    assert [start for start, _ in intervals] == list(range(10)) and lengths == [1, 1, 2, 2, 2, 3, 3, 3, 4, 4]
    for i, length in enumerate(lengths):  # the smallest that reaches tau
        assert entropy(SIXTEEN, i, length) >= 2.2 and (length == 1 or entropy(SIXTEEN, i, length - 1) < 2.2)


def test_the_released_recipe():
    released = load_recipe("flux-e-grpo").sampler.plan
    assert (released.active, released.merge) == ((0, 1, 2, 4), (1, 1, 2, 3))
    values = [entropy(SIXTEEN, n, length) for n, length in zip(released.active, released.merge, strict=True)]
    assert values == pytest.approx([2.893, 2.989, 3.096, 2.824], abs=5e-4)
    assert entropy(SIXTEEN, 4, 2) > 2.2  # so its last merge is longer than the least


@pytest.mark.parametrize(("start", "length"), [(0, 1), (1, 1), (0, 3), (2, 2), (4, 3), (9, 4)])
def test_a_merged_step_is_one_flow_sde_step(start, length):  # 10.16
    x, v = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(start))
    sigmas = SIXTEEN.sigmas()
    grid = sigmas.double().tolist()
    merged = SIXTEEN.transition(x, v, sigmas, start, end=start + length)
    A, C, std = kernel(grid[start], grid[start + length], grid[1])
    torch.testing.assert_close(merged.mean, A * x + C * v, rtol=1e-12, atol=1e-12)
    assert merged.std.item() == pytest.approx(std, rel=1e-12)
    if length == 1:
        plain = SIXTEEN.transition(x, v, sigmas, start)
        assert torch.equal(merged.mean, plain.mean) and torch.equal(merged.std, plain.std)
    euler = SIXTEEN.with_(noise_level=0.0).transition(x, v, sigmas, start, end=start + length)
    torch.testing.assert_close(euler.mean, x - (grid[start] - grid[start + length]) * v, rtol=1e-12, atol=1e-12)
    assert euler.std == 0


# ---------------------------------------------------------------------------------------------------------- branches

SEED, ITERATION = 5, 2


@pytest.fixture
def branched(make_sd3_policy, make_flux_policy, make_rows, perturb):
    """(kind, sampler, size) -> (policy, rollout): two prompts, `size` samples each."""

    def make(kind, sampler, size):
        policy = perturb({"sd3": make_sd3_policy, "flux": make_flux_policy}[kind](True), scale=0.03)
        prompts, members = make_rows(2, size)
        return policy, policy.sample(prompts, members, sampler, seed=SEED, iteration=ITERATION, batch_size=5)

    return make


def walk(policy, rollout, row, x, path):
    """Euler along sigma indices from x `[1, ...]`: the state at each index."""
    part = rollout.rows([row])
    states = [x]
    for start, end in pairwise(path):
        with torch.no_grad():
            v = policy.velocity(states[-1], rollout.sigmas[start], part)
        states.append(states[-1] + (rollout.sigmas[end] - rollout.sigmas[start]) * v)
    return states


def initial(rollout, prompt):
    return noise.batch_normal(rollout.latents.shape[1:], SEED, ITERATION, [prompt], [0], noise.INITIAL)


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_branches_part_from_one_trajectory_and_end_without_noise(branched, kind):  # 5.2, 10.16
    sampler = FIVE.with_(guidance_scale=3.5) if kind == "flux" else FIVE
    policy, rollout = branched(kind, sampler, size=6)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # noqa: E731
    leaves: dict[tuple, list[int]] = {}
    for row, (prompt, member) in enumerate(zip(rollout.prompts, rollout.members, strict=True)):
        plan, n = rollout.plans[row], BRANCHES.active[member % 3]
        end = n + BRANCHES.merge[member % 3]
        assert plan.trained_intervals == ((n, end),) and plan.branch == member % 3
        anchor = walk(policy, rollout, row, initial(rollout, prompt.index), range(n + 1))[-1]
        close(rollout.states[row], anchor)
        xi = noise.batch_normal(rollout.latents.shape[1:], SEED, ITERATION, [prompt.index], [member // 3], n)
        close(rollout.actions[row], rollout.means[row] + sampler.std(rollout.sigmas, n, end) * xi)
        # the suffix starts where the merged step ended, not at n + 1
        close(rollout.latents[row], walk(policy, rollout, row, rollout.actions[row], range(end, 6))[-1][0])
        leaves.setdefault((prompt.index, n), []).append(row)
    assert sorted(map(len, leaves.values())) == [2] * 6
    for first, second in leaves.values():
        assert torch.equal(rollout.states[first], rollout.states[second])
        assert torch.equal(rollout.means[first], rollout.means[second])
        assert (rollout.latents[first] - rollout.latents[second]).abs().max() > 0.05
    again = policy.evaluate(rollout, 0, sampler).log_prob.detach()
    torch.testing.assert_close(again, rollout.log_prob[:, 0], rtol=0, atol=1e-6)


def test_as_the_noise_vanishes_every_branch_takes_the_anchors_euler_step(branched):  # 10.16
    policy, rollout = branched("sd3", FIVE.with_(noise_level=1e-6), size=6)
    for row, prompt in enumerate(rollout.prompts):
        ((n, end),) = rollout.plans[row].trained_intervals
        path = (*range(n + 1), *range(end, 6))
        states = walk(policy, rollout, row, initial(rollout, prompt.index), path)
        torch.testing.assert_close(rollout.actions[row], states[n + 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rollout.latents[row], states[-1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("granularities", [(1,), (1, 2)])
def test_the_shared_trajectory_is_walked_once_per_group(make_sd3_policy, make_rows, granularities):
    policy, passes = make_sd3_policy(), []
    handle = policy.module.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    plan = Merged(active=(0, 2), merge=(1, 2), granularities=granularities)
    prompts, members = make_rows(3, 2 * plan.branches)
    rollout = policy.sample(prompts, members, FIVE.with_(plan=plan), seed=0, iteration=0, batch_size=64)
    handle.remove()
    # Three prompts to step 2 and its velocity; then 4 steps after 0 -> 1 and 1 after 2 -> 4, or 2 and 1 at stride 2.
    suffixes = {(1,): 2 * (4 + 1), (1, 2): 2 * (4 + 1) + 2 * (2 + 1)}[granularities]
    assert sum(passes) == 3 * 3 + 3 * suffixes
    assert sum(passes) == 9 + sum(len(p.path) - 2 - p.anchor for p in rollout.plans)


def make_trainer(policy, tmp_path, objective=None, sampler=FIVE, **arguments):
    defaults = {"iterations": 2, "prompts_per_iteration": 2, "group_size": 6, "log_with": (), "micro_batch_size": 4}
    return Trainer(
        policy,
        objective or EGRPO(),
        sampler,
        lambda images, prompts: images.flatten(1).mean(1),
        ["red square", "a green cat"],
        args=TrainingArguments(output_dir=str(tmp_path), **defaults | arguments),
    )


def test_samples_are_compared_with_those_that_left_at_the_same_step(make_sd3_policy, tmp_path):
    trainer = make_trainer(make_sd3_policy(True), tmp_path, group_size=12)
    rollout, batch, advantage, _ = trainer.rollout(0)
    assert batch.extra["transition"].unique().numel() == 24  # nothing is shared
    rows: dict[tuple, list[int]] = {}
    for s in range(24):
        rows.setdefault((s // 12, int(batch.extra["step"][s, 0])), []).append(s)
    assert sorted(map(len, rows.values())) == [4] * 6 and batch.group_id.unique().numel() == 6
    exact = trainer.objective.advantages(replace(batch, reward=batch.reward.double())).adv[:, 0]
    torch.testing.assert_close(advantage.adv[:, 0].double(), exact, rtol=0, atol=1e-3)
    for members in rows.values():
        r = batch.reward[members].double()
        torch.testing.assert_close(exact[members], (r - r.mean()) / (r.std() + 1e-8))
        assert exact[members].sum().abs() < 1e-9
    assert rollout.units == 1


def test_granularities_share_the_action_and_its_advantage(make_sd3_policy, tmp_path):
    plan = Merged(active=(0, 1), merge=(1, 2), granularities=(1, 2))
    trainer = make_trainer(make_sd3_policy(True), tmp_path, sampler=FIVE.with_(plan=plan), group_size=12)
    rollout, batch, advantage, _ = trainer.rollout(0)
    order = trainer.plan.rows(trainer.args.seed, 0, 0)
    at = {s: i for i, s in enumerate(order)}  # sample number -> row of the rollout
    z = torch.zeros(24)
    for g in batch.group_id.unique():
        rows = batch.group_id == g
        assert rows.sum() == 3
        r = batch.reward[rows]
        z[rows] = (r - r.mean()) / (r.std() + 1e-8)
    ids = batch.extra["transition"]
    assert ids.unique().numel() == 12
    for action in ids.unique():
        one, other = (ids == action).nonzero().flatten().tolist()
        torch.testing.assert_close(advantage.adv[[one, other], 0], (z[one] + z[other]).repeat(2))
        a, b = at[one], at[other]
        for name in ("states", "actions", "log_prob"):
            assert torch.equal(getattr(rollout, name)[a], getattr(rollout, name)[b])
        assert rollout.plans[a].path != rollout.plans[b].path and rollout.plans[a].path[-1] == 5
        assert not torch.equal(rollout.latents[a], rollout.latents[b])
    assert (advantage.adv[:, 0] - z).abs().max() > 0.1


@pytest.mark.parametrize(
    "plan", [BRANCHES, Merged(active=(0, 1), granularities=(1, 2)), Window(2, (0, 4), branch=True)]
)
def test_it_trains(make_sd3_policy, tmp_path, plan):
    sampler = FIVE.with_(plan=plan)
    settings = {"group_size": 2 * plan.branches, "updates_per_iteration": 2}
    trainer = make_trainer(make_sd3_policy(True), tmp_path, sampler=sampler, **settings)
    before = {n: p.detach().clone() for n, p in trainer.policy.trainable().items()}
    summary = trainer.train()
    assert summary["finished"]
    assert any(not torch.equal(p, before[n]) for n, p in trainer.policy.trainable().items())


# ------------------------------------------------------------------------------------------------------------- the loss

GRID = (1.0, 0.85, 0.65, 0.45, 0.2, 0.0)
ACTIVE, MERGE = (0, 1), (1, 2)


def branch_out(policy, sampler, groups, size):
    """A rollout of the linear policy in float64, one row after the other, as a Merged plan says."""
    sigmas = sampler.sigmas()
    prompts = [Prompt(10 + 3 * g, f"prompt {g}") for g in range(groups) for _ in range(size)]
    members = list(range(size)) * groups
    plans = sampler.draw_plans(sigmas, SEED, ITERATION, [p.index for p in prompts], members)
    d = len(policy.module["w"])
    table = {name: [] for name in ("states", "actions", "means", "log_prob", "latents")}
    with torch.no_grad():
        for prompt, plan in zip(prompts, plans, strict=True):
            at = {"seed": SEED, "iteration": ITERATION, "prompt": prompt.index}
            x = noise.normal((1, d), member=0, step=noise.INITIAL, **at).double()
            for (start, end), stochastic in zip(plan.intervals, plan.stochastic, strict=True):
                transition = sampler.transition(
                    x, policy.velocity(x, sigmas[start], None), sigmas, start, stochastic, end=end
                )
                action = transition.mean
                if stochastic:
                    action = transition.sample(noise.normal((1, d), member=plan.noise_member, step=start, **at))
                    log_prob = sampler.log_prob(transition, action)
                    for name, value in zip(table, (x, action, transition.mean, log_prob), strict=False):
                        table[name].append(value)
                x = action
            table["latents"].append(x[0])
    return Rollout(
        prompts=prompts,
        members=members,
        iteration=ITERATION,
        seed=SEED,
        plans=plans,
        sigmas=sigmas,
        guidance_scale=1.0,
        calls={},
        shared={},
        **{name: torch.stack(values) for name, values in table.items()},
    )


def written_out(policy, rollout, plan, rewards, *, clip=1e-4, adv_clip=5.0, kl=0.0):
    """Section 5.2: mean over prompts, active steps and noises of -min(r A, clip(r) A), A summed over granularities."""
    G = rollout.members[-1] // plan.branches + 1
    K = len(plan.granularities)
    reward = rewards.reshape(-1, G, K, len(plan.active))  # members: granularity and step vary fastest
    adv = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-8)).sum(2)
    adv = adv.clamp(-adv_clip, adv_clip)
    size, grid, loss = G * plan.branches, rollout.sigmas.double().tolist(), 0.0
    for p in range(len(adv)):
        for i, n in enumerate(plan.active):
            end = n + plan.merge[i]
            A, C, std = kernel(grid[n], grid[end], grid[1])
            for g in range(G):
                row = p * size + g * plan.branches + i  # of the first granularity
                x, action = rollout.states[row, 0], rollout.actions[row, 0]
                mean = A * x + C * (policy.module["w"] * x + policy.module["b"] * grid[n])
                r = (Normal(mean, std).log_prob(action).mean() - rollout.log_prob[row, 0]).exp()
                a = adv[p, g, i]
                term = -torch.minimum(r * a, r.clamp(1 - clip, 1 + clip) * a)
                if kl:
                    w, b = (policy.weights["reference"][name] for name in "wb")
                    reference = A * x + C * (w * x + b * grid[n])
                    term = term + kl * kl_divergence(Normal(mean, std), Normal(reference, std)).mean()
                loss = loss + term / (len(adv) * len(plan.active) * G)
    return loss


@pytest.fixture
def whole(micros, total):
    """(objective, policy, rollout, sampler, rewards, size) -> (loss, gradients, metrics) with the trainer's batch."""

    def run(objective, policy, rollout, sampler, rewards, size=None):
        branches = sampler.plan.branches
        batch = Batch(
            mask=torch.ones(len(rollout), 1, dtype=torch.bool),
            reward=rewards,
            group_id=torch.tensor(
                [p.index * branches + plan.branch for p, plan in zip(rollout.prompts, rollout.plans, strict=True)]
            ),
            extra={"transition": _actions(rollout.prompts, rollout.members, rollout.plans)},
        )
        advantage = objective.advantages(batch)
        return total(objective, policy, sampler, micros(rollout, batch, advantage, size))

    return run


@pytest.mark.parametrize("granularities", [(1,), (1, 2), (1, 2, 3)])
@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_range": 0.01}, {"clip_range": 0.03}, {"adv_clip_max": 0.6}, {"kl": 0.3, "kl_form": "exact_mean"}],
    ids=["defaults", "clip", "wide clip", "adv clip", "kl"],
)
def test_loss_and_gradient_are_the_formula(linear, whole, close, granularities, settings):
    plan = Merged(active=ACTIVE, merge=MERGE, granularities=granularities)
    sampler = FlowSDE(steps=5, schedule=Explicit(GRID), plan=plan)
    rollout = branch_out(linear, sampler, groups=2, size=3 * plan.branches)
    linear.move(0.1)
    rewards = torch.rand(len(rollout), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss, grads, metrics = whole(EGRPO(**settings), linear, rollout, sampler, rewards, size=5)
    names = {"clip_range": "clip", "adv_clip_max": "adv_clip", "kl": "kl"}
    expected = written_out(linear, rollout, plan, rewards, **{names[k]: v for k, v in settings.items() if k in names})
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    oracle = torch.autograd.grad(expected, list(linear.trainable().values()))
    close(grads, dict(zip(grads, oracle, strict=True)))
    assert metrics["clip_frac_high"] + metrics["clip_frac_low"] > 0.1
    assert all(g.abs().max() > 1e-5 for g in grads.values())


def test_the_coefficients_change_the_gradient(linear, whole):
    plan = Merged(active=ACTIVE, merge=MERGE)
    sampler = FlowSDE(steps=5, schedule=Explicit(GRID), plan=plan)
    rollout = branch_out(linear, sampler, groups=2, size=6)
    linear.move(0.1)
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = whole(EGRPO(), linear, rollout, sampler, rewards)[1]["w"]
    for change in ({"clip_range": 0.03}, {"adv_clip_max": 0.6}, {"kl": 0.3}):
        assert (whole(EGRPO(**change), linear, rollout, sampler, rewards)[1]["w"] - plain).abs().max() > 1e-4


def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(linear, whole, close):  # 10.9
    sampler = FlowSDE(steps=5, schedule=Explicit(GRID), plan=Merged(active=ACTIVE, merge=MERGE, granularities=(1, 2)))
    rollout = branch_out(linear, sampler, groups=2, size=12)
    rewards = torch.rand(24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, grads, metrics = whole(EGRPO(), linear, rollout, sampler, rewards)
    z = rewards.reshape(2, 3, 2, 2)  # prompt, noise, granularity, step
    adv = ((z - z.mean(1, keepdim=True)) / (z.std(1, keepdim=True) + 1e-8)).sum(2, keepdim=True).expand(2, 3, 2, 2)
    plain = -(adv.flatten() * linear.evaluate(rollout, 0, sampler).log_prob).mean()
    oracle = torch.autograd.grad(plain, list(linear.trainable().values()))
    close(grads, dict(zip(grads, oracle, strict=True)))
    assert metrics["log_ratio_max"] < 1e-12


def test_a_branch_without_spread_teaches_nothing(linear, whole):
    sampler = FlowSDE(steps=5, schedule=Explicit(GRID), plan=Merged(active=ACTIVE, merge=MERGE))
    rollout = branch_out(linear, sampler, groups=2, size=6)
    rewards = torch.tensor([0.3, 0.9] * 6, dtype=torch.float64)  # differs between the branches only
    loss, grads, _ = whole(EGRPO(), linear, rollout, sampler, rewards)
    assert loss == 0 and not any(g.any() for g in grads.values())


# -------------------------------------------------------------------------------------------- arguments and interface


@pytest.mark.parametrize("plan", [None, Window(2, (0, 5))], ids=["all steps", "window"])
def test_a_plan_without_branches_is_refused_with_the_remedy(plan):
    sampler = FlowSDE() if plan is None else FlowSDE(plan=plan)
    with pytest.raises(ValueError, match=rf"EGRPO compares samples.*{type(sampler.plan).__name__}.*plan=Merged\("):
        EGRPO().check(sampler)
    with pytest.raises(ValueError, match="EGRPO compares samples"):  # before a model is looked for
        Trainer("no/such/folder", EGRPO(), sampler, "jpeg_compressibility", ["a cat"])


def test_what_else_it_cannot_serve_is_refused():
    for sampler in (ODE(plan=Merged()), FlowSDE(steps=16, noise_level=0.0, plan=Merged())):
        with pytest.raises(ValueError, match="EGRPO scores stochastic steps"):
            EGRPO().check(sampler)
    with pytest.raises(ValueError, match="equal parts"):
        EGRPO(allocation="variance").check(FIVE)


def test_anchored_plans_are_accepted():
    EGRPO().check(FIVE)
    EGRPO().check(SIXTEEN.with_(plan=Merged(active=(0, 1, 2, 4))))
    EGRPO().check(DanceSDE(steps=16, plan=BRANCHES))
    EGRPO().check(FlowSDE(plan=Window(1, (0, 5), branch=True)))


@pytest.mark.parametrize("bad", [{"clip_range": 0.0}, {"adv_clip_max": -1.0}, {"kl": -0.1}])
def test_arguments_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        EGRPO(**bad)


def test_requirements_and_defaults():
    assert EGRPO().requires == {"log_prob", "branches"}
    assert EGRPO(kl=0.1).requires == {"log_prob", "branches", "reference"}
    cfg = EGRPO().algorithm.cfg
    assert (cfg.clip_lo, cfg.clip_hi, cfg.adv_clip_max, cfg.ddof, cfg.eps, cfg.beta) == (1e-4, 1e-4, 5.0, 1, 1e-8, 0.0)


def test_recipes():
    shapes, flux = load_recipe("shapes-e-grpo"), load_recipe("flux-e-grpo")
    assert shapes.training.group_size % shapes.sampler.plan.branches == 0
    plan = shapes.sampler.plan
    for n, length in zip(plan.active, plan.merge, strict=True):  # what tau = 2.2 asks for on that grid
        assert entropy(shapes.sampler, n, length) >= 2.2
        assert length == 1 or entropy(shapes.sampler, n, length - 1) < 2.2
    assert flux.objective == EGRPO(clip_range=1e-4, adv_clip_max=5.0)
    assert flux.sampler.with_(plan=BRANCHES) == SIXTEEN.with_(plan=BRANCHES, guidance_scale=3.5)
    t = flux.training
    assert (t.learning_rate, t.weight_decay, t.iterations, flux.lora) == (2e-6, 1e-4, 300, None)
    assert t.group_size % flux.sampler.plan.branches == 0 and "not run by us" in flux.description
