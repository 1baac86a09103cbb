"""Which steps are stochastic and trained."""

import collections

import pytest
import torch

from flowrl.samplers import CPWS, ODE, AllSteps, FlowSDE, SchedulerConfig, SingleShift, StepPlan, Window

T = 10
FEASIBLE = [True] * (T - 1) + [False]


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


@pytest.mark.parametrize(("size", "start_range"), [(2, (0, 9)), (3, (0, 5)), (1, (4, 5)), (9, (0, 9)), (2, (3, 8))])
def test_window_stays_in_range(size, start_range):
    """Spec 10.15: start in [lo, hi - size], exactly `size` SDE steps, each start equally likely."""
    low, high = start_range
    starts = collections.Counter()
    draws = 400
    for iteration in range(draws):
        plan = Window(size, start_range).draw(0, iteration, T, FEASIBLE)
        start = plan.trained_steps[0]
        assert plan.trained_steps == tuple(range(start, start + size))
        assert plan.stochastic == plan.trained and sum(plan.stochastic) == size
        starts[start] += 1
    assert sorted(starts) == list(range(low, high - size + 1))
    p = 1 / len(starts)
    assert all(abs(count - draws * p) <= 5 * (draws * p * (1 - p)) ** 0.5 for count in starts.values())


def test_window_is_a_function_of_seed_and_iteration():
    plan = Window(2, (0, 9))
    series = [plan.draw(1, iteration, T, FEASIBLE) for iteration in range(20)]
    assert series == [Window(2, [0, 9]).draw(1, iteration, T, torch.tensor(FEASIBLE)) for iteration in range(20)]
    assert series != [plan.draw(2, iteration, T, FEASIBLE) for iteration in range(20)]


@pytest.mark.parametrize(("size", "start_range"), [(3, (4, 6)), (1, (4, 4)), (0, (0, 5)), (2, (-1, 5)), (2, (6, 2))])
def test_empty_windows_raise_at_once(size, start_range):
    with pytest.raises(ValueError, match="no window"):
        Window(size, start_range)


def test_windows_that_do_not_fit_the_schedule_raise_in_every_iteration():
    for iteration in range(10):
        with pytest.raises(ValueError, match="leaves the schedule"):
            Window(2, (0, T + 1)).draw(0, iteration, T, [True] * T)
        with pytest.raises(ValueError, match=r"contains steps \[9\]"):
            Window(2, (0, T)).draw(0, iteration, T, FEASIBLE)


@pytest.mark.parametrize("sampler", [ODE(), FlowSDE(noise_level=0.0)])
@pytest.mark.parametrize("plan", [AllSteps(), Window(2, (0, 5))])
def test_a_deterministic_sampler_has_nothing_to_train(sampler, plan):
    drawn = plan.draw(0, 0, T, sampler.feasible(SingleShift()(T)))
    assert drawn == StepPlan((False,) * T, (False,) * T) and drawn.trained_steps == ()


def test_inconsistent_plans_raise():
    with pytest.raises(ValueError, match="not stochastic"):
        StepPlan(stochastic=(True, False), trained=(True, True))
    with pytest.raises(ValueError, match="flags"):
        StepPlan(stochastic=(True,), trained=(True, False))
    with pytest.raises(ValueError, match="feasibility flags"):
        AllSteps().draw(0, 0, T, [True])
