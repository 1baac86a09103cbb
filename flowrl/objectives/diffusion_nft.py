"""DiffusionNFT (arXiv 2509.16117): contrast an implicit positive and negative policy on the forward process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl import noise
from flowrl.core import PRESETS, AdvOut, Algorithm, Batch, with_gdpo
from flowrl.objectives.base import Combine, Micro, Objective, check_combine
from flowrl.policy import Copies, Policy, Weights
from flowrl.rollout import Rollout
from flowrl.samplers.flow import FlowSampler

_TIMES = int.from_bytes(b"nft-time", "little", signed=True)  # keeps the time shuffle apart from other draws
MODES = ("all", "positive_only", "negative_only", "one_only", "binary")
# (slope start, slope, cap) of the old copy's decay: 0 on-policy, 1 the default, 2 the released OCR recipe.
DECAY = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}


def old_decay(iteration: int, schedule: int) -> float:
    """d of `old <- d old + (1 - d) policy` after `iteration`: min(max(0, iteration - flat) * rate, cap)."""
    flat, rate, cap = DECAY[schedule]
    return min(max(0, iteration - flat) * rate, cap)


def optimality(advantage: Tensor, adv_clip_max: float = 5.0, z_mult: float | None = None, mode: str = "all") -> Tensor:
    """Reward to optimality probability: r = clip(A / (2 z_mult) + 1/2, 0, 1), A clamped to +-adv_clip_max.

    The paper's text reads as z_mult = 1, the released code has z_mult = adv_clip_max (the default here).
    Modes act on A before the division, as released: "positive_only", "negative_only", "one_only", "binary".
    """
    a = advantage.clamp(-adv_clip_max, adv_clip_max)
    a = {
        "all": lambda: a,
        "positive_only": lambda: a.clamp(min=0),
        "negative_only": lambda: a.clamp(max=0),
        "one_only": lambda: (a > 0).to(a),
        "binary": lambda: a.sign(),
    }[mode]()
    return (a / (2 * (z_mult or adv_clip_max)) + 0.5).clamp(0, 1)


@lru_cache(maxsize=8192)  # a sample asks for it once per column
def _time_order(steps: int, seed: int, iteration: int, prompt: int, member: int) -> tuple[int, ...]:
    """The order in which one sample trains on the grid's times."""
    return tuple(noise.permutation(steps, seed, iteration, prompt, member, _TIMES).tolist())


def _mean(x: Tensor) -> Tensor:
    return x.flatten(1).mean(1)


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    x0: Tensor,
    eps: Tensor,
    t: Tensor,
    r: Tensor,
    *,
    nft_beta: float = 1.0,
    adv_clip_max: float = 5.0,
    form: Literal["code", "paper"] = "code",
    adaptive: bool = True,
) -> Tensor:
    """Policy loss per sample, `[b]`; gradient through `v` only.

        v+ = (1 - beta) v_old + beta v        v- = (1 + beta) v_old - beta v        v* = eps - x0
        paper (Eq. 5)     r |v+ - v*|^2 + (1 - r) |v- - v*|^2
        code, adaptive    c (r L+ + (1 - r) L-) / beta,  L = mean (xh - x0)^2 / w,  xh = x_t - t v,
                          w = sg max(mean |xh - x0|, 1e-5)
        code, not so      the same with L = |v - v*|^2

    |.|^2 is the mean over elements. Args: v, v_old, x0, eps `[b, ...]`; t, r `[b]`.
    """
    v_old = v_old.detach()
    positive = (1 - nft_beta) * v_old + nft_beta * v
    negative = (1 + nft_beta) * v_old - nft_beta * v
    target = eps - x0
    time = t.reshape(-1, *[1] * (x0.ndim - 1))

    def distance(implicit: Tensor) -> Tensor:
        if form == "paper" or not adaptive:
            return _mean((implicit - target) ** 2)
        error = (1 - time) * x0 + time * eps - time * implicit - x0
        weight = _mean(error.detach().double().abs()).clamp(min=1e-5)
        return _mean(error**2) / weight.to(error.dtype)

    mixed = r * distance(positive) + (1 - r) * distance(negative)
    return mixed if form == "paper" else adv_clip_max * mixed / nft_beta


