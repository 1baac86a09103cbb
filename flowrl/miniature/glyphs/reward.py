"""The judge of the world "glyphs": the recogniser of `flowrl.rewards.ocr` on the whole image, no detector before it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flowrl.rewards import RewardOutput, register
from flowrl.rewards.ocr import OCRReward

glyphs = OCRReward(strict=True, single_line=True)
"""1 - edit distance / length of the longer text, in [0, 1]: the training signal."""
glyphs.name = "glyphs"
register("glyphs")(glyphs)


@register("glyphs_exact")
def glyphs_exact(images: Tensor, prompts: Sequence[str]) -> RewardOutput:
    """1 where the reader reads exactly the word that was asked for, else 0: what is reported."""
    read = glyphs(images, prompts)
    return RewardOutput((read.values == 1).float(), read.valid, read.details)
