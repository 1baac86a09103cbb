"""GenEval on a folder of images: judge each one, add up, and show what went wrong.

The folder has the benchmark's layout, one folder per prompt:

    00000/metadata.jsonl        the prompt's object: tag, prompt, include, exclude
    00000/samples/00000.png     its images

The decisions are those of `flowrl.rewards.geneval`. Every judged image is a line of `images.jsonl`, so that a run that
was stopped goes on where it was; `summary.json` and `failures.html` come from those lines.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from tqdm.auto import tqdm

from flowrl import __version__
from flowrl.rewards.geneval import (
    COUNTING_THRESHOLD,
    GENEVAL_CLASSES,
    MAX_OBJECTS,
    SCORE_THRESHOLD,
    TASKS,
    ColorClassifier,
    Detection,
    Detector,
    Variant,
    benchmark_prompts,
    parse_metadata,
    relation,
    score,
    summarise,
)

GOLDEN = Path(__file__).parent / "golden"
RESULTS = "images.jsonl"
NOTHING = "(nothing else)"
# Judges of the miniature worlds, and what goes with a detector where the user names nothing else.
DETECTORS = {"shapes": "flowrl.miniature.shapes.reward:ShapesDetector"}
COLOR_CLASSIFIERS = {"shapes": "flowrl.miniature.shapes.reward:palette"}
DEFAULT_COLORS = {"shapes": "shapes", "yolov3-tiny": "hsv"}
DEFAULT_PROMPTS = {"shapes": "shapes/test"}

Record = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One image of the folder: the number of its prompt, its path below the folder, its checked metadata."""

    prompt: int
    file: str
    metadata: dict[str, Any]


# --------------------------------------------------------------------------------------------------- the judge


def classes_of(detector: str) -> tuple[str, ...] | None:
    """The classes of a named detector, known without loading it; None for one of the user's or of a miniature world."""
    return None if ":" in DETECTORS.get(detector, detector).partition("@")[0] else GENEVAL_CLASSES


class Judge:
    """A detector, a colour classifier and a variant, and the names they are known by.

    detector: a name of `load_detector`, or "shapes". colors: a name of `load_colors`, or "shapes"; None takes what goes
    with the detector, "hsv" for "yolov3-tiny", "shapes" for "shapes", else "clip". variant: as in
    `flowrl.rewards.geneval.score`; the official decision is recorded under every variant.
    Raises ValueError on an unknown name, FileNotFoundError where weights are missing.
    """

    def __init__(self, detector: str = "mask2former", colors: str | None = None, variant: Variant = "official") -> None:
        from flowrl.rewards.geneval_parts import load_colors, load_detector

        colors = colors or DEFAULT_COLORS.get(detector, "clip")
        self.detector: Detector = load_detector(DETECTORS.get(detector, detector))
        self.colors: ColorClassifier = load_colors(COLOR_CLASSIFIERS.get(colors, colors))
        self.variant = variant
        files = [stamp(name.partition("@")[2]) if "@" in name else None for name in (detector, colors)]
        self.identity: dict[str, Any] = {
            "detector": detector,
            "colors": colors,
            "variant": variant,
            "files": files,
            "flowrl": __version__,
        }
        """What the decisions depend on beside the image; lines of another identity are judged again."""

    def __call__(self, images: Tensor, metadata: Sequence[Mapping[str, Any]]) -> list[Record]:
        """The decisions on images [N, 3, H, W] in [0, 1], in the order given.

        Each has correct, exact, score, reason and detections: class, score, box and, where the prompt asked for one,
        color, of what the detector is at least 0.3 sure of, best first.
        """
        found = self.detector(images)
        if len(found) != len(images):
            raise ValueError(f"the detector returned {len(found)} lists for {len(images)} images")
        return [self._decide(*row) for row in zip(images, found, metadata, strict=True)]

    def _decide(self, image: Tensor, found: Sequence[Detection], metadata: Mapping[str, Any]) -> Record:
        named: dict[int, str] = {}

        def colors(name: str, objects: Sequence[Detection]) -> list[str]:
            seen = list(self.colors(image, objects, name))
            named.update((id(one), color) for one, color in zip_longest(objects, seen))
            return seen

        classes = self.detector.classes
        verdict = score(metadata, found, colors, classes=classes, variant=self.variant)
        detections = [
            {
                "class": classes[d.class_index],
                "score": float(d.score),
                "box": [float(v) for v in d.box],
                "color": named.get(id(d)),
            }
            for d in sorted(found, key=lambda d: -d.score)
            if d.score > SCORE_THRESHOLD
        ]
        decision = {k: getattr(verdict, k) for k in ("correct", "exact", "score", "reason")}
        return {**decision, "detections": detections}


