"""Hook `on_step`: (state, stats, cfg) -> None, once after each update; the only hook that writes state.

`stats` are the metrics of `Algorithm.loss` added up over the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .batch import State
from .registry import register


@register("on_step", "noop")
def noop(state: State, stats: Mapping[str, Any], cfg: Any) -> None:
    """Nothing to steer."""


@register("on_step", "adaptive_kl", kl_target=0.01, kl_gain=0.1)
def adaptive_kl(state: State, stats: Mapping[str, Any], cfg: Any) -> None:
    """beta <- beta (1 + kl_gain e), e = KL / kl_target - 1 clamped to +-0.2.

    Starts from cfg.beta; KL is stats["kl"]. Source: arXiv 1909.08593, section 2.2.
    """
    error = min(max(float(stats["kl"]) / cfg.kl_target - 1, -0.2), 0.2)
    state["beta"] = state.get("beta", cfg.beta) * (1 + cfg.kl_gain * error)
