from dataclasses import replace

import pytest
import torch

from flowrl.core import PRESETS, Algorithm

from .tables import table


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.neutral is not None])
def test_the_neutral_configuration_is_grpo(name):
    batch = table(spread=0.5)
    results = []
    for algorithm in (Algorithm(name, **PRESETS[name].neutral), Algorithm("grpo")):
        loss, _ = algorithm.loss(batch, algorithm.advantages(batch))
        results.append((loss.detach(), *torch.autograd.grad(loss, batch.logp)))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_data_under_their_own_name(name):
    preset = PRESETS[name]
    assert preset.name == name
    assert preset.formula_status in {"verified", "secondary", "derived"}
    assert Algorithm(name).preset is preset


def reference_grpo(batch, adv):
    """GRPO written down without the core."""
    total = 0
    for i, length in enumerate(batch.mask.sum(1).tolist()):
        for t in range(length):
            rho = torch.exp(batch.logp[i, t] - batch.old_logp[i, t])
            d = batch.ref_logp[i, t] - batch.logp[i, t]
            gain = torch.min(rho * adv[i], rho.clamp(0.8, 1.2) * adv[i])
            total = total - (gain - 0.1 * (d.exp() - d - 1)) / length / len(batch.mask)
    return total


def test_grpo_is_the_published_formula():
    batch = table(spread=0.5)
    adv = torch.cat([(r - r.mean()) / (r.std() + 1e-6) for r in batch.reward.split(4)])
    algorithm = Algorithm("grpo", beta=0.1)
    loss, _ = algorithm.loss(batch, algorithm.advantages(batch))
    expected = reference_grpo(batch, adv)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(value, batch.logp)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients)


def test_flow_grpo_is_the_published_formula():
    # flow_policy_gradient 1.2 and 1.3, full rows
    batch = table(spread=1e-4, mask=torch.ones(8, 6))
    centred = (batch.reward.reshape(2, 4) - batch.reward.reshape(2, 4).mean(1, keepdim=True)).flatten()
    adv = (centred / (batch.reward.std(correction=0) + 1e-4)).clamp(-5, 5)[:, None]
    ratio = torch.exp(batch.logp - batch.old_logp)
    pg = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - 1e-4, 1 + 1e-4)).mean()
    algorithm = Algorithm("flow_grpo")
    loss, metrics = algorithm.loss(batch, algorithm.advantages(batch))
    torch.testing.assert_close(metrics["pg_loss"], pg.detach())
    torch.testing.assert_close(loss, pg + 0.04 * batch.token_kl.mean())


def test_dr_grpo_and_rloo_weigh_units_alike_whatever_the_length():
    batch = replace(table(), mask=torch.ones(8, 6))
    batch.mask[0, 2:] = 0
    batch = replace(batch, old_logp=batch.logp.detach())
    for name, scale in (("dr_grpo", 1 / 50), ("rloo", 4 / 3)):
        algorithm = Algorithm(name, **({"agg_const": 50} if name == "dr_grpo" else {}))
        loss, _ = algorithm.loss(batch, algorithm.advantages(batch))
        centred = (batch.reward.reshape(2, 4) - batch.reward.reshape(2, 4).mean(1, keepdim=True)).flatten()
        (gradient,) = torch.autograd.grad(loss, batch.logp)
        torch.testing.assert_close(gradient, -centred[:, None] * batch.mask * scale / 8)