def stamp(path: str | Path) -> str | None:
    """A hash of the names, sizes and times of a file or of those below a folder, to notice that they changed; None if
    there are none."""
    path = Path(path).expanduser()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    facts = [f"{p.relative_to(path)} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16] if facts else None


def golden_check(judge: Judge, device: torch.device | str = "cpu") -> str:
    """Judge images whose verdict is known, and return a line on what was found.

    They are the detector's own where it has a method `golden() -> [(uint8 image [H, W, 3], metadata, correct)]`, else
    the drawings in `golden/`, for detectors of GenEval's classes; there is none for others. The own ones, and the
    drawings under "yolov3-tiny" with "hsv", must all come out as expected. No other judge has been tried on the
    drawings: of those that show their prompt it must recognise half, which a detector that sees nothing, or a wrong
    build for the GPU, does not.
    Raises RuntimeError naming images that come out wrong.
    """
    if callable(own := getattr(judge.detector, "golden", None)):
        scenes = [(f"scene {i}", pixels, metadata, correct) for i, (pixels, metadata, correct) in enumerate(own())]
    elif tuple(judge.detector.classes) == GENEVAL_CLASSES:
        scenes = list(_bundled())
    else:
        return "none: this detector's classes are not GenEval's and it brings no golden images"
    named = judge.identity["detector"], judge.identity["colors"]
    wrong: dict[str, str] = {}
    missed = 0
    for name, pixels, metadata, correct in tqdm(scenes, desc="golden set", leave=False):
        (record,) = judge(_tensor(pixels)[None].to(device), [metadata])
        if record["correct"] != correct:
            missed += correct
            seen = ", ".join(f"{d['class']} {d['score']:.2f}" for d in record["detections"][:4]) or "nothing"
            wanted, reason = "correct" if correct else "wrong", record["reason"] or "all clauses hold"
            wrong[name] = f"{name} ({metadata['prompt']!r}): wanted {wanted}, got {reason}; saw {seen}"
    strict = own is not None or named == ("yolov3-tiny", "hsv")
    if wrong and (strict or 2 * missed > sum(bool(correct) for *_, correct in scenes)):
        raise RuntimeError(
            f"{len(wrong)} of {len(scenes)} golden images are judged wrongly by {named[0]} with {named[1]}: "
            f"{'. '.join(list(wrong.values())[:3])}. Scores of this judge would mean nothing: check its weights and "
            "its GPU build. --skip-golden goes on regardless and says so in the summary"
        )
    line = f"{len(scenes) - len(wrong)} of {len(scenes)} golden images judged as expected"
    return f"{line}; not {', '.join(wrong)} (drawings this judge has not been verified on)" if wrong else line


def _bundled() -> Iterator[tuple[str, np.ndarray, dict[str, Any], bool]]:
    for sample in read_folder(GOLDEN):
        with Image.open(GOLDEN / sample.file) as image:
            yield sample.file, np.asarray(image), sample.metadata, sample.metadata["correct"]


# -------------------------------------------------------------------------------------------------- the folder


def read_folder(folder: str | Path, classes: Sequence[str] = GENEVAL_CLASSES) -> list[Sample]:
    """The folder's samples in order, everything about them checked.

    Raises FileNotFoundError where there is no such folder, ValueError listing what is wrong with it: a prompt without
    metadata or with bad ones, no or unequally many images, an image that is broken or not RGB.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no image folder {folder}")
    numbered = sorted((p for p in folder.iterdir() if p.is_dir() and p.name.isdigit()), key=lambda p: int(p.name))
    if not numbered:
        raise ValueError(f"{folder} holds no prompts: GenEval's layout is 00000/metadata.jsonl and 00000/samples/*.png")
    problems: list[str] = []
    samples: list[Sample] = []
    counts: dict[str, int] = {}
    for path in numbered:
        metadata = _metadata(path, classes, problems)
        images = sorted((path / "samples").glob("*.png"))
        counts[path.name] = len(images)
        for image in images:
            _check_image(image, folder, problems)
            if metadata:
                samples.append(Sample(int(path.name), image.relative_to(folder).as_posix(), metadata))
    usual = Counter(counts.values()).most_common(1)[0][0]
    problems += [f"{name}: no samples/*.png" for name, n in counts.items() if not n]
    problems += [f"{name}: {n} images, others have {usual}" for name, n in counts.items() if n and n != usual]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{folder} cannot be scored: {'; '.join(problems[:5])}{more}")
    return samples


def _metadata(path: Path, classes: Sequence[str], problems: list[str]) -> dict[str, Any] | None:
    file = path / "metadata.jsonl"
    if not file.is_file():
        problems.append(f"{path.name}: no metadata.jsonl")
        return None
    try:
        return parse_metadata(file.read_text(encoding="utf-8"), classes)
    except (ValueError, OSError) as error:
        problems.append(f"{path.name}: {error}")
        return None


def _check_image(path: Path, folder: Path, problems: list[str]) -> None:
    name = path.relative_to(folder).as_posix()
    try:
        with Image.open(path) as image:
            mode = image.mode
            image.verify()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        problems.append(f"{name}: not a whole PNG ({' '.join(str(error).split())[:80]})")
    else:
        if mode != "RGB":
            problems.append(f"{name}: mode {mode}, not RGB; convert it with PIL's image.convert('RGB')")


def _tensor(pixels: np.ndarray) -> Tensor:
    """uint8 [H, W, 3] as float [3, H, W] in [0, 1]."""
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255


def _read_image(data: bytes) -> Tensor:
    with Image.open(io.BytesIO(data)) as image:
        return _tensor(np.asarray(ImageOps.exif_transpose(image)))


# ------------------------------------------------------------------------------------------------------ judging


def evaluate(
    folder: str | Path,
    samples: Sequence[Sample],
    judge: Judge,
    output: str | Path,
    *,
    batch_size: int = 8,
    device: torch.device | str = "cpu",
) -> list[Record]:
    """Judge every sample and return one record each, in their order; they are also the lines of `output/images.jsonl`.

    A record: prompt (number), tag, file, text, sha256 (of the file's bytes), judge (its identity), metadata, and what
    `Judge` gives. Those that an earlier run left under the same judge, for the same bytes and metadata, are kept.
    With several processes (`accelerate launch`, `torchrun`) each judges every n-th image that is left; `output` must be
    a folder that all of them see. Processes other than the main one return [].
    Raises ValueError on a broken results file, RuntimeError when the results of other processes do not appear.
    """
    folder, output, state = Path(folder), Path(output), processes()
    known: dict[str, Record] = {}
    stale: list[int] = []
    if state.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        known = _merge_parts(output, _read_records(output).values())
        stale = [i for i, s in enumerate(samples) if not _still_holds(known.get(s.file), s, folder, judge)]
    # One list for all, also where a shared folder shows itself late; nobody writes a part before the old ones are gone.
    (stale,) = broadcast_object_list([stale])

    mine = [samples[i] for i in stale[state.process_index :: state.num_processes]]
    bar = tqdm(total=len(mine), desc="judging", disable=not state.is_main_process)
    with bar, (output / f"images.rank-{state.process_index}.jsonl").open("w", encoding="utf-8") as file:
        for chunk in _batches(folder, mine, batch_size):
            rows, hashes, images = zip(*chunk, strict=True)
            decisions = judge(torch.stack(images).to(device), [s.metadata for s in rows])
            for s, sha256, decision in zip(rows, hashes, decisions, strict=True):
                named = {"prompt": s.prompt, "tag": s.metadata["tag"], "file": s.file, "text": s.metadata["prompt"]}
                known_by = {"sha256": sha256, "judge": judge.identity, "metadata": s.metadata}
                file.write(json.dumps({**named, **decision, **known_by}, ensure_ascii=False) + "\n")
            file.flush()
            bar.update(len(rows))
    state.wait_for_everyone()
    if not state.is_main_process:
        return []
    found = _read_records(output)
    if lost := [name for name in (samples[i].file for i in stale) if found.get(name) == known.get(name)]:
        raise RuntimeError(
            f"the results of {len(lost)} images, such as {lost[0]}, are not in {output}: it must be a folder that all "
            "processes see. What is there is kept; run the command again"
        )
    records = [found[s.file] for s in samples]
    _merge_parts(output, records)
    return records


def processes() -> PartialState:
    """accelerate's view of the processes that `torchrun` or `accelerate launch` started.

    Raises RuntimeError when it sees another number of them: each would do the whole work.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    cpu = launched > 1 and not torch.accelerator.is_available()  # else torchrun on CPU is ignored
    # Processes wait for the slowest one; a failed one is the launcher's to notice.
    state = PartialState(cpu, timeout=timedelta(days=1))
    if state.num_processes != launched:
        raise RuntimeError(
            f"the launcher started {launched} processes and accelerate sees {state.num_processes}: unset ACCELERATE_* "
            "variables, or start with torchrun"
        )
    return state


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _still_holds(record: Record | None, sample: Sample, folder: Path, judge: Judge) -> bool:
    return (
        record is not None
        and record["judge"] == judge.identity
        and record["metadata"] == sample.metadata
        and record["sha256"] == _sha256((folder / sample.file).read_bytes())
    )


def _batches(folder: Path, samples: Sequence[Sample], size: int) -> Iterator[list[tuple[Sample, str, Tensor]]]:
    """Up to `size` neighbours of equal height and width: (sample, SHA-256, image)."""
    batch: list[tuple[Sample, str, Tensor]] = []
    for sample in samples:
        data = (folder / sample.file).read_bytes()
        image = _read_image(data)
        if batch and (len(batch) == size or batch[0][2].shape != image.shape):
            yield batch
            batch = []
        batch.append((sample, _sha256(data), image))
    if batch:
        yield batch


def _read_records(output: Path) -> dict[str, Record]:
    """File -> its newest record. A last line cut short by a crash is left out."""
    records: dict[str, Record] = {}
    for path in [output / RESULTS, *sorted(output.glob("images.rank-*.jsonl"))]:
        # Only a newline ends a line: texts may hold U+2028 and its like.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n") if path.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                records[record["file"]] = record
            except (ValueError, KeyError, TypeError) as error:
                if number < len(lines):
                    raise ValueError(f"{path}, line {number}: not a result ({error}); delete the file") from error
    return records


def _merge_parts(output: Path, records: Iterable[Record]) -> dict[str, Record]:
    """Write the records as the results file, then remove the processes' parts; returns them by file."""
    merged = {record["file"]: record for record in records}
    temporary = output / "images.tmp"
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in merged.values())
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, output / RESULTS)
    for part in output.glob("images.rank-*.jsonl"):
        part.unlink()
    return merged


