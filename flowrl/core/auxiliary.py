"""Hook `aux`: (batch, adv_tok, pg_value, state, cfg) -> scalar added to the loss with its own coefficient.

A preset lists (coefficient, name). Divide by `batch.totals` when they are there, so that micro-batches add
up.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .aggregation import token_mean
from .batch import Batch, State
from .registry import register


@register("aux", "entropy", needs=("entropy_grad",))
def entropy(batch: Batch, adv_tok: Tensor, pg_value: Tensor, state: State, cfg: Any) -> Tensor:
    """Minus the mean of extra["entropy_grad"] [B,T] (nats, with gradient): a bonus for a positive
    coefficient."""
    mask = batch.loss_mask
    return -token_mean(batch.extra["entropy_grad"], mask, mask, adv_tok, batch, cfg)
