"""Sigma grids: the published lists, and bit equality with diffusers' own."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from flowrl.samplers import Explicit, SchedulerConfig, SingleShift

FLUX = {
    "use_dynamic_shifting": True,
    "shift": 3.0,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
QWEN = FLUX | {"shift": 1.0, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
SD3 = {"shift": 3.0}

# Spec 0.3, four decimals.
DOUBLE_SHIFT_10 = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]
SINGLE_SHIFT_10 = [1, 0.9643, 0.9231, 0.875, 0.8182, 0.75, 0.6667, 0.5625, 0.4286, 0.25, 0]
SINGLE_SHIFT_16 = [1, 0.9783, 0.9545, 0.9286, 0.9, 0.8684, 0.8333, 0.7941]
SINGLE_SHIFT_16 += [0.75, 0.7, 0.6429, 0.5769, 0.5, 0.4091, 0.3, 0.1667, 0]
FLUX_6 = [1, 0.9037, 0.7897, 0.6525, 0.4842, 0.273, 0]


@pytest.mark.parametrize(
    ("schedule", "tokens", "published"),
    [
        (SchedulerConfig(SD3), None, DOUBLE_SHIFT_10),
        (SingleShift(3.0), None, SINGLE_SHIFT_10),
        (SingleShift(), None, SINGLE_SHIFT_16),
        (SchedulerConfig(FLUX), 1024, FLUX_6),
    ],
    ids=["sd3", "single_10", "single_16", "flux"],
)
def test_published_lists(schedule, tokens, published):
    """Spec 10.18."""
    sigmas = schedule(len(published) - 1, tokens)
    assert sigmas.dtype == torch.float32
    assert (sigmas - torch.tensor(published)).abs().max() <= 0.5001e-4
    assert (sigmas.diff() < 0).all() and sigmas[0] == 1 and sigmas[-1] == 0


@pytest.mark.parametrize("steps", [1, 2, 6, 10, 28, 40])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_static_grids_are_the_scheduler_s_own(steps, shift):
    stock = FlowMatchEulerDiscreteScheduler(shift=shift)
    ours = SchedulerConfig(stock.config)(steps)
    stock.set_timesteps(steps)  # as the SD3 pipeline does
    assert torch.equal(ours, stock.sigmas)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (FLUX, 1),
        (FLUX, 4),
        (FLUX, 6),
        (FLUX, 28),
        (QWEN, 2),
        (QWEN, 28),
        (QWEN | {"time_shift_type": "linear"}, 10),
    ],
)
@pytest.mark.parametrize("tokens", [256, 1024, 4096])
def test_dynamic_grids_are_the_flux_pipeline_s_own(steps, tokens, config):
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

    stock = FlowMatchEulerDiscreteScheduler(**config)
    sizes = (config["base_image_seq_len"], config["max_image_seq_len"])
    mu = calculate_shift(tokens, *sizes, config["base_shift"], config["max_shift"])
    retrieve_timesteps(stock, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    assert torch.equal(SchedulerConfig(stock.config)(steps, tokens), stock.sigmas)


def test_mu_is_diffusers_own():
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    assert SchedulerConfig._mu(1024, FLUX) == pytest.approx(0.63)
    assert all(SchedulerConfig._mu(n, FLUX) == calculate_shift(n) for n in range(64, 8193, 64))


def test_a_static_config_under_a_pipeline_that_passes_linspace():
    """FLUX.1-schnell: nothing in its scheduler config tells, and the two grids differ."""
    schnell = {"shift": 1.0}
    told = SchedulerConfig(schnell, linspace=True)(4)
    assert told.tolist() == [1, 0.75, 0.5, 0.25, 0]
    assert not torch.allclose(SchedulerConfig(schnell)(4), told, atol=1e-2)


def test_single_shift_of_one_is_uniform():
    assert SingleShift(1.0)(4).tolist() == [1, 0.75, 0.5, 0.25, 0]


def test_explicit_returns_its_sigmas():
    sigmas = torch.tensor([0.9, 0.4, 0.1, 0.0])
    schedule = Explicit(sigmas)
    assert torch.equal(schedule(3), sigmas)
    with pytest.raises(ValueError, match="make 3 steps, not 4"):
        schedule(4)


@pytest.mark.parametrize(
    "sigmas",
    [
        (1.0, 0.5, 0.5, 0.0),
        (1.0, 0.5, 0.1),
        (1.2, 0.5, 0.0),
        (0.0,),
        (),
        (1.0, float("nan"), 0.0),
        (0.5, 0.7, 0.0),
    ],
)
def test_explicit_rejects_what_is_no_grid(sigmas):
    with pytest.raises(ValueError, match="sigmas must"):
        Explicit(sigmas)


def test_explicit_rejects_sigmas_equal_in_float32():
    with pytest.raises(ValueError, match="strictly"):
        Explicit((1.0, 0.5 + 1e-12, 0.5, 0.0))


def test_bad_arguments_raise():
    with pytest.raises(ValueError, match="image_tokens"):
        SchedulerConfig(FLUX)(6)
    with pytest.raises(ValueError, match="FlowMatchEulerDiscreteScheduler"):
        SchedulerConfig({"_class_name": "DPMSolverMultistepScheduler"} | dict(DPMSolverMultistepScheduler().config))(6)
    with pytest.raises(ValueError, match="sigmas must"):
        SchedulerConfig({"invert_sigmas": True})(6)
    with pytest.raises(TypeError, match="mapping"):
        SchedulerConfig("scheduler_config.json")
    with pytest.raises(ValueError, match="positive"):
        SingleShift(0.0)
    for schedule in (SingleShift(), SchedulerConfig(SD3), SchedulerConfig(FLUX)):
        with pytest.raises(ValueError, match="at least 1"):
            schedule(0, 1024)


def test_private_keys_are_dropped_and_subclasses_accepted():
    class Recording(FlowMatchEulerDiscreteScheduler):
        pass

    config = {"_class_name": "Recording", "_diffusers_version": "0.0"} | dict(Recording(shift=3.0).config)
    schedule = SchedulerConfig(config)
    assert [key for key in schedule.config if key.startswith("_")] == ["_class_name"]
    assert torch.equal(schedule(10), SchedulerConfig(SD3)(10))


def test_importing_the_samplers_does_not_import_diffusers():
    code = "import flowrl.samplers, sys; sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
