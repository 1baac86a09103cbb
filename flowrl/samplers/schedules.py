"""Sigma grids: the noise levels a generation passes through, from pure noise (1) to data (0)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Schedule(ABC):
    """A function `(steps, image_tokens) -> sigmas`.

    The sigmas are a float32 CPU tensor `[steps + 1]`, at most 1, strictly decreasing to exactly 0.
    `image_tokens` (the transformer's sequence length for one image) matters only to grids that depend
    on the resolution.
    """

    @abstractmethod
    def __call__(self, steps: int, image_tokens: int | None = None) -> Tensor: ...


@dataclass(frozen=True)
class SingleShift(Schedule):
    """Uniform grid under one time shift: the grid of DanceGRPO, MixGRPO and E-GRPO.

        sigma_i = s u_i / (1 + (s - 1) u_i),   u_i = 1 - i / steps

    Args:
        shift: s > 0. 1 leaves the grid uniform, more puts more steps near pure noise.
    """

    shift: float = 3.0

    def __post_init__(self) -> None:
        if not self.shift > 0:
            raise ValueError(f"shift must be positive, not {self.shift}")

    def __call__(self, steps: int, image_tokens: int | None = None) -> Tensor:
        u = 1 - torch.arange(_checked(steps) + 1, dtype=torch.float64) / steps
        return _valid((self.shift * u / (1 + (self.shift - 1) * u)).float())


@dataclass(frozen=True)
class Explicit(Schedule):
    """The given sigmas, whatever they are: `(sigma_0, ..., sigma_T)`.

    Raises:
        ValueError: not strictly decreasing in float32, outside [0, 1], not ending at 0; when called
            with another number of steps.
    """

    sigmas: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigmas", tuple(float(sigma) for sigma in self.sigmas))
        _valid(torch.tensor(self.sigmas))

    def __call__(self, steps: int, image_tokens: int | None = None) -> Tensor:
        if steps != len(self.sigmas) - 1:
            raise ValueError(f"these {len(self.sigmas)} sigmas make {len(self.sigmas) - 1} steps, not {steps}")
        return torch.tensor(self.sigmas, dtype=torch.float32)


@dataclass(frozen=True)
class SchedulerConfig(Schedule):
    """The grid diffusers' own `FlowMatchEulerDiscreteScheduler` makes from `config`, bit for bit.

    With `use_dynamic_shifting` the shift mu is linear in `image_tokens`, as in diffusers'
    `calculate_shift`. Some pipelines start from the scheduler's default timesteps (SD3), others hand it
    `linspace(1, 1/steps, steps)` (FLUX, Qwen-Image, Lumina2, LTX); the config does not say which.

    Args:
        config: `pipe.scheduler.config`. Private keys but `_class_name` are dropped.
        linspace: whether the pipeline passes `linspace(1, 1/steps, steps)`. None: it does exactly if
            `use_dynamic_shifting`. FLUX.1-schnell and Lumina2 need True: static configs, yet they do.

    Raises:
        ValueError: the config belongs to another scheduler; the grid is not one from noise to data
            (inverted sigmas); dynamic shifting without `image_tokens`.
    """

    config: dict[str, Any]
    linspace: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, Mapping):
            raise TypeError(f"config must be a mapping such as pipe.scheduler.config, not {self.config!r}")
        public = {k: v for k, v in self.config.items() if not k.startswith("_") or k == "_class_name"}
        object.__setattr__(self, "config", public)

    def __call__(self, steps: int, image_tokens: int | None = None) -> Tensor:
        scheduler = self._scheduler()
        dynamic = scheduler.config["use_dynamic_shifting"]
        sigmas, mu = None, None
        if dynamic if self.linspace is None else self.linspace:
            sigmas = np.linspace(1.0, 1 / _checked(steps), steps)
        if dynamic:
            if image_tokens is None:
                raise ValueError("this scheduler shifts with the resolution: pass image_tokens")
            mu = self._mu(image_tokens, scheduler.config)
        scheduler.set_timesteps(_checked(steps), sigmas=sigmas, mu=mu)
        return _valid(scheduler.sigmas)

    def _scheduler(self) -> Any:
        import diffusers

        euler = diffusers.FlowMatchEulerDiscreteScheduler
        name = self.config.get("_class_name", euler.__name__)
        stock = getattr(diffusers, name, None)
        # A name diffusers does not know is taken for a subclass made by someone else.
        if stock is not None and not issubclass(stock, euler):
            raise ValueError(f"the samplers walk the grid of {euler.__name__}, and this config is of {name}")
        return euler.from_config({k: v for k, v in self.config.items() if k != "_class_name"})

    @staticmethod
    def _mu(image_tokens: int, config: Mapping[str, Any]) -> float:
        low, high = config["base_image_seq_len"], config["max_image_seq_len"]
        # The order of operations is diffusers' own: the sigmas must agree to the last bit.
        slope = (config["max_shift"] - config["base_shift"]) / (high - low)
        return image_tokens * slope + (config["base_shift"] - slope * low)


def _checked(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"a schedule needs at least 1 step, not {steps}")
    return steps


def _valid(sigmas: Tensor) -> Tensor:
    values = sigmas.tolist()
    if len(values) < 2 or values[-1] != 0 or not values[0] <= 1:
        raise ValueError(f"sigmas must run from at most 1 to exactly 0, in at least one step: {values}")
    if not all(a > b for a, b in pairwise(values)):
        raise ValueError(f"sigmas must decrease strictly: {values}")
    return sigmas
