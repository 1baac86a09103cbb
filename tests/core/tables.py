"""The random table of the preset tests: B=8, T=6, two groups of four, ragged mask."""

import torch

from flowrl.core import Batch

B, T = 8, 6
LENGTHS = (6, 4, 5, 1, 3, 6, 2, 6)


def table(seed=0, spread=0.1, **fields):
    """A float64 batch; log-ratios have scale `spread` and every optional field is there."""
    rng = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(B, T, generator=rng, dtype=torch.float64)

    logp = draw() - 1
    values = {
        "mask": torch.arange(T) < torch.tensor(LENGTHS)[:, None],
        "logp": logp.clone().requires_grad_(),
        "old_logp": logp + spread * draw(),
        "behav_logp": logp + spread * draw(),
        "ref_logp": logp + spread * draw(),
        "token_kl": draw() ** 2,
        "reward": torch.rand(B, generator=rng, dtype=torch.float64),
        "group_id": torch.tensor([3, 3, 3, 3, -7, -7, -7, -7]),
        "extra": {
            "entropy_grad": draw() ** 2,
            "divergence": draw() ** 2,
            "std": draw().abs() + 0.1,
            "length": draw().abs() + 0.1,
        },
    }
    return Batch(**(values | fields))


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)
