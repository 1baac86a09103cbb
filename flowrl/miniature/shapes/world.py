"""The world "shapes": a few coloured shapes on a small white canvas, captioned in GenEval's grammar.

Four shapes x six colours on 32 x 32 pixels. Prompts come in GenEval's six task forms with GenEval's metadata
(`tag`, `prompt`, `include`, `exclude`), so the scorer of `flowrl.rewards.geneval` judges them unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np

CANVAS = 32
SHAPES = ("circle", "square", "triangle", "cross")
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (222, 36, 36),
    "yellow": (240, 200, 20),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "purple": (150, 50, 180),
    "black": (20, 20, 20),
}
COLORS = tuple(PALETTE)
BACKGROUND = (255, 255, 255)
SIZES = (6, 7, 8)
CELL = 8  # scenes place objects in the middle of the cells of a 4 x 4 grid
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
# Test prompts per task. single_object has four prompts in all, too few to hold any out: it is seen in training.
HELD_OUT = {"two_object": 4, "counting": 4, "colors": 8, "position": 12, "color_attr": 24}


@dataclass(frozen=True)
class Object:
    """One shape: `x`, `y` is the top-left pixel of its `size` x `size` box."""

    shape: str
    color: str
    x: int
    y: int
    size: int

    @property
    def box(self) -> tuple[int, int, int, int]:
        """`(x0, y0, x1, y1)` in pixels, x1 and y1 exclusive."""
        return self.x, self.y, self.x + self.size, self.y + self.size


@cache
def template(shape: str, width: int, height: int) -> np.ndarray:
    """Anti-aliased mask `[height, width]` in [0, 1] of a shape that fills its box (8 x 8 samples a pixel)."""
    n = 8
    y, x = np.mgrid[0 : height * n, 0 : width * n]
    u = (x + 0.5) / (width * n) * 2 - 1
    v = (y + 0.5) / (height * n) * 2 - 1
    inside = {
        "circle": u**2 + v**2 <= 1,
        "square": np.ones_like(u, bool),
        "triangle": np.abs(u) <= (v + 1) / 2,
        "cross": (np.abs(u) <= 0.34) | (np.abs(v) <= 0.34),
    }[shape]
    mask = inside.reshape(height, n, width, n).mean(axis=(1, 3)).astype(np.float32)
    mask.setflags(write=False)
    return mask


def render(objects: list[Object]) -> np.ndarray:
    """Draw a scene: uint8 `[32, 32, 3]`."""
    canvas = np.empty((CANVAS, CANVAS, 3), np.float32)
    canvas[:] = BACKGROUND
    for o in objects:
        mask = template(o.shape, o.size, o.size)[..., None]
        region = canvas[o.y : o.y + o.size, o.x : o.x + o.size]
        region += mask * (np.array(PALETTE[o.color], np.float32) - region)
    return canvas.round().astype(np.uint8)


# ---------------------------------------------------------------------------------------------------- prompts


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def _named(*words: str) -> str:
    return f"{_article(words[0])} {' '.join(words)}"


def _prompts_of(tag: str) -> list[dict[str, Any]]:
    def one(shape: str, **more: Any) -> dict[str, Any]:
        return {"class": shape, "count": 1, **more}

    if tag == "single_object":
        return [{"tag": tag, "prompt": f"a photo of {_named(s)}", "include": [one(s)]} for s in SHAPES]
    if tag == "two_object":
        return [
            {"tag": tag, "prompt": f"a photo of {_named(a)} and {_named(b)}", "include": [one(a), one(b)]}
            for a, b in permutations(SHAPES, 2)
        ]
    if tag == "counting":
        return [
            {
                "tag": tag,
                "prompt": f"a photo of {word} {_plural(s)}",
                "include": [{"class": s, "count": n}],
                "exclude": [{"class": s, "count": n + 1}],
            }
            for s in SHAPES
            for n, word in NUMBERS.items()
        ]
    if tag == "colors":
        return [
            {"tag": tag, "prompt": f"a photo of {_named(c, s)}", "include": [one(s, color=c)]}
            for s in SHAPES
            for c in COLORS
        ]
    if tag == "position":
        return [
            {
                "tag": tag,
                "prompt": f"a photo of {_named(a)} {relation} {_named(b)}",
                "include": [one(b), one(a, position=[relation, 0])],
            }
            for a, b in permutations(SHAPES, 2)
            for relation in RELATIONS
        ]
    return [
        {
            "tag": tag,
            "prompt": f"a photo of {_named(c, a)} and {_named(d, b)}",
            "include": [one(a, color=c), one(b, color=d)],
        }
        for a, b in permutations(SHAPES, 2)
        for c, d in permutations(COLORS, 2)
    ]


@cache
def _split() -> dict[str, tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]]:
    """Per task `(train, test)`. The held-out prompts are a fixed draw (seed 7), disjoint from training."""
    result = {}
    for k, tag in enumerate(TASKS):
        every = _prompts_of(tag)
        if tag not in HELD_OUT:
            result[tag] = (tuple(every), tuple(every))
            continue
        order = np.random.default_rng([7, k]).permutation(len(every))
        test = set(order[: HELD_OUT[tag]].tolist())
        result[tag] = (
            tuple(p for i, p in enumerate(every) if i not in test),
            tuple(p for i, p in enumerate(every) if i in test),
        )
    return result


def train_prompts() -> list[dict[str, Any]]:
    """Training prompts as GenEval metadata, with `weight` such that every task is drawn equally often."""
    return [{**p, "weight": 1.0 / len(train)} for train, _ in (_split()[tag] for tag in TASKS) for p in train]


def held_out_prompts() -> list[dict[str, Any]]:
    """Held-out prompts as GenEval metadata; only `single_object` is also seen in training."""
    return [dict(p) for tag in TASKS for p in _split()[tag][1]]


# ----------------------------------------------------------------------------------------------------- scenes


def _free(placed: list[Object], x: int, y: int, size: int) -> bool:
    """One pixel of air around every object."""
    return all(
        x >= o.x + o.size + 1 or o.x >= x + size + 1 or y >= o.y + o.size + 1 or o.y >= y + size + 1 for o in placed
    )


def _shows(relation: str, a: Object, b: Object) -> bool:
    """Clearly so: each in its own half of the canvas, and offset along at least twice as far as across."""
    half = CANVAS / 2
    ax, ay, bx, by = (v + o.size / 2 - half for o in (a, b) for v in (o.x, o.y))
    near, far, across = {
        "left of": (ax, bx, ay - by),
        "right of": (bx, ax, ay - by),
        "above": (ay, by, ax - bx),
        "below": (by, ay, ax - bx),
    }[relation]
    return near < 0 < far and far - near >= 2 * abs(across)


def sample_scene(metadata: dict[str, Any], rng: np.random.Generator) -> list[Object]:
    """A random scene that shows exactly what the prompt says; what it leaves open (colour, place) is random."""
    wanted = [
        (clause["class"], clause.get("color"), clause.get("position"))
        for clause in metadata["include"]
        for _ in range(clause["count"])
    ]
    while True:
        placed: list[Object] = []
        for shape, color, position in wanted:
            for _ in range(60):
                size = int(rng.choice(SIZES))
                x, y = (CELL * int(v) + (CELL - size) // 2 for v in rng.integers(0, CANVAS // CELL, size=2))
                candidate = Object(shape, color or str(rng.choice(COLORS)), x, y, size)
                if _free(placed, x, y, size) and (
                    position is None or _shows(position[0], candidate, placed[position[1]])
                ):
                    placed.append(candidate)
                    break
            else:
                break
        if len(placed) == len(wanted):
            return placed
