"""Copies of the trainable weights: reference, old, ema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightCopies:
    """Named copies of a set of parameters, swapped in and out in place.

    In place, because wrappers (DDP, FSDP2) keep references to the parameters. A graph built before a swap cannot be
    back-propagated after it: torch's version counter raises, so a wrong order is never silent.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], names: tuple[str, ...] = ()) -> None:
        self.parameters = dict(parameters)
        self._copies: dict[str, list[Tensor]] = {}
        self._backup: list[Tensor] | None = None
        for name in names:
            self.capture(name)

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._copies)

    @torch.no_grad()
    def capture(self, name: str) -> None:
        """copy <- policy, made if missing."""
        if name in self._copies:
            torch._foreach_copy_(self._copies[name], list(self.parameters.values()))
        else:
            self._copies[name] = [p.detach().clone() for p in self.parameters.values()]

    @torch.no_grad()
    def blend(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * policy; with decay 0 bit-equal to the policy."""
        if decay == 0:
            self.capture(name)
        else:
            torch._foreach_lerp_(self._copies[name], list(self.parameters.values()), 1 - decay)

    @contextmanager
    def swapped(self, name: str) -> Iterator[None]:
        """Run a block with a copy in place of the policy; the policy's bits are restored whatever happens."""
        if name not in self._copies:
            raise KeyError(f"no copy {name!r} of the weights; there are {sorted(self._copies)}")
        if self._backup is not None:
            raise RuntimeError("copies of the weights cannot be nested")
        live = [p.detach() for p in self.parameters.values()]
        with torch.no_grad():
            self._backup = [p.clone() for p in live]
            torch._foreach_copy_(live, self._copies[name])
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, self._backup)
            self._backup = None


def ema_decay(n: int, cap: float) -> float:
    """Decay of the n-th optimizer step: min((1 + n) / (10 + n), cap). Source: Flow-GRPO's released code."""
    return min((1 + n) / (10 + n), cap)
