"""What objectives on sampled transitions share: the core's loss on one column of the rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from flowrl.core import PRESETS, AdvOut, Algorithm, Batch, Preset, beta_update, with_gdpo
from flowrl.objectives.base import Combine, Micro, Objective, check_combine
from flowrl.policy import Copies, Policy, Transition
from flowrl.rollout import Prompt, Rollout
from flowrl.samplers.flow import CPS, FlowSampler

KLForm = Literal["flow_grpo", "exact_mean", "exact_sum", "v_mse"]
Allocation = Literal["fixed", "variance"]


def transition_kl(
    policy: Transition, reference: Transition, form: KLForm, sampler: FlowSampler, step_length: float | Tensor
) -> Tensor:
    """KL of one transition to the reference, `[b]`; gradient through `policy`.

    exact_sum   ||mu - mu_ref||^2 / (2 std^2)                 the KL, nats
    exact_mean  the same averaged over the d latent elements
    flow_grpo   exact_mean x D, i.e. mean (mu - mu_ref)^2 / (2 sigma_t^2): the released form, for which the published
                beta hold. CPS has no sigma_t; there the released code uses exact_mean.
    v_mse       mean (v - v_ref)^2, the KL without its step-dependent factor
    """
    if form == "v_mse":
        return (policy.velocity - reference.velocity).pow(2).flatten(1).mean(1)
    if form == "exact_sum":
        return policy.distribution.kl(reference.distribution, reduce="sum")
    kl = policy.distribution.kl(reference.distribution, reduce="mean")
    return kl * torch.as_tensor(step_length).to(kl) if form == "flow_grpo" and not isinstance(sampler, CPS) else kl


@dataclass(kw_only=True)
class TrajectoryObjective(Objective):
    """A preset of the core on the Gaussian transitions of an SDE sampler.

    A method is a subclass whose `__post_init__` gets its `algorithm` from `build`, and that adds in `measure` what its
    links read besides log-probabilities.

    Args:
        kl: weight beta of the KL to the reference; 0 skips the reference pass.
        kl_form: see `transition_kl`.
        combine: how several rewards become one advantage. "sum": the method's own, of the weighted sum. "gdpo": every
            reward is normalised in its group, then they are summed by weight and standardised over the iteration
            (GDPO, arXiv 2601.05242), so that a reward's scale does not matter; it takes the place of the method's
            estimator.
        allocation: "fixed", every prompt of an iteration gets the same number of samples; or "variance", the same
            total goes where a tracker of each prompt's rewards is most uncertain, for rewards in [0, 1]
            (`core.allocation`; from SuperFlow, DERIVED, not verified).
        rho: forgetting factor of that tracker in (0, 1]; it remembers about 1 / (1 - rho) samples of a prompt.
        m_min, m_max: bounds of a prompt's share under "variance".
    """

    kl: float = 0.0
    kl_form: KLForm = "flow_grpo"
    combine: Combine = "sum"
    allocation: Allocation = "fixed"
    rho: float = 0.9
    m_min: int = 4
    m_max: int = 48
    algorithm: Algorithm = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kl < 0:
            raise ValueError(f"kl must not be negative, got {self.kl}")
        if self.kl_form not in get_args(KLForm):
            raise ValueError(f"unknown kl_form {self.kl_form!r}: one of {', '.join(get_args(KLForm))}")
        check_combine(self.combine)
        if self.allocation not in get_args(Allocation):
            raise ValueError(f"unknown allocation {self.allocation!r}: one of {', '.join(get_args(Allocation))}")
        if not 0 < self.rho <= 1:
            raise ValueError(f"rho must lie in (0, 1], got {self.rho}")
        if not 2 <= self.m_min <= self.m_max:
            raise ValueError(f"a group needs 2 <= m_min <= m_max, got m_min {self.m_min} and m_max {self.m_max}")

    def build(self, preset: str | Preset, **cfg: Any) -> Algorithm:
        """The algorithm of `preset` with the settings `cfg` and this objective's allocation."""
        preset = PRESETS[preset] if isinstance(preset, str) else preset
        if self.combine == "gdpo":
            preset = with_gdpo(preset)
        if self.allocation == "variance":
            cfg |= {"m_min": self.m_min, "m_max": self.m_max}
        if self.tracks:
            cfg["rho"] = self.rho
        return Algorithm(replace(preset, sampler=self.allocation), **cfg)

    @property
    def tracks(self) -> bool:
        """Whether the rewards of every prompt are tracked."""
        return self.allocation == "variance"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"log_prob", "reference"} if self.kl > 0 else {"log_prob"})

    def check(self, sampler: FlowSampler) -> None:
        super().check(sampler)
        if self.allocation == "variance" and sampler.plan.branches > 1:
            raise ValueError(
                f"{type(sampler.plan).__name__} splits every group into {sampler.plan.branches} equal parts, so "
                "groups cannot have any size: take allocation='fixed', or a plan without branches"
            )

    def allocate(self, prompts: Sequence[Prompt], samples: int) -> list[int]:
        # Without branches the index is the batch's group id, by which the tracker knows the prompt.
        requests = next(self.algorithm.sampler([p.index for p in prompts], SimpleNamespace(budget=samples)))
        return [request.n for request in requests]

    def columns(self, rollout: Rollout) -> int:
        return rollout.units

    def advantages(self, batch: Batch) -> AdvOut:
        out = self.algorithm.advantages(batch)
        if self.tracks:  # only now: a baseline must not know the rewards it is subtracted from
            rows, cfg = batch.valid_rows, self.algorithm.cfg
            keys, rewards = batch.group_id[rows].tolist(), batch.reward[rows].tolist()
            beta_update(self.algorithm.state, keys, rewards, cfg.rho, cfg.beta_prior)
        return out

    def measure(self, transition: Transition, rollout: Rollout, unit: int) -> dict[str, Tensor]:
        """Further entries `[b, 1]` of `Batch.extra`, detached."""
        return {}

    def loss(self, policy: Policy, sampler: FlowSampler, micro: Micro) -> tuple[Tensor, dict[str, Tensor]]:
        rollout, u = micro.rollout, micro.unit
        reference = None
        if self.kl > 0:  # before the pass with gradients: no weights may change between it and its backward
            with torch.no_grad(), policy.use("reference"):
                reference = policy.evaluate(rollout, u, sampler)
        transition = policy.evaluate(rollout, u, sampler)
        token_kl = None
        if reference is not None:
            start, end = rollout.interval(u)
            length = rollout.sigmas[start] - rollout.sigmas[end]
            token_kl = transition_kl(transition, reference, self.kl_form, sampler, length)
        with torch.no_grad():
            measured = self.measure(transition, rollout, u)
        batch = replace(
            micro.batch,
            logp=transition.log_prob[:, None],
            old_logp=rollout.log_prob[:, u : u + 1],
            token_kl=None if token_kl is None else token_kl[:, None],
            extra=micro.batch.extra | measured,
        )
        return self.algorithm.loss(batch, micro.advantage)

    def after_update(self, copies: Copies, iteration: int, stats: Mapping[str, float]) -> None:
        self.algorithm.on_step(stats)

    def state_dict(self) -> dict[str, Any]:
        return self.algorithm.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.algorithm.load_state_dict(state)
