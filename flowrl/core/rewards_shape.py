"""Hook `reward_shape`: (reward, batch, state, cfg) -> reward, [B] or [B,K]. A chain."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from .batch import Batch, State
from .registry import register


@register("reward_shape", "identity")
def identity(reward: Tensor, batch: Batch, state: State, cfg: Any) -> Tensor:
    """The reward as it came."""
    return reward


def vote(
    answers: Sequence[Hashable | None], gid: Tensor, weights: Sequence[float] | None = None
) -> list[Hashable | None]:
    """Majority answer of the group of each row; None where no row of the group has an answer.

    None among `answers` means unparsable and does not vote. weights: votes per row, 1 by default. The answer
    that came first wins a tie.
    """
    labels = gid.tolist()
    tally: dict[int, dict[Hashable, float]] = {label: {} for label in labels}
    for i, (label, answer) in enumerate(zip(labels, answers, strict=True)):
        if answer is not None:
            tally[label][answer] = tally[label].get(answer, 0.0) + (1.0 if weights is None else weights[i])
    winner = {label: max(votes, key=votes.__getitem__, default=None) for label, votes in tally.items()}
    return [winner[label] for label in labels]


def bt_fit(pairs: Tensor, outcomes: Tensor, n: int, lam: float = 0.1) -> Tensor:
    """Bradley-Terry strengths b [n], float64 on the CPU, of items compared in pairs.

    Minimises -sum_m [y log sig(b_i - b_j) + (1-y) log sig(b_j - b_i)] + lam |b|^2 by damped Newton steps.
    pairs [M,2] int: (i, j). outcomes y [M] in [0,1]: 1 when i won, 0.5 for a tie. Raises ValueError unless
    lam > 0, without which an unbeaten item has no finite strength.
    """
    if lam <= 0:
        raise ValueError(f"lam must be positive, got {lam}")
    pairs, y = pairs.cpu(), outcomes.double().cpu()  # a handful of numbers
    design = torch.zeros(len(pairs), n, dtype=torch.float64)
    row = torch.arange(len(pairs))
    design[row, pairs[:, 0]], design[row, pairs[:, 1]] = 1.0, -1.0
    b = torch.zeros(n, dtype=torch.float64)

    def objective(b: Tensor) -> Tensor:
        return cross_entropy(design @ b, y, reduction="sum") + lam * b @ b

    for _ in range(100):
        p = torch.sigmoid(design @ b)
        gradient = design.T @ (p - y) + 2 * lam * b
        hessian = (design.T * (p * (1 - p))) @ design + 2 * lam * torch.eye(n, dtype=torch.float64)
        step = torch.linalg.solve(hessian, gradient)
        if step.abs().max() < 1e-12:
            break
        size = 1.0
        while size > 1e-6 and objective(b - size * step) > objective(b) + 1e-12:
            size /= 2
        b = b - size * step
    return b
