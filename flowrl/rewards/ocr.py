"""Is the text that a prompt asks for in the image? Read by PP-OCRv6 through RapidOCR, scored by edit distance.

The scoring is Flow-GRPO's (Liu et al. 2025). Its reader is PaddleOCR 2.9, which can read otherwise; the two were not
compared. The weights (30 MB) are part of the package `rapidocr`: nothing is downloaded. It is imported when a reward
first reads, runs on the CPU and takes one core.
"""

import functools
import importlib.metadata
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.rewards.base import RewardOutput, quantise, register

_HEIGHT = 48  # of the recogniser's input, in pixels


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split()).lower()


def quoted(prompt: str) -> str:
    """The text a prompt asks for: what its first pair of double quotes encloses, in lower case and without any space.

    Raises ValueError when there is no pair or nothing in it.
    """
    parts = prompt.split('"')
    text = _plain(parts[1]) if len(parts) > 2 else ""
    if not text:
        raise ValueError(
            f"the OCR reward needs the text to draw between straight double quotes in every prompt, got {prompt!r}"
        )
    return text


def flowgrpo_score(text: str, target: str) -> float:
    """1 when `target` is part of `text`, else 1 - min(d, n) / n: d the Levenshtein distance, n the target's length."""
    from rapidfuzz.distance import Levenshtein

    if target in text:
        return 1.0
    return 1 - min(Levenshtein.distance(text, target), len(target)) / len(target)


def strict_score(text: str, target: str) -> float:
    """1 - d / m: d the Levenshtein distance, m the length of the longer text. 1 only when they are equal."""
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.normalized_similarity(text, target)


def _missing(error: ImportError) -> ImportError:
    return ImportError(f"the OCR reward needs pip install 'flowrl-align[ocr]' ({error})")


@functools.cache
def _reader(single_line: bool):
    try:
        import onnxruntime  # noqa: F401
        import rapidfuzz  # noqa: F401
        from rapidocr import RapidOCR
    except ImportError as error:
        raise _missing(error) from error
    settings: dict[str, Any] = {
        "Global.log_level": "critical",  # it warns of every image without text
        "Global.use_cls": False,  # lines are upright
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }
    if single_line:
        settings |= {"Global.use_det": False, "Global.use_preprocess_img": False}
        settings |= {"Rec.rec_img_shape": [3, _HEIGHT, _HEIGHT]}  # pads to this width; 320 by default, a waste
    else:
        settings |= {"Det.limit_type": "max", "Det.limit_side_len": 512}  # by default it enlarges to 736
    return RapidOCR(params=settings)


@register("ocr")
class OCRReward:
    """How well the text in an image agrees with the text quoted in its prompt, in [0, 1].

    strict: False: `flowgrpo_score`, which ignores whatever else is written; True: `strict_score`.
    single_line: the whole image is one line of text. It goes to the recogniser as it is, scaled to 48 pixels of height;
        otherwise the detector looks for lines first, and those read with a confidence below 0.5 are dropped.

    Both texts are compared in lower case, without spaces, in Unicode's form NFKC; the lines of an image are joined in
    reading order. Images are read one by one, so values do not depend on the batch. details["text"]: the N texts read.
    Raises ValueError on a prompt without quoted text and as `quantise` does, ImportError without the extra `ocr`.
    """

    name = "ocr"
    range = (0.0, 1.0)

    def __init__(self, strict: bool = False, single_line: bool = False):
        self.single_line = single_line
        self.name, self.score = ("ocr@strict", strict_score) if strict else ("ocr", flowgrpo_score)

    @property
    def fingerprint(self) -> str:
        """The package's version, which fixes the weights; raises ImportError without it."""
        try:
            return f"rapidocr {importlib.metadata.version('rapidocr')}{', single line' if self.single_line else ''}"
        except importlib.metadata.PackageNotFoundError as error:
            raise _missing(error) from error

    def check_prompts(self, texts: Sequence[str]) -> None:
        """Raises ValueError on the first prompt that quotes no text."""
        for text in texts:
            quoted(text)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> RewardOutput:
        targets = [quoted(prompt) for prompt in prompts]
        texts = [_plain(text) for text in (read_line if self.single_line else read)(images)]
        values = [self.score(text, target) for text, target in zip(texts, targets, strict=True)]
        return RewardOutput(torch.tensor(values), details={"text": texts})

    def known_pair(self) -> tuple[Tensor, list[str], dict[str, list]]:
        """The word asked for and another one, in black on white."""
        images = []
        for word in ("FLOW", "HATS"):
            image = Image.new("RGB", (96, 32), "white")
            ImageDraw.Draw(image).text((48, 16), word, "black", ImageFont.load_default(22), anchor="mm")
            images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255)
        return torch.stack(images), ['the word "FLOW"'] * 2, {}


register("ocr@strict")(OCRReward(strict=True))


def read(images: Tensor) -> list[str]:
    """The text found in each image, its lines joined in reading order; "" where there is none.

    images: float [N, 3, H, W] in [0, 1].
    """
    return _read(False, quantise(images))


def read_line(images: Tensor) -> list[str]:
    """Each image read as one line of text, without looking for it first. images: float [N, 3, H, W] in [0, 1]."""
    pixels = quantise(images).cpu().permute(0, 3, 1, 2).float()
    width = max(1, round(_HEIGHT * pixels.shape[3] / pixels.shape[2]))
    pixels = torch.nn.functional.interpolate(pixels, (_HEIGHT, width), mode="bicubic", antialias=True)
    return _read(True, pixels.clamp(0, 255).round().to(torch.uint8).permute(0, 2, 3, 1))


def _read(single_line: bool, pixels: Tensor) -> list[str]:
    reader = _reader(single_line)
    pixels = pixels.flip(-1).cpu()  # it expects BGR
    return ["".join(reader(image).txts or ()) for image in pixels.numpy()]  # on one core batches are no faster
