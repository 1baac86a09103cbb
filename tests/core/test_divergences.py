import math
from dataclasses import replace

import pytest
import torch

from flowrl.core import PRESETS, Algorithm, Batch

from .tables import table, tensor

FORMS = {"k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(d) - d - 1}
SLOPES = {"k1": lambda d: 1.0, "k2": lambda d: -d, "k3": lambda d: 1 - math.exp(d)}  # d/dlogp, dd/dlogp = -1


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("d", [-0.7, 0.0, 0.4])
def test_sampled_forms(name, d):
    logp = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    batch = Batch(
        mask=torch.ones(1, 1),
        reward=torch.zeros(1),
        group_id=torch.zeros(1).long(),
        logp=logp,
        old_logp=torch.zeros(1, 1, dtype=torch.float64),
        ref_logp=tensor(d)[None],
    )
    loss, metrics = Algorithm(replace(PRESETS["grpo"], kl=name), beta=0.5).loss(batch, torch.zeros(1, 1))
    loss.backward()
    assert metrics["kl"].item() == pytest.approx(FORMS[name](d))
    assert metrics["kl_loss"].item() == pytest.approx(0.5 * FORMS[name](d))
    assert logp.grad.item() == pytest.approx(0.5 * SLOPES[name](d), abs=1e-15)


@pytest.mark.parametrize("name", FORMS)
def test_a_gap_is_clamped_before_the_exponential(name):
    logp = torch.full((8, 6), -900.0, requires_grad=True)
    algorithm = Algorithm(replace(PRESETS["grpo"], kl=name), beta=1.0)
    _, metrics = algorithm.loss(table(logp=logp, ref_logp=torch.zeros(8, 6)), torch.zeros(8, 6))
    assert metrics["kl"].item() == pytest.approx(FORMS[name](20.0))


def test_k3_estimates_the_kl_of_two_categoricals():
    p, q = torch.softmax(tensor(0.1, 0.9, -0.3), 0), torch.softmax(tensor(0.5, 0.2, 0.0), 0)
    d = (q / p).log()
    kl = (p * (p / q).log()).sum()
    for estimate in (-d, d.exp() - d - 1):
        torch.testing.assert_close((p * estimate).sum(), kl)


def test_exact_kl_carries_gradient():
    kl = (torch.rand(8, 6, generator=torch.Generator().manual_seed(0)).double()).requires_grad_()
    batch = table(token_kl=kl)
    loss, metrics = Algorithm("flow_grpo").loss(batch, torch.zeros(8, 6))
    (gradient,) = torch.autograd.grad(loss, kl)
    lengths = batch.mask.sum(1, keepdim=True)
    torch.testing.assert_close(gradient, 0.04 * batch.mask.double() / lengths / 8)
    torch.testing.assert_close(metrics["kl"], (kl * batch.mask / lengths).sum().detach() / 8)


def test_the_reference_is_needed_only_for_a_positive_beta():
    batch = replace(table(), ref_logp=None)
    adv = Algorithm("grpo").advantages(batch)
    Algorithm("grpo").loss(batch, adv)
    with pytest.raises(ValueError, match="kl link 'k3' needs 'ref_logp'"):
        Algorithm("grpo", beta=0.1).loss(batch, adv)
