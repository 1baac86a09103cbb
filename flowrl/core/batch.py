"""The table every hook reads: B samples (rows) by T units (columns).

A unit is one action of the policy: a denoising step, a visual token, a text token. `B`, `T`, `R`/`K` (reward
channels, segments) are used for shapes in the whole room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
"""What hooks remember between updates: numbers, tensors, lists and dicts only, so that it can be checkpointed."""

Index = slice | Tensor | Sequence[int]

TOKEN_FIELDS = (
    "mask",
    "logp",
    "old_logp",
    "behav_logp",
    "ref_logp",
    "teacher_logp",
    "entropy",
    "token_kl",
    "seg",
)
ROW_FIELDS = ("reward", "group_id", "valid", "in_loss")
TOKEN_EXTRA = ("neg_logp", "entropy_grad", "hidden", "logdist", "step", "std", "length", "divergence")
"""Names in `Batch.extra` whose second axis is T (cut by a column slice); all other entries have no T axis."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything else: the precision of every statistic and loss here."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Totals:
    """Counts of the WHOLE update (all micro-batches, all ranks), the denominators of every aggregation.

    rows: rows with at least one unit in the loss. tokens: units in the loss. row_tokens [B]: units in the
    loss of each row of *this* micro-batch, over the row's full length even when the micro-batch holds some of
    its columns. Losses computed with them add up over row and column slices to the loss of the full batch, so
    gradients must be summed, not averaged, over micro-batches and ranks (multiply by the world size under
    DDP).
    """

    rows: float
    tokens: float
    row_tokens: Tensor

    @classmethod
    def of(cls, mask: Tensor, keep: Tensor | None = None) -> Totals:
        """Count `mask` [B,T] in the rows with `keep` [B] true. Over ranks, sum `rows` and `tokens`."""
        row_tokens = (mask != 0).sum(1)  # integers: exact beyond 2^24 units
        if keep is not None:
            row_tokens = row_tokens * keep
        return cls(float((row_tokens > 0).sum()), float(row_tokens.sum()), row_tokens)


