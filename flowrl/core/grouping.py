"""Statistics inside groups, broadcast back to the rows.

`x` is [B] or [B,K], `gid` [B] holds arbitrary int64 labels, `valid` [B] bool marks the rows that count; the
others may hold anything, NaN included. Integers and half floats are computed in float32.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .batch import Batch, compute_dtype
from .registry import register


def _table(x: Tensor, gid: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x as [B,K] with invalid rows 0, the group of each row as 0..P-1, and [B] bool of valid rows."""
    if x.dim() not in (1, 2) or len(x) != len(gid):
        raise ValueError(f"x must be [B] or [B,K] with B = {len(gid)}, got {tuple(x.shape)}")
    index = torch.unique(gid, return_inverse=True)[1]
    ok = torch.ones_like(gid, dtype=torch.bool) if valid is None else valid
    table = x if x.dim() == 2 else x[:, None]
    cells = torch.where(ok[:, None], table.to(compute_dtype(x)), 0)
    return cells, index, ok


def _sum(cells: Tensor, index: Tensor) -> Tensor:
    """Group sums [B,K], on every row."""
    return torch.zeros_like(cells).index_add(0, index, cells)[index]


def _max(cells: Tensor, index: Tensor, ok: Tensor) -> Tensor:
    """Group maxima [B,K], on every row; -inf where a group has no valid row."""
    low = torch.where(ok[:, None], cells, -torch.inf)
    slot = index[:, None].expand_as(low)
    return torch.full_like(low, -torch.inf).scatter_reduce(0, slot, low, "amax")[index]


def group_count(gid: Tensor, valid: Tensor | None = None) -> Tensor:
    """Number of valid rows in the group of each row, float32 [B]."""
    cells, index, _ = _table(torch.ones_like(gid, dtype=torch.float32), gid, valid)
    return _sum(cells, index).squeeze(1)


def group_mean(x: Tensor, gid: Tensor, valid: Tensor | None = None) -> Tensor:
    """Group mean on every row, shaped like x; 0 in a group without valid rows."""
    cells, index, ok = _table(x, gid, valid)
    n = _sum(ok[:, None].to(cells.dtype), index).clamp(min=1)
    return (_sum(cells, index) / n).reshape(x.shape)


def group_std(x: Tensor, gid: Tensor, valid: Tensor | None = None, ddof: int = 1) -> Tensor:
    """Group standard deviation on every row, divisor n - ddof; exactly 0 where all valid rows are equal."""
    cells, index, ok = _table(x, gid, valid)
    n = _sum(ok[:, None].to(cells.dtype), index)
    gap = torch.where(ok[:, None], cells - _sum(cells, index) / n.clamp(min=1), 0)
    std = (_sum(gap**2, index) / (n - ddof).clamp(min=1)).sqrt()
    return torch.where(_alive(cells, index, ok), std, 0).reshape(x.shape)


def _alive(cells: Tensor, index: Tensor, ok: Tensor) -> Tensor:
    """[B,K] bool: the group has two different values (range, not std: rounding of a mean cannot leak in)."""
    return _max(cells, index, ok) > -_max(-cells, index, ok)


def group_max(x: Tensor, gid: Tensor, valid: Tensor | None = None) -> Tensor:
    """Group maximum on every row, shaped like x; 0 in a group without valid rows."""
    cells, index, ok = _table(x, gid, valid)
    top = _max(cells, index, ok)
    return torch.where(_sum(ok[:, None].float(), index) > 0, top, 0).reshape(x.shape)


def group_median(x: Tensor, gid: Tensor, valid: Tensor | None = None) -> Tensor:
    """Group median on every row, mean of the middle two for an even count; 0 without valid rows."""
    cells, index, ok = _table(x, gid, valid)
    high = torch.where(ok[:, None], cells, torch.inf)
    order = high.argsort(0)
    order = order.gather(0, index[order].argsort(dim=0, stable=True))  # by group, then by value
    ranked = high.gather(0, order)
    size = torch.bincount(index, minlength=len(index))
    start, n = (size.cumsum(0) - size)[index], _sum(ok[:, None].long(), index).squeeze(1)
    last = len(index) - 1
    low, up = start + (n - 1).clamp(min=0) // 2, start + n // 2
    median = (ranked[low] + ranked[up.clamp(max=last)]) / 2
    return torch.where(n[:, None] > 0, median, 0).reshape(x.shape)


