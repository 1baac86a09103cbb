"""Which steps are stochastic, trained, merged and shared.

Numbers such as 10.15 and 5.1 refer to the specification of flow policy gradients.
"""

import collections
import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise, product

import pytest
import torch

from flowrl.distributions import Gaussian
from flowrl.samplers import (
    CPS,
    CPWS,
    ODE,
    AllSteps,
    DanceSDE,
    FlowSampler,
    FlowSDE,
    Merged,
    Plan,
    RandomSteps,
    SchedulerConfig,
    SingleShift,
    SlidingWindow,
    StepPlan,
    Window,
)

T = 10
FEASIBLE = [True] * (T - 1) + [False]
E_GRPO = FlowSDE(steps=16, noise_level=0.7, schedule=SingleShift(3.0))
PLANS = [
    AllSteps(),
    Window(2, (0, 5)),
    Window(3, (1, 6), scope="prompt", branch=True),
    Window(1, (0, 9), scope="sample"),
    RandomSteps(3, (0, 5)),
    SlidingWindow(period=3),
    SlidingWindow(2, stride=2, period=2, first=1, strategy="random", branch=True),
    SlidingWindow(2, period=4, strategy="exp_decay", decay=0.5, decay_from=2, restart=True, compression=0.5),
    Merged(active=(0, 1, 3), merge=(1, 2, 4)),
    Merged(active=(1, 2), tau=2.5, scale=1.2, granularities=(1, 3)),
]
each_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: type(plan).__name__)


def draw(plan, iteration=0, seed=0, steps=T, **kw):
    return plan.draw(seed, iteration, steps, [True] * (steps - 1) + [False], **{"std": lambda a, b: 1.0} | kw)


def starts(plan, iterations, **kw):
    """Where the window of each iteration starts."""
    return [draw(plan, iteration, **kw).trained_steps[0] for iteration in iterations]


def evenly(counts, draws):
    """Whether the counts of equally likely outcomes lie within five standard deviations."""
    p = 1 / len(counts)
    return all(abs(n - draws * p) <= 5 * (draws * p * (1 - p)) ** 0.5 for n in counts.values())


# ---------------------------------------------------------------------------------------------------------- StepPlan


def test_a_step_plan_visits_every_sigma_unless_told():
    plan = StepPlan((True, False), (True, False))
    assert plan.path == (0, 1, 2) and plan.intervals == ((0, 1), (1, 2))
    assert plan == StepPlan((True, False), (True, False), path=[0, 1, 2])


def test_a_merged_path_has_longer_steps():
    plan = StepPlan((False, True, True, False), (False, False, True, False), path=(0, 1, 4, 5, 9))
    assert plan.intervals == ((0, 1), (1, 4), (4, 5), (5, 9))
    assert plan.trained_intervals == ((4, 5),) and plan.trained_steps == (4,)


NO = (False, False, False)
INCONSISTENT = {
    "trained but not stochastic": dict(stochastic=(True, False), trained=(True, True)),
    "1 stochastic flags for 2 trained flags": dict(stochastic=(True,), trained=(True, False)),
    "needs 4 indices": dict(stochastic=NO, trained=NO, path=(0, 1, 2)),
    "ascending from 0, got (1, 2, 3, 4)": dict(stochastic=NO, trained=NO, path=(1, 2, 3, 4)),
    "ascending from 0, got (0, 2, 2, 4)": dict(stochastic=NO, trained=NO, path=(0, 2, 2, 4)),
    "before the anchor 2 must be plain": dict(stochastic=(False, True, True), trained=NO, anchor=2),
    "before the anchor 1 must be plain": dict(stochastic=NO, trained=NO, anchor=1, path=(0, 2, 3, 4)),
    "before the anchor 3 must be plain": dict(stochastic=NO, trained=NO, anchor=3),
    "before the anchor -1 must be plain": dict(stochastic=NO, trained=NO, anchor=-1),
    "unknown solver 'heun': 'euler' or 'dpm2'": dict(stochastic=NO, trained=NO, solver="heun"),
}


