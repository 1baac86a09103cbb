import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flowrl.core import (
    PRESETS,
    Algorithm,
    Draw,
    Request,
    beta_update,
    beta_value,
    largest_remainder,
    run_sampler,
    stateless_rng,
    uncertainty,
)


def test_fixed_group_size():
    def serve(requests):
        return [Draw(request, sample=i, reward=float(i)) for request in requests for i in range(request.n)]

    draws, generated = run_sampler(Algorithm("grpo", group_size=3).sampler(["cat", "dog", "cat"]), serve)
    assert generated == 9
    assert [draw.request.group for draw in draws] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [draw.request.prompt for draw in draws[::3]] == ["cat", "dog", "cat"]


def test_a_sampler_may_ask_again():
    def until_solved(prompts):
        draws = yield [Request(prompt, 2, group) for group, prompt in enumerate(prompts)]
        solved = {draw.request.group for draw in draws if draw.reward > 0}
        return draws + (yield [draws[2 * group].request for group in (0, 1) if group not in solved])

    def serve(requests):
        return [Draw(r, None, float(r.prompt == "easy")) for r in requests for _ in range(r.n)]

    draws, generated = run_sampler(until_solved(["easy", "hard"]), serve)
    assert (len(draws), generated) == (6, 6)


def test_stateless_rng_is_a_function_of_its_key():
    def draw(*key):
        return torch.rand(4, generator=stateless_rng(*key))

    assert torch.equal(draw(1, 2, 3), draw(1, 2, 3))
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, -1), (1, 1, 0), (0, 2**40, 0)]
    values = torch.stack([draw(*key) for key in keys])
    assert len(values.unique(dim=0)) == len(keys)


# ------------------------------------------------------------------------------------------------- largest remainders


def test_the_spec_example_and_equal_weights():
    assert largest_remainder(96, [0.5, 0.4, 0.3, 0.1], 4) == [35, 29, 22, 10]
    assert largest_remainder(96, [0.5] * 4, 4, 48) == [24] * 4
    assert largest_remainder(96, [0.3] * 4, 4, 48) == [24] * 4  # 0.3 is no binary fraction
    assert largest_remainder(12, [0.0, 0.0, 0.0]) == [4, 4, 4]


def test_ties_go_to_the_earlier_place():
    assert largest_remainder(10, [1, 1, 1, 1]) == [3, 3, 2, 2]
    assert largest_remainder(7, [0.1, 0.1, 0.1], 2) == [3, 2, 2]
    assert largest_remainder(5, [1, 3, 1, 3]) == [1, 2, 0, 2]  # 0.625, 1.875, 0.625, 1.875


def test_a_cap_passes_on_what_it_cuts():
    assert largest_remainder(20, [8, 1, 1], 0, 10) == [10, 5, 5]
    # Cut twice: (14, 5, 1), then 12 samples are left for the others, (10, 2), then 4.
    assert largest_remainder(20, [70, 25, 5], 0, 8) == [8, 8, 4]
    assert largest_remainder(24, [5, 1, 0, 0], 4, 8) == [8, 8, 4, 4]
    assert largest_remainder(24, [1, 0, 0, 0], 4, 8) == [8, 6, 5, 5]  # the rest have no weight: equal shares
    assert largest_remainder(32, [1, 2, 3, 4], 4, 8) == [8] * 4


def test_random_budgets_add_up_and_keep_the_bounds():
    rng = random.Random(0)
    for _ in range(500):
        n, low = rng.randint(1, 12), rng.randint(0, 5)
        high = low + rng.randint(1, 20)
        total = rng.randint(n * low, n * high)
        weights = [rng.choice([0.0, rng.random(), 0.5, 10 ** rng.uniform(-8, 3)]) for _ in range(n)]
        sizes = largest_remainder(total, weights, low, high)
        assert sum(sizes) == total and low <= min(sizes) and max(sizes) <= high
        assert sizes == largest_remainder(total, weights, low, high)
        for i, j in itertools.combinations(range(n), 2):  # more weight, no fewer samples
            if weights[i] > weights[j]:
                assert sizes[i] >= sizes[j]
            elif weights[i] == weights[j]:
                assert abs(sizes[i] - sizes[j]) <= 1
        free = largest_remainder(total, weights, low)  # without a cap nobody is further than one from the exact share
        if sum(weights):
            for size, w in zip(free, weights, strict=True):
                assert abs(size - low - (total - n * low) * w / sum(weights)) < 1 + 1e-9