def gnorm(
    x: Tensor,
    gid: Tensor,
    scale: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    floor: float | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Group-normalised x: (x - mean) / (std + eps), or / max(std, floor), or x - mean when `scale` is False.

    Exactly 0 for invalid rows, singletons and groups whose values are all equal. Source: GRPO, arXiv
    2402.03300.
    """
    cells, index, ok = _table(x, gid, valid)
    out = cells - group_mean(cells, gid, ok)
    if scale:
        std = group_std(cells, gid, ok, ddof)
        out = out / (std + eps if floor is None else std.clamp(min=floor))
    return torch.where(_alive(cells, index, ok) & ok[:, None], out, 0).reshape(x.shape)


def loo(x: Tensor, gid: Tensor, valid: Tensor | None = None) -> Tensor:
    """x minus the mean of the other valid members, G/(G-1) (x - mean); 0 as in `gnorm` (arXiv 2402.14740)."""
    n = group_count(gid, valid).to(compute_dtype(x))
    factor = n / (n - 1).clamp(min=1)
    centred = gnorm(x, gid, scale=False, valid=valid)
    return centred * (factor if x.dim() == 1 else factor[:, None])


def refine_groups(gid: Tensor, *keys: Tensor) -> Tensor:
    """Ids 0.. that are equal where gid and every key, [B] or [B,D], are equal; the keys' order is free."""
    columns = [torch.unique(key, return_inverse=True, dim=0)[1] for key in (gid, *keys)]
    return torch.unique(torch.stack(columns, 1), return_inverse=True, dim=0)[1]


def rank_in_group(
    x: Tensor,
    gid: Tensor,
    descending: bool = False,
    ties: Literal["average", "dense", "order"] = "average",
    valid: Tensor | None = None,
) -> Tensor:
    """Rank of each row of x [B] in its group, from 1; 0 for invalid rows.

    ties: "average" shares the mean of the tied ranks, "dense" the same rank without gaps after it, "order"
    breaks ties by row position.
    """
    if ties not in ("average", "dense", "order"):
        raise ValueError(f"ties must be 'average', 'dense' or 'order', got {ties!r}")
    cells, index, ok = _table(x, gid, valid)
    rows = ok.nonzero().squeeze(1)
    value, group = cells[rows, 0] * (-1 if descending else 1), index[rows]
    order = value.argsort(stable=True)
    order = order[group[order].argsort(stable=True)]
    value, group = value[order], group[order]
    size = torch.bincount(group, minlength=1)
    position = torch.arange(len(rows), device=x.device) - (size.cumsum(0) - size)[group] + 1
    opens = torch.ones_like(position, dtype=torch.bool)  # a run is a set of tied rows of one group
    opens[1:] = (value[1:] != value[:-1]) | (group[1:] != group[:-1])
    run = opens.long().cumsum(0) - 1
    rank = position.to(cells.dtype)
    if ties == "average":
        rank = group_mean(rank, run)
    elif ties == "dense":
        rank = (run - run[position == 1][torch.unique(group, return_inverse=True)[1]] + 1).to(cells.dtype)
    out = torch.zeros(len(x), dtype=cells.dtype, device=x.device)
    out[rows[order]] = rank
    return out


def zero_spread_share(x: Tensor, gid: Tensor, valid: Tensor | None = None) -> Tensor:
    """Share of the groups (with a valid row) in which no channel of x varies, 0-dim: they teach nothing."""
    cells, index, ok = _table(x, gid, valid)
    alive = _alive(cells, index, ok).any(1)[ok]
    weight = 1 / group_count(gid, valid)[ok].to(cells)  # each group weighs one
    return (weight * ~alive).sum() / weight.sum().clamp(min=1)


@register("group_key", "prompt")
def prompt(batch: Batch) -> Tensor:
    """Samples of one prompt are one group: the ids of the batch."""
    return batch.group_id
