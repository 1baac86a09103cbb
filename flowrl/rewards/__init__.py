"""Rewards: any callable `(images, prompts, **columns)`, named, weighted and checked by a `RewardSet`."""

from flowrl.rewards.base import (
    Reward,
    RewardError,
    RewardOutput,
    RewardSet,
    Scores,
    gate,
    names,
    quantise,
    register,
    resolve,
    scaled,
    to_pil,
)
from flowrl.rewards.geneval import GenEvalReward, HSVColors
from flowrl.rewards.jpeg import jpeg_compressibility, jpeg_incompressibility

__all__ = [
    "GenEvalReward",
    "HSVColors",
    "Reward",
    "RewardError",
    "RewardOutput",
    "RewardSet",
    "Scores",
    "gate",
    "jpeg_compressibility",
    "jpeg_incompressibility",
    "names",
    "quantise",
    "register",
    "resolve",
    "scaled",
    "to_pil",
]
