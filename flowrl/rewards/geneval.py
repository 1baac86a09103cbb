"""GenEval (Ghosh et al. 2023): are the objects of the prompt there, in number, colour and place?

Three parts: a `Detector` finds objects, a `ColorClassifier` names their colours, and pure functions decide.
The functions know no particular class list; a detector brings its own in `classes`.
"""

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from flowrl.rewards.base import RewardOutput, quantise, register

# The 80 COCO things in COCO order under the benchmark's names: map a detector's output by index, never by
# name.
# fmt: off
GENEVAL_CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow",
    "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee",
    "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard",
    "tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple",
    "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch",
    "potted plant", "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote",
    "computer keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book",
    "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")

SCORE_THRESHOLD = 0.3
COUNTING_THRESHOLD = 0.9
MAX_OBJECTS = 16  # per class
NUMBERS = {2: "two", 3: "three", 4: "four"}
POSITION_SHRINK = 0.1
BENCHMARK_SHA256 = "55b6e3650e980c13daf30569eb666e000faf19bfc2b7b4cbe999fcdb7aa9d680"

Variant: TypeAlias = Literal["official", "exact", "partial", "partial_flowgrpo"]
Box: TypeAlias = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Detection:
    """One object in one image.

    class_index: into the detector's `classes`. score: confidence in [0, 1]. box: x1, y1, x2, y2 in pixels,
    x2 and y2 exclusive. mask: bool [H, W] at the size of the image, or None.
    """

    class_index: int
    score: float
    box: Box
    mask: np.ndarray | None = None


