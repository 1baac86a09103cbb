"""Named compositions of links: data only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Which links serve each hook, and the cfg values that differ from the links' own defaults.

    The field defaults are GRPO. paper: arXiv id. formula_status: "verified" against the authors' code or
    paper text, "secondary" against accounts of others, "derived" from an abstract. needs: batch data beyond
    what the links declare. neutral: cfg at which the preset is GRPO, None if there is none.
    """

    name: str
    paper: str
    formula_status: Literal["verified", "secondary", "derived"]
    group_key: str = "prompt"
    reward_shape: tuple[str, ...] = ("identity",)
    advantage: tuple[str, ...] = ("z",)
    credit: tuple[str, ...] = ("broadcast",)
    log_ratio: str = "token"
    bounds: str = "symmetric"
    surrogate: str = "ppo"
    correction: tuple[str, ...] = ()
    kl: str = "k3"
    aggregate: str = "seq_mean_token_mean"
    aux: tuple[tuple[float, str], ...] = ()
    on_step: str = "noop"
    sampler: str = "fixed"
    cfg: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    neutral: dict[str, Any] | None = None


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(name="grpo", paper="2402.03300", formula_status="verified", neutral={}),
        Preset(
            name="dr_grpo",
            paper="2503.20783",
            formula_status="secondary",
            advantage=("centre",),
            aggregate="seq_sum_const",
        ),
        Preset(
            name="rloo",
            paper="2402.14740",
            formula_status="secondary",
            advantage=("loo",),
            bounds="open",
            surrogate="reinforce",
            aggregate="seq_sum_const",  # a sample is one action: its log-probs are summed
        ),
        Preset(name="gdpo", paper="2601.05242", formula_status="verified", advantage=("gdpo",)),
        Preset(
            name="flow_grpo",
            paper="2505.05470",
            formula_status="verified",
            advantage=("global_std", "clip"),
            kl="exact",
            cfg={"clip_lo": 1e-4, "clip_hi": 1e-4, "beta": 0.04},
            neutral={
                "global_std": False,
                "ddof": 1,
                "eps": 1e-6,
                "adv_clip_max": float("inf"),
                "clip_lo": 0.2,
                "clip_hi": 0.2,
                "beta": 0.0,
            },
        ),
        Preset(
            name="flow_dppo",
            paper="2606.11025",
            formula_status="verified",
            advantage=("global_std",),
            bounds="open",
            correction=("divergence_mask",),
            kl="exact",
            cfg={"ddof": 1, "eps": 1e-8},
        ),
        Preset(
            name="e_grpo",
            paper="2601.00423",
            formula_status="verified",
            advantage=("z", "clip"),
            kl="exact",
            cfg={"eps": 1e-8, "clip_lo": 1e-4, "clip_hi": 1e-4},
        ),
        Preset(
            name="superflow",
            paper="2512.17951",
            formula_status="derived",
            advantage=("beta_baseline", "clip"),
            credit=("broadcast", "step_weight"),
            kl="exact",
            sampler="variance",
            cfg={"clip_lo": 1e-4, "clip_hi": 1e-4, "beta": 0.04},
        ),
    )
}


def with_gdpo(preset: Preset) -> Preset:
    """The preset with GDPO's advantage as its estimator; what follows the estimator stays."""
    return replace(preset, advantage=("gdpo", *preset.advantage[1:]))
