"""Transition distributions with exact densities: isotropic Gaussian (flows) and categorical (tokens)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduce = Literal["mean", "sum"]


def upcast(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged if it is float64: densities are never computed in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def reduce_rows(x: Tensor, reduce: Reduce) -> Tensor:
    """Mean or sum over every dimension but the first: `[b, ...] -> [b]`."""
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce must be 'mean' or 'sum', not {reduce!r}")
    rows = x.flatten(1) if x.ndim > 1 else x[:, None]
    return rows.mean(1) if reduce == "mean" else rows.sum(1)


def expand_rows(x: Tensor, like: Tensor) -> Tensor:
    """Shape a 0-dim or `[b]` tensor so that it broadcasts against `like [b, ...]`, on its device and dtype.

    A 0-dim tensor stays on its own device: torch mixes it with any device, and reading it on the CPU
    costs no synchronisation.
    """
    if x.ndim == 0:
        return x.to(like.dtype)
    return x.to(like.device, like.dtype).reshape(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Isotropic Gaussian `N(mean, std² I)`, one per sample.

        log p(x) = -(x - mean)² / (2 std²) - log std - ½ log 2π          per element, then reduced

    Everything is float32, or float64 when `mean` is. `reduce="mean"` averages over the non-batch
    dimensions: the resulting ratio is the d-th root of the true density ratio, which is what all
    published clip ranges of flow methods refer to. `reduce="sum"` gives the true joint value.

    Args:
        mean: `[b, ...]`.
        std: standard deviation >= 0, 0-dim (or a float) or one per sample `[b]`. 0 marks a
            deterministic (ODE) step, which can be sampled but has no density.

    Raises:
        ValueError: `mean` has no batch dimension, or `std` has another shape.
    """

    mean: Tensor
    std: Tensor

    def __post_init__(self) -> None:
        mean = upcast(self.mean)
        if mean.ndim == 0:
            raise ValueError("mean needs a batch dimension: [b, ...]")
        std = torch.as_tensor(self.std, dtype=mean.dtype)
        if std.ndim and std.shape != mean.shape[:1]:
            raise ValueError(f"std must be 0-dim or [{len(mean)}], one per sample; got {list(std.shape)}")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std if std.ndim == 0 else std.to(mean.device))

    def sample(self, noise: Tensor) -> Tensor:
        """`mean + std * noise` for standard normal `noise` of the shape of `mean` (see `flowrl.noise`)."""
        return self.mean + self._std * noise.to(self.mean)

    def log_prob(self, x: Tensor, reduce: Reduce = "mean") -> Tensor:
        """Log-density of `x [b, ...]`, reduced to `[b]`. Nats. Raises ValueError if any std is 0."""
        std = self._positive_std("log_prob")
        # In torch.distributions.Normal's order of operations, so that the two agree to the last bit.
        squared = (x.to(self.mean) - self.mean) ** 2
        log_density = -squared / (2 * std**2) - std.log() - math.log(math.sqrt(2 * math.pi))
        return reduce_rows(log_density, reduce)

    def kl(self, other: Gaussian, reduce: Reduce = "mean") -> Tensor:
        """Exact `KL(self || other)`, reduced to `[b]`. Nats, >= 0. Raises ValueError if any std is 0.

            KL = (mean - mean_o)² / (2 std_o²) + ½ (r - 1 - log r),   r = std² / std_o²

        The second term is exactly 0 when both share a std, as two policies under one sampler do, so a
        tiny KL (1e-8 per element) is not lost in a difference of large numbers.
        """
        std, std_other = self._positive_std("kl"), other._positive_std("kl")
        excess = (std / std_other) ** 2 - 1
        squared = (self.mean - other.mean.to(self.mean)) ** 2
        return reduce_rows(squared / (2 * std_other**2) + (excess - excess.log1p()) / 2, reduce)

    def entropy(self, reduce: Reduce = "mean") -> Tensor:
        """Entropy `½ log(2πe std²)` per element, reduced to `[b]`. Nats. ValueError if any std is 0."""
        per_element = 0.5 + 0.5 * math.log(2 * math.pi) + self._positive_std("entropy").log()
        return reduce_rows(per_element.to(self.mean.device).expand_as(self.mean), reduce)

    @property
    def deterministic(self) -> bool:
        """Whether any std is 0, so that there is no density."""
        return not bool((self.std > 0).all())

    @property
    def _std(self) -> Tensor:
        return expand_rows(self.std, self.mean)

    def _positive_std(self, what: str) -> Tensor:
        if self.deterministic:
            raise ValueError(
                f"{what} of a transition with std 0: a deterministic (ODE) step has no density. "
                "Leave it out of the trained steps."
            )
        return self._std


@dataclass(frozen=True, eq=False)
class Categorical:
    """Categorical distribution over the last dimension of `logits`.

        p_k = exp(logits_k) / sum_j exp(logits_j)

    Results keep the leading dimensions: each token is a unit of its own, so nothing is reduced.
    A logit of -inf excludes a class (it must not be all of them). Float32, or float64 when logits are.

    Args:
        logits: `[..., K]`, unnormalised.
    """

    logits: Tensor

    def __post_init__(self) -> None:
        if self.logits.ndim == 0:
            raise ValueError("logits need a class dimension: [..., K]")
        object.__setattr__(self, "logits", upcast(self.logits).log_softmax(-1))

    def sample(self, noise: Tensor) -> Tensor:
        """Class indices `[...]` from standard normal `noise [...]`: the inverse CDF at u = Phi(noise).

        Taking normals, as `Gaussian.sample` does, lets one source of noise serve every family.
        """
        cdf = self.logits.double().exp().cumsum(-1)
        # u < 1 strictly, so that a trailing class of probability 0 is never drawn.
        u = torch.special.ndtr(noise.to(cdf)).clamp(max=1 - 2**-53)
        return torch.searchsorted(cdf / cdf[..., -1:], u[..., None], right=True)[..., 0]

    def log_prob(self, index: Tensor) -> Tensor:
        """Log-probability of class `index [...]`, an integer tensor. Nats, <= 0."""
        return self.logits.gather(-1, index[..., None])[..., 0]

    def kl(self, other: Categorical) -> Tensor:
        """Exact `KL(self || other) = sum_k p_k (log p_k - log q_k)`, `[...]`. inf where q_k = 0 < p_k."""
        p = self.logits.exp()
        log_ratio = (self.logits - other.logits.to(self.logits)).masked_fill(p == 0, 0.0)
        return (p * log_ratio).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy `-sum_k p_k log p_k`, `[...]`. Nats, in [0, log K]."""
        p = self.logits.exp()
        return -(p * self.logits.masked_fill(p == 0, 0.0)).sum(-1)