@pytest.mark.parametrize(("message", "fields"), INCONSISTENT.items())
def test_inconsistent_step_plans_raise(message, fields):
    with pytest.raises(ValueError) as error:
        StepPlan(**fields)
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------------- every plan


@each_plan
def test_a_plan_is_a_function_of_seed_iteration_and_sample(plan):
    """Equal on all processes and after a restart: a new object asked in another order gives the same."""
    asked = list(product(range(6), (3, 40), (0, 1, 5)))  # iterations, prompts, members
    ours = {key: draw(plan, key[0], prompt=key[1], member=key[2]) for key in asked}
    again = {key: draw(replace(plan), key[0], prompt=key[1], member=key[2]) for key in reversed(asked)}
    assert ours == again


@each_plan
def test_every_plan_ends_at_sigma_zero_and_trains_its_stochastic_steps(plan):
    sampler = FlowSDE(plan=plan)
    for iteration in range(12):
        for step_plan in sampler.draw_plans(sampler.sigmas(), 1, iteration, [4] * 12, list(range(12))):
            assert step_plan.path[-1] == T and step_plan.stochastic == step_plan.trained
            assert step_plan.trained_steps and not step_plan.stochastic[-1]
            assert (step_plan.anchor is not None) == plan.anchored
            assert step_plan.anchor in (None, step_plan.trained_steps[0])  # the group parts at the first noise


@each_plan
def test_a_process_that_asks_for_some_samples_gets_what_one_that_asks_for_all_does(plan):
    sampler = CPS(plan=plan)
    prompts, members = [3] * 6 + [8] * 6, list(range(6)) * 2
    every = sampler.draw_plans(sampler.sigmas(), 0, 5, prompts, members)
    mine = sampler.draw_plans(sampler.sigmas(), 0, 5, prompts[1::2], members[1::2])
    assert mine == every[1::2]


@each_plan
@pytest.mark.parametrize("sampler", [ODE(), FlowSDE(noise_level=0.0)])
def test_a_deterministic_sampler_has_nothing_to_train(sampler, plan):
    (drawn,) = sampler.with_(plan=plan).draw_plans(SingleShift()(T), 0, 0, [0], [1])
    assert drawn == StepPlan((False,) * T, (False,) * T) and drawn.trained_steps == ()


@each_plan
def test_feasibility_has_one_flag_per_step(plan):
    with pytest.raises(ValueError, match="9 feasibility flags for 10 steps"):
        plan.draw(0, 0, T, [True] * 9)
    assert plan.draw(0, 0, T, torch.tensor(FEASIBLE), std=lambda a, b: 1.0) == draw(plan)


@each_plan
def test_a_plan_survives_saving_with_its_sampler(plan, tmp_path):
    sampler = FlowSDE(plan=plan)
    sampler.save_pretrained(tmp_path)
    loaded = FlowSampler.from_pretrained(tmp_path)
    assert loaded == sampler and repr(loaded) == repr(sampler)  # a checkpoint knows its run by the repr
    assert hash(loaded.plan) == hash(plan)
    saved = json.loads((tmp_path / "sampler_config.json").read_text())["plan"]
    assert saved["class"] == type(plan).__name__


@each_plan
def test_a_plan_can_be_written_in_a_recipe(plan):
    import yaml

    from flowrl.training.recipe import dump_recipe, load_recipe, recipe_from

    base = load_recipe("shapes-flow-grpo", ["sampler.steps=10"])
    written = dump_recipe(replace(base, sampler=base.sampler.with_(plan=plan)))
    read = recipe_from(yaml.safe_load(written)).sampler.plan
    assert read == plan and repr(read) == repr(plan)


