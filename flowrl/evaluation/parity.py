"""How far flowrl's GenEval agrees with the original: levels 0 to 4, from pure logic to whole benchmark runs.

0. logic: random detections, all specs; the decision functions are read out of a checkout of the original and run as
   they are. Nothing of the original is in flowrl.
1. post-processing: the same Mask2Former logits in, the same scores, boxes and masks out.
2. weights: the same image in, the same logits and detections out.
3. colours: the same crops in, the same colour out.
4. end to end: two results files of the same images, with what their difference is worth.

Levels 1 to 3 compare with files that `benchmarks/geneval_dump.py` writes in the original's environment (mmdet 2.x).
"""

from __future__ import annotations

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm.auto import trange

from flowrl.rewards.geneval import (
    COLORS,
    COUNTING_THRESHOLD,
    GENEVAL_CLASSES,
    MAX_OBJECTS,
    POSITION_SHRINK,
    SCORE_THRESHOLD,
    TASKS,
    Detection,
    benchmark_prompts,
    score,
)

SOURCES = ("evaluation/evaluate_images.py", "reward_server/gen_eval.py")  # GenEval, Flow-GRPO's reward server
FUNCTIONS = ("compute_iou", "relative_position", "evaluate", "evaluate_image")
OURS = {
    "THRESHOLD": SCORE_THRESHOLD,
    "COUNTING_THRESHOLD": COUNTING_THRESHOLD,
    "MAX_OBJECTS": MAX_OBJECTS,
    "NMS_THRESHOLD": 1.0,
    "POSITION_THRESHOLD": POSITION_SHRINK,
}
SHOWN = 20  # disagreements listed in a result
RESAMPLES = 2000