@pytest.mark.parametrize("weights", [(0.5, 0.4, 0.3), (0.5, 0.05, 0.3), (0.2, 0.21, 0.5)])
@pytest.mark.parametrize("minimum", [0, 2])
def test_it_is_neymans_allocation_of_what_is_above_the_minimum(weights, minimum):
    budget = 24

    def variance_of(sizes):  # of the mean estimates, summed over prompts
        return sum(w * w / (m - minimum) if m > minimum else math.inf for w, m in zip(weights, sizes, strict=True))

    every = [
        (a, b, budget - a - b)
        for a in range(minimum, budget + 1)
        for b in range(minimum, budget + 1 - a)
        if budget - a - b >= minimum
    ]
    room = budget - 3 * minimum
    exact = [minimum + room * w / sum(weights) for w in weights]
    best = min(variance_of(sizes) for sizes in every)
    assert variance_of(exact) == pytest.approx(sum(weights) ** 2 / room)  # the Cauchy-Schwarz bound
    assert variance_of(exact) <= best + 1e-15
    rounded = variance_of(largest_remainder(budget, weights, minimum))
    assert best <= rounded <= 1.02 * best
    assert rounded < variance_of((8, 8, 8))  # what equal groups would give


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: largest_remainder(7, [1, 1], 4), "7 samples cannot give 2 groups at least 4 each: take 8 samples"),
        (lambda: largest_remainder(17, [1, 1], 4, 8), "17 samples exceed 2 groups of at most 8: take 16"),
        (lambda: largest_remainder(9, [1, -1]), "negative"),
        (lambda: largest_remainder(9, [1, math.nan]), "finite"),
        (lambda: largest_remainder(9, [1, math.inf]), "finite"),
    ],
)
def test_what_cannot_be_divided_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------------------------------------------------------------------------------------- Beta tracker


def test_the_tracker_of_the_spec():
    state = {}
    assert beta_value(state, 7) == 0.5
    beta_update(state, [7, 7, 7], [1, 1, 0])
    assert state["tracker"][7] == pytest.approx([2.439, 1.729], abs=1e-12)
    assert beta_value(state, 7) == pytest.approx(0.585173, abs=1e-6)
    assert beta_value(state, 8) == 0.5  # a prompt never seen
    beta_update(state, [7], [1], rho=1.0)
    assert state["tracker"][7] == pytest.approx([3.439, 1.729])


def test_memory_is_bounded_and_rho_one_counts():
    state, rewards = {}, [1.0, 0.25, 0.0, 0.75] * 100
    beta_update(state, [0] * 400, rewards)
    assert sum(state["tracker"][0]) == pytest.approx(10)  # 1 / (1 - rho)
    beta_update(state, [1] * 400, rewards, rho=1.0, prior=(1, 1))
    assert state["tracker"][1] == [201, 201]


def test_the_value_stays_in_the_unit_interval_and_uncertainty_never_vanishes():
    rng = random.Random(1)
    state = {}
    for key, draw in enumerate([lambda: 1, lambda: 0, rng.random]):
        for _ in range(50):
            beta_update(state, [key], [draw()])
            assert 0 < beta_value(state, key) < 1
    beta_update(state, [0] * 20_000, [1] * 20_000)  # the prior is forgotten to the last bit
    assert uncertainty(beta_value(state, 0)) == pytest.approx(1e-3)


