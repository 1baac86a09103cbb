"""Hook `correction`: (log_ratio, adv_tok, batch, state, cfg) -> Correction. A chain whose links multiply."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, Correction, State
from .registry import register


def combine(links: Iterable[Correction]) -> Correction:
    """Product of weights, keeps and lr_scales; renorm if any link asks for it. Nothing is left of no link."""
    total = Correction()
    for link in links:
        total = Correction(
            _times(total.weight, link.weight),
            _times(total.keep, link.keep),
            total.renorm or link.renorm,
            total.lr_scale * link.lr_scale,
        )
    return total


def _times(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if b is None:
        return a
    return b.detach() if a is None else a * b.detach()


@register("correction", "tis", needs=("old_logp", "behav_logp"), tis_cap=2.0)
def tis(log_ratio: Tensor, adv_tok: Tensor, batch: Batch, state: State, cfg: Any) -> Correction:
    """Truncated importance weight min(pi_old / pi_behaviour, tis_cap) of each unit.

    For units that an engine generated whose log-probs differ from the trainer's; off-policy weights as in
    IMPALA, arXiv 1802.01561.
    """
    assert batch.old_logp is not None and batch.behav_logp is not None
    gap = (batch.old_logp - batch.behav_logp).detach().clamp(-20, 20)
    return Correction(weight=torch.exp(gap).clamp(max=cfg.tis_cap))


@register("correction", "divergence_mask", needs=("divergence", "old_logp"), delta=1e-6, divergence_rule="ratio")
def divergence_mask(log_ratio: Tensor, adv_tok: Tensor, batch: Batch, state: State, cfg: Any) -> Correction:
    """Drop the units that have left the trust region and would be pushed further out; keep those that return.

        M = 0  where  D >= delta  and the update leads outwards,  else 1

    D is `batch.extra["divergence"]` [B,T] >= 0, of the old policy and the current one (mean over a unit's elements,
    like the log-probs). Dropped units lose their surrogate, not their KL to the reference, and still count in the
    denominator. Outwards means, by cfg.divergence_rule:

        "ratio"      (A > 0 and r > 1) or (A < 0 and r < 1), as in the released code
        "predicted"  A (log r - D) > 0

    For Gaussians of one std, (log r - D) / (std^2 d) is the inner product of the gradients of log r and of D with
    respect to the mean: the second rule asks whether a small step of the mean along the update raises D.

    The paper also names a threshold on a predicted divergence after the update. Its formula is not known here, so it
    is left out. Raises ValueError on an unknown rule. Source: Flow-DPPO, arXiv 2606.11025.
    """
    divergence = batch.extra["divergence"].to(log_ratio)
    if cfg.divergence_rule == "ratio":
        outwards = adv_tok * log_ratio > 0
    elif cfg.divergence_rule == "predicted":
        outwards = adv_tok * (log_ratio - divergence) > 0
    else:
        raise ValueError(f"unknown divergence_rule {cfg.divergence_rule!r}: 'ratio' or 'predicted'")
    return Correction(weight=(~((divergence >= cfg.delta) & outwards)).to(log_ratio))
