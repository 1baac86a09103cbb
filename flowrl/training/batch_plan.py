"""Which process generates and trains which sample: derived from the experiment, never part of it."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl import noise

_ORDER = int.from_bytes(b"order", "little")  # keeps the shuffle of the samples apart from other draws


@dataclass(frozen=True)
class BatchPlan:
    """The layout of one iteration: P x G samples, U updates, W processes, micro-batches of at most m.

    Sample s is member `s % G` of the iteration's prompt number `s // G`. A permutation of (seed, iteration) deals the
    samples to updates; inside an update, samples go to processes in turn. So the set of samples behind every optimizer
    step is the same for any number of processes.

    Raises:
        ValueError: the samples do not divide into updates and processes; the message proposes numbers that do.
    """

    prompts: int
    group_size: int
    updates: int
    processes: int
    micro_batch_size: int

    def __post_init__(self) -> None:
        share = self.updates * self.processes
        if self.samples % share:
            fits = [p for p in range(1, 4 * self.prompts + share + 1) if p * self.group_size % share == 0]
            nearest = sorted(fits, key=lambda p: abs(p - self.prompts))[:2]
            raise ValueError(
                f"{self.prompts} prompts x {self.group_size} samples = {self.samples} do not divide into "
                f"{self.updates} updates x {self.processes} processes. "
                f"Take prompts_per_iteration = {' or '.join(map(str, sorted(nearest)))}, "
                f"or change group_size or updates_per_iteration."
            )

    @property
    def samples(self) -> int:
        """Samples of one iteration over all processes."""
        return self.prompts * self.group_size

    @property
    def per_update(self) -> int:
        """Samples of one update on one process."""
        return self.samples // (self.updates * self.processes)

    @property
    def micro_batches(self) -> list[slice]:
        """Row slices of one update's share; the last one may be smaller."""
        m = self.micro_batch_size
        return [slice(i, min(i + m, self.per_update)) for i in range(0, self.per_update, m)]

    def rows(self, seed: int, iteration: int, rank: int) -> list[int]:
        """Sample numbers of `rank`, update after update."""
        order = noise.permutation(self.samples, seed, iteration, _ORDER).tolist()
        size = self.samples // self.updates
        return [s for u in range(self.updates) for s in order[u * size : (u + 1) * size][rank :: self.processes]]

    def describe(self) -> str:
        """One paragraph for the log."""
        return (
            f"{self.prompts} prompts x {self.group_size} samples = {self.samples} images an iteration, "
            f"{self.updates} update(s) of {self.samples // self.updates}; "
            f"{self.processes} process(es): {self.per_update} samples each per update in "
            f"{len(self.micro_batches)} micro-batch(es) of at most {self.micro_batch_size}"
        )