def test_plans_as_a_recipe_writes_them():
    from flowrl.training.recipe import load_recipe

    def plan(text):
        return load_recipe("shapes-flow-grpo", ["sampler.steps=16", f"sampler.plan={text}"]).sampler.plan

    assert plan("{name: Merged, active: [0, 1, 2], merge: [1, 1, 2]}") == Merged((0, 1, 2), (1, 1, 2))
    assert plan("{name: Merged, merge: null, tau: 2}") == Merged(tau=2.0)
    assert plan("{name: SlidingWindow, strategy: exp_decay, period: 9}") == SlidingWindow(
        strategy="exp_decay", period=9
    )
    assert plan("{name: Window, size: 2, start_range: [0, 5], branch: true}") == Window(2, (0, 5), branch=True)
    assert plan("SlidingWindow") == SlidingWindow()
    for text, message in {
        "{name: Window, size: 2, start_range: [0, 5], scope: rank}": "scope must be 'iteration' or",
        "{name: Merged, active: 3}": "sampler.plan.active must be a list, got 3",
        "{name: Merged, active: []}": "sampler.plan: active must name at least one step",
        "{name: RandomSteps, count: 3, start_range: [0, 16]}": "sampler: start_range (0, 16) contains steps [15]",
    }.items():
        with pytest.raises(ValueError) as error:
            plan(text)
        assert message in str(error.value)


def test_the_recipes_of_windows_are_the_published_ones():
    """1.6 (no guidance) and 4."""
    from flowrl.training.recipe import load_recipe

    fast, mix = load_recipe("sd35-flow-grpo-fast"), load_recipe("flux-mix-grpo")
    assert type(fast.sampler) is CPS and fast.sampler.plan == Window(3, (0, 5))
    assert (fast.sampler.steps, fast.sampler.noise_level, fast.sampler.guidance_scale) == (10, 0.8, 1.0)
    assert (fast.objective.clip_range, fast.objective.kl) == (1e-5, 0.0)
    assert type(mix.sampler) is FlowSDE and mix.sampler.plan == SlidingWindow(4, 1, 25, branch=True)
    assert (mix.sampler.steps, mix.sampler.noise_level, mix.sampler.schedule) == (25, 0.7, SingleShift(3.0))
    assert (mix.objective.clip_range, mix.objective.kl) == (1e-4, 0.0)
    assert (mix.training.group_size, mix.training.updates_per_iteration) == (12, 4)


@dataclass(frozen=True)
class Uneven(Plan):
    """Member m trains m + 1 steps: what no table can hold."""

    def _draw(self, seed, iteration, feasible, prompt, member, std):
        active = tuple(i <= member for i in range(len(feasible)))
        return StepPlan(active, active)


def test_all_samples_train_the_same_number_of_steps():
    sampler = FlowSDE(plan=Uneven())
    with pytest.raises(ValueError, match=r"Uneven trains \[1, 2\] steps: all samples need the same number"):
        sampler.draw_plans(sampler.sigmas(), 0, 0, [0, 0], [0, 1])
    assert len(sampler.draw_plans(sampler.sigmas(), 0, 0, [0, 5], [1, 1])) == 2


# --------------------------------------------------------------------------------------------------------- AllSteps


def test_all_steps_trains_everything_but_the_last():
    """Flow-GRPO trains int(.99 T) = 9 of 10 steps."""
    plan = AllSteps().draw(seed=0, iteration=0, steps=T, feasible=FEASIBLE)
    assert plan.trained_steps == tuple(range(int(0.99 * T)))
    assert plan.stochastic == plan.trained
    assert AllSteps().draw(0, 0, T, [True] * T) == plan


def test_all_steps_skips_what_the_sampler_cannot_do():
    sampler = CPWS(schedule=SchedulerConfig({"shift": 3.0}))
    plan = sampler.plan.draw(0, 0, sampler.steps, sampler.feasible(sampler.sigmas()))
    assert plan.trained_steps == (0, 1, 2, 3, 4, 5, 6)


# ----------------------------------------------------------------------------------------------------------- Window


@pytest.mark.parametrize(("size", "start_range"), [(2, (0, 9)), (3, (0, 5)), (1, (4, 5)), (9, (0, 9)), (2, (3, 8))])
def test_window_stays_in_range(size, start_range):
    """10.15: start in [lo, hi - size], exactly `size` SDE steps, each start equally likely."""
    low, high = start_range
    found = collections.Counter()
    draws = 400
    for iteration in range(draws):
        plan = draw(Window(size, start_range), iteration)
        start = plan.trained_steps[0]
        assert plan.trained_steps == tuple(range(start, start + size))
        assert plan.stochastic == plan.trained and sum(plan.stochastic) == size
        found[start] += 1
    assert sorted(found) == list(range(low, high - size + 1))
    assert evenly(found, draws)


