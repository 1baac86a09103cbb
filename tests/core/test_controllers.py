from dataclasses import replace

import pytest

from flowrl.core import PRESETS, Algorithm

from .tables import table


def test_the_adaptive_kl_moves_beta_towards_the_target():
    algorithm = Algorithm(replace(PRESETS["grpo"], on_step="adaptive_kl"), beta=0.1, kl_target=0.5)
    algorithm.on_step({"kl": 0.55})
    assert algorithm.beta == pytest.approx(0.1 * 1.01)
    algorithm.on_step({"kl": 5.0})
    assert algorithm.beta == pytest.approx(0.1 * 1.01 * 1.02)
    algorithm.on_step({"kl": 0.0})
    assert algorithm.beta == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    batch = table()
    _, metrics = algorithm.loss(batch, algorithm.advantages(batch))
    assert metrics["kl_loss"].item() == pytest.approx(algorithm.beta * metrics["kl"].item())


def test_state_survives_a_checkpoint_and_foreign_ones_are_refused():
    preset = replace(PRESETS["grpo"], on_step="adaptive_kl")
    a, b = Algorithm(preset, beta=0.1), Algorithm(preset, beta=0.1)
    a.on_step({"kl": 1.0})
    saved = a.state_dict()
    b.load_state_dict(saved)
    a.on_step({"kl": 1.0})
    assert saved == b.state_dict() != a.state_dict()
    with pytest.raises(ValueError, match="does not fit"):
        Algorithm("rloo").load_state_dict(saved)
    with pytest.raises(ValueError, match="keys"):
        b.load_state_dict({"state": {}})


def test_the_default_controller_does_nothing():
    algorithm = Algorithm("flow_grpo")
    algorithm.on_step({"kl": 1.0})
    assert algorithm.state == {}