# ------------------------------------------------------------------------------------------------------ results


def summary(records: Sequence[Record], judge: Judge, golden: str) -> dict[str, Any]:
    """What to report: the table per task, the overall score, the shares of images and prompts, the confusions.

    golden: the line of `golden_check`. overall is GenEval's, the unweighted mean of the tasks' official accuracies.
    benchmark says whether these are the 553 prompts with four images each; notes, what keeps the numbers from being
    compared with published ones.
    """
    table = summarise([r["tag"] for r in records], [r["correct"] for r in records], [r["prompt"] for r in records])
    tasks = []
    for task in TASKS:
        rows = [r for r in records if r["tag"] == task]
        if rows:
            means = {k: float(np.mean([r[k] for r in rows])) for k in ("correct", "exact", "score")}
            tasks.append({"task": task, "prompts": len({r["prompt"] for r in rows}), "images": len(rows), **means})
    per_prompt = Counter(r["prompt"] for r in records)
    asked = {r["prompt"]: {k: r["metadata"][k] for k in ("tag", "prompt", "include", "exclude")} for r in records}
    benchmark = asked == dict(enumerate(benchmark_prompts())) and set(per_prompt.values()) == {4}
    return {
        "overall": table["overall"],
        "tasks": tasks,
        "images": len(records),
        "prompts": len(per_prompt),
        "images_correct": table["images"],
        "prompts_correct": table["prompts"],
        "benchmark": benchmark,
        "judge": judge.identity,
        "golden": golden,
        "notes": _notes(judge, benchmark),
        "confusions": confusions(records),
    }


