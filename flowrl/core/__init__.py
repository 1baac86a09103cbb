"""Group-relative RL on tables of B samples by T units, whatever a unit is. Imports torch only."""

from . import auxiliary, controllers, divergences, ratios, surrogates  # noqa: F401  they register links
from .advantages import combine_channels
from .aggregation import masked_mean, masked_quantile
from .algorithm import Algorithm
from .allocation import (
    Draw,
    Request,
    beta_update,
    beta_value,
    largest_remainder,
    run_sampler,
    stateless_rng,
    uncertainty,
)
from .batch import AdvOut, Batch, Correction, State, Totals
from .credit import diff_boundary, gather_seg, segment_mean, suffix_sum
from .grouping import (
    gnorm,
    group_count,
    group_max,
    group_mean,
    group_median,
    group_std,
    loo,
    rank_in_group,
    refine_groups,
    zero_spread_share,
)
from .presets import PRESETS, Preset, with_gdpo
from .registry import HOOKS, lookup, register
from .rewards_shape import bt_fit, vote

__all__ = [
    "HOOKS",
    "PRESETS",
    "AdvOut",
    "Algorithm",
    "Batch",
    "Correction",
    "Draw",
    "Preset",
    "Request",
    "State",
    "Totals",
    "beta_update",
    "beta_value",
    "bt_fit",
    "combine_channels",
    "diff_boundary",
    "gather_seg",
    "gnorm",
    "group_count",
    "group_max",
    "group_mean",
    "group_median",
    "group_std",
    "largest_remainder",
    "loo",
    "lookup",
    "masked_mean",
    "masked_quantile",
    "rank_in_group",
    "refine_groups",
    "register",
    "run_sampler",
    "segment_mean",
    "stateless_rng",
    "suffix_sum",
    "uncertainty",
    "vote",
    "with_gdpo",
    "zero_spread_share",
]