def test_windows_differ_between_iterations_and_seeds():
    plan = Window(2, (0, 9))
    assert starts(plan, range(20)) != starts(plan, range(20), seed=2)
    assert starts(plan, range(20)) != starts(plan, range(20, 40))


@pytest.mark.parametrize(
    ("scope", "prompt_matters", "member_matters"),
    [("iteration", False, False), ("prompt", True, False), ("sample", True, True)],
)
def test_scope_says_who_shares_a_window(scope, prompt_matters, member_matters):
    plan = Window(2, (0, 9), scope=scope)
    first = starts(plan, range(30))
    assert (starts(plan, range(30), prompt=1) != first) == prompt_matters
    assert (starts(plan, range(30), member=1) != first) == member_matters
    found = collections.Counter(starts(plan, range(400), prompt=7, member=3))
    assert len(found) == 8 and evenly(found, 400)


def test_windows_per_sample_are_independent():
    plan = Window(1, (0, 2), scope="sample")
    pairs = collections.Counter(zip(starts(plan, range(400)), starts(plan, range(400), member=1), strict=True))
    assert len(pairs) == 4 and evenly(pairs, 400)


@pytest.mark.parametrize("scope", ["iteration", "prompt"])
def test_a_branching_window_is_the_same_window_with_an_anchor(scope):
    for iteration in range(10):
        plan = draw(Window(2, (0, 9), scope=scope, branch=True), iteration, prompt=3)
        start = plan.trained_steps[0]
        assert plan.anchor == start and plan.noise_member is None and plan.branch == 0
        assert replace(plan, anchor=None) == draw(Window(2, (0, 9), scope=scope), iteration, prompt=3)


# ------------------------------------------------------------------------------------------------------ RandomSteps


def test_random_steps_are_a_uniform_subset():
    plan, draws = RandomSteps(2, (1, 5)), 600
    found = collections.Counter(draw(plan, iteration).trained_steps for iteration in range(draws))
    assert sorted(found) == [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]  # each pair once, ascending
    assert evenly(found, draws)
    series = [draw(plan, iteration) for iteration in range(20)]
    assert series != [draw(plan, iteration, seed=1) for iteration in range(20)]
    assert series == [draw(plan, iteration, prompt=4, member=2) for iteration in range(20)]


def test_random_steps_can_take_the_whole_range():
    assert draw(RandomSteps(4, (1, 5))).trained_steps == (1, 2, 3, 4)


# ---------------------------------------------------------------------------------------------------- SlidingWindow


