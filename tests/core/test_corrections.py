from dataclasses import replace

import pytest
import torch

from flowrl.core import PRESETS, Algorithm, Correction, Totals, registry
from flowrl.core.corrections import combine

from .tables import B, table, tensor


@pytest.fixture
def odd_rows():
    """A link that keeps rows 1, 3, ... and counts only those."""

    def link(log_ratio, adv_tok, batch, state, cfg):
        return Correction(keep=torch.arange(len(batch.mask))[:, None] % 2, renorm=cfg.odd_renorm)

    registry.register("correction", "odd_rows", odd_renorm=False)(link)
    yield "odd_rows"
    del registry._LINKS["correction"]["odd_rows"]


def test_combine_multiplies_the_chain():
    weight = tensor(1, 2).requires_grad_()
    links = [
        Correction(weight=weight, lr_scale=0.5),
        Correction(keep=tensor(0, 1)),
        Correction(weight=3 * weight, keep=tensor(1, 1), renorm=True, lr_scale=0.5),
    ]
    total = combine(links)
    assert total.weight.tolist() == [3, 12]
    assert not total.weight.requires_grad
    assert (total.keep.tolist(), total.renorm, total.lr_scale) == ([0, 1], True, 0.25)
    assert combine([]) == Correction()


def test_truncated_importance_weight():
    batch = table(spread=1.0)
    algorithm = Algorithm(replace(PRESETS["rloo"], correction=("tis",)), tis_cap=1.5)
    adv = algorithm.advantages(batch)
    loss, _ = algorithm.loss(batch, adv)
    (gradient,) = torch.autograd.grad(loss, batch.logp)
    weight = torch.exp(batch.old_logp - batch.behav_logp).clamp(max=1.5)
    assert (weight == 1.5).any()
    torch.testing.assert_close(gradient, -adv.adv * weight / B)


def test_a_gap_is_clamped_before_the_exponential():
    batch = replace(table(), behav_logp=torch.full((8, 6), -900.0))
    algorithm = Algorithm(replace(PRESETS["grpo"], correction=("tis",)), tis_cap=float("inf"))
    assert algorithm.loss(batch, algorithm.advantages(batch))[0].isfinite()


def test_without_gap_the_weight_is_one():
    batch = table()
    batch = replace(batch, behav_logp=batch.old_logp)
    plain, corrected = Algorithm("grpo"), Algorithm(replace(PRESETS["grpo"], correction=("tis",)))
    adv = plain.advantages(batch)
    assert torch.equal(plain.loss(batch, adv)[0], corrected.loss(batch, adv)[0])


def test_dropped_units_count_unless_renormalised(odd_rows):
    preset = replace(PRESETS["grpo"], correction=("odd_rows",))
    batch = table()
    adv = Algorithm("grpo").advantages(batch)
    kept = replace(batch, in_loss=torch.arange(B) % 2 == 1)
    expected, _ = Algorithm("grpo").loss(kept, adv)
    torch.testing.assert_close(Algorithm(preset, odd_renorm=True).loss(batch, adv)[0], expected)
    torch.testing.assert_close(Algorithm(preset).loss(batch, adv)[0], expected / 2)
    with pytest.raises(ValueError, match="renorm"):
        partial = replace(batch, totals=Totals.of(batch.mask))
        Algorithm(preset, odd_renorm=True).loss(partial, adv)
