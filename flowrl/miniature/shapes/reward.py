"""GenEval's scoring on the world "shapes": our detector, the palette as colour classifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flowrl.miniature.shapes.detector import detect
from flowrl.miniature.shapes.world import COLORS, PALETTE, SHAPES, Object, render
from flowrl.rewards import GenEvalReward, register
from flowrl.rewards.geneval import ColorClassifier, Detection

_PALETTE = np.array(list(PALETTE.values()), np.float32)


class ShapesDetector:
    """`detect` as a GenEval detector."""

    classes = SHAPES

    def __call__(self, images: Tensor) -> list[list[Detection]]:
        return [detect(image)[0] for image in _uint8(images)]

    def golden(self) -> list[tuple[np.ndarray, dict[str, Any], bool]]:
        """Prompts that two known scenes show or do not show: (image, GenEval metadata, whether it is correct)."""
        pair = render([Object("circle", "red", 2, 12, 8), Object("cross", "blue", 22, 12, 8)])
        three = render([Object("square", "green", 4 + 9 * i, 10, 7) for i in range(3)])

        def case(scene: np.ndarray, tag: str, correct: bool, *include: dict[str, Any], exclude=()):
            metadata = {"tag": tag, "prompt": f"golden {tag}", "include": list(include), "exclude": list(exclude)}
            return scene, metadata, correct

        def one(shape: str, **more: Any) -> dict[str, Any]:
            return {"class": shape, "count": 1, **more}

        def squares(n: int) -> dict[str, Any]:
            return {"class": "square", "count": n}

        return [
            case(pair, "two_object", True, one("circle"), one("cross")),
            case(pair, "single_object", False, one("triangle")),
            case(pair, "colors", True, one("cross", color="blue")),
            case(pair, "colors", False, one("circle", color="blue")),
            case(pair, "position", True, one("cross"), one("circle", position=["left of", 0])),
            case(pair, "position", False, one("circle"), one("cross", position=["left of", 0])),
            case(three, "counting", True, squares(3), exclude=[squares(4)]),
            case(three, "counting", False, squares(2), exclude=[squares(3)]),
        ]


def palette() -> ColorClassifier:
    """`palette_colors`, as `load_colors` takes it."""
    return palette_colors


def palette_colors(image: Tensor, detections: Sequence[Detection], class_name: str) -> list[str]:
    """The palette colour nearest to the median pixel of each object."""
    pixels = _uint8(image[None])[0].astype(np.float32)
    medians = [np.median(pixels[d.mask], axis=0) for d in detections]
    return [COLORS[int(((_PALETTE - m) ** 2).sum(-1).argmin())] for m in medians]


def _uint8(images: Tensor) -> np.ndarray:
    return (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()


class _ShapesReward(GenEvalReward):
    range = (0.0, 1.0)

    def known_pair(self) -> tuple[Tensor, list[str], dict[str, list]]:
        """The scene of a prompt, and the same with its colours swapped."""
        wanted = [("circle", "red"), ("cross", "blue")]
        include = [{"class": shape, "count": 1, "color": color} for shape, color in wanted]
        scenes = [
            [Object(shape, color, x, 12, 8) for (shape, _), color, x in zip(wanted, colors, (4, 20), strict=True)]
            for colors in (("red", "blue"), ("blue", "red"))
        ]
        images = torch.from_numpy(np.stack([render(scene) for scene in scenes])).permute(0, 3, 1, 2).float() / 255
        return (
            images,
            ["a photo of a red circle and a blue cross"] * 2,
            {"tag": ["color_attr"] * 2, "include": [include] * 2},
        )


def _reward(variant: Literal["official", "exact", "partial"], name: str) -> GenEvalReward:
    reward = _ShapesReward(ShapesDetector(), palette_colors, variant)
    reward.name = name
    return register(name)(reward)


shapes = _reward("partial", "shapes")
"""Share of the prompt's clauses that the image meets, in [0, 1]: the training signal."""
shapes_official = _reward("official", "shapes_official")
"""1 where GenEval calls the image correct, else 0: what is reported."""
