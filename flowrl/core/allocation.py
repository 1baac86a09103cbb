"""Hook `sampler`: which samples are drawn for which prompt.

(prompts, state, cfg, services) -> generator that yields lists of `Request`, is sent the finished and rewarded
`Draw`s of each list, and returns the draws to train on. `services` is what the caller offers besides
generation (scoring, judging, a teacher); nothing of it is checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .batch import State
from .registry import register


@dataclass(frozen=True)
class Request:
    """Draw n samples for `prompt` with group id `group`.

    train_prompt: the context that scores the samples when it is not `prompt`. prefix: actions forced on the
    sample, masked out of the loss. model: who generates ("policy", "teacher", ...). tags: copied to
    `Batch.extra`.
    """

    prompt: Any
    n: int
    group: int
    train_prompt: Any = None
    prefix: Any = None
    temperature: float = 1.0
    model: str = "policy"
    role: str | None = None
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Draw:
    """One sample of a request: whatever was generated (opaque here), its reward and what that is made of."""

    request: Request
    sample: Any
    reward: Tensor | float
    parts: dict[str, float] = field(default_factory=dict)
    in_loss: bool = True


Sampler = Generator[list[Request], list[Draw], list[Draw]]


@register("sampler", "fixed", group_size=8)
def fixed(prompts: Sequence[Any], state: State, cfg: Any, services: Any) -> Sampler:
    """group_size samples for every prompt, one group per place in the list."""
    return (yield [Request(prompt, cfg.group_size, group) for group, prompt in enumerate(prompts)])


def run_sampler(sampler: Sampler, serve: Callable[[list[Request]], list[Draw]]) -> tuple[list[Draw], int]:
    """Answer the requests of `sampler` with `serve` until it returns: (draws to train on, samples
    generated)."""
    generated, draws = 0, None
    while True:
        try:
            requests = next(sampler) if draws is None else sampler.send(draws)
        except StopIteration as end:
            return end.value, generated
        draws = serve(requests)
        generated += sum(request.n for request in requests)


def stateless_rng(seed: int, step: int, gid: int) -> torch.Generator:
    """CPU generator that depends on (seed, step, group id) alone, so that pure hooks can draw random
    numbers."""
    word = 0
    for part in (seed, step, gid):  # splitmix64: neighbouring triples get unrelated streams
        word = (word + part + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        word ^= word >> 31
    return torch.Generator().manual_seed(word >> 1)
