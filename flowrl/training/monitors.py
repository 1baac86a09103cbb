"""What is measured while training: rewards, exact drift, image statistics, non-finite numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flowrl import noise
from flowrl.core import AdvOut, Batch, group_count, group_std, zero_spread_share
from flowrl.policy import Policy
from flowrl.rollout import Prompt, Rollout
from flowrl.samplers.flow import FlowSampler


def reward_metrics(prompts: list[Prompt], parts: Mapping[str, Tensor], batch: Batch) -> dict[str, float]:
    """Mean and std per reward and of the total, means per task (`tag`), spread and size of groups, failures."""
    valid = batch.valid_rows
    total = batch.reward[valid]
    sizes = group_count(batch.group_id, valid)
    metrics = {
        "reward/mean": total.mean().item(),
        "reward/std": total.std(correction=0).item(),
        "reward/group_std": group_std(batch.reward.nan_to_num(), batch.group_id, valid, 0)[valid].mean().item(),
        "reward/zero_spread_share": float(zero_spread_share(batch.reward.nan_to_num(), batch.group_id, valid)),
        "reward/invalid_share": 1 - valid.float().mean().item(),
        "allocation/group_min": sizes.min().item(),
        "allocation/group_max": sizes.max().item(),
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

    With stochastic steps: exact KL per step, averaged over latent elements (nats), and its mean; and the gap
    lp - lp_old of the recorded actions' log-probabilities, in expectation -KL(old || policy). Without: mean squared
    velocity difference to the reference half-way from the final latents to their initial noise.
    """
    metrics: dict[str, float] = {}
    steps = rollout.steps
    if steps.numel():
        scored = [policy.evaluate(rollout, u, sampler) for u in range(rollout.units)]
        now = [transition.distribution for transition in scored]
        before = [type(d)(rollout.means[:, u], d.std) for u, d in enumerate(now)]
        _kl_metrics(metrics, "old", steps, now, before)
        gap = torch.stack([transition.log_prob for transition in scored], 1) - rollout.log_prob
        _per_step(metrics, "log_prob_gap", steps, gap)
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
    kls = torch.stack([a.kl(b, reduce="mean") for a, b in zip(now, other, strict=True)], 1)
    _per_step(metrics, f"kl/{name}", steps, kls)


def _per_step(metrics: dict[str, float], name: str, steps: Tensor, table: Tensor) -> None:
    """Means of a `[B, U]` table: over all of it, and per step of the sampler."""
    table = table.cpu()
    metrics[name] = table.mean().item()
    metrics |= {f"{name}/step_{s:02d}": table[steps == s].mean().item() for s in steps.unique().tolist()}


def effective_sample_size(ratio_mean: float, ratio_square_mean: float) -> float:
    """(sum r)^2 / (n sum r^2) of importance weights r, in (0, 1]: 1 when all are equal, 1/n when one outweighs all.

    Both means add up over micro-batches and processes, the quotient does not. 0 when there are no samples. Source:
    Kish, Survey Sampling (1965).
    """
    return min(ratio_mean**2 / ratio_square_mean, 1.0) if ratio_square_mean else 0.0


def image_statistics(images: Tensor) -> dict[str, Tensor]:
    """Statistics `[B]` of images `[B, 3, H, W]` in [0, 1], 3 x 3 pixels or more; grey is the mean of the channels.

    high_frequency  share of grey's power spectrum, its mean left out, above half the Nyquist frequency; 0 if constant
    saturation      mean over pixels of max - min over channels (the chroma of HSV)
    sharpness       variance over pixels of grey's Laplacian (4 neighbours)
    """
    grey = images.float().mean(1)
    centred = grey - grey.mean((1, 2), keepdim=True)
    power = torch.fft.fft2(centred, norm="forward").abs().square()  # sums to the variance
    down, across = (torch.fft.fftfreq(n, device=grey.device) for n in grey.shape[1:])
    high = torch.hypot(down[:, None], across[None]) > 0.25
    c = grey[:, 1:-1, 1:-1]
    laplacian = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:] - 4 * c
    return {
        "high_frequency": (power * high).sum((1, 2)) / power.sum((1, 2)).clamp_min(1e-10),
        "saturation": (images.amax(1) - images.amin(1)).float().mean((1, 2)),
        "sharpness": laplacian.flatten(1).var(1, correction=0),
    }


def thumbnails(images: Tensor, size: int = 32) -> Tensor:
    """Block means of images `[B, 3, H, W]`, no side longer than `size`."""
    return torch.nn.functional.avg_pool2d(images.float(), -(-max(images.shape[-2:]) // size))


def group_diversity(images: Tensor, group_id: Tensor) -> float | None:
    """Mean over groups of the RMS pixel distance between two different members; None if no group has two.

    sqrt(mean over pairs and pixels of (x_i - x_j)^2) = sqrt(2 x unbiased variance), so no pair is formed. In [0, 1] for
    images in [0, 1]: 0 when all members are equal.
    """
    groups = [images[group_id == g].flatten(1).double() for g in group_id.unique()]
    spread = [(2 * x.var(0).mean()).sqrt() for x in groups if len(x) > 1]
    return torch.stack(spread).mean().item() if spread else None


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