@pytest.mark.parametrize(("steps", "size", "stride", "period"), [(25, 4, 1, 25), (10, 4, 1, 150), (10, 2, 3, 4)])
def test_the_window_advances_by_its_stride_at_multiples_of_its_period(steps, size, stride, period):
    """10.15, with the published FLUX and SD3.5 settings."""
    plan = SlidingWindow(size, stride, period)
    last = (steps - 1 - size) // stride * stride
    for iteration in (*range(3 * period), 10**6):
        start = min(iteration // period * stride, last)
        drawn = draw(plan, iteration, steps=steps)
        assert drawn.trained_steps == tuple(range(start, start + size)) and drawn.solver == "euler"
        assert drawn.path == tuple(range(steps + 1))


@pytest.mark.parametrize("strategy", ["progressive", "exp_decay", "random"])
@pytest.mark.parametrize("restart", [False, True])
def test_sliding_windows_are_never_empty_nor_cut_short(strategy, restart):
    for size, stride, first in product((1, 4, 8), (1, 3), (0, 1)):
        plan = SlidingWindow(size, stride, 1, first, strategy=strategy, restart=restart, decay_from=3)
        for iteration in range(30):
            steps = draw(plan, iteration).trained_steps
            assert len(steps) == size and first <= steps[0] and steps[-1] < T - 1


def test_a_restarted_window_begins_again_where_it_began():
    plan = SlidingWindow(3, 2, period=2, first=1, restart=True)
    assert starts(plan, range(14)) == [1, 1, 3, 3, 5, 5, 1, 1, 3, 3, 5, 5, 1, 1]
    assert starts(replace(plan, restart=False), range(14)) == [1, 1, 3, 3, *[5] * 10]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("tau", [1, 5, 25])
def test_exp_decay_is_a_counter_that_moves_the_window(tau, restart):
    """An independent simulation, iteration by iteration, of tau(cur) = ceil(tau exp(-.1 max(cur - 13, 0)))."""
    steps, size = 25, 4
    plan = SlidingWindow(size, period=tau, strategy="exp_decay", restart=restart)
    cur, stayed = 0, 0
    for iteration in range(25 * tau):
        assert draw(plan, iteration, steps=steps).trained_steps[0] == cur
        stayed += 1
        if stayed == math.ceil(tau * math.exp(-0.1 * max(cur - 13, 0))):
            at_end = cur == steps - 1 - size
            cur, stayed = (0 if restart else cur) if at_end else cur + 1, 0


def test_exp_decay_stays_shorter_on_late_steps():
    plan = SlidingWindow(strategy="exp_decay")
    stays = collections.Counter(starts(plan, range(470), steps=25))
    assert [stays[k] for k in range(14)] == [25] * 14
    assert [stays[k] for k in range(14, 20)] == [23, 21, 19, 17, 16, 14]


def test_random_windows_stay_for_a_period():
    plan = SlidingWindow(2, 2, period=5, first=1, strategy="random")
    found = starts(plan, range(2000))
    assert all(len(set(found[i : i + 5])) == 1 for i in range(0, 2000, 5))
    counts = collections.Counter(found[::5])
    assert sorted(counts) == [1, 3, 5, 7] and evenly(counts, 400)
    assert found[:100] != starts(plan, range(100), seed=1)


def test_a_branching_sliding_window_parts_at_the_window():
    for iteration in (0, 7):
        plan = draw(SlidingWindow(period=3, branch=True), iteration)
        assert plan.anchor == plan.trained_steps[0] == iteration // 3
        assert replace(plan, anchor=None) == draw(SlidingWindow(period=3), iteration)


@pytest.mark.parametrize("compression", [0.01, 0.2, 0.4, 0.5, 0.99, 1.0])
def test_flash_takes_a_share_of_the_steps_after_the_window(compression):
    plan = SlidingWindow(period=1, compression=compression)
    for iteration in range(21):
        drawn = draw(plan, iteration, steps=25)
        start, end = iteration if iteration < 21 else 20, iteration + 4
        assert drawn.path[: end + 1] == tuple(range(end + 1)) and drawn.trained_steps == tuple(range(start, end))
        after = drawn.path[end:]
        assert after[-1] == 25  # sigma 0, also with a single step left
        assert len(after) - 1 == max(1, round((25 - end) * compression))
        lengths = {b - a for a, b in pairwise(after)}
        assert max(lengths) - min(lengths) <= 1  # as even as the grid allows
        assert drawn.solver == ("euler" if compression == 1 else "dpm2")


def test_flash_with_a_frozen_window_takes_eight_forwards():
    """Flash* (the window stays at 0, compression .2): 4 + 4 of 25 steps."""
    plan = SlidingWindow(period=10**9, compression=0.2)
    assert {draw(plan, iteration, steps=25).path for iteration in range(0, 300, 50)} == {(0, 1, 2, 3, 4, 9, 14, 19, 25)}


# ----------------------------------------------------------------------------------------------------------- Merged


def entropies(sampler, ends):
    """E = sqrt(2 pi e) std of the steps (i, end), from the sampler's own distribution."""
    sigmas, x = sampler.sigmas(), torch.zeros(1, 4, dtype=torch.float64)
    stds = [sampler.transition(x, x, sigmas, i, end=end).std.item() for i, end in ends]
    return [math.sqrt(2 * math.pi * math.e) * std for std in stds]


def test_the_entropy_table():
    """5.1, T = 16, shift 3, a = .7."""
    published = [2.893, 2.989, 2.137, 1.763, 1.542, 1.392, 1.281, 1.193, 1.120, 1.056]
    assert entropies(E_GRPO, [(i, i + 1) for i in range(10)]) == pytest.approx(published, abs=6e-4)
    released = entropies(E_GRPO, [(0, 1), (1, 2), (2, 4), (4, 7)])
    assert released == pytest.approx([2.893, 2.989, 3.096, 2.824], abs=6e-4)


def merged_intervals(sampler):
    members = range(sampler.plan.branches)
    plans = sampler.draw_plans(sampler.sigmas(), 0, 0, [0] * len(members), list(members))
    return [interval for plan in plans for interval in plan.trained_intervals]


def test_merging_by_entropy_gives_the_published_lengths():
    """5.1: l_i = 1 1 2 2 2 3 3 3 4 4 at tau = 2.2."""
    found = merged_intervals(E_GRPO.with_(plan=Merged(active=range(10))))
    assert [end - start for start, end in found] == [1, 1, 2, 2, 2, 3, 3, 3, 4, 4]
    # Smallest: one step less does not reach tau; tau = 2.2 means std >= .532.
    assert all(e >= 2.2 for e in entropies(E_GRPO, found))
    assert all(e < 2.2 for e in entropies(E_GRPO, [(i, end - 1) for i, end in found if end - i > 1]))
    assert 2.2 / math.sqrt(2 * math.pi * math.e) == pytest.approx(0.532, abs=5e-4)


def test_scale_and_tau_are_one_threshold():
    by_tau = merged_intervals(E_GRPO.with_(plan=Merged(active=range(6), tau=1.1)))
    by_scale = merged_intervals(E_GRPO.with_(plan=Merged(active=range(6), scale=2.0)))
    assert by_tau == by_scale != merged_intervals(E_GRPO.with_(plan=Merged(active=range(6))))


def test_explicit_merges():
    released = E_GRPO.with_(plan=Merged((0, 1, 2, 4), (1, 1, 2, 3)))
    assert merged_intervals(released) == [(0, 1), (1, 2), (2, 4), (4, 7)]


@pytest.mark.parametrize("sampler", [FlowSDE(steps=16), DanceSDE(steps=16), CPS(steps=16)])
def test_a_merged_step_is_the_kernels_step_of_that_length(sampler):
    """10.16: of length 1 the ordinary step; longer, the same kernel between its two sigmas; at noise 0, Euler's."""
    sigmas = sampler.sigmas()
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    for i, length in product((0, 1, 5), (1, 3)):
        merged = sampler.transition(x, v, sigmas, i, end=i + length)
        A, C, std = sampler.coefficients(*sigmas[[i, i + length, 1]].double())
        torch.testing.assert_close(merged.mean, A * x + C * v, rtol=1e-12, atol=1e-12)
        assert merged.std == std == pytest.approx(sampler.std(sigmas, i, i + length), rel=1e-12)
        if length == 1:
            assert torch.equal(merged.mean, sampler.transition(x, v, sigmas, i).mean)
        silent = sampler.with_(noise_level=0.0).transition(x, v, sigmas, i, end=i + length)
        t, t_end = sigmas[[i, i + length]].double()
        torch.testing.assert_close(silent.mean, x - (t - t_end) * v, rtol=1e-12, atol=1e-12)
        assert isinstance(silent, Gaussian) and silent.deterministic


def test_members_take_turns_over_the_branches():
    """10.16: the prefix is the anchor's, the suffix starts where the merged step ends, every path ends at sigma 0."""
    plan = Merged((0, 1, 4), (1, 2, 3), granularities=(1, 4))
    assert plan.branches == 6 and plan.anchored
    drawn = [draw(plan, iteration=8, steps=16, prompt=5, member=m) for m in range(12)]
    assert [p.branch for p in drawn] == [0, 1, 2, 3, 4, 5] * 2
    assert [p.noise_member for p in drawn] == [0] * 6 + [1] * 6  # strides of one step share its noise
    assert [p.anchor for p in drawn] == [p.trained_steps[0] for p in drawn] == [0, 1, 4] * 4
    assert [p.trained_intervals for p in drawn[:6]] == [((0, 1),), ((1, 3),), ((4, 7),)] * 2
    assert drawn[0].path == tuple(range(17))
    assert drawn[1].path == (0, 1, *range(3, 17))
    assert drawn[2].path == (*range(5), *range(7, 17))
    assert [p.path for p in drawn[3:6]] == [(0, 1, 5, 9, 13, 16), (0, 1, 3, 7, 11, 15, 16), (*range(5), 7, 11, 15, 16)]
    assert all(sum(p.stochastic) == 1 for p in drawn)
    assert drawn == [draw(plan, iteration=3, seed=4, steps=16, prompt=2, member=m) for m in range(12)]  # nothing drawn


# ------------------------------------------------------------------------------------------------------- unit table


def test_the_unit_table_describes_each_samples_own_steps():
    sampler = E_GRPO.with_(plan=Merged((0, 2), (1, 2)))
    sigmas = sampler.sigmas().double()
    plans = sampler.draw_plans(sampler.sigmas(), 0, 0, [0] * 4, list(range(4)))
    table = sampler.unit_table(sampler.sigmas(), plans)
    assert table["step"].tolist() == [[0], [2], [0], [2]]
    lengths = [[sigmas[0] - sigmas[1]], [sigmas[2] - sigmas[4]]] * 2
    torch.testing.assert_close(table["length"], torch.tensor(lengths, dtype=torch.float64), rtol=1e-12, atol=0)
    std = [entropy / math.sqrt(2 * math.pi * math.e) for entropy in entropies(sampler, [(0, 1), (2, 4)])]
    assert table["std"][:, 0].tolist() == pytest.approx(std * 2, rel=1e-12)


def test_the_unit_table_of_windows_per_sample():
    sampler = CPS(plan=Window(2, (0, 9), scope="sample"))
    plans = sampler.draw_plans(sampler.sigmas(), 0, 3, [0] * 5, list(range(5)))
    table = sampler.unit_table(sampler.sigmas(), plans)
    assert [tuple(row) for row in table["step"].tolist()] == [p.trained_steps for p in plans]
    assert len({p.trained_steps for p in plans}) > 1
    std = sampler.sigmas().double()[table["step"] + 1] * math.sin(0.4 * math.pi)
    torch.testing.assert_close(table["std"], std, rtol=1e-12, atol=0)


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("size", "start_range"), [(3, (4, 6)), (1, (4, 4)), (0, (0, 5)), (2, (-1, 5)), (2, (6, 2))])
@pytest.mark.parametrize("kind", [Window, RandomSteps])
def test_empty_windows_raise_at_once(kind, size, start_range):
    with pytest.raises(ValueError, match="no window"):
        kind(size, start_range)


