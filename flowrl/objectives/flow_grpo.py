"""Flow-GRPO (arXiv 2505.05470): clipped policy gradient on the transitions of an SDE sampler."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.objectives.trajectory import KLForm, TrajectoryObjective, transition_kl

__all__ = ["FlowGRPO", "KLForm", "transition_kl"]


@dataclass
class FlowGRPO(TrajectoryObjective):
    """Flow-GRPO: the preset `flow_grpo` of the core on Gaussian transitions.

        L = mean_b mean_i [ max(-A r, -A clip(r, 1 - c, 1 + c)) + kl KL_i ],   r = exp(lp - lp_old)

    with A = (R - group mean) / (std of all rewards of the iteration + 1e-4), clamped to +-adv_clip_max.

    Args:
        clip_range: c, half-width of the ratio clip; for log-probs averaged over latent elements (1e-4 published).
        adv_clip_max: bound of the advantage.
        global_std: std over all rewards of the iteration (True) or over the group; `combine="gdpo"` has its own.
        kl: weight beta of the KL to the reference; 0 skips the reference pass (.04 published for GenEval and OCR).
        kl_form: see `transition_kl`.
        combine, allocation, rho, m_min, m_max: see `TrajectoryObjective`.
    """

    clip_range: float = 1e-4
    adv_clip_max: float = 5.0
    global_std: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_range <= 0 or self.adv_clip_max <= 0:
            raise ValueError("clip_range and adv_clip_max must be positive")
        estimator = {} if self.combine == "gdpo" else {"global_std": self.global_std}
        self.algorithm = self.build(
            "flow_grpo",
            clip_lo=self.clip_range,
            clip_hi=self.clip_range,
            beta=self.kl,
            adv_clip_max=self.adv_clip_max,
            **estimator,
        )