def _notes(judge: Judge, benchmark: bool) -> list[str]:
    """What keeps the numbers from being compared with published ones."""
    notes = []
    if not benchmark:
        notes.append("not the benchmark: that has its 553 prompts with four images each")
    detector, colors = judge.identity["detector"], judge.identity["colors"]
    if not detector.startswith("mask2former") or colors != "clip":
        notes.append("not the benchmark's judge (Mask2Former and CLIP): not to be compared with published scores")
    elif detector == "mask2former":
        notes.append("Mask2Former with Meta's weights, not the benchmark's: keep the two out of one table")
    return notes


def task_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The summary's tasks as rows of a table, with a last one for the overall score (means over the tasks)."""
    rows = [dict(row) for row in result["tasks"]]
    means = {k: float(np.mean([row[k] for row in rows])) for k in ("correct", "exact", "score")}
    return [*rows, {"task": "overall", "prompts": result["prompts"], "images": result["images"], **means}]


def confusions(records: Sequence[Record]) -> dict[str, dict[str, dict[str, int]]]:
    """What was seen where something was wanted: kind -> wanted -> seen -> how often.

    classes: per class that was wanted and is not there, the classes seen that nobody asked for. colors: per object that
    was asked for a colour and found, the colour it has. relations: per pair of objects found, how they lie. counts: of
    the counting task, the number found. The last three hold the right answers too.
    """
    table: dict[str, dict[str, Counter[str]]] = {
        kind: defaultdict(Counter) for kind in ("classes", "colors", "relations", "counts")
    }
    for record in records:
        metadata, objects = record["metadata"], _objects(record)
        include = metadata["include"]
        asked = {clause["class"] for clause in include}
        for clause in include:
            name, found = clause["class"], objects.get(clause["class"], [])
            best = found[: clause["count"]]
            if not found:
                table["classes"][name].update([c for c in objects if c not in asked] or [NOTHING])
            if "color" in clause:
                table["colors"][clause["color"]].update(d["color"] for d in best if d["color"])
            if "position" in clause:
                wanted, target = clause["position"][0], include[clause["position"][1]]
                others = objects.get(target["class"], [])[: target["count"]]
                pairs = [sorted(relation(tuple(a["box"]), tuple(b["box"]))) for a in best for b in others]
                table["relations"][wanted].update(" and ".join(held) or "none" for held in pairs)
            if metadata["tag"] == "counting":
                table["counts"][str(clause["count"])][str(len(found))] += 1
    return {
        kind: {wanted: dict(sorted(seen.items())) for wanted, seen in sorted(rows.items()) if seen}
        for kind, rows in table.items()
    }