REFUSED = {
    "an integer size and an integer range (lo, hi), got 2, (0, 5, 7)": lambda: Window(2, (0, 5, 7)),
    "an integer size and an integer range (lo, hi), got 2.5, (0, 5)": lambda: Window(2.5, (0, 5)),
    "unknown scope 'rank': 'iteration', 'prompt' or 'sample' (a window per process": lambda: Window(2, (0, 5), "rank"),
    "branch needs one window per group": lambda: Window(2, (0, 5), scope="sample", branch=True),
    "size must be an integer of at least 1, not 0": lambda: SlidingWindow(0),
    "size must be an integer of at least 1, not 1.5": lambda: SlidingWindow(1.5),
    "stride must be an integer of at least 1, not 0": lambda: SlidingWindow(stride=0),
    "period must be an integer of at least 1, not -3": lambda: SlidingWindow(period=-3),
    "first must be an integer of at least 0, not -1": lambda: SlidingWindow(first=-1),
    "decay_from must be an integer of at least 0, not -1": lambda: SlidingWindow(decay_from=-1),
    "unknown strategy 'decay': 'progressive', 'exp_decay' or 'random'": lambda: SlidingWindow(strategy="decay"),
    "compression must lie in (0, 1], not 0": lambda: SlidingWindow(compression=0),
    "compression must lie in (0, 1], not 1.2": lambda: SlidingWindow(compression=1.2),
    "decay must be finite and not negative, not -0.1": lambda: SlidingWindow(decay=-0.1),
    "decay must be finite and not negative, not nan": lambda: SlidingWindow(decay=math.nan),
    "active must name at least one step": lambda: Merged(active=()),
    "in ascending order, got (2, 1)": lambda: Merged(active=(2, 1)),
    "in ascending order, got (1, 1)": lambda: Merged(active=(1, 1)),
    "active must be an integer of at least 0, not -1": lambda: Merged(active=(-1, 1)),
    "merge needs one length for each of the active steps (0, 1, 2, 4), got (1, 2)": lambda: Merged(merge=(1, 2)),
    "merge must be an integer of at least 1, not 0": lambda: Merged(active=(0, 1), merge=(1, 0)),
    "granularities must be different strides, at least one, got ()": lambda: Merged(granularities=()),
    "granularities must be different strides, at least one, got (2, 2)": lambda: Merged(granularities=(2, 2)),
    "granularities must be an integer of at least 1, not 0": lambda: Merged(granularities=(0,)),
    "tau must be positive and finite, not 0": lambda: Merged(tau=0),
    "scale must be positive and finite, not inf": lambda: Merged(scale=math.inf),
}


