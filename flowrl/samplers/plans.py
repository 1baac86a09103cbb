"""Which steps of a generation are stochastic, merged, shared or trained.

A plan is data made from (seed, iteration, prompt, member) alone: every process and a resumed run draw the same one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from flowrl.noise import integers, permutation

# Keep these draws apart from other integers drawn from (seed, iteration).
_WINDOW = int.from_bytes(b"window", "little")
_SUBSET = int.from_bytes(b"subset", "little")
_SLIDE = int.from_bytes(b"slide", "little")

Flags = tuple[bool, ...]
Std = Callable[[int, int], float]
"""Standard deviation of a stochastic step between two indices of the grid, 0 where the kernel has none."""


@dataclass(frozen=True)
class StepPlan:
    """The way of one sample through a grid of T steps, sigma_0 = 1 to sigma_T = 0.

    Args:
        stochastic: per step of the path, whether noise is injected; the others are ODE steps.
        trained: per step of the path, whether its transition enters the loss.
        path: indices of the sigmas visited, from 0 on; an index left out merges two steps into one. () visits all.
        anchor: the group starts from one noise and shares its ODE trajectory up to this step, where its samples part;
            None: every sample has a trajectory of its own.
        noise_member: which member's noise the sample takes; None its own. Samples of one group that differ only
            after their stochastic step share it.
        branch: the part of the group that the sample belongs to; parts are compared within themselves.
        solver: of the ODE steps after the last stochastic one: "euler", or "dpm2" (see `dpm2_step`).

    Raises:
        ValueError: lengths differ, the path does not ascend from 0, a trained step is not stochastic (it would have no
            density), a step before the anchor is stochastic or merged, or no such solver.
    """

    stochastic: Flags
    trained: Flags
    path: tuple[int, ...] = ()
    anchor: int | None = None
    noise_member: int | None = None
    branch: int = 0
    solver: Literal["euler", "dpm2"] = "euler"

    def __post_init__(self) -> None:
        n = len(self.stochastic)
        if n != len(self.trained):
            raise ValueError(f"{n} stochastic flags for {len(self.trained)} trained flags")
        path = tuple(self.path or range(n + 1))
        object.__setattr__(self, "path", path)
        if len(path) != n + 1 or path[0] != 0 or any(b <= a for a, b in self.intervals):
            raise ValueError(f"a path of {n} steps needs {n + 1} indices ascending from 0, got {path}")
        bare = [i for i, (t, s) in enumerate(zip(self.trained, self.stochastic, strict=True)) if t and not s]
        if bare:
            raise ValueError(f"steps {bare} are trained but not stochastic, so they have no density")
        if self.anchor is not None and (
            self.anchor >= n or path[self.anchor] != self.anchor or any(self.stochastic[: self.anchor])
        ):
            raise ValueError(f"the steps before the anchor {self.anchor} must be plain ODE steps")
        if self.solver not in ("euler", "dpm2"):
            raise ValueError(f"unknown solver {self.solver!r}: 'euler' or 'dpm2'")

    @property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """(from, to) indices of every step of the path."""
        return tuple(zip(self.path[:-1], self.path[1:], strict=True))

    @property
    def trained_intervals(self) -> tuple[tuple[int, int], ...]:
        """(from, to) indices of the trained steps, ascending."""
        return tuple(ab for ab, trained in zip(self.intervals, self.trained, strict=True) if trained)

    @property
    def trained_steps(self) -> tuple[int, ...]:
        """Index at which each trained step starts, ascending."""
        return tuple(a for a, _ in self.trained_intervals)


class Plan(ABC):
    """Draws the `StepPlan` of a sample. A new plan implements `_draw`."""

    def draw(
        self,
        seed: int,
        iteration: int,
        steps: int,
        feasible: Sequence[bool],
        *,
        prompt: int = 0,
        member: int = 0,
        std: Std | None = None,
    ) -> StepPlan:
        """The plan of one sample.

        Args:
            steps: T of the grid.
            feasible: per step, whether the sampler can be stochastic there (`FlowSampler.feasible`; a
                bool tensor will do). A sampler that never can (ODE, noise 0) gets an all-ODE plan.
            prompt, member: index of the prompt and position within its group.
            std: standard deviation of the step between two indices; plans that merge steps read it.

        Raises:
            ValueError: `feasible` has not `steps` entries, or the plan does not fit the schedule. The latter does not
                depend on the draw: it is raised in every iteration or in none.
        """
        flags = tuple(bool(flag) for flag in feasible)
        if len(flags) != steps:
            raise ValueError(f"{len(flags)} feasibility flags for {steps} steps")
        return self._draw(seed, iteration, flags, prompt, member, std) if any(flags) else StepPlan(flags, flags)

    @abstractmethod
    def _draw(self, seed: int, iteration: int, feasible: Flags, prompt: int, member: int, std: Std | None) -> StepPlan:
        """`draw` with at least one feasible step."""

    @property
    def branches(self) -> int:
        """Into how many equal parts the plan splits a group, each compared within itself."""
        return 1

    @property
    def anchored(self) -> bool:
        """Whether the samples of a group share a trajectory before they part."""
        return False

    @property
    def in_step(self) -> bool:
        """Whether all samples of an iteration call the model equally often, in the same batches."""
        return self.branches == 1 and not self.anchored


@dataclass(frozen=True)
class AllSteps(Plan):
    """Every feasible step but the last is stochastic and trained, as in Flow-GRPO (int(.99 T) of T = 10)."""

    def _draw(self, seed: int, iteration: int, feasible: Flags, prompt: int, member: int, std: Std | None) -> StepPlan:
        active = (*feasible[:-1], False)
        return StepPlan(stochastic=active, trained=active)


@dataclass(frozen=True)
class Window(Plan):
    """A random window of consecutive stochastic, trained steps in an ODE trajectory (Flow-GRPO-Fast).

        start ~ uniform integer in [lo, hi - size],   window = start, ..., start + size - 1

    The released code draws one window per device, so that results depend on the number of GPUs; `scope="sample"`
    mixes windows within a group as that does, for any number of them.

    Args:
        size: number of steps in the window, >= 1.
        start_range: (lo, hi), the steps lo..hi-1 the window must lie in.
        scope: one window per "iteration" (for everybody), per "prompt" or per "sample".
        branch: the group shares its initial noise and its ODE trajectory up to the window, as in the first release of
            Flow-GRPO-Fast: all differences between its rewards then come from the window.

    Raises:
        ValueError: no window fits (lo, hi), an unknown scope, or `branch` with a window per sample; in a sampler, the
            range leaves the schedule or contains a step that cannot be stochastic, such as the last one.

    Source: the code of Flow-GRPO (arXiv 2505.05470); published there: 3 of the first half of the steps.
    """

    size: int
    start_range: tuple[int, int]
    scope: Literal["iteration", "prompt", "sample"] = "iteration"
    branch: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_range", _range(self.start_range, self.size))
        if self.scope not in ("iteration", "prompt", "sample"):
            raise ValueError(
                f"unknown scope {self.scope!r}: 'iteration', 'prompt' or 'sample' (a window per process would make "
                "results depend on the number of processes)"
            )
        if self.branch and self.scope == "sample":
            raise ValueError("branch needs one window per group: scope 'iteration' or 'prompt'")

    @property
    def anchored(self) -> bool:
        return self.branch

    @property
    def in_step(self) -> bool:
        return super().in_step and self.scope == "iteration"

    def _draw(self, seed: int, iteration: int, feasible: Flags, prompt: int, member: int, std: Std | None) -> StepPlan:
        low, high = self.start_range
        _require(feasible, range(low, high), f"start_range ({low}, {high})")
        key = {"iteration": (), "prompt": (prompt,), "sample": (prompt, member)}[self.scope]
        start = integers(low, high - self.size + 1, seed, iteration, _WINDOW, *key)
        active = tuple(start <= i < start + self.size for i in range(len(feasible)))
        return StepPlan(stochastic=active, trained=active, anchor=start if self.branch else None)


@dataclass(frozen=True)
class RandomSteps(Plan):
    """A random subset of steps, not necessarily consecutive, is stochastic and trained; the others are ODE steps.

    One subset per iteration, the same for everybody.

    Args:
        count: number of steps, >= 1.
        start_range: (lo, hi), the steps lo..hi-1 they are drawn from without replacement.

    Raises:
        ValueError: as `Window`.

    Source: the recipes of Flow-DPPO (arXiv 2606.11025), which take 3 of the first half of the steps.
    """

    count: int
    start_range: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_range", _range(self.start_range, self.count))

    def _draw(self, seed: int, iteration: int, feasible: Flags, prompt: int, member: int, std: Std | None) -> StepPlan:
        low, high = self.start_range
        _require(feasible, range(low, high), f"start_range ({low}, {high})")
        chosen = {low + i for i in permutation(high - low, seed, iteration, _SUBSET)[: self.count].tolist()}
        active = tuple(i in chosen for i in range(len(feasible)))
        return StepPlan(stochastic=active, trained=active)


@dataclass(frozen=True)
class SlidingWindow(Plan):
    """MixGRPO's window: it moves from noisy to clean steps while training goes on; ODE steps outside it.

        progressive   start = first + stride * (iteration // period)
        exp_decay     the same, but it stays ceil(period * exp(-decay * max(start - decay_from, 0))) iterations
        random        start ~ uniform over the same positions, a new one every `period` iterations

    The window is never cut short: positions end where it last fits before the final step (the released code lets it
    shrink and run empty). Flash: with `compression` < 1 only that share of the steps after the window is taken, by
    DPM-Solver++(2M) on the clean estimates that the steps before left. Steps before the window are never merged.

    Args:
        size: w, steps in the window, >= 1.
        stride: s, steps it moves at a time, >= 1.
        period: tau, iterations it stays, >= 1. One of at least the run's iterations freezes it (Flash*).
        first: where it starts, >= 0.
        strategy: how it moves.
        restart: after the last position begin again at `first`; else stay there. "random" has no last position.
        decay, decay_from: of "exp_decay", >= 0.
        compression: share of the steps after the window that is taken, in (0, 1], rounded to at least one step.
        branch: the group shares its initial noise and so its ODE trajectory up to the window, as published.

    Raises:
        ValueError: a value out of range; in a sampler, a window that leaves the schedule or contains a step that cannot
            be stochastic.

    Source: MixGRPO (arXiv 2507.21802): w 4, tau 25, s 1 at T = 25; Flash tau 20, compression .4, Flash* first 0, .2.
    """

    size: int = 4
    stride: int = 1
    period: int = 25
    first: int = 0
    strategy: Literal["progressive", "exp_decay", "random"] = "progressive"
    restart: bool = False
    decay: float = 0.1
    decay_from: int = 13
    compression: float = 1.0
    branch: bool = False

    def __post_init__(self) -> None:
        for name in ("size", "stride", "period"):
            _at_least(1, name, getattr(self, name))
        for name in ("first", "decay_from"):
            _at_least(0, name, getattr(self, name))
        if self.strategy not in ("progressive", "exp_decay", "random"):
            raise ValueError(f"unknown strategy {self.strategy!r}: 'progressive', 'exp_decay' or 'random'")
        if not 0 < self.compression <= 1:
            raise ValueError(f"compression must lie in (0, 1], not {self.compression}")
        if not 0 <= self.decay < math.inf:
            raise ValueError(f"decay must be finite and not negative, not {self.decay}")

    @property
    def anchored(self) -> bool:
        return self.branch

    def _draw(self, seed: int, iteration: int, feasible: Flags, prompt: int, member: int, std: Std | None) -> StepPlan:
        steps = len(feasible)
        positions = range(self.first, steps - self.size, self.stride)
        if not positions:
            raise ValueError(
                f"a window of {self.size} steps from step {self.first} leaves the schedule of {steps} steps (the last "
                "step is never stochastic): more steps, or a smaller window"
            )
        covered = range(self.first, positions[-1] + self.size)
        _require(feasible, covered, f"the window's way over steps {self.first} to {covered[-1]}")
        start = positions[self._position(seed, iteration, positions)]
        end = start + self.size
        count = max(1, round((steps - end) * self.compression))
        rest = tuple(end + i * (steps - end) // count for i in range(count + 1))  # ends at sigma 0, whatever the count
        path = (*range(end), *rest)
        active = tuple(start <= a < end for a in path[:-1])
        return StepPlan(
            stochastic=active,
            trained=active,
            path=path,
            anchor=start if self.branch else None,
            solver="dpm2" if self.compression < 1 else "euler",
        )

    def _position(self, seed: int, iteration: int, positions: range) -> int:
        """Which of the positions the window has in this iteration."""
        if self.strategy == "random":
            return integers(0, len(positions), seed, iteration // self.period, _SLIDE)
        stays = [self.period] * len(positions)
        if self.strategy == "exp_decay":
            stays = [math.ceil(self.period * math.exp(-self.decay * max(p - self.decay_from, 0))) for p in positions]
        if self.restart:
            iteration %= sum(stays)
        for k, stay in enumerate(stays):
            if iteration < stay:
                return k
            iteration -= stay
        return len(positions) - 1


@dataclass(frozen=True)
class Merged(Plan):
    """E-GRPO's branches: one stochastic step per sample, long enough to be worth exploring.

    A group shares its initial noise and one ODE trajectory, the anchor. Member m leaves it at active step n (members
    take turns over the active steps) by one stochastic step from sigma_n to sigma_{n+l}, and finishes with ODE steps.
    Samples that left at the same step are compared with one another; `group_size` must be a multiple of `branches`.

        l given by `merge`, or the smallest l with  E(n, l) = scale * sqrt(2 pi e) * std(n, n + l) >= tau

    The scale of the paper's entropy can be read in more than one way. This is the reading per dimension, in which its
    tau = 2.2 means std >= .532: DERIVED, not verified.

    Args:
        active: steps at which samples leave, ascending.
        merge: l per active step, or None to derive it from `tau`.
        tau, scale: see above; positive.
        granularities: strides of the ODE steps after the stochastic one. More than one samples every branch once per
            stride, from the same noise (an option of E-GRPO's code, from G2RPO).

    Raises:
        ValueError: empty or unordered `active`, lengths differ, values below 1; in a sampler, a merge that would reach
            the last sigma, a tau that no merge reaches, or a merged step that the kernel cannot make.

    Source: E-GRPO (arXiv 2601.00423). Its released recipe at T = 16: active 0 1 2 4, merge 1 1 2 3.
    """

    active: tuple[int, ...] = (0, 1, 2, 4)
    merge: tuple[int, ...] | None = None
    tau: float = 2.2
    scale: float = 1.0
    granularities: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name, least in (("active", 0), ("merge", 1), ("granularities", 1)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(_at_least(least, name, v) for v in value))
        if not self.active or list(self.active) != sorted(set(self.active)):
            raise ValueError(f"active must name at least one step, in ascending order, got {self.active}")
        if self.merge is not None and len(self.merge) != len(self.active):
            raise ValueError(f"merge needs one length for each of the active steps {self.active}, got {self.merge}")
        if not self.granularities or len(set(self.granularities)) != len(self.granularities):
            raise ValueError(f"granularities must be different strides, at least one, got {self.granularities}")
        for name in ("tau", "scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)}")

    @property
    def branches(self) -> int:
        return len(self.active) * len(self.granularities)

    @property
    def anchored(self) -> bool:
        return True

    def _draw(self, seed: int, iteration: int, feasible: Flags, prompt: int, member: int, std: Std | None) -> StepPlan:
        steps, ends = len(feasible), self.ends(feasible, std)
        branch = member % self.branches
        start, end = self.active[branch % len(ends)], ends[branch % len(ends)]
        path = (*range(start + 1), *range(end, steps, self.granularities[branch // len(ends)]), steps)
        active = tuple(a == start for a in path[:-1])
        return StepPlan(
            stochastic=active,
            trained=active,
            path=path,
            anchor=start,
            noise_member=member // self.branches,
            branch=branch,
        )

    def ends(self, feasible: Flags, std: Std | None) -> tuple[int, ...]:
        """Index at which the merged step of each active step ends."""
        return tuple(self._end(k, feasible, std) for k in range(len(self.active)))

    def _end(self, k: int, feasible: Flags, std: Std | None) -> int:
        steps, n = len(feasible), self.active[k]
        if n >= steps or not feasible[n]:
            raise ValueError(f"active step {n} cannot be stochastic in a schedule of {steps} steps")
        if self.merge is not None:
            end = n + self.merge[k]
            if end >= steps:
                raise ValueError(
                    f"merging {self.merge[k]} steps at step {n} goes beyond the schedule: of {steps} steps the "
                    f"last is never stochastic, so at most {steps - 1 - n} can be merged there"
                )
            if std is not None and std(n, end) <= 0:
                raise ValueError(f"this sampler has no stochastic step as long as that from step {n} to {end}")
            return end
        if std is None:
            raise ValueError("merging by entropy needs the sampler's std")
        entropy = {j: self.scale * math.sqrt(2 * math.pi * math.e) * std(n, j) for j in range(n + 1, steps)}
        reached = [j for j, e in entropy.items() if e >= self.tau]
        if not reached:
            raise ValueError(
                f"no merge at step {n} reaches tau = {self.tau} (at most {max(entropy.values()):.3f}): leave the step "
                "out of active, lower tau, or raise noise_level"
            )
        return reached[0]


def _at_least(least: int, name: str, value: int) -> int:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    return value


def _range(start_range: Sequence[int], size: int) -> tuple[int, int]:
    if len(start_range) != 2 or not all(isinstance(i, int) for i in (*start_range, size)):
        raise ValueError(f"a window needs an integer size and an integer range (lo, hi), got {size!r}, {start_range}")
    low, high = start_range
    if size < 1 or low < 0 or high - size < low:
        raise ValueError(f"no window of {size} steps lies in start_range ({low}, {high})")
    return low, high


def _require(feasible: Flags, wanted: range, what: str) -> None:
    """Refuse a range with steps that cannot be stochastic: all of it, so that a bad one fails in iteration 0."""
    if wanted.stop > len(feasible):
        raise ValueError(f"{what} leaves the schedule of {len(feasible)} steps")
    barred = [i for i in wanted if not feasible[i]]
    if barred:
        raise ValueError(
            f"{what} contains steps {barred}, which this sampler cannot make "
            "stochastic on this schedule (the last step never can be)"
        )
