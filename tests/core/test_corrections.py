from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowrl.core import PRESETS, Algorithm, Batch, Correction, Totals, registry
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


def mask_of(divergence, advantage, log_ratio, delta=0.5, rule="ratio"):
    """M of units given as lists, by the link alone."""
    cells = [tensor(*x)[None] for x in (divergence, advantage, log_ratio)]
    batch = Batch(mask=torch.ones_like(cells[0]), reward=tensor(0), group_id=torch.tensor([0]))
    batch = replace(batch, old_logp=cells[2], extra={"divergence": cells[0]})
    cfg = SimpleNamespace(delta=delta, divergence_rule=rule)
    link = registry.lookup("correction", "divergence_mask")
    return [int(m) for m in link(cells[2], cells[1], batch, {}, cfg).weight[0]]


def test_divergence_mask_table():
    # (D >= delta, A > 0, r > 1): only outward updates from outside the region are dropped
    expected = {combination: 1 for combination in product((True, False), repeat=3)}
    expected[True, True, True] = expected[True, False, False] = 0
    outside, up, raised = zip(*expected, strict=True)
    divergence = [0.6 if x else 0.4 for x in outside]
    advantage, log_ratio = ([1.3 if x else -1.3 for x in flags] for flags in (up, raised))
    assert mask_of(divergence, advantage, log_ratio) == list(expected.values())
    assert mask_of([0.5, 0.5], [1, -1], [0.1, -0.1]) == [0, 0]  # at delta itself the code masks, the paper would not
    assert mask_of([0.0] * 4, [1, 1, -1, -1], [0.1, -0.1, 0.1, -0.1]) == [1] * 4
    for rule in ("ratio", "predicted"):
        assert mask_of([9.0] * 2, [0.0, 0.0], [0.1, -0.1], rule=rule) == [1, 1]  # A == 0
    assert mask_of([9.0] * 2, [1, -1], [0.0, 0.0]) == [1, 1]  # r == 1


def test_the_predicted_rule_compares_the_log_ratio_with_the_divergence():
    # with A > 0 the policy moves along the gradient of log r: away from the old mean if log r > D
    for log_ratio, outwards in ((0.7, True), (0.5, False), (-0.1, False)):
        assert mask_of([0.6], [1.3], [log_ratio], rule="predicted") == [int(not outwards)]
        assert mask_of([0.6], [-1.3], [log_ratio], rule="predicted") == [int(outwards)]
    assert mask_of([0.6], [1.0], [0.6], rule="predicted") == [1]
    assert mask_of([0.4], [1.0], [0.9], rule="predicted") == [1]


def test_the_predicted_rule_is_the_angle_between_both_gradients():
    rng = torch.Generator().manual_seed(0)
    d, std = 6, 0.3
    disagree = 0
    for _ in range(200):
        old, noise, step, sign = (torch.randn(d, generator=rng, dtype=torch.float64) for _ in range(4))
        advantage = sign[0].item()
        action = old + std * noise
        mean = (old + 0.2 * step).requires_grad_()
        log_ratio = (Normal(mean, std).log_prob(action) - Normal(old, std).log_prob(action)).mean()
        divergence = kl_divergence(Normal(old, std), Normal(mean, std)).mean()
        gain, away = (torch.autograd.grad(f, mean)[0] for f in (advantage * log_ratio, divergence))
        inner = (gain @ away).item()
        expected = advantage * (log_ratio - divergence).item() / (std**2 * d)
        assert inner == pytest.approx(expected, rel=1e-9)
        args = [divergence.item()], [advantage], [log_ratio.item()]
        assert mask_of(*args, delta=0, rule="predicted") == [int(inner <= 0)]
        # and what it predicts happens: a small step along the gain raises the divergence
        after = kl_divergence(Normal(old, std), Normal(mean + 1e-6 * gain, std)).mean()
        assert (after > divergence).item() == (inner > 0)
        disagree += mask_of(*args, delta=0) != mask_of(*args, delta=0, rule="predicted")
    assert 10 < disagree < 100  # the sampled ratio is a guess


@pytest.mark.parametrize("rule", ["ratio", "predicted"])
def test_dropped_units_leave_the_sum_and_stay_in_the_denominator(rule):
    batch = table(spread=0.5)
    algorithm = Algorithm("flow_dppo", delta=0.3, divergence_rule=rule)
    adv = algorithm.advantages(batch)
    loss, metrics = algorithm.loss(batch, adv)
    (gradient,) = torch.autograd.grad(loss, batch.logp)
    log_ratio, divergence, mask = (batch.logp - batch.old_logp).detach(), batch.extra["divergence"], batch.mask
    sign = log_ratio if rule == "ratio" else log_ratio - divergence
    dropped = mask & (divergence >= 0.3) & (adv.adv * sign > 0)
    assert 5 < dropped.sum() < 25
    per_unit = torch.where(mask & ~dropped, -adv.adv * log_ratio.exp(), 0) / mask.sum(1, keepdim=True) / B
    torch.testing.assert_close(gradient, per_unit)
    torch.testing.assert_close(loss.detach(), per_unit.sum())
    torch.testing.assert_close(metrics["drop_frac"].double(), dropped.sum() / mask.sum().double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["divergence"], divergence[mask].mean())


def test_dropped_units_keep_their_kl():
    batch = table(spread=0.5)
    adv = Algorithm("flow_dppo").advantages(batch)
    with_kl, without = (Algorithm("flow_dppo", delta=0.0, beta=beta).loss(batch, adv) for beta in (0.3, 0.0))
    assert with_kl[1]["drop_frac"] > 0.3
    mean = (batch.token_kl * batch.mask).sum(1) / batch.mask.sum(1)
    torch.testing.assert_close(with_kl[0] - without[0], 0.3 * mean.mean())


def test_without_a_threshold_nothing_is_dropped():
    batch = table(spread=0.5)
    masked = Algorithm("flow_dppo", delta=torch.inf)
    plain = Algorithm(replace(PRESETS["flow_dppo"], correction=()))
    adv = plain.advantages(batch)
    (loss, metrics), (expected, bare) = masked.loss(batch, adv), plain.loss(batch, adv)
    assert torch.equal(loss, expected) and metrics["drop_frac"] == 0 and "drop_frac" not in bare
    torch.testing.assert_close(*(torch.autograd.grad(x, batch.logp)[0] for x in (loss, expected)), rtol=0, atol=0)


def test_a_divergence_mask_without_its_data_or_rule_is_refused():
    batch = table()
    adv = Algorithm("flow_dppo").advantages(batch)
    with pytest.raises(ValueError, match="'divergence_mask' needs 'divergence'"):
        Algorithm("flow_dppo").loss(replace(batch, extra={}), adv)
    with pytest.raises(ValueError, match="unknown divergence_rule 'angle': 'ratio' or 'predicted'"):
        Algorithm("flow_dppo", divergence_rule="angle").loss(batch, adv)
