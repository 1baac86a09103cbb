"""Hook `kl`: (batch, cfg) -> [B,T], KL(policy || reference) of each unit, carries gradient.

k1, k2, k3 estimate it from the sampled action, with d = ref_logp - logp (clamped to +-20).
Source: J. Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .batch import Batch
from .registry import register


def _gap(batch: Batch) -> Tensor:
    assert batch.logp is not None and batch.ref_logp is not None
    return (batch.ref_logp.detach() - batch.logp).clamp(-20, 20)


@register("kl", "k1", needs=("logp", "ref_logp"))
def k1(batch: Batch, cfg: Any) -> Tensor:
    """-d: unbiased, high variance, and as a loss its expected on-policy gradient is 0."""
    return -_gap(batch)


@register("kl", "k2", needs=("logp", "ref_logp"))
def k2(batch: Batch, cfg: Any) -> Tensor:
    """d^2 / 2: biased, its on-policy gradient is that of the KL."""
    return _gap(batch) ** 2 / 2


@register("kl", "k3", needs=("logp", "ref_logp"))
def k3(batch: Batch, cfg: Any) -> Tensor:
    """exp(d) - d - 1: unbiased and never negative."""
    d = _gap(batch)
    return d.exp() - d - 1


@register("kl", "exact", needs=("token_kl",))
def exact(batch: Batch, cfg: Any) -> Tensor:
    """`batch.token_kl`: the closed form, computed by whoever knows both distributions."""
    assert batch.token_kl is not None
    return batch.token_kl
