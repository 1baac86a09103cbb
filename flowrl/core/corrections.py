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
