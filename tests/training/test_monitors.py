"""What is watched: statistics of hand-made tables, exact drift, names of broken tensors."""

import math

import pytest
import torch
from torch import nn

from flowrl.core import AdvOut, Batch
from flowrl.rollout import Prompt
from flowrl.training import monitors


def table(reward, group, valid=None):
    n = len(reward)
    zeros = torch.zeros(n, 1)
    return Batch(
        mask=torch.ones(n, 1, dtype=torch.bool),
        logp=zeros,
        old_logp=zeros,
        reward=torch.tensor(reward),
        group_id=torch.tensor(group),
        valid=None if valid is None else torch.tensor(valid),
    )


def prompts_with(*tags):
    return [Prompt(i, "x", {} if t is None else {"tag": t}) for i, t in enumerate(tags)]


# ------------------------------------------------------------------------------------------------ rewards


def test_reward_statistics_of_a_table():
    batch = table([1.0, 3.0, 5.0, 5.0], [7, 7, 9, 9])
    parts = {"a": torch.tensor([1.0, 1.0, 2.0, 4.0]), "b": torch.tensor([0.0, 2.0, 3.0, 1.0])}
    found = monitors.reward_metrics(prompts_with("x", "x", None, "y"), parts, batch)
    assert found == pytest.approx(
        {
            "reward/mean": 3.5,
            "reward/std": math.sqrt(11 / 4),
            "reward/group_std": 0.5,  # 1 in the first group, 0 in the second
            "reward/zero_spread_share": 0.5,
            "reward/invalid_share": 0.0,
            "allocation/group_min": 2.0,
            "allocation/group_max": 2.0,
            "reward/a/mean": 2.0,
            "reward/a/std": math.sqrt(1.5),
            "reward/b/mean": 1.5,
            "reward/b/std": math.sqrt(1.25),
            "reward/task/x": 2.0,
            "reward/task/y": 5.0,
        }
    )


def test_invalid_rows_count_for_nothing_but_their_share():
    nan = float("nan")
    batch = table([1.0, nan, 3.0, nan, 8.0], [0, 0, 0, 1, 1], [True, False, True, False, True])
    parts = {"a": torch.tensor([1.0, nan, 3.0, 4.0, nan])}
    found = monitors.reward_metrics(prompts_with("x", "x", "y", "y", "z"), parts, batch)
    assert found["reward/mean"] == 4.0 and found["reward/invalid_share"] == pytest.approx(0.4)
    assert found["reward/a/mean"] == pytest.approx(8 / 3)
    # Group 1 has one valid row: no spread. Group 0 has [1, 3].
    assert found["reward/zero_spread_share"] == 0.5
    assert found["reward/group_std"] == pytest.approx((1 + 1 + 0) / 3)
    assert (found["allocation/group_min"], found["allocation/group_max"]) == (1, 2)
    assert found["reward/task/x"] == 1.0 and found["reward/task/y"] == 3.0 and found["reward/task/z"] == 8.0
    assert all(math.isfinite(v) for v in found.values())


def test_a_reward_or_task_without_a_valid_row_is_left_out():
    nan = float("nan")
    batch = table([1.0, 2.0], [0, 0], [True, True])
    found = monitors.reward_metrics(prompts_with("x", "x"), {"dead": torch.tensor([nan, nan])}, batch)
    assert not [k for k in found if k.startswith("reward/dead")]
    batch = table([1.0, nan], [0, 1], [True, False])
    assert "reward/task/y" not in monitors.reward_metrics(prompts_with("x", "y"), {}, batch)


def test_advantage_statistics():
    batch = table([0.0] * 5, [0] * 5, [True, True, True, True, False])
    advantage = AdvOut(torch.tensor([[1.0, 1.0], [-3.0, -3.0], [0.0, 0.0], [0.0, 0.0], [99.0, 99.0]]))
    batch.mask = torch.ones(5, 2, dtype=torch.bool)
    found = monitors.advantage_metrics(advantage, batch)
    assert found == pytest.approx(
        {"advantage/std": math.sqrt(2.5 - 0.25), "advantage/abs_max": 3.0, "advantage/zero_share": 0.5}
    )


