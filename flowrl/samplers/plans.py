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

Std = Callable[[int, int], float]
"""Standard deviation of one step between two indices of the grid."""


@dataclass(frozen=True)
class StepPlan:
    """The way of one sample through a grid of T steps, sigma_0 = 1 to sigma_T = 0.

    Args:
        stochastic: per step of the path, whether noise is injected; the others are ODE steps.
        trained: per step of the path, whether its transition enters the loss.
        path: indices of the sigmas visited, 0 to T; an index left out merges two steps into one. None visits all.
        anchor: the group starts from one noise and shares its ODE trajectory up to this step, where its samples part;
            None: every sample has a trajectory of its own.
        noise_member: which member's noise the sample takes; None its own. Samples of one group that differ only
            after their stochastic step share it.
        branch: the part of the group that the sample belongs to; parts are compared within themselves.
        solver: of the ODE steps after the last stochastic one: "euler", or "dpm2" (see `ODE`).

    Raises:
        ValueError: lengths differ, the path does not ascend from 0, a trained step is not stochastic (it would have no
            density), or a step before the anchor is stochastic or merged.
    """

    stochastic: tuple[bool, ...]
    trained: tuple[bool, ...]
    path: tuple[int, ...] | None = None
    anchor: int | None = None
    noise_member: int | None = None
    branch: int = 0
    solver: Literal["euler", "dpm2"] = "euler"

    def __post_init__(self) -> None:
        n = len(self.stochastic)
        if n != len(self.trained):
            raise ValueError(f"{n} stochastic flags for {len(self.trained)} trained flags")
        path = tuple(range(n + 1)) if self.path is None else tuple(self.path)
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

    @property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """(from, to) indices of every step of the path."""
        assert self.path is not None
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
    """Draws the `StepPlan` of a sample."""

    @abstractmethod
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
            std: standard deviation of the step between two indices; plans that merge by entropy read it.

        Raises:
            ValueError: `feasible` has not `steps` entries, or the plan does not fit the schedule.
        """

    @property
    def branches(self) -> int:
        """Into how many equal parts the plan splits a group, each compared within itself."""
        return 1

    @property
    def anchored(self) -> bool:
        """Whether the samples of a group share a trajectory before they part."""
        return False


@dataclass(frozen=True)
class AllSteps(Plan):
    """Every feasible step but the last is stochastic and trained, as in Flow-GRPO (int(.99 T) of T = 10)."""

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
        active = (*_flags(feasible, steps)[:-1], False)
        return StepPlan(stochastic=active, trained=active)


@dataclass(frozen=True)
class Window(Plan):
    """A random window of consecutive stochastic, trained steps in an ODE trajectory (Flow-GRPO-Fast).

        start ~ uniform integer in [lo, hi - size],   window = start, ..., start + size - 1

    The released code draws one window per device, so that results depend on the number of GPUs; `scope="sample"`
    mixes windows the same way without that.

    Args:
        size: number of steps in the window, >= 1.
        start_range: (lo, hi), the steps lo..hi-1 the window must lie in.
        scope: one window per "iteration" (for everybody), per "prompt" or per "sample".
        branch: the group shares its noise and its ODE trajectory up to the window, as in the first release of
            Flow-GRPO-Fast: all differences between its rewards then come from the window.

    Raises:
        ValueError: no window fits (lo, hi), or `branch` with a window per sample; on drawing, the range leaves the
            schedule or contains a step that cannot be stochastic, such as the last one.
    """

    size: int
    start_range: tuple[int, int]
    scope: Literal["iteration", "prompt", "sample"] = "iteration"
    branch: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_range", _range(self.start_range, self.size))
        if self.scope not in ("iteration", "prompt", "sample"):
            raise ValueError(f"unknown scope {self.scope!r}: 'iteration', 'prompt' or 'sample'")
        if self.branch and self.scope == "sample":
            raise ValueError("branch needs one window per group: scope 'iteration' or 'prompt'")

    @property
    def anchored(self) -> bool:
        return self.branch

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
        low, high = self.start_range
        if not _ready(feasible, steps, range(low, high), f"start_range ({low}, {high})"):
            return _ode(steps)
        key = {"iteration": (), "prompt": (prompt,), "sample": (prompt, member)}[self.scope]
        start = integers(low, high - self.size + 1, seed, iteration, _WINDOW, *key)
        active = tuple(start <= i < start + self.size for i in range(steps))
        return StepPlan(stochastic=active, trained=active, anchor=start if self.branch else None)


@dataclass(frozen=True)
class RandomSteps(Plan):
    """A random subset of steps, not necessarily consecutive, is stochastic and trained; the others are ODE steps.

    Flow-DPPO's released recipe takes 3 of the first half. One subset per iteration, the same for everybody.

    Args:
        count: number of steps, >= 1.
        start_range: (lo, hi), the steps lo..hi-1 they are drawn from without replacement.

    Raises:
        ValueError: as `Window`.
    """

    count: int
    start_range: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_range", _range(self.start_range, self.count))

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
        low, high = self.start_range
        if not _ready(feasible, steps, range(low, high), f"start_range ({low}, {high})"):
            return _ode(steps)
        chosen = {low + i for i in permutation(high - low, seed, iteration, _SUBSET)[: self.count].tolist()}
        active = tuple(i in chosen for i in range(steps))
        return StepPlan(stochastic=active, trained=active)


@dataclass(frozen=True)
class SlidingWindow(Plan):
    """MixGRPO's window: it moves from noisy to clean steps while training goes on; ODE steps outside it.

        progressive   start = stride * (iteration // period), from `first`
        exp_decay     the same, with the period shrunk to ceil(period * exp(-decay * max(start - decay_from, 0)))
        random        start ~ uniform over the same positions, a new one every `period` iterations

    The window is never cut short: positions end where it last fits before the final step (the released code lets it
    shrink and run empty). Flash: with `compression` < 1 the ODE after the window takes only that share of its steps,
    by DPM-Solver++(2M) on the clean estimates that the steps before it left.

    Args:
        size: w, steps in the window.
        stride: s, steps it moves at a time.
        period: tau, iterations it stays.
        first: where it starts.
        strategy: how it moves.
        restart: after the last position begin again at `first`; else stay there.
        decay, decay_from: of "exp_decay".
        compression: share of the ODE steps after the window that is taken, in (0, 1].

    Raises:
        ValueError: a value out of range; on drawing, a window beyond the schedule.

    Source: MixGRPO (arXiv 2507.21802): w 4, tau 25, s 1 at T = 25; compression .4 for Flash.
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

    def __post_init__(self) -> None:
        if min(self.size, self.stride, self.period) < 1 or self.first < 0:
            raise ValueError("size, stride and period must be at least 1, first at least 0")
        if self.strategy not in ("progressive", "exp_decay", "random"):
            raise ValueError(f"unknown strategy {self.strategy!r}: 'progressive', 'exp_decay' or 'random'")
        if not 0 < self.compression <= 1:
            raise ValueError(f"compression must lie in (0, 1], not {self.compression}")
        if self.decay < 0:
            raise ValueError(f"decay must not be negative, got {self.decay}")

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
        if not any(_flags(feasible, steps)):
            return _ode(steps)
        positions = range(self.first, steps - self.size, self.stride)
        if not positions:
            raise ValueError(
                f"a window of {self.size} steps from step {self.first} leaves the schedule of {steps} steps (the last "
                "step is never stochastic): more steps, or a smaller window"
            )
        covered = range(self.first, positions[-1] + self.size)
        _ready(feasible, steps, covered, f"the window's range {self.first}..{covered[-1]}")
        start = positions[self._position(seed, iteration, len(positions), positions)]
        end = start + self.size
        path = (*range(end), *_strided(end, steps, math.ceil((steps - end) * self.compression)))
        active = tuple(start <= a < end for a in path[:-1])
        return StepPlan(active, active, path=path, solver="dpm2" if self.compression < 1 else "euler")

    def _position(self, seed: int, iteration: int, count: int, positions: range) -> int:
        """Which of the `count` positions the window has in this iteration."""
        if self.strategy == "random":
            return integers(0, count, seed, iteration // self.period, _SLIDE)
        stays = [self.period] * count
        if self.strategy == "exp_decay":
            stays = [math.ceil(self.period * math.exp(-self.decay * max(p - self.decay_from, 0))) for p in positions]
        if self.restart:
            iteration %= sum(stays)
        for k, stay in enumerate(stays):
            if iteration < stay:
                return k
            iteration -= stay
        return count - 1


@dataclass(frozen=True)
class Merged(Plan):
    """E-GRPO's branches: one stochastic step per sample, long enough to be worth exploring.

    A group shares its noise and one ODE trajectory, the anchor. Member m leaves it at active step n (members take turns
    over the active steps) by one stochastic step from sigma_n to sigma_{n+l}, and finishes with ODE steps. Samples that
    left at the same step are compared with one another; `group_size` must be a multiple of `branches`.

        l given by `merge`, or the smallest l with  E(n, l) = scale * sqrt(2 pi e) * std(n, n + l) >= tau

    The paper's entropy can be read in more than one way; this is the reading per dimension, in which its tau = 2.2
    means std >= .532.

    Args:
        active: steps at which samples leave, ascending.
        merge: l per active step, or None to derive it from `tau`.
        tau, scale: see above.
        granularities: strides of the ODE steps after the stochastic one; more than one samples every branch once per
            stride from the same noise (the multi-granularity option of E-GRPO, from G2RPO).

    Raises:
        ValueError: empty or unordered `active`, lengths differ, values below 1; on drawing, a merge that would reach
            the last sigma, or a tau that no merge reaches.

    Source: E-GRPO (arXiv 2601.00423). Its released recipe at T = 16: active 0 1 2 4, merge 1 1 2 3.
    """

    active: tuple[int, ...] = (0, 1, 2, 4)
    merge: tuple[int, ...] | None = None
    tau: float = 2.2
    scale: float = 1.0
    granularities: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name in ("active", "merge", "granularities"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        if not self.active or self.active[0] < 0 or list(self.active) != sorted(set(self.active)):
            raise ValueError(f"active must name steps in ascending order, got {self.active}")
        if self.merge is not None and (len(self.merge) != len(self.active) or min(self.merge) < 1):
            raise ValueError(f"merge needs a length of at least 1 for each of the active steps, got {self.merge}")
        if not self.granularities or min(self.granularities) < 1:
            raise ValueError(f"granularities must be strides of at least 1, got {self.granularities}")
        if self.tau <= 0 or self.scale <= 0:
            raise ValueError("tau and scale must be positive")

    @property
    def branches(self) -> int:
        return len(self.active) * len(self.granularities)

    @property
    def anchored(self) -> bool:
        return True

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
        if not any(_flags(feasible, steps)):
            return _ode(steps)
        ends = self.ends(steps, feasible, std)
        which = member % self.branches
        start, stride = self.active[which % len(self.active)], self.granularities[which // len(self.active)]
        end = ends[which % len(self.active)]
        path = (*range(start + 1), *range(end, steps, stride), steps)
        active = tuple(a == start for a in path[:-1])
        return StepPlan(active, active, path=path, anchor=start, noise_member=member // self.branches, branch=which)

    def ends(self, steps: int, feasible: Sequence[bool], std: Std | None) -> tuple[int, ...]:
        """Index at which the merged step of each active step ends."""
        flags = _flags(feasible, steps)
        ends = []
        for k, n in enumerate(self.active):
            if n >= steps or not flags[n]:
                raise ValueError(f"active step {n} cannot be stochastic in a schedule of {steps} steps")
            if self.merge is not None:
                end = n + self.merge[k]
                if end >= steps:
                    raise ValueError(
                        f"merging {self.merge[k]} steps at step {n} goes beyond the schedule: of {steps} steps the "
                        f"last is never stochastic, so at most {steps - 1 - n} can be merged there"
                    )
            else:
                if std is None:
                    raise ValueError("merging by entropy needs the sampler's std")
                entropy = [self.scale * math.sqrt(2 * math.pi * math.e) * std(n, j) for j in range(n + 1, steps)]
                reached = [j for j, e in enumerate(entropy, n + 1) if e >= self.tau]
                if not reached:
                    raise ValueError(
                        f"no merge at step {n} reaches tau = {self.tau} (at most {max(entropy):.3f}): leave the step "
                        "out of active, lower tau, or raise noise_level"
                    )
                end = reached[0]
            ends.append(end)
        return tuple(ends)


def _flags(feasible: Sequence[bool], steps: int) -> tuple[bool, ...]:
    if len(feasible) != steps:
        raise ValueError(f"{len(feasible)} feasibility flags for {steps} steps")
    return tuple(bool(flag) for flag in feasible)


def _ode(steps: int) -> StepPlan:
    return StepPlan((False,) * steps, (False,) * steps)


def _range(start_range: Sequence[int], size: int) -> tuple[int, int]:
    low, high = start_range
    if size < 1 or low < 0 or high - size < low:
        raise ValueError(f"no window of {size} steps lies in start_range ({low}, {high})")
    return low, high


def _ready(feasible: Sequence[bool], steps: int, wanted: range, what: str) -> bool:
    """False for a sampler without noise. The whole range is checked, not one draw: a bad one fails in iteration 0."""
    flags = _flags(feasible, steps)
    if wanted.stop > steps:
        raise ValueError(f"{what} leaves the schedule of {steps} steps")
    if not any(flags):
        return False
    barred = [i for i in wanted if not flags[i]]
    if barred:
        raise ValueError(
            f"{what} contains steps {barred}, which this sampler cannot make "
            "stochastic on this schedule (the last step never can be)"
        )
    return True


def _strided(start: int, stop: int, count: int) -> list[int]:
    """`count` steps from start to stop as evenly as integers allow: count + 1 indices, both ends included."""
    return [start + round(i * (stop - start) / count) for i in range(count + 1)]