@pytest.mark.parametrize(("message", "make"), REFUSED.items())
def test_impossible_plans_are_refused_at_construction(message, make):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)


UNFIT = {
    "start_range (0, 11) leaves the schedule of 10 steps": Window(2, (0, 11)),
    "start_range (0, 10) contains steps [9], which this sampler cannot make stochastic": Window(2, (0, 10)),
    "start_range (4, 12) leaves the schedule of 10 steps": RandomSteps(3, (4, 12)),
    "a window of 10 steps from step 0 leaves the schedule of 10 steps": SlidingWindow(10),
    "a window of 4 steps from step 6 leaves the schedule of 10 steps": SlidingWindow(first=6),
    "active step 9 cannot be stochastic in a schedule of 10 steps": Merged((0, 9)),
    "active step 12 cannot be stochastic in a schedule of 10 steps": Merged((0, 12), (1, 1)),
    "merging 3 steps at step 7 goes beyond the schedule: of 10 steps the last is never stochastic, so at most 2 can": (
        Merged((0, 7), (1, 3))
    ),
}


@pytest.mark.parametrize(("message", "plan"), UNFIT.items())
@pytest.mark.parametrize("sampler", [FlowSDE(), CPS(), ODE()])
def test_a_sampler_refuses_a_plan_that_does_not_fit_its_steps(sampler, message, plan):
    for make in (lambda: sampler.with_(plan=plan), lambda: sampler.with_(steps=40, plan=plan).with_(steps=T)):
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value)


