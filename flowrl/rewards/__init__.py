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
from flowrl.rewards.clip_family import AestheticReward, CLIPScore, HPSv21, PickScore
from flowrl.rewards.geneval import GenEvalReward, HSVColors
from flowrl.rewards.jpeg import jpeg_compressibility, jpeg_incompressibility
from flowrl.rewards.remote import FingerprintError, RemoteReward
from flowrl.rewards.server import RewardServer

__all__ = [
    "AestheticReward",
    "CLIPScore",
    "FingerprintError",
    "GenEvalReward",
    "HPSv21",
    "HSVColors",
    "PickScore",
    "RemoteReward",
    "Reward",
    "RewardError",
    "RewardOutput",
    "RewardServer",
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
