"""Rectified-flow samplers as stochastic policies.

Time and noise level are one number t = sigma in [0, 1]; t = 1 is pure noise, t = 0 data:

    x_t = (1 - t) x0 + t eps,    v(x, t) = E[eps - x0 | x_t]
    X0 = x - t v                 clean estimate
    X1 = x + (1 - t) v           noise estimate

A step from t to t' = t - D is the Gaussian transition

    x' = A x + C v + std xi,     xi ~ N(0, I)

and a sampler is its three coefficients. Log-probabilities, KL and ratios follow from them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from flowrl.distributions import Gaussian, expand_rows, reduce_rows, upcast
from flowrl.samplers._serialise import from_dict, reject_unknown, suggest, to_dict
from flowrl.samplers.plans import AllSteps, Plan, StepPlan
from flowrl.samplers.schedules import Schedule, SchedulerConfig, SingleShift

CONFIG_NAME = "sampler_config.json"

Self = TypeVar("Self", bound="FlowSampler")
Coefficients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class FlowSampler(ABC):
    """A sigma grid, a kernel and a plan: how a flow model's generation becomes a decision process.

    Args:
        steps: number of denoising steps T >= 1.
        noise_level: strength of the injected noise, >= 0; its meaning is the subclass's. At 0 every
            sampler is the Euler ODE.
        guidance_scale: classifier-free or embedded guidance the policy uses, >= 0.
        schedule: the sigma grid.
        plan: which steps are stochastic and trained.
        logprob: "gaussian", the density; or "unnormalised", the -mean (x' - mean)² that the released
            CPS code uses as a log-probability. Only the first makes ratios and KL statements exact.

    Raises:
        ValueError: a value out of range, or a plan that does not fit the number of steps.
    """

    steps: int = 10
    noise_level: float
    guidance_scale: float = 1.0
    schedule: Schedule = field(default_factory=SingleShift)
    plan: Plan = field(default_factory=AllSteps)
    logprob: Literal["gaussian", "unnormalised"] = "gaussian"

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps must be an integer of at least 1, not {self.steps!r}")
        for name in ("noise_level", "guidance_scale"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and not negative, not {value!r}")
        if self.logprob not in ("gaussian", "unnormalised"):
            raise ValueError(f"unknown logprob {self.logprob!r}{suggest(self.logprob, _LOGPROBS)}")
        # A plan that no grid of this many steps can serve is refused here; what depends on the grid, in `draw_plans`.
        self.plan.draw(0, 0, self.steps, [True] * (self.steps - 1) + [False], std=lambda start, end: math.inf)

    @abstractmethod
    def coefficients(self, t: Any, t_next: Any, sigma_1: Any) -> Coefficients:
        """(A, C, std) of the stochastic step from t to t_next, float64, in the shape of `t`.

        Args:
            t, t_next: noise levels, 1 >= t > t_next >= 0; floats or tensors.
            sigma_1: the grid's second sigma, which Flow-SDE needs at t = 1.
        """

    @classmethod
    def from_config(cls: type[Self], scheduler_config: Mapping[str, Any], **parameters: Any) -> Self:
        """This sampler on the grid of a diffusers scheduler: `from_config(pipe.scheduler.config, ...)`.

        Args:
            scheduler_config: becomes `SchedulerConfig(scheduler_config)`.
            parameters: the other fields. Unknown ones raise ValueError.
        """
        reject_unknown(cls, parameters)
        return cls(schedule=SchedulerConfig(dict(scheduler_config)), **parameters)

    def with_(self: Self, **changes: Any) -> Self:
        """A copy with some fields changed. Unknown ones raise ValueError."""
        reject_unknown(type(self), changes)
        return dataclasses.replace(self, **changes)

    def sigmas(self, image_tokens: int | None = None) -> Tensor:
        """The grid, float32 `[steps + 1]`, decreasing to 0."""
        return self.schedule(self.steps, image_tokens)

    def feasible(self, sigmas: Tensor) -> Tensor:
        """Which steps of `sigmas [T + 1]` can be stochastic: bool `[T]`.

        False where the kernel has no noise (noise level 0, CPWS beyond its range) and for the last
        step, t' = 0: its noise would go straight into the image, so it is always an ODE step.
        """
        grid = sigmas.double().cpu()
        std = self.coefficients(grid[:-1], grid[1:], grid[1])[2]
        return (std > 0) & (grid[1:] > 0)

    def std(self, sigmas: Tensor, start: int, end: int) -> float:
        """Standard deviation of the stochastic step from `sigmas[start]` to `sigmas[end]`, 0 where there is none."""
        grid = sigmas.double().cpu()
        return self.coefficients(grid[start], grid[end], grid[1])[2].item()

    def draw_plans(
        self, sigmas: Tensor, seed: int, iteration: int, prompts: Sequence[int], members: Sequence[int]
    ) -> list[StepPlan]:
        """The plan of each sample (prompt index, member) of an iteration.

        Raises:
            ValueError: the plan does not fit the grid, or gives samples different numbers of trained steps.
        """
        feasible = self.feasible(sigmas).tolist()
        std = cache(lambda start, end: self.std(sigmas, start, end))  # the samples ask for the same few steps
        plans = [
            self.plan.draw(seed, iteration, len(feasible), feasible, prompt=prompt, member=member, std=std)
            for prompt, member in zip(prompts, members, strict=True)
        ]
        counts = {len(plan.trained_steps) for plan in plans}
        if len(counts) > 1:
            raise ValueError(
                f"{type(self.plan).__name__} trains {sorted(counts)} steps: all samples need the same number"
            )
        return plans

    def unit_table(self, sigmas: Tensor, plans: Sequence[StepPlan]) -> dict[str, Tensor]:
        """What the kernel says of each trained step of each sample, `[B, U]`: `step` (index it starts at, int64), `std`
        and `length` (D = t - t'), float64."""
        grid = sigmas.double().cpu()
        table = torch.tensor([plan.trained_intervals for plan in plans]).reshape(len(plans), -1, 2)
        start, end = table.unbind(-1)
        return {
            "step": start,
            "std": self.coefficients(grid[start], grid[end], grid[1])[2],
            "length": grid[start] - grid[end],
        }

    def transition(
        self,
        x: Tensor,
        v: Tensor,
        sigmas: Tensor,
        step: int | Tensor,
        stochastic: bool = True,
        *,
        end: int | Tensor | None = None,
        previous: tuple[float, Tensor] | None = None,
    ) -> Gaussian:
        """The distribution of x' after one step, from state `x [b, ...]` and velocity `v [b, ...]`.

        Coefficients are computed in float64 from the float32 grid and the mean in float32, with x and v
        upcast first (float64 inputs stay float64). Not stochastic, or not feasible: the Euler step
        `x + (sigma_next - sigma) v` with std 0, bit-equal in float32 to the stock scheduler's.

        Args:
            sigmas: the grid `[T + 1]`, best on the CPU, where it is read without synchronisation.
            step: index in 0..T-1, or an integer tensor `[b]` with one index per sample.
            end: index of the sigma the step leads to, by default step + 1; beyond it steps are merged into one.
            previous: sigma and clean estimate of the step before. Given, the step is the ODE step `dpm2_step`.

        Raises:
            ValueError: shapes of x and v differ, a step outside the grid, or a tensor of steps with `previous`.
        """
        if x.shape != v.shape:
            raise ValueError(f"x {list(x.shape)} and v {list(v.shape)} must have one shape")
        t, t_next, sigma_1 = _interval(sigmas, step, end)
        if previous is not None:
            if t.ndim or t_next.ndim:
                raise ValueError("a multistep solver walks one trajectory: step must be an int")
            return Gaussian(dpm2_step(x, v, t.item(), t_next.item(), previous), torch.tensor(0.0))
        x, v = upcast(x), upcast(v)
        A, C, std = self.coefficients(t, t_next, sigma_1)
        noisy = (std > 0) & (t_next > 0) & stochastic
        A = torch.where(noisy, A, 1.0)
        C = torch.where(noisy, C, t_next - t)
        std = torch.where(noisy, std, 0.0)
        return Gaussian(expand_rows(A, x) * x + expand_rows(C, x) * v, std)

    def log_prob(self, transition: Gaussian, x_next: Tensor) -> Tensor:
        """Log-probability of the action `x_next [b, ...]` (detached), mean over its elements: `[b]`.

        Raises ValueError for an ODE step, in either form of `logprob`.
        """
        x_next = x_next.detach()
        if self.logprob == "gaussian" or transition.deterministic:
            return transition.log_prob(x_next)
        return -reduce_rows((x_next.to(transition.mean) - transition.mean) ** 2, "mean")

    def clean_estimate(self, x: Tensor, v: Tensor, sigmas: Tensor, step: int | Tensor) -> Tensor:
        """`X0 = x - t v`, float32 `[b, ...]`."""
        x, v = upcast(x), upcast(v)
        return x - expand_rows(_interval(sigmas, step)[0], x) * v

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `sampler_config.json` into `directory`, which is created if missing."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory, CONFIG_NAME).write_text(json.dumps(to_dict(self), indent=2) + "\n")

    @classmethod
    def from_pretrained(cls: type[Self], directory: str | Path) -> Self:
        """Read what `save_pretrained` wrote; `FlowSampler.from_pretrained` takes any kind.

        Raises ValueError if the class is unknown or not a `cls`, or a key is unknown.
        """
        data = json.loads(Path(directory, CONFIG_NAME).read_text())
        return from_dict(data, cls, nested={"schedule": Schedule, "plan": Plan})


@dataclass(frozen=True, kw_only=True)
class ODE(FlowSampler):
    """The deterministic sampler, for evaluation and for methods that need only the final image.

    Every transition has std 0: no log-probability exists.

    Args:
        solver: "euler", x' = x - D v; or "dpm2", the `dpm2_step` wherever it is defined, as DiffusionNFT (arXiv
            2509.16117) samples its rollouts.
    """

    noise_level: float = 0.0
    solver: Literal["euler", "dpm2"] = "euler"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_level != 0:
            raise ValueError("ODE injects no noise: noise_level must be 0. Use FlowSDE, DanceSDE, CPS or CPWS.")
        if self.solver not in ("euler", "dpm2"):
            raise ValueError(f"unknown solver {self.solver!r}{suggest(self.solver, ['euler', 'dpm2'])}")

    def coefficients(self, t: Any, t_next: Any, sigma_1: Any) -> Coefficients:
        t, t_next, sigma_1 = _float64(t, t_next, sigma_1)
        return torch.ones_like(t), t_next - t, torch.zeros_like(t)

    def draw_plans(
        self, sigmas: Tensor, seed: int, iteration: int, prompts: Sequence[int], members: Sequence[int]
    ) -> list[StepPlan]:
        plans = super().draw_plans(sigmas, seed, iteration, prompts, members)
        return [dataclasses.replace(plan, solver=self.solver) for plan in plans]


@dataclass(frozen=True, kw_only=True)
class FlowSDE(FlowSampler):
    """Flow-GRPO's SDE, also MixGRPO's; a = `noise_level`.

        sigma_t² = a² t / (1 - t),  with sigma_1 for t in 1 - t at t = 1
        A = 1 - sigma_t² D / (2 t),   C = -D (1 + sigma_t² (1 - t) / (2 t)),   std = sigma_t √D

    So std = a in the first step and C = -D (1 + a² / 2) in the others. Published a: .7 for SD3.5, .9 for
    FLUX, 1.2 for Qwen-Image.

    Source: Flow-GRPO (arXiv 2505.05470, v5) and its released code.
    """

    noise_level: float = 0.7

    def coefficients(self, t: Any, t_next: Any, sigma_1: Any) -> Coefficients:
        t, t_next, sigma_1 = _float64(t, t_next, sigma_1)
        return _score_sde(t, t_next, _flow_variance(self.noise_level, t, sigma_1))


@dataclass(frozen=True, kw_only=True)
class DanceSDE(FlowSampler):
    """DanceGRPO's SDE: Flow-SDE's kernel with a constant sigma_t = eta = `noise_level`.

        A = 1 - eta² D / (2 t),   C = -D (1 + eta² (1 - t) / (2 t)),   std = eta √D

    Source: DanceGRPO (arXiv 2505.07818) and its released code. Above eta = .3 images stay noisy.
    """

    noise_level: float = 0.3

    def coefficients(self, t: Any, t_next: Any, sigma_1: Any) -> Coefficients:
        t, t_next, sigma_1 = _float64(t, t_next, sigma_1)
        return _score_sde(t, t_next, torch.full_like(t, self.noise_level**2))


@dataclass(frozen=True, kw_only=True)
class CPS(FlowSampler):
    """Coefficients-preserving sampling; eta = `noise_level` in [0, 1].

        mean = (1 - t') X0 + t' cos(eta π/2) X1,   std = t' sin(eta π/2)
        A = (1 - t') + t' cos,   C = -t (1 - t') + t' (1 - t) cos

    Signal and total noise of x' are exactly those of level t', so few-step rollouts are not grainy.
    The marginal of non-degenerate data is not preserved.

    Source: CPS (arXiv 2509.05952).
    """

    noise_level: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_level > 1:
            raise ValueError(f"CPS mixes noise by an angle: noise_level must lie in [0, 1], not {self.noise_level}")

    def coefficients(self, t: Any, t_next: Any, sigma_1: Any) -> Coefficients:
        t, t_next, sigma_1 = _float64(t, t_next, sigma_1)
        angle = self.noise_level * math.pi / 2
        return *_weights(t, t_next, t_next * math.cos(angle)), t_next * math.sin(angle)


@dataclass(frozen=True, kw_only=True)
class CPWS(FlowSampler):
    """Coefficient preservation with Flow-SDE's noise; a = `noise_level`.

        mean = (1 - t') X0 + √(t'² - std²) X1,   std as in Flow-SDE

    Flow-SDE is its first-order expansion; unlike CPS it converges to the true marginals as steps grow.
    Infeasible where std > t' (late steps): the step is Euler's there and `feasible` says so.

    Source: MixGRPO (arXiv 2507.21802, v7), whose coefficient-preserving kernel is of this kind.
    """

    noise_level: float = 0.7

    def coefficients(self, t: Any, t_next: Any, sigma_1: Any) -> Coefficients:
        t, t_next, sigma_1 = _float64(t, t_next, sigma_1)
        std = (_flow_variance(self.noise_level, t, sigma_1) * (t - t_next)).sqrt()
        std = torch.where(std <= t_next, std, 0.0)
        return *_weights(t, t_next, (t_next**2 - std**2).sqrt()), std


# diffusers' DPMSolverMultistepScheduler has this step (the tests compare), but neither its grid nor its history can be
# given to it: to go on where a stochastic window ended we would have to write its internals.
def dpm2_step(x: Tensor, v: Tensor, t: float, t_next: float, previous: tuple[float, Tensor]) -> Tensor:
    """x' of one step of DPM-Solver++(2M, midpoint) in data prediction, from t to t' = t_next.

        x' = x - D v + D / (2 t) (h / h_prev) (X0 - X0_prev),   h = lambda(t') - lambda(t)

    with lambda(t) = log((1 - t) / t). The first-order part is the Euler step, and where an h is infinite (to t' = 0, or
    with a previous t of 1) the whole step is.

    Args:
        x, v: state and velocity at t, `[b, ...]`.
        previous: sigma and clean estimate of the step before.

    Source: DPM-Solver++ (arXiv 2211.01095), algorithm 2.
    """
    x, v = upcast(x), upcast(v)
    t_previous, clean = previous
    euler = x + (t_next - t) * v
    if t_previous == 1 or t_next == 0:
        return euler
    h, h_previous = _log_snr(t_next) - _log_snr(t), _log_snr(t) - _log_snr(t_previous)
    return euler + (t - t_next) / (2 * t) * (h / h_previous) * (x - t * v - upcast(clean))


_LOGPROBS = ("gaussian", "unnormalised")


def _flow_variance(a: float, t: Tensor, sigma_1: Tensor) -> Tensor:
    """Flow-SDE's sigma_t². Only the 1 - t of its denominator is clamped at t = 1."""
    return a**2 * t / (1 - torch.where(t == 1, sigma_1, t))


def _score_sde(t: Tensor, t_next: Tensor, variance: Tensor) -> Coefficients:
    """(A, C, std) of `x - D (v + sigma_t² / (2 t) X1) + sigma_t √D xi`, with `variance` = sigma_t²."""
    D = t - t_next
    A = 1 - variance * D / (2 * t)
    C = -D * (1 + variance * (1 - t) / (2 * t))
    return A, C, (variance * D).sqrt()


def _weights(t: Tensor, t_next: Tensor, noise_weight: Tensor) -> tuple[Tensor, Tensor]:
    """(A, C) of the mean `(1 - t') X0 + noise_weight X1`."""
    return (1 - t_next) + noise_weight, -t * (1 - t_next) + (1 - t) * noise_weight


def _log_snr(t: float) -> float:
    """lambda(t) = log((1 - t) / t)."""
    return math.log((1 - t) / t)


def _float64(*values: Any) -> tuple[Tensor, ...]:
    return tuple(torch.as_tensor(value, dtype=torch.float64) for value in values)


def _interval(sigmas: Tensor, step: int | Tensor, end: int | Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(t, t', sigma_1) of `step`, float64 on the CPU, 0-dim or `[b]`."""
    grid = sigmas.double().cpu()
    start = torch.as_tensor(step).cpu()
    stop = start + 1 if end is None else torch.as_tensor(end).cpu()
    if bool(((start < 0) | (stop <= start) | (stop >= len(grid))).any()):
        raise ValueError(f"step {step} is outside the {len(grid) - 1} steps of the grid")
    return grid[start], grid[stop], grid[1]