class Detector(Protocol):
    """Finds objects: images float [N, 3, H, W] in [0, 1] -> N lists of detections, unfiltered."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    def __call__(self, images: Tensor) -> Sequence[Sequence[Detection]]: ...


class ColorClassifier(Protocol):
    """Names colours: image float [3, H, W] in [0, 1], detections of one class -> one of `COLORS` for each."""

    def __call__(self, image: Tensor, detections: Sequence[Detection], class_name: str) -> Sequence[str]: ...


ColorsOf: TypeAlias = Callable[[str, Sequence[Detection]], Sequence[str]]


@dataclass(frozen=True)
class Verdict:
    """The decision on one image.

    correct: GenEval's own, whatever the variant. exact: every clause with exactly its count. score: the
    variant's number. terms: what the partial score is the mean of. reason: why the variant's decision
    failed, "" if it did not.
    """

    correct: bool
    exact: bool
    score: float
    terms: tuple[float, ...]
    reason: str


# ---------------------------------------------------------------------------------------- scoring


def relation(box_a: Box, box_b: Box) -> set[str]:
    """Where A lies as seen from B: a subset of `RELATIONS`, two of them on a diagonal, none when too close.

    offset = centre A - centre B; each axis is shrunk towards 0 by 0.1 (size A + size B) on that axis; the
    shrunk vector over the length of the unshrunk one must exceed 0.5 in a component. Two 100-px squares in a
    row need more than 40 px.
    """
    a, b = np.asarray(box_a, float).reshape(2, 2), np.asarray(box_b, float).reshape(2, 2)
    offset = a.mean(0) - b.mean(0)
    size = np.abs(a[1] - a[0]) + np.abs(b[1] - b[0])
    shrunk = np.sign(offset) * np.maximum(np.abs(offset) - POSITION_SHRINK * size, 0)
    if np.all(np.abs(shrunk) < 1e-3):
        return set()
    x, y = shrunk / np.linalg.norm(offset)
    holds = (x < -0.5, x > 0.5, y < -0.5, y > 0.5)
    return {name for name, held in zip(RELATIONS, holds, strict=True) if held}


def _objects(tag: str, detections: Sequence[Detection], classes: Sequence[str]) -> dict[str, list[Detection]]:
    """The detections that count, by class name, best first."""
    threshold = COUNTING_THRESHOLD if tag == "counting" else SCORE_THRESHOLD
    objects: dict[str, list[Detection]] = {}
    for found in sorted(detections, key=lambda found: -found.score):
        if not 0 <= found.class_index < len(classes):
            raise ValueError(f"detection of class {found.class_index}, but there are {len(classes)} classes")
        if not all(map(math.isfinite, (found.score, *found.box))):
            raise ValueError(f"detection with score {found.score} and box {found.box}; they must be finite")
        same = objects.setdefault(classes[found.class_index], [])
        if found.score > threshold and len(same) < MAX_OBJECTS:
            same.append(found)
    return objects


def _judge(metadata: Mapping[str, Any], objects, colors: ColorsOf, exact: bool):
    """Walk the clauses; returns the reasons for failure and the terms (kind, value) of the partial score."""
    reasons: list[str] = []
    terms: list[tuple[str, float]] = []
    matched: list[list[Detection] | None] = []  # per clause, for the positions of later clauses
    for clause in metadata["include"]:
        name, k = clause["class"], clause["count"]
        n = len(objects.get(name, ()))
        best = objects.get(name, [])[:k]
        terms.append(("count", 1 - abs(k - n) / k))
        passed = n == k if exact else n >= k
        if not passed:
            reasons.append(f"{name}: wanted {'exactly' if exact else 'at least'} {k}, found {n}")
            if "color" in clause or "position" in clause:
                terms.append(("not asked", 0.0))
        if passed and "color" in clause:
            seen = list(colors(name, best))
            right = seen.count(clause["color"])
            terms.append(("color", right / k))
            passed = right == k
            if not passed:
                reasons.append(f"{name}: wanted {k} {clause['color']}, saw {', '.join(seen)}")
        if passed and "position" in clause:
            wanted, index = clause["position"]
            target, target_name = matched[index], metadata["include"][index]["class"]
            if target is None:
                passed = False
                reasons.append(f"{name}: nothing to be {wanted}, as {target_name} failed")
            elif not all(wanted in relation(a.box, b.box) for a in best for b in target):
                passed = False
                reasons.append(f"{name}: not {wanted} {target_name}")
            terms.append(("no target" if target is None else "relation", float(passed)))
        matched.append(best if passed else None)
    for clause in metadata["exclude"]:
        n = len(objects.get(clause["class"], ()))
        if n >= clause["count"]:
            reasons.append(f"{clause['class']}: wanted fewer than {clause['count']}, found {n}")
    return reasons, terms


def score(
    metadata: Mapping[str, Any],
    detections: Sequence[Detection],
    colors: ColorsOf | Sequence[str] | None = None,
    *,
    classes: Sequence[str] = GENEVAL_CLASSES,
    variant: Variant = "official",
    clamp_min: float | None = None,
) -> Verdict:
    """Judge one image from its detections.

    metadata: from `parse_metadata`. detections: all of the image's; those above 0.3 (counting: 0.9) count,
    the 16 best of each class. colors: `(class name, detections) -> colour names`, called only for clauses
    with a colour that have enough objects; or the colour of every detection.

    variant: "official" scores 1 when each clause finds at least its count among the best, all with the
    colour, every pair of objects in the relation, and no `exclude` clause is reached; "exact" scores 1 when
    each count is also met exactly; "partial" is the mean of: 1 - |k-n|/k per clause; 0 for the colour or
    position of a clause whose count is wrong; else the share of the right colour; and, while the clause
    holds, 1 or 0 for the relation (`exclude` is not looked at). "partial_flowgrpo" adds a 1 beside each
    wrong relation, as the Flow-GRPO server does.
    clamp_min: lower bound of each term. None means the variant's own: 0 for "partial", unbounded for
    "partial_flowgrpo" (k=1, n=16 gives -14).
    A partial score is a training signal, not GenEval: report `correct`.

    Raises ValueError on an unknown variant, a class index outside `classes`, a score or box that is not
    finite, and missing, miscounted or unknown colours. Sources: GenEval's evaluation and Flow-GRPO's reward
    server.
    """
    if variant not in get_args(Variant):
        raise ValueError(f"variant must be one of {', '.join(get_args(Variant))}, got {variant!r}")
    objects = _objects(metadata["tag"], detections, classes)
    colors_of = _colors_of(colors, detections)
    reasons, _ = _judge(metadata, objects, colors_of, exact=False)
    exact_reasons, kinds = _judge(metadata, objects, colors_of, exact=True)

    flowgrpo = variant == "partial_flowgrpo"
    floor = clamp_min if clamp_min is not None else (-math.inf if flowgrpo else 0.0)
    terms = [max(value, floor) for _, value in kinds]
    if flowgrpo:
        terms += [1.0 for kind, value in kinds if kind == "relation" and value == 0]
    correct, exact = not reasons, not exact_reasons
    value = {"official": float(correct), "exact": float(exact)}.get(variant, sum(terms) / len(terms))
    reason = "; ".join(reasons if variant == "official" else exact_reasons)
    return Verdict(correct, exact, value, tuple(terms), reason)


def _colors_of(colors: ColorsOf | Sequence[str] | None, detections: Sequence[Detection]) -> ColorsOf:
    """A checked function that asks once for the same detections, so that the two walks share the answers."""
    if isinstance(colors, Sequence) and len(colors) != len(detections):
        raise ValueError(f"{len(colors)} colours for {len(detections)} detections; give one for each")
    given = {id(d): c for d, c in zip(detections, colors, strict=True)} if isinstance(colors, Sequence) else {}
    known: dict[tuple[int, ...], list[str]] = {}

    def colors_of(name: str, found: Sequence[Detection]) -> list[str]:
        if colors is None:
            raise ValueError(f"the prompt asks for the colour of {name!r}; give `colors`")
        key = tuple(map(id, found))
        if key not in known:
            seen = [given[i] for i in key] if isinstance(colors, Sequence) else list(colors(name, found))
            if len(seen) != len(found) or not set(seen) <= set(COLORS):
                raise ValueError(f"wanted {len(found)} colours of {', '.join(COLORS)} for {name!r}, got {seen}")
            known[key] = seen
        return known[key]

    return colors_of


def summarise(tags: Sequence[str], correct: Sequence[bool], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """GenEval's table from one entry per image: its tag, its decision and its prompt (text or index).

    correct: the official decisions. Returns "tasks": {tag: accuracy over its images}, "overall": the
    unweighted mean of the tasks present, "images": the share of correct images, "prompts": the share of
    prompts with at least one correct image; all in [0, 1].
    Raises ValueError on an unknown tag, no images or unequal lengths.
    """
    if not tags or len(tags) != len(correct) or len(tags) != len(prompts):
        raise ValueError(f"got {len(tags)} tags, {len(correct)} decisions, {len(prompts)} prompts; give one per image")
    if unknown := set(tags) - set(TASKS):
        raise ValueError(f"unknown tags {sorted(unknown)}; known: {', '.join(TASKS)}")
    decided = [bool(flag) for flag in correct]
    tasks = {}
    for task in TASKS:
        flags = [flag for tag, flag in zip(tags, decided, strict=True) if tag == task]
        if flags:
            tasks[task] = sum(flags) / len(flags)
    solved = {prompt for prompt, flag in zip(prompts, decided, strict=True) if flag}
    return {
        "tasks": tasks,
        "overall": sum(tasks.values()) / len(tasks),
        "images": sum(decided) / len(decided),
        "prompts": len(solved) / len(set(prompts)),
    }


# ---------------------------------------------------------------------------------------- prompts


def parse_metadata(line: str | Mapping[str, Any], classes: Sequence[str] = GENEVAL_CLASSES) -> dict[str, Any]:
    """One GenEval prompt, checked: {"tag", "prompt", "include", "exclude", ...}; other keys pass through.

    line: JSON text or a mapping. include: clauses {"class", "count"[, "color"][, "position": [relation,
    index of an earlier clause]]}; exclude: clauses {"class", "count"} or absent. Raises one ValueError
    naming the line, what is wrong with it and what would be right.
    """

    def fail(problem: str) -> ValueError:
        return ValueError(f"bad GenEval prompt: {problem}. The line: {line if isinstance(line, str) else dict(line)}")

    def among(value: Any, known: Sequence[str], what: str) -> None:
        if value not in known:
            close = difflib.get_close_matches(str(value), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise fail(f"unknown {what} {value!r}; {hint}")

    def clauses(key: str, fields: Sequence[str]) -> list[dict[str, Any]]:
        given = [] if metadata.get(key) is None else metadata[key]
        if not isinstance(given, list | tuple) or not all(isinstance(clause, Mapping) for clause in given):
            raise fail(f"{key!r} must be a list of objects, got {given!r}")
        kept: list[dict[str, Any]] = []
        for clause in given:
            # A table of prompts fills absent fields with None.
            clause = {field: value for field, value in clause.items() if value is not None}
            for field in clause:
                among(field, fields, f"field of {key!r}")
            if not {"class", "count"} <= set(clause):
                raise fail(f"a clause of {key!r} needs 'class' and 'count', got {clause}")
            among(clause["class"], classes, "class")
            if type(clause["count"]) is not int or clause["count"] < 1:
                raise fail(f"the count of {clause['class']!r} must be an integer from 1, got {clause['count']!r}")
            if "color" in clause:
                among(clause["color"], COLORS, "colour")
            if "position" in clause:
                position = clause["position"]
                if not isinstance(position, list | tuple) or len(position) != 2:
                    raise fail(f"a position is [relation, index of an earlier clause], got {position!r}")
                among(position[0], RELATIONS, "relation")
                if type(position[1]) is not int or not 0 <= position[1] < len(kept):
                    raise fail(
                        f"position {position!r} of clause {len(kept)} must point to an earlier clause; "
                        "list the target first"
                    )
            kept.append(clause)
        return kept

    if isinstance(line, str):
        try:
            metadata = json.loads(line)
        except json.JSONDecodeError as error:
            raise fail(f"not JSON ({error})") from error
    else:
        metadata = dict(line)
    if not isinstance(metadata, dict):
        raise fail("it must be a JSON object with tag, prompt and include")
    known = ("tag", "prompt", "include", "exclude")
    for key in set(metadata) - set(known):  # a misspelt "exclude" would quietly ask for less
        if close := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
            raise fail(f"unknown key {key!r}; did you mean {close[0]!r}?")
    among(metadata.get("tag"), TASKS, "tag")
    if not isinstance(metadata.get("prompt"), str) or not metadata["prompt"].strip():
        raise fail("'prompt' must be a non-empty string")
    include = clauses("include", ("class", "count", "color", "position"))
    if not include:
        raise fail("'include' must list at least one clause")
    return {**metadata, "include": include, "exclude": clauses("exclude", ("class", "count"))}


def load_prompts(path: str | Path, classes: Sequence[str] = GENEVAL_CLASSES) -> list[dict[str, Any]]:
    """The checked prompts of a JSON-lines file (blank lines skipped).

    Raises ValueError naming file and line number of the first bad line, or that the file holds none.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                prompts.append(parse_metadata(line, classes))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _a(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def make_prompt(
    tag: str, classes: Sequence[str], colors: Sequence[str] = (), relation: str = "", count: int = 2
) -> dict[str, Any]:
    """The benchmark's text and clauses for one prompt, as `parse_metadata` returns them.

    classes, colors: in the order of the text, one or two as the task has them. relation: of the first class to the
    second, for "position". count: 2, 3 or 4, for "counting". Raises ValueError on an unknown task.
    """

    def one(name: str, **more: Any) -> dict[str, Any]:
        return {"class": name, "count": 1, **more}

    exclude: list[dict[str, Any]] = []
    if tag == "counting":
        name = classes[0]
        text = f"{NUMBERS[count]} {name}{'es' if name.endswith('s') else 's'}"
        include, exclude = [{"class": name, "count": count}], [{"class": name, "count": count + 1}]
    elif tag == "position":
        a, b = classes
        text = f"{_a(a)} {relation} {_a(b)}"
        include = [one(b), one(a, position=[relation, 0])]
    elif tag in ("colors", "color_attr"):
        text = " and ".join(_a(f"{color} {name}") for color, name in zip(colors, classes, strict=True))
        include = [one(name, color=color) for color, name in zip(colors, classes, strict=True)]
    elif tag in ("single_object", "two_object"):
        text, include = " and ".join(map(_a, classes)), [one(name) for name in classes]
    else:
        raise ValueError(f"unknown task {tag!r}; known: {', '.join(TASKS)}")
    return {"tag": tag, "prompt": f"a photo of {text}", "include": include, "exclude": exclude}


def benchmark_prompts() -> list[dict[str, Any]]:
    """The 553 prompts of the GenEval benchmark, drawn anew: 80, 99, 80, 94, 100, 100 in the order of `TASKS`.

    Each as `parse_metadata` returns it. Raises RuntimeError when the SHA-256 of the texts is not the
    benchmark's, which would mean that NumPy changed its generator.
    """
    rng = np.random.default_rng(43)
    names, n = GENEVAL_CLASSES, len(GENEVAL_CLASSES)
    drawn: list[dict[str, Any]] = []

    def add(*parts: Any, **more: Any) -> None:
        record = make_prompt(*parts, **more)
        if record not in drawn:
            drawn.append(record)

    for i in rng.choice(n, size=n, replace=False):
        add("single_object", [names[i]])
    for _ in range(100):
        add("two_object", [names[i] for i in rng.choice(n, size=2, replace=False)])
    for _ in range(100):
        add("counting", [names[rng.choice(n)]], count=int(rng.integers(2, 4, endpoint=True)))
    for _ in range(100):  # a person has no colour, so index 0 is left out here and below
        add("colors", [names[rng.choice(n - 1) + 1]], [COLORS[rng.choice(len(COLORS))]])
    for _ in range(100):
        pair = [names[i] for i in rng.choice(n, size=2, replace=False)]
        add("position", pair, relation=RELATIONS[rng.choice(len(RELATIONS))])
    for _ in range(100):
        pair = [names[i + 1] for i in rng.choice(n - 1, size=2, replace=False)]
        add("color_attr", pair, [COLORS[i] for i in rng.choice(len(COLORS), size=2, replace=False)])

    text = "".join(f"{record['prompt']}\n" for record in drawn)
    if hashlib.sha256(text.encode()).hexdigest() != BENCHMARK_SHA256:
        raise RuntimeError(
            f"the regenerated GenEval prompts differ from the benchmark (NumPy {np.__version__}); load the "
            "published file with load_prompts instead"
        )
    return drawn


# ---------------------------------------------------------------------------------------- the reward


class HSVColors:
    """A `ColorClassifier` without a model: the most frequent colour among the pixels of each object.

    Every pixel inside the mask (or the box, where there is none) votes by hue, saturation and value; grey
    votes black or white by its brightness. A rule of thumb for flat, well-lit colours; it makes no claim to
    agree with the benchmark's CLIP. Raises ValueError on a mask of another size and on an object without
    pixels.
    """

    # Upper ends of the hue ranges in degrees; red closes the circle.
    _ENDS = (15, 45, 70, 165, 260, 320, 345)
    _HUES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "red")

    def __call__(self, image: Tensor, detections: Sequence[Detection], class_name: str) -> list[str]:
        pixels = image.detach().float().permute(1, 2, 0).cpu().numpy()
        return [self._vote(self._inside(pixels, found)) for found in detections]

    @staticmethod
    def _inside(pixels: np.ndarray, found: Detection) -> np.ndarray:
        height, width = pixels.shape[:2]
        if found.mask is not None:
            if found.mask.shape != (height, width):
                raise ValueError(f"mask of {found.mask.shape} for an image of {(height, width)}")
            inside = pixels[found.mask.astype(bool)]
        else:
            x1, y1 = (max(math.floor(v), 0) for v in found.box[:2])
            x2, y2 = (max(math.ceil(v), 0) for v in found.box[2:])
            inside = pixels[y1:y2, x1:x2].reshape(-1, 3)
        if not len(inside):
            raise ValueError(f"a detection without pixels: box {found.box} in an image of {(height, width)}")
        return inside

    @classmethod
    def _vote(cls, rgb: np.ndarray) -> str:
        value, spread = rgb.max(-1), np.ptp(rgb, axis=-1)
        saturation = spread / np.maximum(value, 1e-6)
        r, g, b = (rgb / np.maximum(spread, 1e-6)[:, None]).T
        top = rgb.argmax(-1)
        hue = 60 * np.choose(top, [(g - b) % 6, b - r + 2, r - g + 4])
        names = np.array(cls._HUES)[np.searchsorted(cls._ENDS, hue, side="right")]
        names = np.where((names == "orange") & (value < 0.7), "brown", names)
        names = np.where((names == "red") & (saturation < 0.8) & (value < 0.7), "brown", names)
        names = np.where((names == "red") & (saturation < 0.5) & (value >= 0.7), "pink", names)
        names = np.where(saturation < 0.15, np.where(value < 0.5, "black", "white"), names)
        names = np.where(value < 0.2, "black", names)
        return max(COLORS, key=lambda color: int((names == color).sum()))


