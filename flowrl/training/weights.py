"""Copies of the trainable weights: reference, old, ema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class WeightCopies:
    """Named copies of a set of parameters, swapped in and out in place.

    In place, because wrappers (DDP, FSDP2) keep references to the parameters. A graph built before a swap cannot be
    back-propagated after it: torch's version counter raises, so a wrong order is never silent. Of sharded parameters
    (FSDP2) each process copies its own shard.

    Args:
        parameters: name -> parameter.
        names: copies to make at once.
        module: what holds the parameters; needed where it is sharded.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], names: tuple[str, ...] = (), module: nn.Module | None = None
    ) -> None:
        self.parameters = dict(parameters)
        self._sharded = [m for m in (module.modules() if module else ()) if isinstance(m, FSDPModule)]
        self._copies: dict[str, list[Tensor]] = {}
        self._backup: list[Tensor] | None = None
        for name in names:
            self.capture(name)

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._copies)

    def _live(self) -> list[Tensor]:
        """The parameters' own storage."""
        with torch.no_grad():
            return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in self.parameters.values()]

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for module in self._sharded:  # else what a forward gathered outlives the weights it was gathered from
            module.reshard()
        torch._foreach_copy_(self._live(), values)

    @torch.no_grad()
    def capture(self, name: str) -> None:
        """copy <- policy, made if missing."""
        if name in self._copies:
            torch._foreach_copy_(self._copies[name], self._live())
        else:
            self._copies[name] = [p.clone() for p in self._live()]

    @torch.no_grad()
    def blend(self, name: str, decay: float) -> None:
        """copy <- decay * copy + (1 - decay) * policy; with decay 0 bit-equal to the policy."""
        if decay == 0:
            self.capture(name)
        else:
            torch._foreach_lerp_(self._copies[name], self._live(), 1 - decay)

    def is_policy(self, name: str) -> bool:
        """Whether a copy equals the policy, bit for bit.

        False also for a copy that there is not, and for sharded weights: only all processes together could tell.
        """
        if self._sharded or name not in self._copies or self._backup is not None:
            return False
        return all(torch.equal(a, b) for a, b in zip(self._copies[name], self._live(), strict=True))

    @contextmanager
    def swapped(self, name: str) -> Iterator[None]:
        """Run a block with a copy in place of the policy; the policy's bits are restored whatever happens."""
        if name not in self._copies:
            raise KeyError(f"no copy {name!r} of the weights; there are {sorted(self._copies)}")
        if self._backup is not None:
            raise RuntimeError("copies of the weights cannot be nested")
        self._backup = [p.clone() for p in self._live()]
        self._write(self._copies[name])
        try:
            yield
        finally:
            self._write(self._backup)
            self._backup = None


def ema_decay(n: int, cap: float) -> float:
    """Decay of the n-th optimizer step: min((1 + n) / (10 + n), cap). Source: Flow-GRPO's released code."""
    return min((1 + n) / (10 + n), cap)
