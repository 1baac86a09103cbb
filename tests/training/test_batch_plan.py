"""The layout of an iteration is derived from the experiment and hides the number of processes."""

import re
from collections import Counter

import pytest

from flowrl.training.batch_plan import BatchPlan
from flowrl.training.prompts import PromptSet

LAYOUTS = [(8, 8, 1, 16), (8, 8, 4, 3), (4, 6, 2, 64), (2, 4, 2, 1), (12, 2, 3, 5)]  # P, G, U, micro-batch


def plans(layout, worlds=(1, 2, 4)):
    prompts, group, updates, micro = layout
    return [BatchPlan(prompts, group, updates, w, micro) for w in worlds if prompts * group % (updates * w) == 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_processes_partition_the_samples(layout):
    found = plans(layout)
    assert len(found) >= 2
    for plan in found:
        rows = [plan.rows(5, 2, r) for r in range(plan.processes)]
        assert sorted(s for r in rows for s in r) == list(range(plan.samples))
        assert {len(r) for r in rows} == {plan.updates * plan.per_update}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("iteration", [0, 7])
def test_each_update_sees_the_same_samples_on_any_number_of_processes(layout, iteration):
    sets = []
    for plan in plans(layout):
        n = plan.per_update
        sets.append(
            [
                frozenset(s for r in range(plan.processes) for s in plan.rows(5, iteration, r)[u * n : (u + 1) * n])
                for u in range(plan.updates)
            ]
        )
    assert all(s == sets[0] for s in sets)
    assert all(len(x) == plans(layout)[0].samples // layout[2] for x in sets[0])


def test_the_deal_is_a_function_of_seed_and_iteration():
    plan = BatchPlan(8, 8, 2, 1, 16)
    assert plan.rows(1, 3, 0) == plan.rows(1, 3, 0)
    assert plan.rows(1, 3, 0) != plan.rows(1, 4, 0)
    assert plan.rows(1, 3, 0) != plan.rows(2, 3, 0)


def test_the_deal_does_not_depend_on_the_micro_batch():
    assert BatchPlan(8, 8, 2, 2, 1).rows(0, 0, 1) == BatchPlan(8, 8, 2, 2, 64).rows(0, 0, 1)


def test_samples_of_a_group_are_spread_over_the_updates():
    """Dealt by a permutation: over many iterations every sample meets every update about equally often."""
    plan = BatchPlan(4, 4, 2, 1, 16)
    n, draws = plan.per_update, 2000
    first = Counter(s for i in range(draws) for s in plan.rows(0, i, 0)[:n])
    five_errors = 5 * (draws * 0.25) ** 0.5
    assert all(abs(first[s] - draws / 2) < five_errors for s in range(plan.samples))


@pytest.mark.parametrize(("per_update", "micro", "sizes"), [(16, 16, [16]), (16, 5, [5, 5, 5, 1]), (3, 64, [3])])
def test_micro_batches_cover_the_share_in_order(per_update, micro, sizes):
    slices = BatchPlan(per_update, 2, 2, 1, micro).micro_batches
    assert [s.stop - s.start for s in slices] == sizes
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(per_update))


@pytest.mark.parametrize(
    ("prompts", "group", "updates", "world"), [(3, 5, 2, 1), (7, 3, 1, 4), (1, 2, 3, 5), (9, 24, 5, 3)]
)
def test_a_plan_that_does_not_divide_is_refused_with_numbers_that_do(prompts, group, updates, world):
    with pytest.raises(ValueError, match="do not divide") as refusal:
        BatchPlan(prompts, group, updates, world, 4)
    proposed = re.search(r"prompts_per_iteration = ([\d or]+),", str(refusal.value))
    numbers = [int(n) for n in re.findall(r"\d+", proposed[1])]
    assert 1 <= len(numbers) <= 2 and prompts not in numbers
    for n in numbers:
        assert BatchPlan(n, group, updates, world, 4).samples == n * group
    # Nothing nearer would have divided.
    nearest = min(abs(n - prompts) for n in numbers)
    assert all(p * group % (updates * world) for p in range(max(1, prompts - nearest + 1), prompts + nearest))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_iteration_holds_exactly_m_prompts_k_times(world):
    """Over all processes together: m distinct prompts, each k times, with the members 0..k-1."""
    prompts = PromptSet([f"prompt {i}" for i in range(40)])
    plan = BatchPlan(6, 4, 2, world, 8)
    drawn = {}
    for iteration in range(4):
        pairs = []
        for rank in range(world):  # every process draws the prompts for itself
            groups = prompts.draw(11, iteration, plan.prompts)
            pairs += [(groups[s // 4].index, s % 4) for s in plan.rows(11, iteration, rank)]
        assert len(set(pairs)) == len(pairs) == 24
        assert set(Counter(p for p, _ in pairs).values()) == {4} and len({p for p, _ in pairs}) == 6
        drawn[iteration] = frozenset(p for p, _ in pairs)
    assert len(set(drawn.values())) > 1


def test_the_description_says_what_runs():
    text = BatchPlan(8, 8, 2, 2, 5).describe()
    for part in ("8 prompts x 8 samples = 64", "2 update(s) of 32", "2 process(es): 16", "4 micro-batch(es)"):
        assert part in text