def _objects(record: Record) -> dict[str, list[dict[str, Any]]]:
    """The detections that count for a record, by class, best first: those `score` looked at."""
    threshold = COUNTING_THRESHOLD if record["tag"] == "counting" else SCORE_THRESHOLD
    objects: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for found in record["detections"]:
        if found["score"] > threshold:
            objects[found["class"]].append(found)
    return {name: same[:MAX_OBJECTS] for name, same in objects.items()}


def mistakes(confused: Mapping[str, Mapping[str, Mapping[str, int]]], most: int = 5) -> list[dict[str, Any]]:
    """The most frequent confusions of each kind, as rows of a table."""
    rows = []
    for kind, table in confused.items():
        pairs = [
            (n, wanted, seen) for wanted, row in table.items() for seen, n in row.items() if not _right(wanted, seen)
        ]
        for n, wanted, seen in sorted(pairs, key=lambda pair: (-pair[0], *pair[1:]))[:most]:
            rows.append({"mistakes": kind, "wanted": wanted, "seen": seen, "times": n})
    return rows


def _right(wanted: str, seen: str) -> bool:
    return wanted in seen.split(" and ")


def write_summary(output: str | Path, folder: str | Path, result: Mapping[str, Any], records: Sequence[Record]) -> None:
    """`summary.json`, and `failures.html`: up to 60 images that failed, spread over the prompts, with the reasons."""
    output = Path(output)
    (output / "summary.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    wrong = [r for r in records if not r["correct"]]
    shown = [wrong[i] for i in sorted({round(i) for i in np.linspace(0, len(wrong) - 1, min(60, len(wrong)))})]
    (output / "failures.html").write_text(_sheet(Path(folder), shown, len(wrong), len(records)), encoding="utf-8")


def _sheet(folder: Path, shown: Sequence[Record], wrong: int, images: int) -> str:
    from flowrl.evaluation.report import _STYLE, _png

    figures = []
    for record in shown:
        with Image.open(folder / record["file"]) as image:
            picture = _png(image.convert("RGB"))
        text, reason, name = (html.escape(str(record[k]), quote=True) for k in ("text", "reason", "file"))
        caption = f"<b>{text}</b><br>{reason or 'wrong'}<br>{name}"
        figures.append(f'<figure><img style="width:100%" src="{picture}" alt="{text}"><figcaption>{caption}')
    body = "</figcaption></figure>\n".join([*figures, ""])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>GenEval failures</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{wrong} of {images} images failed</h1>"
        f'<p class=note>{len(shown)} of them, spread over the prompts.</p>\n<div class="gallery">{body}</div>\n'
        "</body></html>\n"
    )