def earlier(path: str | Path) -> dict[str, Any]:
    """The results in a file of earlier levels, by level; none where there is no file. Raises ValueError if the file is
    another one."""
    path = Path(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        results = None
    if not isinstance(results, dict) or not set(results) <= set("01234"):
        raise ValueError(f"{path} is there and holds no results of parity: give another --output")
    return results


def keep(path: str | Path, results: Mapping[str, Any]) -> None:
    """Write results by level, for `earlier`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(sorted(results.items())), indent=2, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------- level 0: logic


@dataclass(frozen=True)
class Original:
    """The decisions of a checkout.

    decide: (detections by class as mmdet gives them, metadata) -> correct and, of the reward server, strict_correct and
    score. constants: its thresholds. classes: its object names, None where the checkout has no such file.
    """

    path: Path
    decide: Callable[[tuple[list[np.ndarray], list[list[str]]], Mapping[str, Any]], dict[str, Any]]
    constants: dict[str, float]
    classes: tuple[str, ...] | None


def load_original(checkout: str | Path) -> Original:
    """Read the decision functions out of a checkout of GenEval or of Flow-GRPO's reward server, and nothing else.

    Runs the definitions of `relative_position`, `evaluate`, `evaluate_image` (and `evaluate_reward`) with the constants
    assigned in the same file; mmdet, CLIP and the rest of the file are neither imported nor run. A detection's mask
    carries the name of its colour in their place. Raises FileNotFoundError and ValueError naming what is not there.
    """
    checkout = Path(checkout)
    found = [checkout / source for source in SOURCES if (checkout / source).is_file()]
    if not found:
        raise FileNotFoundError(f"{checkout} has neither {' nor '.join(SOURCES)}: give a checkout of GenEval")
    path = found[0]
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    server = path == checkout / SOURCES[1]
    names = [*FUNCTIONS, "evaluate_reward"] if server else FUNCTIONS
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names}
    constants = {k: v for node in ast.walk(tree) if (k := _target(node)) in OURS and (v := _number(node)) is not None}
    if missing := [k for k in (*names, *OURS) if k not in functions and k not in constants]:
        raise ValueError(f"{path} lacks {', '.join(missing)}: it is not a version that can be compared")
    current: list[Any] = []
    scope: dict[str, Any] = {
        **constants,
        "MAX_OBJECTS": int(constants["MAX_OBJECTS"]),
        "np": np,
        "json": json,
        "COLORS": list(COLORS),
        "classnames": list(GENEVAL_CLASSES),
        "object_detector": None,
        "inference_detector": lambda _, images: current if isinstance(images, list) else current[0],
        "Image": SimpleNamespace(open=lambda path: path),
        "ImageOps": SimpleNamespace(exif_transpose=lambda image: image),
        "color_classification": lambda image, objects, name: [color for _, color in objects],
    }
    exec(compile(ast.Module(list(functions.values()), []), str(path), "exec"), scope)

    def decide(detections: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
        current[:] = [detections]
        if server:
            return scope["evaluate_image"]([0], [metadata], False)[0]
        return scope["evaluate_image"]("", metadata)

    objects = path.parent / "object_names.txt"
    classes = tuple(objects.read_text(encoding="utf-8").split("\n")) if objects.is_file() else None
    return Original(path, decide, constants, classes and tuple(name.strip() for name in classes if name.strip()))


def _target(node: ast.AST) -> str | None:
    one = isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    return node.targets[0].id if one else None


def _number(node: ast.AST) -> float | None:
    """The number assigned: written there, or the default of an option."""
    numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    numbers = [float(value) for value in numbers if isinstance(value, int | float)]
    return numbers[-1] if numbers else None


def random_case(metadata: Mapping[str, Any], rng: np.random.Generator) -> tuple[list[Detection], list[str]]:
    """Detections and colours for one prompt, near the edge of being right.

    Counts one off, scores all above or around the thresholds, more objects than count, neighbours too close, and one
    time in four a wrong colour or side.
    """
    detections, colors, mixed = [], [], rng.random() < 0.4

    def add(name: str, centre: np.ndarray, color: str | None) -> None:
        low, high = [(0.05, 0.35), (0.28, 0.95), (0.86, 1.0)][rng.choice(3)] if mixed else (0.91, 1.0)
        half = rng.uniform(8, 90, 2)
        corners = np.array([*(centre - half), *(centre + half)], np.float32)
        x1, y1, x2, y2 = (corners.round() if rng.random() < 0.5 else corners).tolist()  # those of masks are integers
        value = float(np.float32(rng.uniform(low, high)))
        detections.append(Detection(GENEVAL_CLASSES.index(name), value, (x1, y1, x2, y2)))
        colors.append(color if color and rng.random() < 0.75 else str(rng.choice(COLORS)))

    centres: list[np.ndarray] = []
    for clause in metadata["include"]:
        k = clause["count"]
        n = max(int(rng.choice([k - 1, k, k + 1, int(rng.integers(0, 21))], p=(0.15, 0.6, 0.15, 0.1))), 0)
        centre = rng.uniform(100, 400, 2)
        if "position" in clause and rng.random() < 0.75:
            side = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}[clause["position"][0]]
            centre = centres[clause["position"][1]] + np.array(side) * rng.uniform(20, 300) + rng.normal(0, 40, 2)
        centres.append(centre)
        for _ in range(n):
            add(clause["class"], centre + rng.normal(0, 30, 2), clause.get("color"))
    for _ in range(rng.integers(0, 4)):
        add(str(rng.choice(GENEVAL_CLASSES)), rng.uniform(0, 500, 2), None)
    return detections, colors


def logic(checkout: str | Path, cases: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Level 0: our decisions against those of a checkout on random detections, each spec in turn.

    Of GenEval the official decision is compared, of the reward server also `strict_correct` and the partial score
    (variant "partial_flowgrpo"). Equal scores of two detections, whose order the original leaves open, do not occur.
    Also compared: the thresholds, and the class names and prompts where the checkout has them.
    """
    original, prompts = load_original(checkout), benchmark_prompts()
    wrong: list[dict[str, Any]] = []
    correct = 0
    for i in trange(cases, desc="level 0"):
        metadata = prompts[i % len(prompts)]
        detections, colors = random_case(metadata, np.random.default_rng([seed, i]))
        theirs = original.decide(_as_mmdet(detections, colors), metadata)
        verdict = score(metadata, detections, colors, variant="partial_flowgrpo")
        ours = {"correct": verdict.correct, "strict_correct": verdict.exact, "score": verdict.score}
        correct += verdict.correct
        differing = [k for k, v in ours.items() if k in theirs and abs(float(theirs[k]) - float(v)) > 1e-9]
        if differing:
            facts = {k: {"ours": ours[k], "theirs": theirs[k]} for k in differing}
            found = [
                {"class": GENEVAL_CLASSES[d.class_index], "score": d.score, "box": d.box, "color": color}
                for d, color in zip(detections, colors, strict=True)
            ]
            wrong.append({"case": i, "prompt": metadata["prompt"], **facts, "detections": found})
    listed = Path(checkout) / "prompts" / "evaluation_metadata.jsonl"
    equal = {
        "constants": original.constants == OURS,
        "classes": None if original.classes is None else original.classes == GENEVAL_CLASSES,
        "prompts": _same_prompts(listed, prompts) if listed.is_file() else None,
    }
    return {
        "original": str(original.path),
        "cases": cases,
        "share_correct": correct / cases,
        "disagreements": len(wrong),
        "equal": equal,
        "passed": not wrong and False not in equal.values(),
        "examples": wrong[:SHOWN],
    }


def _as_mmdet(detections: Sequence[Detection], colors: Sequence[str]) -> tuple[list[np.ndarray], list[list[str]]]:
    """Per class an array [n, 5] of box and score, and in place of the masks the colours."""
    boxes: list[list[tuple[float, ...]]] = [[] for _ in GENEVAL_CLASSES]
    masks: list[list[str]] = [[] for _ in GENEVAL_CLASSES]
    for found, color in zip(detections, colors, strict=True):
        boxes[found.class_index].append((*found.box, found.score))
        masks[found.class_index].append(color)
    return [np.array(rows, np.float32).reshape(-1, 5) for rows in boxes], masks


def _same_prompts(path: Path, prompts: Sequence[Mapping[str, Any]]) -> bool:
    return [{"exclude": [], **line} for line in _json_lines(path)] == list(prompts)


def _json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


# ------------------------------------------------------------------- levels 1 to 3: the parts, from a dump of mmdet


def _arrays(dump: str | Path) -> Iterator[dict[str, Any]]:
    paths = sorted(Path(dump).glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"{dump} holds no *.npz: write them with benchmarks/geneval_dump.py")
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            arrays = {k: file[k] for k in file.files}
        arrays["masks"] = np.unpackbits(arrays["masks"], axis=1, count=int(np.prod(arrays["size"]))).astype(bool)
        yield arrays


def _theirs(arrays: Mapping[str, Any]) -> list[Detection]:
    masks = arrays["masks"].reshape(-1, *arrays["size"])
    rows = zip(arrays["labels"].tolist(), arrays["scores"].tolist(), arrays["boxes"].tolist(), masks, strict=True)
    return [Detection(label, value, tuple(box), mask) for label, value, box, mask in rows if value > SCORE_THRESHOLD]


def _compare(ours: Sequence[Detection], theirs: Sequence[Detection]) -> dict[str, Any]:
    """Detections above 0.3 of two sources, matched one to one within their class by the overlap of their masks."""
    from scipy.optimize import linear_sum_assignment

    ours = [d for d in ours if d.score > SCORE_THRESHOLD]
    overlap = np.zeros((len(ours), len(theirs)))
    for i, a in enumerate(ours):
        for j, b in enumerate(theirs):
            if a.class_index == b.class_index:
                overlap[i, j] = (a.mask & b.mask).sum() / max((a.mask | b.mask).sum(), 1)  # ty: ignore
    pairs = [(i, j) for i, j in zip(*linear_sum_assignment(-overlap), strict=True) if overlap[i, j] > 0]
    boxes = [np.abs(np.subtract(ours[i].box, theirs[j].box)).max() for i, j in pairs]
    return {
        "matched": len(pairs),
        "unmatched": len(ours) + len(theirs) - 2 * len(pairs),
        "score": max((abs(ours[i].score - theirs[j].score) for i, j in pairs), default=0.0),
        "box": float(max(boxes, default=0.0)),
        "overlap": float(min((overlap[i, j] for i, j in pairs), default=1.0)),
    }


def _worst(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = {k: sum(row[k] for row in rows) for k in ("matched", "unmatched")}
    return {**total, "max_score": max(r["score"] for r in rows), "max_box": max(r["box"] for r in rows),
            "min_overlap": min(r["overlap"] for r in rows)}  # fmt: skip


def post_processing(dump: str | Path) -> dict[str, Any]:
    """Level 1: mmdet's logits through our post-processing against mmdet's detections. Passes when every detection above
    0.3 has its equal, scores and boxes to 1e-5."""
    from flowrl.rewards.geneval_parts.mask2former import instances

    rows = []
    for arrays in _arrays(dump):
        logits = (torch.from_numpy(arrays[k]) for k in ("class_logits", "mask_logits"))
        padded, inside, size = (tuple(arrays[k].tolist()) for k in ("padded", "inside", "size"))
        rows.append(_compare(instances(*logits, padded, inside, size, SCORE_THRESHOLD), _theirs(arrays)))
    worst = _worst(rows)
    passed = not worst["unmatched"] and worst["max_score"] <= 1e-5 and worst["max_box"] <= 1e-5
    return {"images": len(rows), **worst, "passed": passed}


def weights(dump: str | Path, images: str | Path, detector: Any, device: str = "cpu") -> dict[str, Any]:
    """Level 2: our Mask2Former on the images of the dump against mmdet's logits and detections. Passes at logits within
    1e-3, overlaps above 0.99, scores within 1e-3, nothing unmatched.

    Raises TypeError for another detector, FileNotFoundError for an image that is not there.
    """
    from flowrl.rewards.geneval_parts.mask2former import Mask2Former, prepare

    if not isinstance(detector, Mask2Former):
        raise TypeError(
            f"level 2 compares the logits of Mask2Former; give --detector mask2former@FOLDER, not {detector}"
        )
    rows, logits = [], 0.0
    for arrays in _arrays(dump):
        with Image.open(Path(images) / str(arrays["image"])) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float().to(device)
        rows.append(_compare(detector(pixels[None] / 255)[0], _theirs(arrays)))
        with torch.no_grad():
            out = detector.model(pixel_values=prepare(pixels)[0])
        for key, tensor in (("class_logits", out.class_queries_logits), ("mask_logits", out.masks_queries_logits)):
            logits = max(logits, float((tensor[0].cpu() - torch.from_numpy(arrays[key])).abs().max()))
    worst = _worst(rows)
    near = logits < 1e-3 and worst["min_overlap"] > 0.99 and worst["max_score"] < 1e-3
    return {"images": len(rows), "max_logit": logits, **worst, "passed": near and not worst["unmatched"]}


def colors(dump: str | Path, classifier: Any, device: str = "cpu") -> dict[str, Any]:
    """Level 3: our colours of the dump's crops against the original's. Passes above 99.5 % equal."""
    path = Path(dump) / "colors.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{dump} holds no colors.jsonl: write it with benchmarks/geneval_dump.py")
    crops = _json_lines(path)
    if not crops:
        raise ValueError(f"{path} holds no crops: the original saw no object in the images it was given")
    differing = []
    for crop in crops:
        with Image.open(Path(dump) / crop["crop"]) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float().to(device) / 255
        whole = Detection(GENEVAL_CLASSES.index(crop["class"]), 1.0, (0.0, 0.0, pixels.shape[2], pixels.shape[1]))
        (seen,) = classifier(pixels, [whole], crop["class"])
        if seen != crop["color"]:
            differing.append({**crop, "ours": seen})
    share = 1 - len(differing) / len(crops)
    return {"crops": len(crops), "equal": share, "passed": share > 0.995, "examples": differing[:SHOWN]}


# ------------------------------------------------------------------------------------------ level 4: end to end


def end_to_end(ours: str | Path, theirs: str | Path, seed: int = 0) -> dict[str, Any]:
    """Level 4: two results files of the same images, GenEval's `results.jsonl` or our `images.jsonl`, in either order.

    Per task and overall: both accuracies, the difference (first minus second) with its 95 % interval from a paired
    bootstrap over the prompts of each task, and Cohen's kappa. Passes when the overall difference is at most 0.005.
    Raises ValueError when the files are not about the same images.
    """
    a, b = _read_results(Path(ours)), _read_results(Path(theirs))
    if a.keys() != b.keys():
        only = sorted(a.keys() ^ b.keys())
        raise ValueError(f"{len(only)} images are in one file only, such as {only[0]}: compare runs on the same folder")
    if tags := [key for key in a if a[key]["tag"] != b[key]["tag"] or a[key]["prompt"] != b[key]["prompt"]]:
        raise ValueError(f"{len(tags)} images have another prompt in the other file, such as {tags[0]}")
    rng = np.random.default_rng(seed)
    rows, resampled = [], []
    for task in TASKS:
        keys = [key for key in a if a[key]["tag"] == task]
        if not keys:
            continue
        first, second = (np.array([x[key]["correct"] for key in keys]) for x in (a, b))
        differences = _bootstrap([key[0] for key in keys], first.astype(float) - second, rng)
        resampled.append(differences)
        rows.append({"task": task, "images": len(keys), **_pair(first, second, differences)})
    first, second = (np.array([x[key]["correct"] for key in a]) for x in (a, b))
    overall = {
        k: float(np.mean([row[k] for row in rows])) for k in ("ours", "theirs", "difference")
    }  # as in the benchmark, the mean over tasks
    interval = np.percentile(np.mean(resampled, 0), [2.5, 97.5]).tolist()
    differing = [key for key in a if a[key]["correct"] != b[key]["correct"]]
    reasons = [
        {
            "file": "/".join(map(str, key)),
            "prompt": a[key]["prompt"],
            "ours": a[key]["reason"],
            "theirs": b[key]["reason"],
        }
        for key in differing
    ]
    total = {"task": "overall", "images": len(a), **overall, "interval": interval, "kappa": kappa(first, second)}
    return {
        "tasks": [*rows, total],
        "disagreements": len(differing),
        "passed": abs(overall["difference"]) <= 0.005,
        "images": reasons,
    }


def kappa(a: np.ndarray, b: np.ndarray) -> float:
    """Cohen's kappa of two binary judges: (p_o - p_e) / (1 - p_e); 1 where both always say the same one thing."""
    agreed = float((a == b).mean())
    chance = float(a.mean() * b.mean() + (1 - a.mean()) * (1 - b.mean()))
    return 1.0 if chance == 1 else (agreed - chance) / (1 - chance)


def _pair(first: np.ndarray, second: np.ndarray, resampled: np.ndarray) -> dict[str, Any]:
    difference = float(first.mean() - second.mean())
    interval = np.percentile(resampled, [2.5, 97.5]).tolist()
    facts = {"ours": float(first.mean()), "theirs": float(second.mean()), "difference": difference}
    return {**facts, "interval": interval, "kappa": kappa(first, second)}


def _bootstrap(prompts: Sequence[int], differences: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mean difference in each of 2,000 resamples of the prompts, their images kept together."""
    sums: dict[int, float] = defaultdict(float)
    for prompt, difference in zip(prompts, differences.tolist(), strict=True):
        sums[prompt] += difference
    counts = Counter(prompts)
    total, size = np.array(list(sums.values())), np.array([counts[p] for p in sums])
    drawn = rng.integers(len(total), size=(RESAMPLES, len(total)))
    return total[drawn].sum(1) / size[drawn].sum(1)


def _read_results(path: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """(number of the prompt, file name) -> tag, prompt, correct, reason."""
    if not path.is_file():
        raise FileNotFoundError(f"no results file {path}")
    results = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            file = Path(row.get("filename") or row["file"])
            facts = {"tag": row["tag"], "prompt": row.get("text", row["prompt"]), "reason": row["reason"] or ""}
            results[int(file.parts[-3]), file.name] = {**facts, "correct": bool(row["correct"])}
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a result of GenEval ({error})") from error
    if not results:
        raise ValueError(f"{path} holds no results")
    return dict(sorted(results.items()))
