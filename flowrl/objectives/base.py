"""What the trainer asks of an objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from flowrl.core import AdvOut, Batch
from flowrl.policy import Copies, Policy, Weights
from flowrl.rollout import Prompt, Rollout
from flowrl.samplers.flow import FlowSampler

Combine = Literal["sum", "gdpo"]


def check_combine(combine: str) -> None:
    """Raise ValueError unless it is a `Combine`, a way from several rewards to one advantage."""
    if combine not in get_args(Combine):
        raise ValueError(f"unknown combine {combine!r}: one of {', '.join(get_args(Combine))}")


@dataclass(frozen=True)
class Micro:
    """One forward and backward: some rows of the rollout, one column of its table."""

    rollout: Rollout
    """The rows at hand."""
    unit: int
    """The column."""
    batch: Batch
    """Rewards, groups and validity of these rows with the totals of the whole update; log-probs are to be filled in."""
    advantage: AdvOut
    """`[b, 1]`, the column's advantages."""


class Objective(ABC):
    """How a rollout with rewards becomes a loss.

    `requires`: what it needs of the sampler, the policy and the trainer, out of `"log_prob"` (stochastic steps with a
    density), `"mean"` (their exact means, `Rollout.means`), `"branches"` (samples of a group that part from one shared
    trajectory), `"old"` (an averaged copy of the weights) and `"reference"` (the weights before training).
    `behaviour`: the weights that sample the rollouts.
    """

    behaviour: Weights = "policy"

    @property
    @abstractmethod
    def requires(self) -> frozenset[str]: ...

    def check(self, sampler: FlowSampler) -> None:
        """Refuse a sampler that cannot serve this objective.

        Raises:
            ValueError: with the reason and the remedy.
        """
        if "branches" in self.requires and not sampler.plan.anchored:
            raise ValueError(
                f"{type(self).__name__} compares samples that part from one trajectory, and with "
                f"plan={type(sampler.plan).__name__} every sample has its own. Take plan=Merged(...)."
            )
        if not {"log_prob", "mean"} & self.requires:
            return
        members = list(range(sampler.plan.branches))
        plans = sampler.draw_plans(sampler.sigmas(1024), 0, 0, [0] * len(members), members)  # any resolution will do
        if not plans[0].trained_steps:
            raise ValueError(
                f"{type(self).__name__} scores stochastic steps, and {type(sampler).__name__}(steps={sampler.steps}, "
                f"noise_level={sampler.noise_level}) has none. Take FlowSDE, DanceSDE, CPS or CPWS with "
                "noise_level > 0 and at least 2 steps."
            )

    def allocate(self, prompts: Sequence[Prompt], samples: int) -> list[int]:
        """How many of the iteration's `samples` each prompt gets: equal shares unless the objective says otherwise."""
        return [samples // len(prompts)] * len(prompts)

    @abstractmethod
    def columns(self, rollout: Rollout) -> int:
        """Number of columns `U` of the table this objective trains on."""

    @abstractmethod
    def advantages(self, batch: Batch) -> AdvOut:
        """Advantages `[B, U]` of the full batch, gathered over ranks.

        Called once per rollout, on every rank with the same batch: an objective that keeps statistics updates them
        here. `batch.extra` has in `rewards` [B, R] the rewards that `batch.reward` is the weighted sum of, and in
        `reward_weights` their weights. With `"log_prob"` required it has the sampler's `unit_table`, and in
        `transition` [B] ids that are equal for samples with the same stochastic steps and noise.
        """

    @abstractmethod
    def loss(self, policy: Policy, sampler: FlowSampler, micro: Micro) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one micro-batch. Summed over the micro-batches and ranks of an update it is the update's loss.

        Metrics ending in `_min` / `_max` are extremes, all others add up like the loss.
        """

    def after_update(self, copies: Copies, iteration: int, stats: Mapping[str, float]) -> None:  # noqa: B027
        """Called once per iteration after its last optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore `state_dict`."""