def test_an_iteration_without_a_single_valid_row_still_has_statistics():
    """`max_invalid_share=1` allows it; a crash in the bookkeeping would be a poor way to say so."""
    nan = float("nan")
    batch = table([nan, nan], [0, 0], [False, False])
    monitors.reward_metrics(prompts_with("x", "x"), {"a": torch.tensor([nan, nan])}, batch)
    found = monitors.advantage_metrics(AdvOut(torch.zeros(2, 1)), batch)
    assert found["advantage/abs_max"] == 0.0


# --------------------------------------------------------------------------------- effective sample size


def test_sample_sizes_by_hand():
    def size(*ratios):
        return monitors.effective_sample_size(sum(ratios) / len(ratios), sum(r * r for r in ratios) / len(ratios))

    assert size(1, 1, 1, 5) == pytest.approx(0.5714, abs=1e-4)
    assert size(0.3, 0.3) == pytest.approx(1.0) and size(0, 0, 0, 2) == 0.25
    assert monitors.effective_sample_size(0.0, 0.0) == 0.0  # no sample in the loss
    assert monitors.effective_sample_size(1.0, 1 - 1e-9) == 1.0  # rounding


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_the_sample_size_is_that_of_the_whole_update(make_trainer, step, tmp_path, micro):
    shift = 0.4 * torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

    def change(rollout, batch):
        rollout.log_prob -= shift

    trainer = make_trainer(tmp_path, updates_per_iteration=1, micro_batch_size=micro)
    found = step(trainer, change=change)[0]["effective_sample_size"]
    ratio = shift.double().exp()
    expected = (ratio.sum() ** 2 / (ratio.numel() * ratio.square().sum())).item()
    assert found == pytest.approx(expected, rel=1e-5) and expected < 0.95


# ------------------------------------------------------------------------------------------------ images


def waves(*parts, size=32, channels=3):
    """Grey images: .5 + a cos(2 pi k x / size) along each (a, k, axis)."""
    x = torch.arange(size, dtype=torch.float64) / size
    grid = torch.full((size, size), 0.5, dtype=torch.float64)
    for a, k, axis in parts:
        grid = grid + a * torch.cos(2 * math.pi * k * (x[None] if axis else x[:, None]))
    return grid.float().expand(1, channels, size, size)


@pytest.mark.parametrize(
    ("image", "share"),
    [
        (waves(), 0.0),
        (waves((0.2, 3, 0)), 0.0),
        (waves((0.2, 8, 1)), 0.0),  # half the Nyquist frequency itself still counts as low
        (waves((0.2, 9, 1)), 1.0),
        (waves((0.1, 2, 0), (0.2, 13, 1)), 0.8),  # powers a^2 / 2
    ],
)
def test_high_frequencies_of_known_waves(image, share):
    assert monitors.image_statistics(image)["high_frequency"].item() == pytest.approx(share, abs=1e-5)


def test_image_statistics_of_random_images_by_definition():
    images = torch.rand(3, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    found = monitors.image_statistics(images)
    kernel = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]], dtype=torch.float64)[None, None]
    for i, image in enumerate(images.double()):
        grey = image.mean(0)
        high = total = 0.0
        for u in range(6):
            for v in range(8):
                phase = torch.arange(6)[:, None] * u / 6 + torch.arange(8)[None] * v / 8
                power = (grey * torch.exp(-2j * math.pi * phase)).sum().abs().item() ** 2 if u or v else 0.0
                total += power
                high += power * (math.hypot(min(u, 6 - u) / 6, min(v, 8 - v) / 8) > 0.25)
        assert found["high_frequency"][i].item() == pytest.approx(high / total, rel=1e-4) and 0.2 < high / total < 1
        laplacian = torch.nn.functional.conv2d(grey[None, None], kernel)
        assert found["sharpness"][i].item() == pytest.approx(laplacian.var(correction=0).item(), rel=1e-4)
        chroma = [max(p) - min(p) for p in image.flatten(1).T.tolist()]
        assert found["saturation"][i].item() == pytest.approx(sum(chroma) / 48, rel=1e-5)


