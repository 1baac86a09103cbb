"""Flow-DPPO (arXiv 2606.11025): policy gradient inside a trust region of the exact divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from flowrl.distributions import Gaussian
from flowrl.objectives.trajectory import KLForm, TrajectoryObjective
from flowrl.policy import Transition
from flowrl.rollout import Rollout
from flowrl.samplers.flow import FlowSampler

DivergenceRule = Literal["ratio", "predicted"]


@dataclass(kw_only=True)
class FlowDPPO(TrajectoryObjective):
    """Flow-DPPO: the preset `flow_dppo` of the core on Gaussian transitions.

        L = mean_b mean_i [ -M A r + kl KL_i ],   r = exp(lp - lp_old)
        D = mean_d (mu_old - mu)^2 / (2 std^2)
        M = 0  where  D >= delta  and  (A > 0 and r > 1 or A < 0 and r < 1),  else 1

    with A = (R - group mean) / (std of all rewards of the iteration, divisor n - 1, + 1e-8). The ratio is not clipped:
    a sample outside the region is dropped when it pushes further out and kept when it returns. D comes from the
    recorded float32 means and the sampler's own std, so that it is 0 before the first update and rounding does not
    trigger the mask.

    With `logprob="unnormalised"` r is not a ratio of densities while D stays exact. The released CPS runs do that.

    Logged besides the usual: `drop_frac` (share of samples and steps with M = 0), `divergence` (mean D).

    Args:
        delta: trust region, nats per latent element; inf switches the mask off. The paper takes 1e-7 with FlowSDE and
            1e-6 with CPS, its release (UniRL) 1e-5, Flow-Factory 1e-6. With few elements take a larger one: delta times
            their number is the region of one step in nats.
        divergence_rule: what counts as pushing outwards: "ratio" as above, or "predicted", A (log r - D) > 0: whether
            a step of the mean along the update raises D. See `core.corrections.divergence_mask`.
        kl: weight beta of the KL to the reference; 0 skips the reference pass (1e-3 published for FLUX.2).
        kl_form: see `transition_kl`; the paper's is exact.
        combine, allocation, rho, m_min, m_max: see `TrajectoryObjective`.

    Raises:
        ValueError: a value out of range; on `check`, the rule "predicted" without Gaussian log-probabilities.
    """

    delta: float = 1e-6
    divergence_rule: DivergenceRule = "ratio"
    kl_form: KLForm = "exact_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delta > 0:
            raise ValueError(f"delta must be positive, got {self.delta}")
        if self.divergence_rule not in get_args(DivergenceRule):
            rules = ", ".join(get_args(DivergenceRule))
            raise ValueError(f"unknown divergence_rule {self.divergence_rule!r}: one of {rules}")
        self.algorithm = self.build("flow_dppo", delta=self.delta, divergence_rule=self.divergence_rule, beta=self.kl)

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {"mean"}

    def check(self, sampler: FlowSampler) -> None:
        super().check(sampler)
        if self.divergence_rule == "predicted" and sampler.logprob != "gaussian":
            raise ValueError(
                "divergence_rule 'predicted' subtracts D from log r, which needs log-probabilities of a density: take "
                "logprob='gaussian' or divergence_rule='ratio'"
            )

    def measure(self, transition: Transition, rollout: Rollout, unit: int) -> dict[str, Tensor]:
        now = transition.distribution
        return {"divergence": Gaussian(rollout.means[:, unit], now.std).kl(now)[:, None]}
