import math

import pytest
import torch

from flowrl.core import AdvOut, Algorithm, Batch

from .tables import tensor


def gradient(preset, ratio, adv, **cfg):
    logp = torch.log(tensor(ratio))[None].requires_grad_()
    batch = Batch(
        mask=torch.ones(1, 1),
        reward=torch.zeros(1),
        group_id=torch.zeros(1).long(),
        logp=logp,
        old_logp=torch.zeros_like(logp).detach(),
    )
    loss, metrics = Algorithm(preset, **cfg).loss(batch, AdvOut(tensor(adv)[None]))
    loss.backward()
    return logp.grad.item(), loss.item(), metrics


@pytest.mark.parametrize("adv", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("ratio", [0.7, 0.85, 1.0, 1.25, 1.4])
def test_clip_truth_table(adv, ratio):
    # flow_policy_gradient 10.10, with different radii on the two sides
    slope, loss, metrics = gradient("grpo", ratio, adv, clip_lo=0.2, clip_hi=0.3)
    clipped = (adv > 0 and ratio > 1.3) or (adv < 0 and ratio < 0.8)
    assert slope == pytest.approx(0 if clipped else -adv * ratio, abs=1e-12)
    assert loss == pytest.approx(-adv * (min(max(ratio, 0.8), 1.3) if clipped else ratio))
    assert metrics["clip_frac_high"] == (ratio > 1.3)
    assert metrics["clip_frac_low"] == (ratio < 0.8)


def test_reinforce_is_minus_advantage_times_log_prob():
    slope, loss, metrics = gradient("rloo", 1.4, 2.0)
    assert (slope, loss) == (-2.0, pytest.approx(-2 * math.log(1.4)))
    assert metrics["clip_frac_high"] == metrics["clip_frac_low"] == 0


@pytest.mark.parametrize("preset", ["grpo", "flow_grpo", "dr_grpo"])
def test_on_policy_gradient(preset):
    # flow_policy_gradient 10.9: at ratio 1 the gradient is that of -A logp, and 0 for A = 0
    assert gradient(preset, 1.0, 1.7, beta=0.0)[0] == -1.7
    assert gradient(preset, 1.0, 0.0, beta=0.0)[0] == 0


def test_log_ratios_are_clamped_before_the_exponential():
    slope, loss, metrics = gradient("grpo", math.exp(300), -1.0)
    assert (slope, loss) == (0, pytest.approx(math.exp(20)))
    assert metrics["log_ratio_max"] == pytest.approx(300)
