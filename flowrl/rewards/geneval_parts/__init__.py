"""Detectors and colour classifiers for GenEval, by name.

`load_detector` and `load_colors` import a part when it is asked for. Parts read their weights at once, so that what is
missing is said before any image is made, and work on the device of the images they are given.
"""

import difflib
import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from flowrl.rewards.geneval import ColorClassifier, Detector

# What follows "@" in a name is the class's first argument.
DETECTORS = {
    "mask2former": "flowrl.rewards.geneval_parts.mask2former:Mask2Former",
    "rt-detr": "flowrl.rewards.geneval_parts.boxes:ObjectDetection",
    "grounding-dino": "flowrl.rewards.geneval_parts.boxes:GroundingDino",
    "yolov3-tiny": "flowrl.rewards.geneval_parts.yolov3_tiny:YOLOv3Tiny",
}
COLOR_CLASSIFIERS = {
    "clip": "flowrl.rewards.geneval_parts.clip_colors:CLIPColors",
    "hsv": "flowrl.rewards.geneval:HSVColors",
}


def load_detector(name: str) -> Detector:
    """The detector called `name`.

    name: "mask2former" (the benchmark's architecture, masks), "rt-detr" (any model of transformers'
    `AutoModelForObjectDetection`), "grounding-dino", "yolov3-tiny", each alone or as "NAME@FOLDER-OR-HUB-ID"; or
    "module:function", where the function takes no argument and returns the detector (a class will do).
    Raises ValueError on an unknown name or another model than the name promises, FileNotFoundError when weights are
    not at hand. The same name (but not your own function) gives the same object, so that rewards share it.
    """
    return _load("detector", DETECTORS, name)


def load_colors(name: str) -> ColorClassifier:
    """The colour classifier called `name`: "clip" (the benchmark's), "clip@FOLDER-OR-HUB-ID" (another open_clip
    tower), "hsv" (a rule without a model) or "module:function" as in `load_detector`, whose errors it raises."""
    return _load("colour classifier", COLOR_CLASSIFIERS, name)


def _load(kind: str, table: Mapping[str, str], name: str):
    base, at, model = name.partition("@")
    if base in table:
        part = _attribute(table[base])
        if at and not (model and inspect.signature(part).parameters):
            problem = f"{base} takes nothing after the '@'" if model else "nothing follows the '@'"
            raise ValueError(f"{kind} {name!r}: {problem}")
        return _made(part, *([model] if at else []))
    if ":" not in name:
        close = difflib.get_close_matches(base, table, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(table)}."
        raise ValueError(f"unknown {kind} {name!r}; {hint} Your own is given as 'module:function'.")
    try:
        part = _attribute(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load {kind} {name!r}: {error}") from error
    return part()


def _attribute(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


@functools.cache
def _made(part: Any, *arguments: str) -> Any:
    return part(*arguments)