@dataclass
class DiffusionNFT(Objective):
    """DiffusionNFT: supervised contrast on noised clean samples; needs neither log-probs nor an SDE.

        L = mean over samples and times of [ nft_loss + kl mean (v - v_ref)^2 ]

    Rollouts come from the old copy of the weights, which follows the policy by `old_schedule`. Training times are the
    rollout's own grid in a random order per sample, all but the last 1 %, with fresh noise for each (sample, time).

    Args:
        nft_beta: strength beta of the implicit policies, > 0 (1.0 published for GenEval, 0.1 for OCR).
        kl: weight of the velocity-space pull to the reference, 0 skips the pass (1e-4 released; the paper has none).
        adv_clip_max, z_mult, mode: see `optimality`.
        form, adaptive: see `nft_loss`.
        old_schedule: 0 on-policy, 1 default, 2 slow (see `DECAY`). On-policy with one update an iteration the old copy
            is the policy, and its pass is saved.
        timestep_fraction: share of the grid's times used.
        combine: how several rewards become one advantage, "sum" or "gdpo"; see `TrajectoryObjective`.
    """

    nft_beta: float = 1.0
    kl: float = 1e-4
    adv_clip_max: float = 5.0
    z_mult: float | None = None
    mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    form: Literal["code", "paper"] = "code"
    adaptive: bool = True
    old_schedule: Literal[0, 1, 2] = 1
    timestep_fraction: float = 0.99
    combine: Combine = "sum"
    behaviour: Weights = field(default="old", init=False)
    algorithm: Algorithm = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.nft_beta <= 0 or self.kl < 0 or self.adv_clip_max <= 0:
            raise ValueError("nft_beta and adv_clip_max must be positive, kl not negative")
        if self.old_schedule not in DECAY:
            raise ValueError(f"unknown old_schedule {self.old_schedule!r}: one of {sorted(DECAY)}")
        if self.form not in ("code", "paper"):
            raise ValueError(f"unknown form {self.form!r}: 'code' or 'paper'")
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}: one of {', '.join(map(repr, MODES))}")
        if self.z_mult is not None and not self.z_mult > 0:
            raise ValueError(f"z_mult must be positive or None, not {self.z_mult}")
        if not 0 < self.timestep_fraction <= 1:
            raise ValueError(f"timestep_fraction must lie in (0, 1], not {self.timestep_fraction}")
        check_combine(self.combine)
        # The same advantage as Flow-GRPO's: group mean, std over all rewards of the iteration.
        preset = with_gdpo(PRESETS["flow_grpo"]) if self.combine == "gdpo" else PRESETS["flow_grpo"]
        self.algorithm = Algorithm(preset, adv_clip_max=self.adv_clip_max, beta=0.0)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"old", "reference"} if self.kl > 0 else {"old"})

    def columns(self, rollout: Rollout) -> int:
        return max(1, int((len(rollout.sigmas) - 1) * self.timestep_fraction))

    def advantages(self, batch: Batch) -> AdvOut:
        return self.algorithm.advantages(batch)

    def loss(self, policy: Policy, sampler: FlowSampler, micro: Micro) -> tuple[Tensor, dict[str, Tensor]]:
        rollout, u = micro.rollout, micro.unit
        x0 = rollout.latents.float()
        steps = len(rollout.sigmas) - 1
        index = [p.index for p in rollout.prompts]
        order = [
            _time_order(steps, rollout.seed, rollout.iteration, i, m)[u]
            for i, m in zip(index, rollout.members, strict=True)
        ]
        t = rollout.sigmas[torch.tensor(order)].to(x0.device)
        # Steps 0..T-1 are the sampler's; the columns take the numbers after them.
        eps = noise.batch_normal(
            x0.shape[1:], rollout.seed, rollout.iteration, index, rollout.members, steps + u, x0.device
        )
        x = torch.lerp(x0, eps, t.reshape(-1, *[1] * (x0.ndim - 1))).to(rollout.latents.dtype)
        # Passes with other weights come first: none may change between the pass with gradients and its backward.
        v_old = v_ref = None
        with torch.no_grad():
            if self.old_schedule or not policy.equals("old"):  # on-policy they are one before the first step
                with policy.use("old"):
                    v_old = policy.velocity(x, t, rollout)
            if self.kl > 0:
                with policy.use("reference"):
                    v_ref = policy.velocity(x, t, rollout)
        v = policy.velocity(x, t, rollout)
        if v_old is None:
            v_old = v.detach()

        keep = micro.batch.loss_mask[:, 0]
        totals = micro.batch.totals
        assert totals is not None

        def mean(x: Tensor) -> Tensor:
            return torch.where(keep, x, 0).sum() / max(totals.tokens, 1)

        r = optimality(micro.advantage.adv[:, 0].to(v), self.adv_clip_max, self.z_mult, self.mode)
        policy_loss = mean(
            nft_loss(
                v,
                v_old,
                x0,
                eps,
                t,
                r,
                nft_beta=self.nft_beta,
                adv_clip_max=self.adv_clip_max,
                form=self.form,
                adaptive=self.adaptive,
            )
        )
        metrics = {"pg_loss": policy_loss, "old_distance": mean(_mean((v - v_old) ** 2))}
        loss = policy_loss
        if v_ref is not None:
            metrics["kl"] = mean(_mean((v - v_ref) ** 2))
            loss = loss + self.kl * metrics["kl"]
        metrics["loss"] = loss
        return loss, {k: x.detach() for k, x in metrics.items()}

    def after_update(self, copies: Copies, iteration: int, stats: Mapping[str, float]) -> None:
        copies.blend("old", old_decay(iteration, self.old_schedule))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
