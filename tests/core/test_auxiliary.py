from dataclasses import replace

import torch

from flowrl.core import PRESETS, Algorithm

from .tables import LENGTHS, table

PRESET = replace(PRESETS["grpo"], aux=((0.3, "entropy"),))


def test_entropy_bonus():
    batch = table()
    entropy = batch.extra["entropy_grad"].requires_grad_()
    adv = Algorithm("grpo").advantages(batch)
    plain, _ = Algorithm("grpo").loss(batch, adv)
    loss, metrics = Algorithm(PRESET).loss(batch, adv)
    mean = (entropy * batch.mask).sum() / sum(LENGTHS)
    torch.testing.assert_close(loss, plain - 0.3 * mean)
    torch.testing.assert_close(metrics["aux/entropy"], -mean.detach())
    (gradient,) = torch.autograd.grad(loss, entropy)
    torch.testing.assert_close(gradient, -0.3 * batch.mask.double() / sum(LENGTHS))


def test_a_pure_auxiliary_objective():
    batch = table()
    algorithm = Algorithm(PRESET, pg_coef=0.0)
    loss, metrics = algorithm.loss(batch, algorithm.advantages(batch))
    torch.testing.assert_close(loss, 0.3 * metrics["aux/entropy"])