@pytest.mark.parametrize("plan", UNFIT.values())
def test_what_does_not_fit_raises_in_every_iteration(plan):
    for iteration, member in product(range(8), range(4)):
        with pytest.raises(ValueError):
            draw(plan, iteration, member=member)


def raised_by(sampler):
    with pytest.raises(ValueError) as error:
        sampler.draw_plans(sampler.sigmas(), 0, 0, [0], [0])
    return str(error.value)


def test_what_depends_on_the_grid_raises_when_it_is_known():
    sd3 = SchedulerConfig({"shift": 3.0})
    late = CPWS(schedule=sd3, plan=Window(2, (4, 9)))
    assert "start_range (4, 9) contains steps [7, 8], which this sampler cannot make stochastic" in raised_by(late)
    assert "the window's way over steps 0 to 8 contains steps [7, 8]" in raised_by(late.with_(plan=SlidingWindow()))
    # A merged step can be too long for a kernel that can make each of its parts.
    assert CPWS(schedule=sd3).std(sd3(T), 4, 5) > 0
    long = raised_by(CPWS(schedule=sd3, plan=Merged((0, 4), (1, 4))))
    assert long == "this sampler has no stochastic step as long as that from step 4 to 8"
    assert "no merge at step 0 reaches tau = 30" in raised_by(FlowSDE(plan=Merged(tau=30.0)))
    quiet = raised_by(FlowSDE(noise_level=0.1, plan=Merged((0, 1))))
    assert "(at most 1.894): leave the step out of active, lower tau, or raise noise_level" in quiet
    with pytest.raises(ValueError, match="merging by entropy needs the sampler's std"):
        Merged().draw(0, 0, T, FEASIBLE)
