"""Hook `credit`: (adv_tok, adv, batch, state, cfg) -> [B,T]. A chain; adv_tok is None for the first link."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch import Batch, State, compute_dtype
from .registry import register


def gather_seg(vals: Tensor, seg: Tensor) -> Tensor:
    """Segment values [B,K] on the units of seg [B,T]: out[b,t] = vals[b, seg[b,t]], 0 where seg is -1."""
    return torch.where(seg >= 0, vals.gather(1, seg.clamp(min=0)), 0)


def segment_mean(x: Tensor, seg: Tensor, K: int) -> Tensor:
    """Mean of x [B,T] over each segment 0..K-1 of seg [B,T], [B,K]; 0 for an empty one, -1 is left out."""
    inside = seg >= 0
    slot = torch.where(inside, seg, K)  # an extra bucket takes what is outside
    x = torch.where(inside, x.to(compute_dtype(x)), 0)
    zero = x.new_zeros(len(x), K + 1)
    n = zero.scatter_add(1, slot, torch.ones_like(x)).clamp(min=1)
    return (zero.scatter_add(1, slot, x) / n)[:, :K]


def suffix_sum(vals: Tensor) -> Tensor:
    """out[b,k] = sum of vals[b,j] over j >= k, for vals [B,K]."""
    return vals.flip(1).cumsum(1).flip(1)


def diff_boundary(V: Tensor) -> Tensor:
    """Gain of each segment, V[:, k+1] - V[:, k], from values at its boundaries: [B,K+1] -> [B,K]."""
    return V[:, 1:] - V[:, :-1]


@register("credit", "broadcast", first=True)
def broadcast(adv_tok: None, adv: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """Every unit of a row gets the row's advantage, [B] -> [B,T]. Raises ValueError on several channels."""
    if adv.dim() != 1:
        raise ValueError(f"credit link 'broadcast' needs an advantage [B], got {tuple(adv.shape)}")
    return adv[:, None].expand(batch.mask.shape)


@register("credit", "gather_seg", needs=("seg",), first=True)
def by_segment(adv_tok: None, adv: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """Every unit gets the advantage of its segment, [B,K] -> [B,T], 0 outside segments."""
    if adv.dim() != 2:
        raise ValueError(f"credit link 'gather_seg' needs an advantage [B,K], got {tuple(adv.shape)}")
    assert batch.seg is not None
    return gather_seg(adv, batch.seg)


@register("credit", "step_weight", needs=("std", "length"), first=False)
def step_weight(adv_tok: Tensor, adv: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """A_it = u_t A_i,   u_t = sigma_t / mean_t sigma_t,   sigma_t = std_t / sqrt(length_t).

    std and length [B,T] are the noise and the time step of each unit of a flow sampler; the mean is over the row's
    units in the mask, so that u has mean 1. Computed in float64 and rounded to float32: a constant sigma gives exactly
    1, and so does a row of one unit. Raises ValueError where a unit in the mask has no positive std or length.
    Source: SuperFlow, arXiv 2512.17951. DERIVED, not verified.
    """
    mask = batch.mask != 0
    std, length = batch.extra["std"].double(), batch.extra["length"].double()
    bad = mask & ~((std > 0) & (length > 0))
    if bad.any():
        raise ValueError(f"credit link 'step_weight' needs std > 0 and length > 0, {int(bad.sum())} units have not")
    sigma = torch.where(mask, std / length.sqrt(), 0)
    mean = sigma.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return adv_tok * torch.where(mask, sigma / mean, 0).float().to(adv_tok)
