"""E-GRPO (arXiv 2601.00423): one exploring step a sample, compared with those that explored at the same step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowrl.core import PRESETS
from flowrl.objectives.trajectory import TrajectoryObjective


@dataclass(kw_only=True)
class EGRPO(TrajectoryObjective):
    """E-GRPO: the preset `e_grpo` of the core on a plan of branches, `sampler.plan = Merged(...)`.

        L = -mean_n mean_g min( r A, clip(r, 1 - c, 1 + c) A ),   r = exp(lp - lp_old) of the merged transition
        A_ng = (R_ng - mean_g) / (std_g + 1e-8),  divisor G - 1, clamped to +-adv_clip_max

    for the active steps n of a prompt and the G samples g that leave its ODE trajectory at step n. What a sample does
    after its one stochastic step is deterministic, so its reward speaks of that step alone.

    With K `granularities` every such step is continued on K grids, which gives K samples with one action. Each of the
    K reward sets is normalised on its own, and the action's advantage is the sum over its K samples (clamped after the
    sum). All K carry it: the mean over samples is then the mean over actions above, with the summed advantage.

    Args:
        clip_range: c, half-width of the ratio clip, for log-probs averaged over latent elements (1e-4 published).
        adv_clip_max: bound of the advantage.
        kl: weight of the KL to the reference; E-GRPO has none.
        kl_form: see `transition_kl`.
        combine, allocation, rho, m_min, m_max: see `TrajectoryObjective`; branches need "fixed".

    Raises:
        ValueError: a value out of range; on `check`, a plan whose samples do not part from a shared trajectory.
    """

    clip_range: float = 1e-4
    adv_clip_max: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_range <= 0 or self.adv_clip_max <= 0:
            raise ValueError("clip_range and adv_clip_max must be positive")
        self.algorithm = self.build(
            # Without granularities no two samples share an action, and the sum changes nothing.
            replace(PRESETS["e_grpo"], advantage=("z", "sum_shared", "clip")),
            clip_lo=self.clip_range,
            clip_hi=self.clip_range,
            adv_clip_max=self.adv_clip_max,
            beta=self.kl,
        )

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {"branches"}
