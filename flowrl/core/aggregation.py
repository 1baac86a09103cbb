"""Hook `aggregate`: (tok_loss, num_mask, den_mask, adv_tok, batch, cfg) -> scalar, linear in tok_loss.

Units with num_mask = 0 are left out of the sum. The counts are `batch.totals`, of the whole update, else
those of den_mask. Units that a correction drops are in den_mask only: they still count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch import Batch, Totals, compute_dtype
from .registry import register


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask is not 0, else 0, whatever x holds there."""
    return torch.where(mask != 0, x, 0)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of x over the units with mask not 0, over all axes or one; 0 where there is none."""
    x, count = masked(x.to(compute_dtype(x)), mask), mask != 0
    if dim is None:
        return x.sum() / count.sum().clamp(min=1)
    return x.sum(dim) / count.sum(dim).clamp(min=1)


def masked_quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """q-quantile of each row of x [B,T] over mask, linearly interpolated, [B]; 0 where a row has no unit."""
    ranked = torch.where(mask != 0, x.to(compute_dtype(x)), torch.inf).sort(1).values
    n = (mask != 0).sum(1, keepdim=True)
    place = (n - 1).clamp(min=0) * q
    low = place.floor().long()
    up = torch.minimum(low + 1, (n - 1).clamp(min=0))
    below, above = ranked.gather(1, low), ranked.gather(1, up)
    value = below + (above - below) * (place - low).to(below)
    return torch.where(n > 0, value, 0).squeeze(1)


@register("aggregate", "token_mean")
def token_mean(tok_loss: Tensor, num_mask: Tensor, den_mask: Tensor, adv_tok: Tensor, batch: Batch, cfg: Any) -> Tensor:
    """Sum over units / number of units: every unit weighs the same. Source: DAPO, arXiv 2503.14476."""
    totals = batch.totals or Totals.of(den_mask)
    return masked(tok_loss, num_mask).sum() / max(totals.tokens, 1)


@register("aggregate", "seq_mean_token_mean")
def seq_mean_token_mean(
    tok_loss: Tensor, num_mask: Tensor, den_mask: Tensor, adv_tok: Tensor, batch: Batch, cfg: Any
) -> Tensor:
    """Mean over rows of the row's unit mean: every row weighs the same. Source: GRPO, arXiv 2402.03300."""
    totals = batch.totals or Totals.of(den_mask)
    per_row = masked(tok_loss, num_mask).sum(1) / totals.row_tokens.to(tok_loss).clamp(min=1)
    return per_row.sum() / max(totals.rows, 1)


@register("aggregate", "seq_sum_const", agg_const=1.0)
def seq_sum_const(
    tok_loss: Tensor, num_mask: Tensor, den_mask: Tensor, adv_tok: Tensor, batch: Batch, cfg: Any
) -> Tensor:
    """Mean over rows of the row's unit sum / agg_const, so that length has no say in a unit's weight.

    Source: Dr. GRPO, arXiv 2503.20783, where the constant is the longest length allowed.
    """
    totals = batch.totals or Totals.of(den_mask)
    return masked(tok_loss, num_mask).sum() / (max(totals.rows, 1) * cfg.agg_const)
