"""Hook `sampler`: which samples are drawn for which prompt.

(prompts, state, cfg, services) -> generator that yields lists of `Request`, is sent the finished and rewarded
`Draw`s of each list, and returns the draws to train on. `services` is what the caller offers besides
generation (scoring, judging, a teacher; `budget`, the samples to draw); nothing of it is checkpointed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from .batch import State
from .registry import register


@dataclass(frozen=True)
class Request:
    """Draw n samples for `prompt` with group id `group`.

    train_prompt: the context that scores the samples when it is not `prompt`. prefix: actions forced on the
    sample, masked out of the loss. model: who generates ("policy", "teacher", ...). tags: copied to
    `Batch.extra`.
    """

    prompt: Any
    n: int
    group: int
    train_prompt: Any = None
    prefix: Any = None
    temperature: float = 1.0
    model: str = "policy"
    role: str | None = None
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Draw:
    """One sample of a request: whatever was generated (opaque here), its reward and what that is made of."""

    request: Request
    sample: Any
    reward: Tensor | float
    parts: dict[str, float] = field(default_factory=dict)
    in_loss: bool = True


Sampler = Generator[list[Request], list[Draw], list[Draw]]


def largest_remainder(total: int, weights: Sequence[float], minimum: int = 0, maximum: int | None = None) -> list[int]:
    """`total` divided in proportion to `weights`, in whole numbers that add up to it.

        m_c = minimum + LR( (total - n minimum) w_c / sum w ),   minimum <= m_c <= maximum

    LR rounds down and gives what is left to the largest fractions, the earlier place first among equal ones; the
    fractions are exact. Who would exceed the maximum gets it, and the others share the rest by the same rule. Weights
    that are all 0 count as equal.

    Without a minimum this is Neyman's allocation, which minimises sum_c w_c^2 / m_c before rounding. With one, only
    what is above it is divided so: the minimiser under m_c >= minimum would be max(minimum, lambda w_c).

    Raises ValueError on a weight that is negative or not finite, and when `total` does not fit the bounds.
    """
    n = len(weights)
    maximum = total if maximum is None else maximum
    if not all(math.isfinite(w) and w >= 0 for w in weights):
        raise ValueError(f"weights must be finite and not negative, got {list(weights)}")
    if total < n * minimum:
        raise ValueError(
            f"{total} samples cannot give {n} groups at least {minimum} each: take {n * minimum} samples or more, or a "
            "smaller minimum (m_min)"
        )
    if total > n * maximum:
        raise ValueError(
            f"{total} samples exceed {n} groups of at most {maximum}: take {n * maximum} samples or fewer, or a larger "
            "maximum (m_max)"
        )
    exact = [Fraction(w) for w in weights]
    sizes = [minimum] * n
    left, free = total - n * minimum, list(range(n))
    while True:
        whole = sum(exact[i] for i in free)
        quota = {i: left * exact[i] / whole if whole else Fraction(left, len(free)) for i in free}
        share = {i: math.floor(q) for i, q in quota.items()}
        spare = left - sum(share.values())
        for i in sorted(free, key=lambda i: share[i] - quota[i])[:spare]:  # stable: earlier places win ties
            share[i] += 1
        over = [i for i in free if minimum + share[i] > maximum]
        if not over:
            return [size + share.get(i, 0) for i, size in enumerate(sizes)]
        for i in over:
            sizes[i] = maximum
            left -= maximum - minimum
        free = [i for i in free if i not in over]


TRACKER: dict[str, Any] = {"rho": 0.9, "beta_prior": (1.0, 1.0)}
"""Settings of the Beta tracker: forgetting factor in (0, 1] and the (a, b) of a prompt never seen."""


def beta_update(
    state: State,
    keys: Sequence[Hashable],
    rewards: Sequence[float],
    rho: float = TRACKER["rho"],
    prior: tuple[float, float] = TRACKER["beta_prior"],
) -> None:
    """Let the tracker see rewards in [0, 1], each of the prompt with the key beside it, in their order.

        a <- rho a + r,   b <- rho b + (1 - r)

    Kept as `state["tracker"]`, key -> [a, b]. a + b tends to 1 / (1 - rho), the number of rewards remembered; rho = 1
    counts all. To keep it equal on every process, show it the rewards gathered over processes.

    Raises ValueError, before anything is changed, on rewards outside [0, 1] or not finite (1e-6 is forgiven: weighted
    sums round).

    Source: SPO (arXiv 2509.13232), as accounts of SuperFlow (arXiv 2512.17951) describe it. DERIVED, not verified.
    """
    bad = [r for r in rewards if not -1e-6 <= r <= 1 + 1e-6]
    if bad:
        raise ValueError(
            f"the Beta tracker needs rewards in [0, 1], got {bad[:4]}: map the reward affinely, "
            "(r - low) / (high - low) with its lowest and highest value"
        )
    tracker = state.setdefault("tracker", {})
    for key, r in zip(keys, rewards, strict=True):
        a, b = tracker.get(key, prior)
        r = min(max(r, 0.0), 1.0)
        tracker[key] = [rho * a + r, rho * b + (1 - r)]


def beta_value(state: State, key: Hashable, prior: tuple[float, float] = TRACKER["beta_prior"]) -> float:
    """vhat = a / (a + b), the tracker's mean reward of the prompt `key`, in [0, 1]."""
    a, b = state.get("tracker", {}).get(key, prior)
    return a / (a + b)