def test_uncertainty_of_the_spec():
    assert [uncertainty(v, 0.0) for v in (0.5, 0.8, 0.95)] == pytest.approx([0.5, 0.4, 0.2179], abs=1e-4)
    grid = [i / 100 for i in range(101)]
    assert max(grid, key=uncertainty) == 0.5
    assert uncertainty(0.5) == pytest.approx(math.sqrt(0.25 + 1e-6), rel=1e-15)
    assert uncertainty(0.0) == uncertainty(1.0) == pytest.approx(1e-3)


@pytest.mark.parametrize("bad", [-0.3, 1.7, math.nan, math.inf, -math.inf])
def test_rewards_outside_the_unit_interval_are_refused_before_anything_changes(bad):
    state = {}
    with pytest.raises(ValueError, match=rf"\[0, 1\], got \[{bad}\].*affine"):
        beta_update(state, [0, 1], [0.5, bad])
    assert state == {}
    beta_update(state, [0, 1], [-1e-7, 1 + 1e-7])  # a weighted sum may round
    assert state["tracker"] == {0: [0.9, 1.9], 1: [1.9, 0.9]}


# --------------------------------------------------------------------------------------------------------------- links


def sizes_of(algorithm, prompts, **services):
    requests = next(algorithm.sampler(prompts, SimpleNamespace(**services) if services else None))
    assert [r.group for r in requests] == list(range(len(prompts))) and [r.prompt for r in requests] == list(prompts)
    return [r.n for r in requests]


def test_fixed_takes_an_equal_share_of_a_budget():
    assert sizes_of(Algorithm("grpo", group_size=3), ["cat", "dog"]) == [3, 3]
    assert sizes_of(Algorithm("grpo", group_size=3), ["cat", "dog"], budget=20) == [10, 10]


def test_variance_goes_where_the_tracker_is_uncertain():
    algorithm = Algorithm(replace(PRESETS["flow_grpo"], sampler="variance"), rho=1.0)
    assert sizes_of(algorithm, [5, 6, 7, 8], budget=96) == [24] * 4
    for key, share in {5: 0.5, 6: 0.8, 7: 0.9}.items():
        rewards = [1.0] * round(100 * share) + [0.0] * round(100 * (1 - share))
        beta_update(algorithm.state, [key] * 100, rewards, algorithm.cfg.rho, algorithm.cfg.beta_prior)
    weights = [uncertainty(beta_value(algorithm.state, key)) for key in (5, 6, 7, 8)]
    sizes = sizes_of(algorithm, [5, 6, 7, 8], budget=96)
    assert sizes == largest_remainder(96, weights, 4, 48)
    assert sum(sizes) == 96 and sizes[0] == sizes[3] > sizes[1] > sizes[2]
    assert sizes_of(algorithm, [8, 7, 6, 5], budget=96) == sizes[::-1]
    drawn, generated = run_sampler(
        algorithm.sampler([5, 7], SimpleNamespace(budget=20)),
        lambda requests: [Draw(r, None, 1.0) for r in requests for _ in range(r.n)],
    )
    assert generated == len(drawn) == 20


def test_variance_says_what_it_misses():
    algorithm = Algorithm("superflow", m_min=4, m_max=6)
    with pytest.raises(ValueError, match=r"'variance' divides a budget.*`budget`"):
        sizes_of(algorithm, [1, 2])
    with pytest.raises(ValueError, match=r"7 samples cannot give 2 groups at least 4.*m_min"):
        sizes_of(algorithm, [1, 2], budget=7)
    with pytest.raises(ValueError, match=r"13 samples exceed 2 groups of at most 6.*m_max"):
        sizes_of(algorithm, [1, 2], budget=13)


def test_the_tracker_survives_a_checkpoint(tmp_path):
    one, other = Algorithm("superflow"), Algorithm("superflow")
    beta_update(one.state, [3, -7, 3], [0.2, 1.0, 0.9])
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.state == one.state and list(other.state["tracker"]) == [3, -7]
    beta_update(one.state, [3], [1.0])
    assert other.state != one.state  # a copy
    assert sizes_of(other, [3, -7, 5], budget=40) != sizes_of(Algorithm("superflow"), [3, -7, 5], budget=40)
