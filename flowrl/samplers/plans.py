"""Which steps of a generation are stochastic, and which of them are trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.noise import integers

# Keeps the window's draws apart from other integers drawn from (seed, iteration).
_WINDOW = int.from_bytes(b"window", "little")


@dataclass(frozen=True)
class StepPlan:
    """The role of each of the T steps in one iteration.

    Args:
        stochastic: per step, whether noise is injected; the others are Euler ODE steps.
        trained: per step, whether its transition enters the loss.

    Raises:
        ValueError: lengths differ, or a trained step is not stochastic (it would have no density).
    """

    stochastic: tuple[bool, ...]
    trained: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.stochastic) != len(self.trained):
            raise ValueError(f"{len(self.stochastic)} stochastic flags for {len(self.trained)} trained flags")
        bare = [i for i in self.trained_steps if not self.stochastic[i]]
        if bare:
            raise ValueError(f"steps {bare} are trained but not stochastic, so they have no density")

    @property
    def trained_steps(self) -> tuple[int, ...]:
        """Indices of the trained steps, ascending."""
        return tuple(i for i, trained in enumerate(self.trained) if trained)


class Plan(ABC):
    """Draws a `StepPlan` from `(seed, iteration)` alone, so that all ranks and a resumed run agree."""

    @abstractmethod
    def draw(self, seed: int, iteration: int, steps: int, feasible: Sequence[bool]) -> StepPlan:
        """The plan of one iteration.

        Args:
            feasible: per step, whether the sampler can be stochastic there (`FlowSampler.feasible`; a
                bool tensor will do). A sampler that never can (ODE, noise 0) gets an all-ODE plan.

        Raises:
            ValueError: `feasible` has not `steps` entries, or the plan does not fit the schedule.
        """


@dataclass(frozen=True)
class AllSteps(Plan):
    """Every feasible step but the last is stochastic and trained, as in Flow-GRPO (int(.99 T) of T = 10)."""

    def draw(self, seed: int, iteration: int, steps: int, feasible: Sequence[bool]) -> StepPlan:
        active = (*_flags(feasible, steps)[:-1], False)
        return StepPlan(stochastic=active, trained=active)


@dataclass(frozen=True)
class Window(Plan):
    """A random window of consecutive stochastic, trained steps in an ODE trajectory (Flow-GRPO-Fast).

        start ~ uniform integer in [lo, hi - size],   window = start, ..., start + size - 1

    One window per iteration, the same on every rank: a group spread over ranks then shares it.

    Args:
        size: number of steps in the window, >= 1.
        start_range: (lo, hi), the steps lo..hi-1 the window must lie in.

    Raises:
        ValueError: no window fits (lo, hi); on drawing, the range leaves the schedule or contains a
            step that cannot be stochastic, such as the last one.
    """

    size: int
    start_range: tuple[int, int]

    def __post_init__(self) -> None:
        low, high = self.start_range
        object.__setattr__(self, "start_range", (low, high))
        if self.size < 1 or low < 0 or high - self.size < low:
            raise ValueError(f"no window of {self.size} steps lies in start_range ({low}, {high})")

    def draw(self, seed: int, iteration: int, steps: int, feasible: Sequence[bool]) -> StepPlan:
        low, high = self.start_range
        if high > steps:
            raise ValueError(f"start_range ({low}, {high}) leaves the schedule of {steps} steps")
        flags = _flags(feasible, steps)
        if not any(flags):
            return StepPlan(flags, flags)
        # The whole range is checked, not just this draw: a bad range fails in iteration 0, not some day.
        barred = [i for i in range(low, high) if not flags[i]]
        if barred:
            raise ValueError(
                f"start_range ({low}, {high}) contains steps {barred}, which this sampler cannot make "
                "stochastic on this schedule (the last step never can be)"
            )
        start = integers(low, high - self.size + 1, seed, iteration, _WINDOW)
        active = tuple(start <= i < start + self.size for i in range(steps))
        return StepPlan(stochastic=active, trained=active)


def _flags(feasible: Sequence[bool], steps: int) -> tuple[bool, ...]:
    if len(feasible) != steps:
        raise ValueError(f"{len(feasible)} feasibility flags for {steps} steps")
    return tuple(bool(flag) for flag in feasible)
