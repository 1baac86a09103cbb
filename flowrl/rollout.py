"""What one iteration drew and what came of it: `Prompt`, `Conditioning`, `Rollout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.samplers.plans import StepPlan


@dataclass(frozen=True)
class Prompt:
    """One prompt. `index` is the identity of its group; `metadata` holds the columns that rewards receive."""

    index: int
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0


@dataclass
class Conditioning:
    """`arguments`: the pipeline's own prompt-embedding keywords, each `[B, ...]`, one row per sample."""

    arguments: dict[str, Tensor]

    def rows(self, index: slice) -> Conditioning:
        return Conditioning({k: v[index] for k, v in self.arguments.items()})


@dataclass
class Rollout:
    """`B` samples with what the objectives need to score them again.

    `U` is the number of trained (recorded) steps of each sample; column u of the `[B, U]` table is the transition
    between the sigmas `plans[b].trained_intervals[u]`.
    """

    prompts: list[Prompt]
    """`B` prompts, one per sample; samples of one group share the prompt's `index`."""
    members: list[int]
    """`B` positions within the group."""
    iteration: int
    seed: int
    plans: list[StepPlan]
    """`B` plans, one per sample."""
    sigmas: Tensor
    """`[T + 1]` noise levels, 1 to 0, float32."""
    guidance_scale: float
    calls: dict[str, Tensor]
    """Batched arguments of the recorded generator call, `[B, guidance branches, ...]`."""
    shared: dict[str, Any]
    """Arguments of that call without a batch dimension (position ids, flags)."""
    latents: Tensor
    """`[B, ...]` clean latents at sigma 0."""
    states: Tensor
    """`[B, U, ...]` x before each trained step, in the generator's dtype."""
    actions: Tensor
    """`[B, U, ...]` x after it."""
    means: Tensor
    """`[B, U, ...]` transition means under the behaviour weights, float32."""
    log_prob: Tensor
    """`[B, U]` log-probability of the actions under the behaviour weights, float32."""
    media: Tensor | None = None
    """`[B, 3, H, W]` images in [0, 1]."""

    @property
    def group_id(self) -> Tensor:
        """`[B]` int64."""
        return torch.tensor([p.index for p in self.prompts])

    @property
    def units(self) -> int:
        """`U`."""
        return self.log_prob.shape[1]

    @property
    def steps(self) -> Tensor:
        """`[B, U]` int64: the step that each column of each sample is."""
        return torch.tensor([plan.trained_steps for plan in self.plans], dtype=torch.long).reshape(len(self), -1)

    def interval(self, unit: int) -> tuple[int | Tensor, int | Tensor]:
        """(from, to) indices in `sigmas` of column `unit`: integers where all samples agree, else `[B]` each."""
        intervals = [plan.trained_intervals[unit] for plan in self.plans]
        if len(set(intervals)) == 1:
            return intervals[0]
        start, end = torch.tensor(intervals).unbind(1)
        return start, end

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, index: Sequence[int]) -> Rollout:
        """The samples at `index`, in that order."""
        where = torch.as_tensor(index, device=self.latents.device)
        changed: dict[str, Any] = {
            "prompts": [self.prompts[i] for i in index],
            "members": [self.members[i] for i in index],
            "plans": [self.plans[i] for i in index],
            "calls": {k: v[where] for k, v in self.calls.items()},
        }
        for name in ("latents", "states", "actions", "means", "log_prob", "media"):
            value = getattr(self, name)
            changed[name] = None if value is None else value[where]
        return replace(self, **changed)

    @staticmethod
    def cat(parts: Sequence[Rollout]) -> Rollout:
        """Join the chunks of one iteration."""
        first = parts[0]
        changed: dict[str, Any] = {}
        for f in fields(Rollout):
            values = [getattr(p, f.name) for p in parts]
            if f.name in ("prompts", "members", "plans"):
                changed[f.name] = [x for v in values for x in v]
            elif f.name == "calls":
                changed[f.name] = {k: torch.cat([v[k] for v in values]) for k in first.calls}
            elif isinstance(values[0], Tensor) and f.name != "sigmas":
                changed[f.name] = torch.cat(values)
        return replace(first, **changed)
