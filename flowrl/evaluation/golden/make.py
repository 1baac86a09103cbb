"""Draw the golden scenes again: `python flowrl/evaluation/golden/make.py [NotoColorEmoji.ttf]`.

Needs the font Noto Color Emoji (Debian: `fonts-noto-color-emoji`, version 2.042), which users do not: the pictures are
bundled. Verdicts are written by hand below; the tests ask a detector whether it agrees.
"""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
SIZE = 416
EMOJI = {
    "bicycle": "\N{BICYCLE}",
    "chair": "\N{CHAIR}",
    "clock": "\N{CLOCK FACE THREE OCLOCK}",
    "laptop": "\N{PERSONAL COMPUTER}",
    "stop sign": "\N{OCTAGONAL SIGN}",
    "umbrella": "\N{UMBRELLA}",
    "wine glass": "\N{WINE GLASS}",
}
Thing = tuple[str, int, float, float]  # class, long side and centre in pixels


def one(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


def scene(tag: str, text: str, include: list, correct: bool, *things: Thing, exclude: list | None = None):
    prompt = {"tag": tag, "prompt": f"a photo of {text}", "include": include, "exclude": exclude or []}
    return {"correct": correct, **prompt}, things


TWO_CLOCKS = ("counting", "two clocks", [one("clock", 2)])
CLOCK_LEFT = ("position", "a clock left of a laptop", [one("laptop"), one("clock", position=["left of", 0])])
SCENES = [
    scene("single_object", "a bicycle", [one("bicycle")], True, ("bicycle", 210, 208, 208)),
    scene("single_object", "a wine glass", [one("wine glass")], False, ("chair", 190, 208, 208)),
    scene(
        "two_object", "a laptop and a chair", [one("laptop"), one("chair")], True,
        ("laptop", 170, 110, 208), ("chair", 170, 310, 208),
    ),
    scene(
        "two_object", "a wine glass and a bicycle", [one("wine glass"), one("bicycle")], False,
        ("bicycle", 200, 208, 208),
    ),
    scene(*TWO_CLOCKS, True, ("clock", 150, 105, 208), ("clock", 150, 311, 208), exclude=[one("clock", 3)]),
    scene(*TWO_CLOCKS, False, ("clock", 150, 208, 208), exclude=[one("clock", 3)]),
    scene("colors", "a red stop sign", [one("stop sign", color="red")], True, ("stop sign", 150, 208, 208)),
    scene("colors", "a green stop sign", [one("stop sign", color="green")], False, ("stop sign", 140, 180, 230)),
    scene(*CLOCK_LEFT, True, ("clock", 150, 100, 208), ("laptop", 170, 305, 208)),
    scene(*CLOCK_LEFT, False, ("laptop", 170, 110, 208), ("clock", 150, 315, 208)),
    scene(
        "color_attr", "a red stop sign and a blue laptop",
        [one("stop sign", color="red"), one("laptop", color="blue")], True,
        ("stop sign", 150, 100, 208), ("laptop", 170, 305, 208),
    ),
    scene(
        "color_attr", "a red stop sign and a green umbrella",
        [one("stop sign", color="red"), one("umbrella", color="green")], False,
        ("stop sign", 150, 100, 208), ("umbrella", 150, 310, 208),
    ),
]  # fmt: skip


def glyph(font: ImageFont.FreeTypeFont, name: str, side: int) -> Image.Image:
    """An emoji, its long side `side` pixels."""
    drawn = Image.new("RGBA", (160, 160))
    ImageDraw.Draw(drawn).text((0, 0), EMOJI[name], font=font, embedded_color=True)
    drawn = drawn.crop(drawn.getbbox())
    scale = side / max(drawn.size)
    return drawn.resize((round(drawn.width * scale), round(drawn.height * scale)), Image.Resampling.LANCZOS)


def main(font_path: str = FONT) -> None:
    folder = Path(__file__).parent
    font = ImageFont.truetype(font_path, 109)  # the only size of its bitmaps
    for number, (record, things) in enumerate(SCENES):
        image = Image.new("RGB", (SIZE, SIZE), (200, 205, 210))
        for name, side, x, y in things:
            drawn = glyph(font, name, side)
            image.paste(drawn, (round(x - drawn.width / 2), round(y - drawn.height / 2)), drawn)
        path = folder / f"{number:05d}"
        (path / "samples").mkdir(parents=True, exist_ok=True)
        few = image.quantize(64, dither=Image.Dither.NONE)  # smaller, and still RGB as the benchmark wants it
        few.convert("RGB").save(path / "samples" / "00000.png", optimize=True)
        (path / "metadata.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
