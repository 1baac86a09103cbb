"""SuperFlow (arXiv 2512.17951): samples where prompts are uncertain, a tracked baseline, noisy steps weighted more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from flowrl.core import PRESETS
from flowrl.objectives.trajectory import Allocation, TrajectoryObjective

Baseline = Literal["beta_tracker", "group"]


@dataclass(kw_only=True)
class SuperFlow(TrajectoryObjective):
    """SuperFlow: the preset `superflow` of the core on Gaussian transitions.

    STATUS: DERIVED, not verified. There is no code, accounts of the paper disagree, and its latest version is reported
    as withdrawn: these are formulas that fit the accounts, and its published numbers are no target.

        vhat_p = a / (a + b);   a <- rho a + R,  b <- rho b + 1 - R  for every reward R of prompt p, from (1, 1)
        w_p    = sqrt(vhat_p (1 - vhat_p) + 1e-6)
        m_p    = m_min + LR( (budget - n m_min) w_p / sum w ) <= m_max      samples of prompt p, LR largest remainders
        A_it   = u_t A_i,   u_t = sigma_t / mean_t sigma_t,   sigma_t = std_t / sqrt(t - t')
        L      = mean_i mean_t [ max(-A_it r, -A_it clip(r, 1 - c, 1 + c)) + kl KL_it ],   r = exp(lp - lp_old)

    The mean is over samples, so a prompt counts by its number of samples; a mean over groups would give each sample of
    a small group more weight. The budget is `prompts_per_iteration * group_size`. Rewards must lie in [0, 1]; w is the
    standard deviation of those that are 0 or 1. Drawing prompts in proportion to w and group sizes by tiers of w, which
    accounts report too, are left out. With equal w, a constant sigma (DanceSDE) and `baseline="group"` this is
    Flow-GRPO, bit for bit.

    Args:
        baseline: "beta_tracker", A = R - vhat with vhat of before this iteration, standardised over the iteration's
            samples (population std + 1e-4); or "group", Flow-GRPO's advantage.
        step_weights: multiply by u_t; False takes u = 1. Where a sample trains on one step u is 1 anyway.
        clip_range: c, half-width of the ratio clip; for log-probs averaged over latent elements.
        adv_clip_max: bound of A, before u, as in Flow-GRPO.
        kl: weight of the KL to the reference; 0 skips the reference pass.
        kl_form: see `transition_kl`.
        combine, allocation, rho, m_min, m_max: see `TrajectoryObjective`.

    Raises:
        ValueError: a value out of range; on `check`, groups of any size with a plan of branches; on the first batch,
            rewards outside [0, 1].
    """

    baseline: Baseline = "beta_tracker"
    step_weights: bool = True
    clip_range: float = 1e-4
    adv_clip_max: float = 5.0
    allocation: Allocation = "variance"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline not in get_args(Baseline):
            raise ValueError(f"unknown baseline {self.baseline!r}: one of {', '.join(get_args(Baseline))}")
        if self.clip_range <= 0 or self.adv_clip_max <= 0:
            raise ValueError("clip_range and adv_clip_max must be positive")
        if self.combine == "gdpo" and self.baseline == "beta_tracker":
            raise ValueError("combine='gdpo' is an advantage of its own and takes no baseline: take baseline='group'")
        preset = PRESETS["superflow"]
        if self.baseline == "group":
            preset = replace(preset, advantage=PRESETS["flow_grpo"].advantage)
        if not self.step_weights:
            preset = replace(preset, credit=("broadcast",))
        self.algorithm = self.build(
            preset,
            clip_lo=self.clip_range,
            clip_hi=self.clip_range,
            adv_clip_max=self.adv_clip_max,
            beta=self.kl,
        )

    @property
    def tracks(self) -> bool:
        return super().tracks or self.baseline == "beta_tracker"