class GenEvalReward:
    """GenEval as a reward: detect, name colours, `score`.

    detector, color_classifier: the parts above, or their names for `geneval_parts.load_detector` and
    `load_colors`, which read their weights at once. variant, clamp_min: as in `score`. Called with the prompt
    columns tag, include and, where prompts have it, exclude. Returns values [N] with details "correct" (the
    official decision, what to report), "exact" and "reason". Pixels are rounded to 8 bits first, so that a
    folder of PNGs gets the same scores.
    Raises ValueError on an unknown variant, on bad metadata and on a detector that returns the wrong number
    of lists; and, for names, as the two loaders do.
    """

    def __init__(
        self,
        detector: Detector | str,
        color_classifier: ColorClassifier | str,
        variant: Variant = "partial",
        clamp_min: float | None = None,
    ):
        from flowrl.rewards import geneval_parts as parts

        if variant not in get_args(Variant):
            raise ValueError(f"variant must be one of {', '.join(get_args(Variant))}, got {variant!r}")
        self.detector = parts.load_detector(detector) if isinstance(detector, str) else detector
        self.color_classifier = (
            parts.load_colors(color_classifier) if isinstance(color_classifier, str) else color_classifier
        )
        self.variant, self.clamp_min = variant, clamp_min
        # A partial score must not be read as GenEval.
        self.name = "geneval" if variant == "official" else f"geneval_{variant}"

    def __call__(self, images: Tensor, prompts: Sequence[str], tag, include, exclude=None) -> RewardOutput:
        images = quantise(images).permute(0, 3, 1, 2).float() / 255
        exclude = [None] * len(prompts) if exclude is None else exclude
        detected = self.detector(images)
        if len(detected) != len(images):
            raise ValueError(f"the detector returned {len(detected)} lists for {len(images)} images")
        verdicts = []
        for i, found in enumerate(detected):
            record = {"tag": tag[i], "prompt": prompts[i], "include": include[i], "exclude": exclude[i]}
            verdicts.append(
                score(
                    parse_metadata(record, self.detector.classes),
                    found,
                    lambda name, objects, image=images[i]: self.color_classifier(image, objects, name),
                    classes=self.detector.classes,
                    variant=self.variant,
                    clamp_min=self.clamp_min,
                )
            )
        return RewardOutput(
            torch.tensor([verdict.score for verdict in verdicts]),
            details={
                "correct": torch.tensor([verdict.correct for verdict in verdicts]),
                "exact": torch.tensor([verdict.exact for verdict in verdicts]),
                "reason": [verdict.reason for verdict in verdicts],
            },
        )


def _with_released_parts(variant: Variant) -> type[GenEvalReward]:
    class ReleasedGenEval(GenEvalReward):
        def __init__(self):  # weights are read when the reward is used, not when it is registered
            super().__init__("mask2former", "clip", variant)

    return ReleasedGenEval


register("geneval")(_with_released_parts("partial"))
register("geneval@official")(_with_released_parts("official"))
register("geneval@exact")(_with_released_parts("exact"))
register("geneval@flowgrpo")(_with_released_parts("partial_flowgrpo"))
