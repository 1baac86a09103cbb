"""Scores by rewards that compare the samples of a group, whose samples may be on several processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from torch import Tensor

from flowrl.rewards import RewardSet
from flowrl.rewards.base import GROUP, Scores


def score_groups(
    rewards: RewardSet,
    images: Tensor,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence],
    groups: Sequence[int],
    numbers: Sequence[int],
) -> Scores:
    """The scores of this process's samples, every group scored whole by one process; without details.

    images [b, 3, H, W], prompts [b], columns name -> [b], groups [b]: this process's samples. numbers [b]: theirs in
    the iteration; in their order the rewards see a group, whatever the number of processes. All images of the
    iteration pass through every process, and all must call this. Raises as `RewardSet.score` does.
    """
    state = PartialState()
    given = [{**{k: v[i] for k, v in columns.items()}, GROUP: group} for i, group in enumerate(groups)]
    every = gather_object(list(zip(numbers, prompts, given, strict=True)))
    images = gather(images)  # in the order of `every`
    order = sorted(range(len(every)), key=lambda i: every[i][0])
    labels = list(dict.fromkeys(every[i][2][GROUP] for i in order))
    mine = set(labels[state.process_index :: state.num_processes])
    rows = [i for i in order if every[i][2][GROUP] in mine]
    found: dict[int, list[float]] = {}
    if rows:
        texts, metadata = [every[i][1] for i in rows], [every[i][2] for i in rows]
        scores = rewards.score(images[rows], texts, {key: [m[key] for m in metadata] for key in metadata[0]})
        table = torch.stack([scores.total, scores.valid.float(), *scores.parts.values()], 1).tolist()
        found = dict(zip([every[i][0] for i in rows], table, strict=True))
    known = {number: row for part in gather_object([found]) for number, row in part.items()}
    table = torch.tensor([known[number] for number in numbers])
    parts = {name: table[:, i + 2] for i, name in enumerate(rewards.weights)}
    return Scores(table[:, 0], parts, table[:, 1] > 0, {})