def uncertainty(value: float, eps: float = 1e-6) -> float:
    """w = sqrt(v (1 - v) + eps): the standard deviation of a reward of 0 or 1 with mean v, never 0."""
    return math.sqrt(value * (1 - value) + eps)


@register("sampler", "fixed", group_size=8)
def fixed(prompts: Sequence[Any], state: State, cfg: Any, services: Any) -> Sampler:
    """The same number of samples for every prompt, one group per place in the list: an equal share of
    `services.budget` if there is one, else group_size."""
    budget = getattr(services, "budget", None)
    n = cfg.group_size if budget is None else budget // len(prompts)
    return (yield [Request(prompt, n, group) for group, prompt in enumerate(prompts)])


@register("sampler", "variance", **TRACKER, m_min=4, m_max=48, w_eps=1e-6)
def variance(prompts: Sequence[Any], state: State, cfg: Any, services: Any) -> Sampler:
    """`services.budget` samples divided by the prompts' `uncertainty`, m_min to m_max each: see `largest_remainder`.

    Prompts are keys of the tracker, the batch's group ids, which whoever rewards the samples must `beta_update`.
    Prompts never seen are as uncertain as the prior, which is most uncertain for (1, 1).

    Source: SuperFlow (arXiv 2512.17951). DERIVED, not verified: accounts of the paper report tiers by uncertainty,
    which fix no budget; this rule does.
    """
    budget = getattr(services, "budget", None)
    if budget is None:
        raise ValueError("sampler link 'variance' divides a budget: pass services with `budget`, a number of samples")
    weights = [uncertainty(beta_value(state, prompt, cfg.beta_prior), cfg.w_eps) for prompt in prompts]
    sizes = largest_remainder(budget, weights, cfg.m_min, cfg.m_max)
    return (yield [Request(prompt, sizes[group], group) for group, prompt in enumerate(prompts)])


def run_sampler(sampler: Sampler, serve: Callable[[list[Request]], list[Draw]]) -> tuple[list[Draw], int]:
    """Answer the requests of `sampler` with `serve` until it returns: (draws to train on, samples
    generated)."""
    generated, draws = 0, None
    while True:
        try:
            requests = next(sampler) if draws is None else sampler.send(draws)
        except StopIteration as end:
            return end.value, generated
        draws = serve(requests)
        generated += sum(request.n for request in requests)


def stateless_rng(seed: int, step: int, gid: int) -> torch.Generator:
    """CPU generator that depends on (seed, step, group id) alone, so that pure hooks can draw random
    numbers."""
    word = 0
    for part in (seed, step, gid):  # splitmix64: neighbouring triples get unrelated streams
        word = (word + part + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        word ^= word >> 31
    return torch.Generator().manual_seed(word >> 1)
