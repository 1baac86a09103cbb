"""Training and held-out prompts in GenEval's grammar.

The mix follows Flow-GRPO (Liu et al. 2025): position : counting : color_attr : colors : two_object = 7 : 5 : 3 : 1 : 1,
without any prompt whose text is in the benchmark. The draws and the split by class are our own, so the lists are not
those of its authors.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flowrl.rewards.geneval import COLORS, GENEVAL_CLASSES, RELATIONS, TASKS, benchmark_prompts, make_prompt

TASK_WEIGHTS = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
DRAWS = 50_000
UNSEEN_CLASSES = GENEVAL_CLASSES[3::4]
"""20 classes kept out of `seen_prompts`: every fourth in COCO order, so that all kinds of things occur."""
SEEN_CLASSES = tuple(name for name in GENEVAL_CLASSES if name not in UNSEEN_CLASSES)
UNSEEN_PER_TASK = 248  # 20 + 60 + 200 distinct prompts exist of the small tasks: 1,024 in all


def train_prompts() -> list[dict[str, Any]]:
    """50,000 draws over all 80 classes, less the benchmark's texts; drawn n times means one entry of `weight` n."""
    return _training(GENEVAL_CLASSES)


def seen_prompts() -> list[dict[str, Any]]:
    """The same over `SEEN_CLASSES` alone, for the question whether what was learnt carries over to other objects."""
    return _training(SEEN_CLASSES)


def unseen_prompts() -> list[dict[str, Any]]:
    """1,024 distinct prompts over `UNSEEN_CLASSES` alone: all of the small tasks, 248 of each of the others."""
    rng = np.random.default_rng(45)
    kept = []
    for tag in TASKS:
        drawn = [prompt for prompt, _ in _draw(tag, 10_000, rng, UNSEEN_CLASSES)]
        kept += [drawn[i] for i in rng.permutation(len(drawn))[:UNSEEN_PER_TASK]]
    return kept


def _training(names: Sequence[str]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(44)
    held_out = {prompt["prompt"] for prompt in benchmark_prompts()}
    return [
        {**prompt, "weight": times}
        for tag, share in TASK_WEIGHTS.items()
        for prompt, times in _draw(tag, round(DRAWS * share / sum(TASK_WEIGHTS.values())), rng, names)
        if prompt["prompt"] not in held_out
    ]


def _draw(tag: str, draws: int, rng: np.random.Generator, names: Sequence[str]) -> Iterator[tuple[dict[str, Any], int]]:
    """The distinct prompts among uniform draws of a task, and how often each came. A person never gets a colour."""
    pair, coloured = tag in ("two_object", "position", "color_attr"), tag in ("colors", "color_attr")
    names = [name for name in names if name != "person"] if coloured else names

    def choose(n: int, size: int) -> np.ndarray:
        """`[draws, size]` indices below n, those of a pair different."""
        first = rng.integers(n, size=draws)
        second = rng.integers(n - 1, size=draws)
        return np.stack([first, second + (second >= first)], 1)[:, :size]

    columns = [choose(len(names), 1 + pair)]
    columns.append(choose(len(COLORS), 1 + pair) if coloured else np.empty((draws, 0), int))
    columns.append(rng.integers(len(RELATIONS), size=(draws, 1)) if tag == "position" else np.zeros((draws, 1), int))
    columns.append(rng.integers(2, 5, size=(draws, 1)) if tag == "counting" else np.full((draws, 1), 2))
    rows, times = np.unique(np.concatenate(columns, 1), axis=0, return_counts=True)
    for row, n in zip(rows.tolist(), times.tolist(), strict=True):
        classes, colors = row[: 1 + pair], row[1 + pair : -2]
        yield make_prompt(tag, [names[i] for i in classes], [COLORS[i] for i in colors], RELATIONS[row[-2]], row[-1]), n