@dataclass(kw_only=True)
class Batch:
    """What one update, or a slice of it, knows.

    mask [B,T] bool or 0/1: units that the policy produced and that count. reward [B] or [B,R]. group_id [B]
    int: arbitrary labels, equal for the samples of one prompt. Log-probs [B,T] in nats: `logp` current
    policy, with gradient; `old_logp` policy at the start of the update; `behav_logp` whatever really
    generated; `ref_logp` frozen reference; `teacher_logp`. entropy [B,T] in nats. token_kl [B,T]: exact
    KL(policy || reference) of each unit, may carry gradient. seg [B,T] int: segment of each unit, -1 for
    none. valid [B] bool: False = no reward; the row leaves the statistics and the loss.
    in_loss [B] bool: False = the row stays in the statistics but gets no gradient.
    step: optimiser step. totals: see `Totals`; None = this batch is the whole update. extra: named data of
    single methods; entries of length B (tensors, lists) are per row, other entries are shared.

    Raises ValueError when a shape or an index type does not fit.
    """

    mask: Tensor
    reward: Tensor
    group_id: Tensor
    logp: Tensor | None = None
    old_logp: Tensor | None = None
    behav_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    entropy: Tensor | None = None
    token_kl: Tensor | None = None
    seg: Tensor | None = None
    valid: Tensor | None = None
    in_loss: Tensor | None = None
    step: int = 0
    totals: Totals | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mask.dim() != 2:
            raise ValueError(f"Batch.mask must be [B,T], got shape {tuple(self.mask.shape)}")
        rows, columns = shape = self.mask.shape
        for name in TOKEN_FIELDS:
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(f"Batch.{name} must be [B,T] = [{rows},{columns}], got {tuple(value.shape)}")
        if self.reward.dim() not in (1, 2) or len(self.reward) != rows:
            raise ValueError(f"Batch.reward must be [B] or [B,R] with B = {rows}, got {tuple(self.reward.shape)}")
        for name in ("group_id", "valid", "in_loss"):
            value = getattr(self, name)
            if value is not None and value.shape != (rows,):
                raise ValueError(f"Batch.{name} must be [B] = [{rows}], got {tuple(value.shape)}")
            if name != "group_id" and value is not None and value.dtype != torch.bool:
                raise ValueError(f"Batch.{name} must be bool, got {value.dtype}")
        for name in ("group_id", "seg"):
            value = getattr(self, name)
            if value is not None and (value.is_floating_point() or value.dtype == torch.bool):
                raise ValueError(f"Batch.{name} must hold integers, got {value.dtype}")
        if self.totals is not None and self.totals.row_tokens.shape != (rows,):
            raise ValueError(f"Totals.row_tokens must be [B] = [{rows}], got {tuple(self.totals.row_tokens.shape)}")

    @property
    def valid_rows(self) -> Tensor:
        """Rows that enter the statistics, bool [B]."""
        return torch.ones_like(self.group_id, dtype=torch.bool) if self.valid is None else self.valid

    @property
    def loss_rows(self) -> Tensor:
        """Rows that enter the loss, bool [B]."""
        return self.valid_rows if self.in_loss is None else self.valid_rows & self.in_loss

    @property
    def loss_mask(self) -> Tensor:
        """Units that enter the loss, bool [B,T]."""
        return (self.mask != 0) & self.loss_rows[:, None]

    def has(self, name: str) -> bool:
        """Whether a field or an entry of `extra` called `name` is there."""
        return getattr(self, name, None) is not None or self.extra.get(name) is not None

    def slice(self, rows: Index = slice(None), columns: Index = slice(None), keep: Tensor | None = None) -> Batch:
        """Take rows and columns, keeping the totals of this batch, so that losses of the slices add up.

        keep [B] bool: `AdvOut.keep`, the rows in the loss; only read when this batch has no totals yet.
        """
        totals = self.totals or Totals.of(self.mask, self.loss_rows if keep is None else keep)
        cut: dict[str, Any] = {"totals": replace(totals, row_tokens=totals.row_tokens[rows])}
        for name in TOKEN_FIELDS:
            value = getattr(self, name)
            cut[name] = None if value is None else value[rows][:, columns]
        for name in ROW_FIELDS:
            value = getattr(self, name)
            cut[name] = None if value is None else value[rows]
        cut["extra"] = {name: self._slice_extra(name, value, rows, columns) for name, value in self.extra.items()}
        return replace(self, **cut)

    def _slice_extra(self, name: str, value: Any, rows: Index, columns: Index) -> Any:
        if not isinstance(value, (Tensor, list)) or (isinstance(value, Tensor) and value.dim() == 0):
            return value
        if len(value) != len(self.mask):
            return value
        if isinstance(value, list):
            chosen = torch.arange(len(value))[rows.cpu() if isinstance(rows, Tensor) else rows]
            return [value[i] for i in chosen.tolist()]
        return value[rows][:, columns] if name in TOKEN_EXTRA else value[rows]

    def clean(self, mask: Tensor, dtype: torch.dtype) -> Batch:
        """Cast to `dtype` and overwrite everything outside `mask` [B,T], so that hooks never meet padding.

        Floats become 0 there (hence log-ratios 0 and ratios 1 before any exp), segments -1, and rewards of
        invalid rows 0.
        """
        known = self.valid_rows if self.reward.dim() == 1 else self.valid_rows[:, None]
        new: dict[str, Any] = {"reward": torch.where(known, self.reward.to(dtype), 0)}
        for name in TOKEN_FIELDS[1:]:
            value = getattr(self, name)
            if value is not None:
                value = value if name == "seg" else value.to(dtype)
                new[name] = torch.where(mask, value, -1 if name == "seg" else 0)
        return replace(self, **new)


@dataclass(frozen=True)
class AdvOut:
    """An advantage and the rows it may be used on.

    adv: [B] | [B,K] from a link, [B,T] from `Algorithm.advantages`. keep [B] bool: rows in the loss. A link
    that uses a row as baseline only returns keep = False for it.
    """

    adv: Tensor
    keep: Tensor | None = None

    def slice(self, rows: Index = slice(None), columns: Index = slice(None)) -> AdvOut:
        """The same rows and columns as `Batch.slice`, of an `adv` that is [B,T]."""
        return AdvOut(self.adv[rows][:, columns], None if self.keep is None else self.keep[rows])


@dataclass(frozen=True)
class Correction:
    """What a correction link asks for: weight and keep [B,T] or [B,1] on the unit losses, detached.

    renorm: False keeps the denominators, True counts kept units only. lr_scale: factor on the learning rate
    of this one update.
    """

    weight: Tensor | None = None
    keep: Tensor | None = None
    renorm: bool = False
    lr_scale: float = 1.0
