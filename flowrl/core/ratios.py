"""Hook `log_ratio`: (batch, cfg) -> [B,T], carries gradient. The core clamps it to +-20."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .batch import Batch
from .registry import register


@register("log_ratio", "token", needs=("logp", "old_logp"))
def token(batch: Batch, cfg: Any) -> Tensor:
    """log rho = logp - old_logp of each unit."""
    assert batch.logp is not None and batch.old_logp is not None
    return batch.logp - batch.old_logp
