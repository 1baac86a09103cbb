"""Rewards: any callable `(images, prompts, **columns)`, named, weighted and checked by a `RewardSet`."""

from flowrl.rewards.base import (
    Reward,
    RewardError,
    RewardOutput,
    Scores,
    names,
    quantise,
    register,
    resolve,
    to_pil,
)
from flowrl.rewards.clip_family import AestheticReward, CLIPScore, HPSv21, PickScore
from flowrl.rewards.combinators import cached, gate, majority, per_group, ranked, scaled, win_rate
from flowrl.rewards.geneval import GenEvalReward, HSVColors
from flowrl.rewards.image_reward import ImageReward
from flowrl.rewards.jpeg import jpeg_compressibility, jpeg_incompressibility
from flowrl.rewards.ocr import OCRReward
from flowrl.rewards.quality import BrisqueReward
from flowrl.rewards.remote import FingerprintError, RemoteReward
from flowrl.rewards.reward_set import RewardSet
from flowrl.rewards.server import RewardServer
from flowrl.rewards.vlm_client import ChatClient, JudgeError
from flowrl.rewards.vlm_judge import SoftTIFA, VQAScore
from flowrl.rewards.vlm_rubric import QwenVLJudge, RubricJudge, UnifiedReward, UnifiedReward2

__all__ = [
    "AestheticReward",
    "BrisqueReward",
    "CLIPScore",
    "ChatClient",
    "FingerprintError",
    "GenEvalReward",
    "HPSv21",
    "HSVColors",
    "ImageReward",
    "JudgeError",
    "OCRReward",
    "PickScore",
    "QwenVLJudge",
    "RemoteReward",
    "Reward",
    "RewardError",
    "RewardOutput",
    "RewardServer",
    "RewardSet",
    "RubricJudge",
    "Scores",
    "SoftTIFA",
    "UnifiedReward",
    "UnifiedReward2",
    "VQAScore",
    "cached",
    "gate",
    "jpeg_compressibility",
    "jpeg_incompressibility",
    "majority",
    "names",
    "per_group",
    "quantise",
    "ranked",
    "register",
    "resolve",
    "scaled",
    "to_pil",
    "win_rate",
]
