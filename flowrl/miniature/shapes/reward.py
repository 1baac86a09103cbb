"""GenEval's scoring on the world "shapes": our detector, the palette as colour classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from flowrl.miniature.shapes.detector import detect
from flowrl.miniature.shapes.world import COLORS, PALETTE, SHAPES
from flowrl.rewards import GenEvalReward, register
from flowrl.rewards.geneval import Detection

_PALETTE = np.array(list(PALETTE.values()), np.float32)


class ShapesDetector:
    """`detect` as a GenEval detector."""

    classes = SHAPES

    def __call__(self, images: Tensor) -> list[list[Detection]]:
        return [detect(image)[0] for image in _uint8(images)]


def palette_colors(image: Tensor, detections: Sequence[Detection], class_name: str) -> list[str]:
    """The palette colour nearest to the median pixel of each object."""
    pixels = _uint8(image[None])[0].astype(np.float32)
    medians = [np.median(pixels[d.mask], axis=0) for d in detections]
    return [COLORS[int(((_PALETTE - m) ** 2).sum(-1).argmin())] for m in medians]


def _uint8(images: Tensor) -> np.ndarray:
    return (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


def _reward(variant: Literal["official", "exact", "partial"], name: str) -> GenEvalReward:
    reward = GenEvalReward(ShapesDetector(), palette_colors, variant)
    reward.name = name
    return register(name)(reward)


shapes = _reward("partial", "shapes")
"""Share of the prompt's clauses that the image meets, in [0, 1]: the training signal."""
shapes_official = _reward("official", "shapes_official")
"""1 where GenEval calls the image correct, else 0: what is reported."""
