"""What is watched while training: reward statistics, exact drift, non-finite numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flowrl import noise
from flowrl.core import AdvOut, Batch, group_std, zero_spread_share
from flowrl.policy import Policy
from flowrl.rollout import Prompt, Rollout
from flowrl.samplers.flow import FlowSampler


def reward_metrics(prompts: list[Prompt], parts: Mapping[str, Tensor], batch: Batch) -> dict[str, float]:
    """Mean and std per reward and of the total, means per task (`tag`), spread within groups, failures."""
    valid = batch.valid_rows
    total = batch.reward[valid]
    metrics = {
        "reward/mean": total.mean().item(),
        "reward/std": total.std(correction=0).item(),
        "reward/group_std": group_std(batch.reward.nan_to_num(), batch.group_id, valid, 0)[valid].mean().item(),
        "reward/zero_spread_share": float(zero_spread_share(batch.reward.nan_to_num(), batch.group_id, valid)),
        "reward/invalid_share": 1 - valid.float().mean().item(),
    }
    for name, values in parts.items():
        known = values[~values.isnan()]
        if len(known):
            metrics[f"reward/{name}/mean"] = known.mean().item()
            metrics[f"reward/{name}/std"] = known.std(correction=0).item()
    tags = [p.metadata.get("tag") for p in prompts]
    for tag in sorted({t for t in tags if t is not None}):
        rows = torch.tensor([t == tag for t in tags]) & valid
        if rows.any():
            metrics[f"reward/task/{tag}"] = batch.reward[rows].mean().item()
    return metrics


def advantage_metrics(advantage: AdvOut, batch: Batch) -> dict[str, float]:
    """Spread of the advantages and the share that is exactly 0."""
    a = advantage.adv[batch.valid_rows]
    if not a.numel():
        return {"advantage/std": 0.0, "advantage/abs_max": 0.0, "advantage/zero_share": 1.0}
    return {
        "advantage/std": a.std(correction=0).item(),
        "advantage/abs_max": a.abs().max().item(),
        "advantage/zero_share": (a == 0).float().mean().item(),
    }


@torch.no_grad()
def drift(policy: Policy, sampler: FlowSampler, rollout: Rollout, reference: bool) -> dict[str, float]:
    """How far the policy is from the behaviour weights and from the reference, on recorded states.

    With stochastic steps: exact KL per step, averaged over latent elements (nats), and its mean. Without: mean squared
    velocity difference to the reference half-way from the final latents to their initial noise.
    """
    metrics: dict[str, float] = {}
    steps = rollout.steps
    if steps.numel():
        now = [policy.evaluate(rollout, u, sampler).distribution for u in range(rollout.units)]
        before = [type(d)(rollout.means[:, u], d.std) for u, d in enumerate(now)]
        _kl_metrics(metrics, "old", steps, now, before)
        if reference:
            with policy.use("reference"):
                start = [policy.evaluate(rollout, u, sampler).distribution for u in range(rollout.units)]
            _kl_metrics(metrics, "reference", steps, now, start)
    elif reference:
        half = rollout.sigmas.new_tensor(0.5)
        eps = noise.batch_normal(
            rollout.latents.shape[1:],
            rollout.seed,
            rollout.iteration,
            [p.index for p in rollout.prompts],
            rollout.members,
            noise.INITIAL,
            rollout.latents.device,
        )
        x = 0.5 * (rollout.latents.float() + eps)
        v = policy.velocity(x, half, rollout)
        with policy.use("reference"):
            metrics["drift/velocity_mse_reference"] = (v - policy.velocity(x, half, rollout)).pow(2).mean().item()
    return metrics


def _kl_metrics(metrics: dict[str, float], name: str, steps: Tensor, now, other) -> None:
    kls = torch.stack([a.kl(b, reduce="mean") for a, b in zip(now, other, strict=True)], 1).cpu()
    metrics[f"kl/{name}"] = kls.mean().item()
    metrics |= {f"kl/{name}/step_{s:02d}": kls[steps == s].mean().item() for s in steps.unique().tolist()}


def first_non_finite(tensors: Mapping[str, Tensor | None], module: nn.Module) -> str:
    """The name of the first tensor, in the order of computation, that holds NaN or inf."""
    for name, value in tensors.items():
        if value is not None and not torch.isfinite(value).all():
            return name
    for name, p in module.named_parameters():
        if not torch.isfinite(p).all():
            return f"weight {name}"
    for name, p in module.named_parameters():
        if p.grad is not None and not torch.isfinite(p.grad).all():
            return f"gradient of {name}"
    return "loss (all its inputs are finite)"