def test_saturation_and_sharpness_of_plain_images():
    red = torch.tensor([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1).expand(1, 3, 5, 7)
    ramp = torch.linspace(0, 1, 9).expand(1, 3, 9, 9)
    for image, saturation in ((red, 1.0), (ramp, 0.0), (0.5 * red + 0.5, 0.5)):
        found = monitors.image_statistics(image)
        assert found["saturation"].item() == saturation
        assert found["sharpness"].item() == pytest.approx(0.0, abs=1e-12)


def test_diversity_is_the_distance_of_pairs():
    images = torch.rand(7, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    group_id = torch.tensor([5, 9, 5, 7, 5, 9, 2**40])  # 7 and 2^40 are alone
    distances = []
    for g in (5, 9):
        x = images[group_id == g].double()
        pairs = [((x[i] - x[j]) ** 2).mean().item() for i in range(len(x)) for j in range(i)]
        distances.append((sum(pairs) / len(pairs)) ** 0.5)
    assert monitors.group_diversity(images, group_id) == pytest.approx(sum(distances) / 2, rel=1e-9)
    assert monitors.group_diversity(images, torch.arange(7)) is None
    assert monitors.group_diversity(images[[1, 1, 1]], torch.zeros(3)) == 0.0
    assert monitors.group_diversity(torch.stack([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)]), torch.zeros(2)) == 1.0


@pytest.mark.parametrize(("size", "expected"), [((16, 8), (16, 8)), ((64, 32), (32, 16)), ((1000, 520), (31, 16))])
def test_thumbnails_are_block_means(size, expected):
    image = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    small = monitors.thumbnails(image)
    assert small.shape == (2, 3, *expected)
    k = -(-max(size) // 32)
    torch.testing.assert_close(
        small[1, 2, -1, 3], image[1, 2, k * (expected[0] - 1) : k * expected[0], 3 * k : 4 * k].mean()
    )


# -------------------------------------------------------------------------------------------- non-finite


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_broken_tensor_is_named_in_the_order_of_computation(net, bad):
    good, broken = torch.ones(3), torch.tensor([1.0, bad, 1.0])
    name = monitors.first_non_finite
    assert name({"latents": good, "reward": good}, net) == "loss (all its inputs are finite)"
    assert name({"latents": None, "log_prob": broken, "reward": broken}, net) == "log_prob"
    net[1].weight.grad = torch.full((2, 2), bad)
    assert name({"reward": good}, net) == "gradient of 1.weight"
    net[0].bias.data[1] = bad
    net[0].bias.grad = torch.full((2,), bad)
    assert name({"reward": good}, net) == "weight 0.bias"
    assert name({"reward": broken}, net) == "reward"


def test_integer_tensors_are_finite(net):
    assert monitors.first_non_finite({"index": torch.tensor([1, 2])}, net).startswith("loss")


# ------------------------------------------------------------------------------------------------- drift


@pytest.fixture
def rolled(make_sd3_policy, perturb, make_rows, give_copies):
    """(policy, sampler, rollout) of an adapter that is not at its initialisation."""
    from flowrl import FlowSDE
    from flowrl.samplers.schedules import SingleShift

    policy = perturb(make_sd3_policy(True))
    sampler = FlowSDE(steps=4, noise_level=0.6, schedule=SingleShift(1.5))
    rollout = policy.sample(*make_rows(2, 2), sampler, seed=1, iteration=0, batch_size=4)
    return policy, sampler, rollout


def test_drift_is_zero_before_any_update(rolled):
    policy, sampler, rollout = rolled
    found = monitors.drift(policy, sampler, rollout, reference=False)
    kinds = ("kl/old", "log_prob_gap")
    assert set(found) == {f"{kind}{step}" for kind in kinds for step in ("", "/step_00", "/step_01", "/step_02")}
    assert all(v == 0.0 for v in found.values())  # equal batch shapes: the very same bits


def test_drift_to_the_reference_is_zero_at_the_adapters_start(make_sd3_policy, make_rows):
    from peft import LoraConfig

    from flowrl import FlowSDE
    from flowrl.samplers.schedules import SingleShift

    policy = make_sd3_policy(LoraConfig(r=4, lora_alpha=8))  # B = 0
    sampler = FlowSDE(steps=3, schedule=SingleShift(1.5))
    rollout = policy.sample(*make_rows(1, 2), sampler, seed=1, iteration=0, batch_size=2)
    found = monitors.drift(policy, sampler, rollout, reference=True)
    assert found["kl/reference"] == 0.0 and found["kl/old"] == 0.0


def test_drift_after_a_perturbation_is_the_kl_by_hand(rolled, perturb):
    policy, sampler, rollout = rolled
    perturb(policy, 0.02, seed=9)
    found = monitors.drift(policy, sampler, rollout, reference=True)

    with torch.no_grad():
        for against in ("old", "reference"):
            steps = []
            for u, step in enumerate(rollout.plans[0].trained_steps):
                x, t, t_next = rollout.states[:, u], rollout.sigmas[step], rollout.sigmas[step + 1]
                first = float(rollout.sigmas[1])
                mean = sampler.transition(x, policy.velocity(x, t, rollout), rollout.sigmas, step).mean
                if against == "old":
                    other = rollout.means[:, u]
                else:
                    with policy.use("reference"):
                        v = policy.velocity(x, t, rollout)
                    other = sampler.transition(x, v, rollout.sigmas, step).mean
                # Flow-SDE's own variance: a^2 t / (1 - t) (t - t').
                one_minus = 1 - (first if float(t) == 1 else float(t))
                variance = 0.6**2 * float(t) / one_minus * float(t - t_next)
                steps.append((((mean - other).double() ** 2).mean() / (2 * variance)).item())
                assert found[f"kl/{against}/step_{step:02d}"] == pytest.approx(steps[-1], rel=1e-4)
            assert found[f"kl/{against}"] == pytest.approx(sum(steps) / len(steps), rel=1e-4)
            assert found[f"kl/{against}"] > 1e-5
        gaps = []
        for u, step in enumerate(rollout.plans[0].trained_steps):
            now = policy.evaluate(rollout, u, sampler).distribution
            errors = [(rollout.actions[:, u] - mean).double() ** 2 for mean in (rollout.means[:, u], now.mean)]
            gaps.append(((errors[0] - errors[1]).mean() / (2 * now.std.double() ** 2)).item())
            assert found[f"log_prob_gap/step_{step:02d}"] == pytest.approx(gaps[-1], rel=1e-2, abs=1e-6)
        assert found["log_prob_gap"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-2, abs=1e-6)
        assert found["log_prob_gap"] != 0


def test_drift_leaves_the_policy_trainable_and_unchanged(rolled):
    policy, sampler, rollout = rolled
    before = {n: p.detach().clone() for n, p in policy.trainable().items()}
    monitors.drift(policy, sampler, rollout, reference=True)
    assert before.keys() == policy.trainable().keys()
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable().items())
    assert not any(p.grad is not None for p in policy.trainable().values())


def test_drift_of_an_ode_rollout_is_a_velocity_difference_half_way(make_sd3_policy, perturb, make_rows):
    from flowrl import ODE, noise

    policy = perturb(make_sd3_policy(True), 0.1)
    sampler = ODE(steps=4)
    prompts, members = make_rows(2, 2)
    rollout = policy.sample(prompts, members, sampler, seed=1, iteration=5, batch_size=4)
    assert monitors.drift(policy, sampler, rollout, reference=False) == {}
    found = monitors.drift(policy, sampler, rollout, reference=True)
    assert set(found) == {"drift/velocity_mse_reference"}

    # On x = (x0 + eps) / 2 with the rollout's own kind of noise: a state the model knows.
    eps = noise.batch_normal(rollout.latents.shape[1:], 1, 5, [p.index for p in prompts], members, noise.INITIAL)
    x = (rollout.latents + eps) / 2
    with torch.no_grad():
        v = policy.velocity(x, torch.tensor(0.5), rollout)
        with policy.use("reference"):
            expected = (v - policy.velocity(x, torch.tensor(0.5), rollout)).square().mean().item()
    assert found["drift/velocity_mse_reference"] == pytest.approx(expected, rel=1e-4) and expected > 0
