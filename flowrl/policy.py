"""The protocol every generator implements: a stochastic policy that acts step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor, nn

from flowrl.distributions import Gaussian
from flowrl.rollout import Conditioning, Prompt, Rollout

Weights = Literal["policy", "reference", "old", "ema"]


@dataclass
class Transition:
    """One step of the policy scored again."""

    distribution: Gaussian
    """Over the next state."""
    log_prob: Tensor
    """`[b]`, of the recorded action."""
    velocity: Tensor
    """`[b, ...]`, the network's guided output, float32."""


class Copies(Protocol):
    """Named copies of the trainable weights; the trainer provides them."""

    def swapped(self, name: str) -> AbstractContextManager[None]:
        """Run a block with a copy in place of the policy."""
        ...

    def is_policy(self, name: str) -> bool:
        """Whether a copy equals the policy, bit for bit. False also where only all processes together could tell."""
        ...

    def blend(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * policy."""
        ...


class Policy(Protocol):
    """A generator seen as a policy. Every method but `evaluate` and `velocity` runs without gradients."""

    module: nn.Module
    """The network whose parameters are trained, unwrapped: rollouts call it."""
    forward_module: nn.Module
    """The same network as the launcher wrapped it (DDP): passes with gradients go through it."""
    copies: Copies | None

    def encode(self, prompts: Sequence[Prompt], guidance_scale: float = 1.0) -> Conditioning:
        """Prompt embeddings, one row per entry, cached by text."""
        ...

    def sample(
        self,
        prompts: Sequence[Prompt],
        members: Sequence[int],
        sampler,
        *,
        seed: int,
        iteration: int,
        batch_size: int,
        on_latents: Callable[[Tensor], None] | None = None,
    ) -> Rollout:
        """Generate one sample per (prompt, member); the result depends on these indices alone.

        `on_latents` is given those of the first `batch_size` rows, of the next ones and so on, each batch as soon as it
        is sampled.
        """
        ...

    def evaluate(self, rollout: Rollout, unit: int, sampler) -> Transition:
        """Score the recorded action of column `unit` under the current weights; carries gradient."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, rollout: Rollout) -> Tensor:
        """`v(x, sigma)` `[b, ...]` in float32 with the rollout's conditioning; carries gradient."""
        ...

    def sigmas(self, sampler) -> Tensor:
        """The sampler's grid for this generator and resolution, `[T + 1]`."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images `[b, 3, H, W]` in [0, 1], float32."""
        ...

    def use(self, weights: Weights) -> AbstractContextManager[None]:
        """Run the block with other weights; the policy's own are back afterwards, whatever happens inside."""
        ...

    def equals(self, weights: Weights) -> bool:
        """Whether a pass with these weights is known to give what the policy's own gives: it can be saved."""
        ...

    def save_pretrained(self, directory: str | Path) -> None:
        """Write what stock tools load."""
        ...
