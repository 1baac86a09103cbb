"""The world "glyphs": one short word of capital letters on a small white canvas, read back by a real OCR model.

Words of two to four letters out of ten, on 24 x 48 pixels. A prompt asks for a word in double quotes, as the reward of
`flowrl.rewards.ocr` expects; `tag` is its length, so that evaluations report each length.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

HEIGHT, WIDTH = 24, 48
LETTERS = "ABCEHKNPRS"
"""Ten capitals that the reader tells apart at this size."""
TAGS = {2: "two_letters", 3: "three_letters", 4: "four_letters"}
SHADES = (20, 50, 80)
"""Grey levels of the ink."""
SIZES = (14, 15)
"""Font sizes in pixels."""
CELL = 11  # pixels from letter to letter
HELD_OUT = {2: 16, 3: 24, 4: 32}
TRAIN = 240  # prompts of each length, where there are that many


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(float(size))


def render(word: str, rng: np.random.Generator) -> np.ndarray:
    """Draw a word: uint8 `[24, 48, 3]`. Size, shade and, by a pixel or so, the place are random.

    The font is Pillow's own. Raises ValueError when the word has more letters than columns.
    """
    if len(word) * CELL > WIDTH:
        raise ValueError(f"{word!r} does not fit on {WIDTH} pixels: at most {WIDTH // CELL} letters")
    font = _font(int(rng.choice(SIZES)))
    ink = (SHADES[rng.integers(len(SHADES))],) * 3
    x, y = (WIDTH - CELL * (len(word) - 1)) / 2 + rng.uniform(-1, 1), HEIGHT / 2 + rng.uniform(-1, 1)
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for k, letter in enumerate(word):
        draw.text((x + CELL * k, y), letter, ink, font, anchor="mm")
    return np.array(image)


@cache
def _split() -> dict[int, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Per length the words `(others, held out)`, a fixed shuffle (seed 11)."""
    result = {}
    for length, held_out in HELD_OUT.items():
        words = ["".join(letters) for letters in product(LETTERS, repeat=length)]
        order = np.random.default_rng([11, length]).permutation(len(words))
        result[length] = (
            tuple(words[i] for i in order[held_out:]),
            tuple(words[i] for i in order[:held_out]),
        )
    return result


def words(length: int) -> tuple[str, ...]:
    """Every word of a length that is not held out; the first `TRAIN` are the RL prompts."""
    return _split()[length][0]


def caption(word: str) -> str:
    return f'the word "{word}"'


def train_prompts() -> list[dict[str, Any]]:
    """Training prompts with `tag`, and `weight` such that every length is drawn equally often."""
    return [
        {"prompt": caption(word), "tag": tag, "weight": 1.0 / len(words(length)[:TRAIN])}
        for length, tag in TAGS.items()
        for word in words(length)[:TRAIN]
    ]


def held_out_prompts() -> list[dict[str, Any]]:
    """Held-out prompts with `tag`: words seen neither in RL nor in pretraining."""
    return [{"prompt": caption(word), "tag": tag} for length, tag in TAGS.items() for word in _split()[length][1]]
