"""Random numbers as pure functions of indices.

Every draw is keyed by what it is for (seed, iteration, prompt, member, step), never by what was drawn
before. The same sample therefore gets the same noise in any batch, order, process or device, and a
resumed run needs no generator state.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

INITIAL = -1
"""The `step` of the initial latent; denoising steps count from 0."""


def generator(seed: int, *keys: int) -> torch.Generator:
    """CPU generator determined by `(seed, *keys)` alone.

    The integers are packed as int64 and hashed with BLAKE2b, so neighbouring keys give unrelated
    streams. Torch keeps 32 bits of a CPU seed: two different keys share a stream with chance 2^-32.

    Raises:
        TypeError: a key is not an integer.
        ValueError: a key does not fit in 64 bits.
    """
    return _generator("generator", seed, *keys)


def normal(shape: Sequence[int], *, seed: int, iteration: int, prompt: int, member: int, step: int) -> Tensor:
    """Standard normal noise of one sample at one step: float32 CPU tensor of `shape`.

    Args:
        shape: of one sample, without a batch dimension.
        prompt: index of the prompt (the group).
        member: index within the group. Pass a constant to share noise within the group.
        step: denoising step, or `INITIAL` for the initial latent.
    """
    draw = _generator("normal", seed, iteration, prompt, member, step)
    return torch.randn(tuple(shape), generator=draw, dtype=torch.float32)


def batch_normal(
    shape: Sequence[int],
    seed: int,
    iteration: int,
    prompts: Sequence[int],
    members: Sequence[int],
    step: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`normal` for the samples `zip(prompts, members)`, stacked: `[b, *shape]`.

    Drawn in float32 on the CPU, then moved and cast.

    Raises:
        ValueError: `prompts` and `members` differ in length or are empty.
    """
    if len(prompts) != len(members) or len(prompts) == 0:
        raise ValueError(f"prompts and members must be equally long, at least 1: {len(prompts)}, {len(members)}")
    rows = [
        normal(shape, seed=seed, iteration=iteration, prompt=prompt, member=member, step=step)
        for prompt, member in zip(prompts, members, strict=True)
    ]
    return torch.stack(rows).to(device=device, dtype=dtype)


def permutation(n: int, seed: int, *keys: int) -> Tensor:
    """Uniform random permutation of `0..n-1`: int64 CPU tensor `[n]`."""
    return torch.randperm(n, generator=_generator("permutation", seed, *keys))


def integers(low: int, high: int, seed: int, *keys: int) -> int:
    """One uniform integer in `[low, high)`. Raises ValueError if the range is empty."""
    if high <= low:
        raise ValueError(f"no integer in [{low}, {high})")
    return int(torch.randint(low, high, (), generator=_generator("integers", seed, *keys)))


def _generator(purpose: str, *keys: int) -> torch.Generator:
    # The purpose keeps a shuffle and a window that happen to share their keys independent.
    indices = [operator.index(key) for key in keys]
    try:
        packed = struct.pack(f"<{len(indices)}q", *indices)
    except struct.error:
        raise ValueError(f"seed and keys must fit in 64 bits: {indices}") from None
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
