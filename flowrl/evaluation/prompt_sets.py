"""Prompt sets of other benchmarks, read from files of yours, and how their answers become scores.

Nothing of them is bundled: GenEval 2 is CC-BY-NC-4.0, the others are small downloads. A reader returns entries as
`PromptSet` takes them, a mapping with "prompt" and columns per prompt, so they can be `eval_prompts`:

    trainer = Trainer(..., eval_prompts=geneval2("geneval2_data.jsonl"), eval_rewards=my_reward)

Questions are put by `ask(image, questions) -> probabilities`, one in [0, 1] per question: of the right answer for
`geneval2_score`, of "yes" for `dpg_score`. Not verified on the released files: the formats are those of the READMEs and
the published scripts.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flowrl.rewards import vlm_judge

Entry: TypeAlias = dict[str, Any]
Ask: TypeAlias = Callable[[Any, Sequence[Any]], Sequence[float]]
COMPBENCH = ("color", "shape", "texture", "spatial", "3d_spatial", "non_spatial", "numeracy", "complex")


# ----------------------------------------------------------------------------------------------------- GenEval 2


def geneval2(path: str | Path) -> list[Entry]:
    """GenEval 2 (Kamath et al. 2025), `geneval2_data.jsonl`: prompt, atom_count, vqa_list [[question, answer], ...],
    skills (one per question); tag "atoms_N" for the means per atom count.

    Raises ValueError naming the line that is not so, FileNotFoundError.
    """
    entries = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
            pairs = [(str(question), str(answer)) for question, answer in row["vqa_list"]]
            entry = {
                "prompt": _filled(row["prompt"]),
                "atom_count": int(row["atom_count"]),
                "vqa_list": [list(pair) for pair in pairs],
                "skills": [str(skill) for skill in row["skills"]],
                "tag": f"atoms_{int(row['atom_count'])}",
            }
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: not a GenEval 2 prompt ({type(error).__name__}: {error})") from error
        if not pairs or len(entry["skills"]) != len(pairs):
            raise ValueError(
                f"{where}: {len(pairs)} questions and {len(entry['skills'])} skills; there is one for each"
            )
        entries.append(entry)
    return _some(entries, path)


def soft_tifa(probabilities: Sequence[float]) -> dict[str, float]:
    """Soft-TIFA of one image from the probability of each right answer: "am", their mean, for atoms, and "gm", the
    geometric mean, 0 if any is 0, for the prompt. The benchmark averages each over prompts and multiplies by 100."""
    am, gm = vlm_judge.soft_tifa(_probabilities(probabilities))
    return {"am": am, "gm": gm}


def geneval2_score(image: Any, entry: Mapping[str, Any], ask: Ask) -> dict[str, Any]:
    """Soft-TIFA of one image: am, gm and skills, skill -> mean probability. `ask` receives [question, answer] pairs."""
    p = _answers(ask, image, entry["vqa_list"])
    by_skill: dict[str, list[float]] = {}
    for skill, value in zip(entry["skills"], p, strict=True):
        by_skill.setdefault(skill, []).append(value)
    return {**soft_tifa(p), "skills": {skill: sum(values) / len(values) for skill, values in by_skill.items()}}


# ----------------------------------------------------------------------------------------------------- DPG-Bench


def dpg_bench(path: str | Path, skip_first: bool = True) -> list[Entry]:
    """DPG-Bench (Hu et al. 2024), `dpg_bench.csv`: per item its prompt, id and questions, each with "id", "question",
    "parents" (ids of the questions it depends on) and "category" (entity, attribute, ...).

    skip_first: leave out the first row of data, as the published script does by mistake, so that scores compare; the
    first item then lacks a question, and a parent that is not asked counts as yes (the published script fails on an
    item with such a parent, and leaves it out). Raises ValueError naming the line that is not so, FileNotFoundError.
    """
    columns = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
    items: dict[str, Entry] = {}
    for number, row in enumerate(_rows(path, columns)):
        where = f"{path}, data row {number + 1}"
        if skip_first and number == 0:
            continue
        try:
            parents = [int(part) for part in row["dependency"].split(",")]
            asked = {
                "id": int(row["proposition_id"]),
                "question": _filled(row["question_natural_language"]),
                "parents": [parent for parent in parents if parent],
                "category": row["tuple"].split("(")[0].split("-")[0].strip(),
            }
            prompt = _filled(row["text"])
        except ValueError as error:
            raise ValueError(f"{where}: not a DPG-Bench question ({error})") from error
        item = items.setdefault(row["item_id"], {"prompt": prompt, "item_id": row["item_id"], "questions": []})
        if item["prompt"] != prompt:
            raise ValueError(f"{where}: item {row['item_id']} has another text than before")
        item["questions"].append(asked)
    return _some(list(items.values()), path)


def dpg_answers(answers: Mapping[int, float], parents: Mapping[int, Sequence[int]]) -> float:
    """One image's score in [0, 1]: the mean over questions of yes = 1, where a question with a parent at 0 counts 0.

    answers, parents: by question id, in the order of the file, in which zeros are passed on to the children of
    children. A parent that was not asked counts as yes.
    """
    scores = {number: float(value) for number, value in answers.items()}
    for number, above in parents.items():
        if any(scores.get(parent, 1.0) == 0 for parent in above):
            scores[number] = 0.0
    return sum(scores.values()) / len(scores)


def dpg_score(images: Sequence[Any], entry: Mapping[str, Any], ask: Ask) -> dict[str, Any]:
    """A prompt's score: the mean over its images (four in the benchmark, times 100), and per category the share of yes.

    A question is answered yes at a probability of 0.5 or more. Categories use the answers before zeroing; the published
    script takes them from the last image alone, this from all.
    """
    questions = entry["questions"]
    parents = {q["id"]: q["parents"] for q in questions}
    scores, by_category = [], dict[str, list[float]]()
    for image in images:
        p = _answers(ask, image, [q["question"] for q in questions])
        answers = {q["id"]: float(value >= 0.5) for q, value in zip(questions, p, strict=True)}
        scores.append(dpg_answers(answers, parents))
        for q in questions:
            by_category.setdefault(q["category"], []).append(answers[q["id"]])
    means = {category: sum(values) / len(values) for category, values in by_category.items()}
    return {"score": sum(scores) / len(scores), "categories": means}


# ------------------------------------------------------------------------------------- T2I-CompBench++, DrawBench


def compbench(folder: str | Path, split: str = "val") -> list[Entry]:
    """T2I-CompBench++ (Huang et al. 2025), a folder with `CATEGORY_SPLIT.txt`: prompt, tag (the category) and, of
    "complex", kind: "spatial" or "action" for texts in `complex_SPLIT_spatial.txt` or `complex_SPLIT_action.txt`, else
    "spatial_action". As in the published script, those texts are compared up to the first full stop, in lower case.

    Raises FileNotFoundError naming a missing file.
    """
    folder = Path(folder)
    files = {kind: folder / f"complex_{split}_{kind}.txt" for kind in ("spatial", "action")}
    kinds = {kind: {_sentence(text) for text in _lines(file)} for kind, file in files.items()}
    entries: list[Entry] = []
    for category in COMPBENCH:
        for prompt in _lines(folder / f"{category}_{split}.txt"):
            entry: Entry = {"prompt": prompt, "tag": category}
            if category == "complex":
                named = [kind for kind, texts in kinds.items() if _sentence(prompt) in texts]
                entry["kind"] = named[0] if named else "spatial_action"
            entries.append(entry)
    return _some(entries, folder)


def _sentence(text: str) -> str:
    return text.partition(".")[0].lower()


def compbench_complex(kind: str, attribute: float, spatial: float, action: float) -> float:
    """The score of a "complex" image: the mean of its attribute score (BLIP-VQA) and of those its kind names, spatial
    (UniDet), action (CLIPScore) or both. Raises ValueError on an unknown kind."""
    parts = {
        "spatial": (attribute, spatial),
        "action": (attribute, action),
        "spatial_action": (attribute, spatial, action),
    }
    if kind not in parts:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(parts)}")
    return sum(parts[kind]) / len(parts[kind])


def drawbench(path: str | Path) -> list[Entry]:
    """DrawBench (Saharia et al. 2022), a CSV with Prompts and Category: prompt and tag. It has no automatic score; it
    serves as held-out prompts for rewards that were not trained on. Raises ValueError, FileNotFoundError."""
    rows = _rows(path, ("Prompts", "Category"))
    return _some([{"prompt": _filled(row["Prompts"]), "tag": row["Category"].strip()} for row in rows], path)


# -------------------------------------------------------------------------------------------------------- pieces


def _text(path: str | Path) -> str:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no prompt file {path}: download the benchmark and give its path")
    return path.read_text(encoding="utf-8-sig")


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in _text(path).split("\n") if line.strip()]


def _rows(path: str | Path, columns: Sequence[str]) -> list[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""))
    if missing := set(columns) - set(reader.fieldnames or ()):
        raise ValueError(f"{path} has no column {', '.join(sorted(missing))}; it has {reader.fieldnames}")
    rows = list(reader)
    for number, row in enumerate(rows, 1):
        if None in [row[column] for column in columns]:
            raise ValueError(f"{path}, data row {number}: fewer cells than the header")
    return rows


def _filled(text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"empty text {text!r}")
    return text.strip()


def _some(entries: list[Entry], path: str | Path) -> list[Entry]:
    if not entries:
        raise ValueError(f"{path} holds no prompts")
    return entries


def _probabilities(values: Sequence[float]) -> list[float]:
    p = [float(value) for value in values]
    if not p or not all(0 <= value <= 1 for value in p):
        raise ValueError(f"answers must be probabilities in [0, 1], at least one, got {p}")
    return p


def _answers(ask: Ask, image: Any, questions: Sequence[Any]) -> list[float]:
    p = _probabilities(ask(image, questions))
    if len(p) != len(questions):
        raise ValueError(f"`ask` returned {len(p)} answers to {len(questions)} questions")
    return p
