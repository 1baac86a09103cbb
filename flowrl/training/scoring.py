"""Rewards of a rollout, called chunk by chunk while the next chunk is sampled."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from flowrl.rewards import RewardOutput, RewardSet
from flowrl.rewards.base import Scores
from flowrl.rollout import Prompt
from flowrl.training.groups import score_groups
from flowrl.training.prompts import columns_of


class Scoring:
    """The images and scores of one rollout, which comes in chunks of consecutive rows.

    Rewards that wait (async or `remote`) set off when their chunk is added, and of all chunks they run together. The
    others compute: with `thread` in a thread of its own, one chunk after the other while the caller goes on, else in
    `add`. A set with a group-wise reward is called once, in `result`, with all images.

    Values and errors are those of one call with all images, if a point-wise reward scores an image whatever the others
    of its batch are.

    A context manager: what has not been scored when the block ends by an error is given up.
    """

    def __init__(
        self,
        rewards: RewardSet,
        prompts: Sequence[Prompt],
        columns: Sequence[str],
        numbers: Sequence[int] | None = None,
        *,
        thread: bool = False,
        first: bool = False,
    ) -> None:
        """numbers: of the samples in the iteration, for group-wise rewards; default 0, 1, ...
        thread: for a generator on a GPU. On the CPU a second thread that computes would only be in its way.
        first: the rewards were never called. Nothing runs beside them on the first chunk then: while a model loads its
            weights, defaults of torch such as the dtype may be others, for all threads.
        """
        self.rewards, self.first = rewards, first
        self.prompts = [p.text for p in prompts]
        self.columns = columns_of(prompts, columns)
        self.media: Any = None
        """`[B, 3, H, W]`, filled by `add`."""
        self.groups = [p.index for p in prompts]
        self.numbers = range(len(prompts)) if numbers is None else numbers
        self.at_once = rewards.groupwise
        self._added = 0
        self._answers: list[Future[Generator[dict[str, RewardOutput]]]] = []
        self._waiting: SimpleQueue = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="flowrl-scoring", daemon=True) if thread else None

    def add(self, images: Tensor) -> None:
        """The images `[b, 3, H, W]` of the next b rows.

        Raises RewardError when a reward failed on an earlier chunk: what is still to be sampled would be in vain.
        """
        if self.media is None:
            self.media = images.new_empty((len(self.prompts), *images.shape[1:]))
        rows = slice(self._added, self._added + len(images))
        self._added = rows.stop
        self.media[rows] = images
        if self.at_once:
            return
        for earlier in self._answers:
            if earlier.done():
                earlier.result()
        self._answers.append(answers := Future())
        if self._thread is None:
            self._call(rows, answers)
        else:
            self._waiting.put((rows, answers))
        if self._thread is None or (self.first and rows.start == 0):
            answers.result()

    def result(self) -> Scores:
        """The scores of all rows, when the last reward has answered. Raises as `RewardSet.score` does."""
        if self.at_once:
            with torch.no_grad():
                return score_groups(self.rewards, self.media, self.prompts, self.columns, self.groups, self.numbers)
        parts = [next(answers.result()) for answers in self._answers]
        answers = {name: _joined([part[name] for part in parts]) for name in self.rewards.weights}
        return self.rewards.judge(answers, self.media, self.prompts, self.columns)

    def _call(self, rows: slice, answers: Future) -> None:
        """Call the rewards on a chunk; the trainer's thread meets their errors in `add` or `result`."""
        try:
            with torch.no_grad():
                answers.set_result(self.rewards.start(self.media, self.prompts, self.columns, rows))
        except BaseException as error:
            answers.set_exception(error)

    def _work(self) -> None:
        while (chunk := self._waiting.get()) is not None:
            rows, answers = chunk
            if not answers.set_running_or_notify_cancel():
                continue
            if self.media.is_cuda:
                torch.cuda.set_device(self.media.device)  # every thread has its own
            self._call(rows, answers)
            if answers.exception() is not None:
                return

    def __enter__(self) -> Scoring:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for answers in self._answers:
            answers.cancel()
        self._waiting.put(None)
        if self._thread is not None and (kind is None or issubclass(kind, Exception)):
            self._thread.join()  # not after Ctrl-C: its reward may take long, and the thread ends with the process
        for answers in self._answers:
            if answers.done() and not answers.cancelled() and answers.exception() is None:
                answers.result().close()


def _joined(parts: Sequence[RewardOutput]) -> RewardOutput:
    """A reward's answers to one chunk after the other; a detail that some chunks lack is None there."""
    details: dict[str, Tensor | list] = {
        key: [x for part in parts for x in part.details.get(key, [None] * len(part.values))]
        for key in dict.fromkeys(key for part in parts for key in part.details)
    }
    valid = torch.cat([torch.as_tensor(part.valid) for part in parts])
    return RewardOutput(torch.cat([part.values for part in parts]), valid, details)
