"""Hooks `surrogate`: (log_ratio, adv_tok, (lo, hi), batch, cfg) -> [B,T] loss of each unit, and `bounds`:
(log_ratio, adv_tok, batch, cfg) -> (lo, hi), the clip radii below and above ratio 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .registry import register

Bounds = tuple[float | Tensor, float | Tensor]


@register("bounds", "symmetric", clip_lo=0.2, clip_hi=0.2)
def symmetric(log_ratio: Tensor, adv_tok: Tensor, batch: Batch, cfg: Any) -> Bounds:
    """The same radii for every unit, rho in [1 - clip_lo, 1 + clip_hi]."""
    return cfg.clip_lo, cfg.clip_hi


@register("bounds", "open")
def unbounded(log_ratio: Tensor, adv_tok: Tensor, batch: Batch, cfg: Any) -> Bounds:
    """No clip."""
    return torch.inf, torch.inf


@register("surrogate", "ppo")
def ppo(log_ratio: Tensor, adv_tok: Tensor, bounds: Bounds, batch: Batch, cfg: Any) -> Tensor:
    """-min(rho A, clip(rho, 1 - lo, 1 + hi) A). Source: PPO, arXiv 1707.06347, eq. 7."""
    ratio = log_ratio.exp()
    lo, hi = (torch.as_tensor(radius, dtype=ratio.dtype, device=ratio.device) for radius in bounds)
    clipped = ratio.clamp(1 - lo, 1 + hi)
    return -torch.minimum(ratio * adv_tok, clipped * adv_tok)


@register("surrogate", "reinforce", needs=("logp",))
def reinforce(log_ratio: Tensor, adv_tok: Tensor, bounds: Bounds, batch: Batch, cfg: Any) -> Tensor:
    """-A logp: the plain policy gradient, without ratio and clip."""
    assert batch.logp is not None
    return -adv_tok * batch.logp
