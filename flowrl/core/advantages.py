"""Hook `advantage`: (x, reward, batch, state, cfg) -> Tensor | AdvOut. A chain.

The first link is an estimator and gets x = reward; later links get the running advantage in `x` and the
shaped reward in `reward`. All see [B] or [B,K] and ignore rows with valid = False.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .allocation import TRACKER, beta_value
from .batch import Batch, State
from .grouping import gnorm, group_std
from .grouping import loo as leave_one_out
from .registry import register


@register("advantage", "z", first=True, ddof=1, eps=1e-6)
def z(x: Tensor, reward: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """A = (r - mean_g) / (std_g + eps), divisor n - ddof. Source: GRPO, arXiv 2402.03300."""
    return gnorm(x, batch.group_id, ddof=cfg.ddof, eps=cfg.eps, valid=batch.valid_rows)


@register("advantage", "global_std", first=True, global_std=True, ddof=0, eps=1e-4)
def global_std(x: Tensor, reward: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """A = (r - mean_g) / (std + eps) with the std of ALL valid rewards of the batch, population by default.

    cfg.global_std = False takes the std of the group. A group without spread gets exactly 0.
    Source: Flow-GRPO, arXiv 2505.05470.
    """
    if not cfg.global_std:
        return z(x, reward, batch, state, cfg)
    everyone = torch.zeros_like(batch.group_id)
    std = group_std(x, everyone, batch.valid_rows, cfg.ddof)
    return gnorm(x, batch.group_id, scale=False, valid=batch.valid_rows) / (std + cfg.eps)


@register("advantage", "centre", first=True)
def centre(x: Tensor, reward: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """A = r - mean_g. Source: Dr. GRPO, arXiv 2503.20783."""
    return gnorm(x, batch.group_id, scale=False, valid=batch.valid_rows)


@register("advantage", "loo", first=True)
def loo(x: Tensor, reward: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """A_i = r_i - mean of the other members of the group. Source: RLOO, arXiv 2402.14740."""
    return leave_one_out(x, batch.group_id, batch.valid_rows)


@register("advantage", "beta_baseline", first=True, **TRACKER, eps=1e-4)
def beta_baseline(x: Tensor, reward: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """r - vhat standardised over the batch: A = (d - mean d) / (std d + eps), d = r - vhat, population std.

    vhat is the prompt's `beta_value`, keyed by group id, so the batch must be shown to the tracker only afterwards.
    Exactly 0 where all d are equal. Raises ValueError on several channels.
    Source: SuperFlow, arXiv 2512.17951, and SPO, arXiv 2509.13232. DERIVED, not verified.
    """
    if x.dim() != 1:
        raise ValueError(f"advantage link 'beta_baseline' needs a reward [B], got {tuple(x.shape)}")
    value = [beta_value(state, key, cfg.beta_prior) for key in batch.group_id.tolist()]
    everyone = torch.zeros_like(batch.group_id)
    return gnorm(x - x.new_tensor(value), everyone, ddof=0, eps=cfg.eps, valid=batch.valid_rows)


@register("advantage", "gdpo", first=True, ddof=1, eps=1e-6)
def gdpo(x: Tensor, reward: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """Every reward on its own: S = sum_k w_k z(r_k), z inside the group; A = S / (std of S in the batch + eps).

    r is `batch.extra["rewards"]` [B,R], the rewards before they were summed, and w `batch.extra["reward_weights"]`, R
    numbers; without them the reward itself, [B] or [B,R], with weights 1. A reward's unit and offset do not matter.
    Whitened over samples, not over units as in the released code, where long samples count more.
    Source: GDPO, arXiv 2601.05242.
    """
    rewards = batch.extra.get("rewards", x).to(x).reshape(len(x), -1)
    weights = rewards.new_tensor(batch.extra.get("reward_weights", [1.0] * rewards.shape[1]))
    gid, valid = batch.group_id, batch.valid_rows
    return combine_channels(rewards, weights, "norm_sum_whiten", gid, valid, cfg.ddof, cfg.eps)


@register("advantage", "clip", first=False, adv_clip_max=5.0)
def clip(x: Tensor, reward: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """A clamped to [-adv_clip_max, adv_clip_max]."""
    return x.clamp(-cfg.adv_clip_max, cfg.adv_clip_max)


@register("advantage", "sum_shared", needs=("transition",), first=False)
def sum_shared(x: Tensor, reward: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """Rows that share one action get the sum of their advantages: one action, valued by all that came of it.

    `batch.extra["transition"]` [B] int: equal for the rows that share. An action of K rows enters a mean over rows K
    times, so the mean of a loss over rows is its mean over actions. A row that shares with none keeps its advantage.
    Source: the granularities of E-GRPO, arXiv 2601.00423, where one noisy step is continued on K grids.
    """
    x = torch.where(batch.valid_rows if x.dim() == 1 else batch.valid_rows[:, None], x, 0)
    action = torch.unique(batch.extra["transition"].to(x.device), return_inverse=True)[1]
    return torch.zeros_like(x).index_add(0, action, x)[action]


def combine_channels(
    x: Tensor,
    weights: Tensor,
    mode: Literal["sum_then_norm", "norm_then_sum", "norm_sum_whiten", "std_weighted"],
    gid: Tensor,
    valid: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """One advantage [B] from reward channels x [B,R] and weights w [R].

    sum_then_norm: z(sum_k w_k r_k). norm_then_sum: sum_k w_k z(r_k). norm_sum_whiten: norm_then_sum, then
    standardised over the whole batch (GDPO). std_weighted: sum_k w_k std_k z(r_k) / sum_k w_k std_k
    (DVAO). Raises ValueError on an unknown mode or a wrong number of weights.
    """
    if x.dim() != 2 or weights.shape != x.shape[1:]:
        raise ValueError(f"need x [B,R] and weights [R], got {tuple(x.shape)} and {tuple(weights.shape)}")
    z_k = gnorm(x, gid, ddof=ddof, eps=eps, valid=valid)
    w = weights.to(z_k)
    if mode == "sum_then_norm":
        return gnorm(x.to(z_k.dtype) @ w, gid, ddof=ddof, eps=eps, valid=valid)
    if mode == "norm_then_sum":
        return z_k @ w
    if mode == "norm_sum_whiten":
        total = z_k @ w  # its mean over the batch is 0; subtracting what rounding left would move groups without spread
        return total / (group_std(total, torch.zeros_like(gid), valid, ddof) + eps)
    if mode == "std_weighted":
        std = group_std(x, gid, valid, ddof) * w
        total = std.sum(1, keepdim=True)
        return (torch.where(total > 0, std / total, 0) * z_k).sum(1)
    raise ValueError(f"unknown mode {mode!r}")
