"""Readers and scores of other benchmarks, on files written here in their formats and numbers worked out by hand."""

import json
import math

import pytest

from flowrl.evaluation import prompt_sets
from flowrl.training.prompts import PromptSet

COWS = {
    "prompt": "four white bicycles behind a cow",
    "atom_count": 4,
    "vqa_list": [["How many bicycles?", "four"], ["Are they white?", "Yes"], ["Behind the cow?", "Yes"]],
    "skills": ["count", "attribute", "position"],
}
DPG = """item_id,text,keywords,proposition_id,dependency,category_broad,extra,tuple,question_natural_language
a,"a cat, on a mat",,1,0,entity,whole,entity - whole (cat),Is there a cat?
a,"a cat, on a mat",,2,0,entity,whole,entity - whole (mat),Is there a mat?
a,"a cat, on a mat",,3,"1,2",relation,spatial,"relation - spatial (cat, mat, on)",Is the cat on the mat?
a,"a cat, on a mat",,4,3,attribute,other,attribute - other (cat),Is it lying?
b,a red bus,,1,0,entity,whole,entity - whole (bus),Is there a bus?
"""


@pytest.fixture
def file(tmp_path):
    def write(text, name="data"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


# ----------------------------------------------------------------------------------------------------- GenEval 2


def test_geneval2_is_read_and_serves_as_prompts(file):
    (entry,) = prompt_sets.geneval2(file(json.dumps(COWS) + "\n\n"))
    assert entry == {**COWS, "tag": "atoms_4"}
    prompts = PromptSet([entry])
    assert prompts[0].text == COWS["prompt"] and prompts[0].metadata["vqa_list"] == COWS["vqa_list"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "data, line 1: not a GenEval 2 prompt"),
        (
            json.dumps({k: v for k, v in COWS.items() if k != "skills"}),
            "line 1: not a GenEval 2 prompt .KeyError: 'ski",
        ),
        (json.dumps({**COWS, "skills": ["count"]}), "3 questions and 1 skills"),
        (json.dumps({**COWS, "vqa_list": [["one"]]}), "line 1: not a GenEval 2 prompt"),
        (json.dumps({**COWS, "prompt": " "}), "empty text"),
        ("", "holds no prompts"),
    ],
)
def test_geneval2_bad_lines(line, message, file):
    with pytest.raises(ValueError, match=message):
        prompt_sets.geneval2(file(line))


def test_soft_tifa():
    assert prompt_sets.soft_tifa([0.5, 0.5, 1.0, 0.25])["am"] == 0.5625
    assert prompt_sets.soft_tifa([0.5, 0.5, 1.0, 0.25])["gm"] == pytest.approx(0.0625**0.25)  # = 0.5
    assert prompt_sets.soft_tifa([0.9, 0.0]) == {"am": 0.45, "gm": 0.0}
    tiny = prompt_sets.soft_tifa([1e-200] * 3)  # the product itself would underflow
    assert tiny["gm"] == pytest.approx(1e-200) and math.isfinite(tiny["gm"])
    for bad in ([], [1.2], [float("nan")]):
        with pytest.raises(ValueError, match="must be probabilities"):
            prompt_sets.soft_tifa(bad)


def test_geneval2_score():
    asked = []

    def ask(image, questions):
        asked.append((image, questions))
        return [0.5, 1.0, 0.25]

    score = prompt_sets.geneval2_score("image", COWS, ask)
    assert asked == [("image", COWS["vqa_list"])]
    assert score["skills"] == {"count": 0.5, "attribute": 1.0, "position": 0.25}
    assert score["gm"] == pytest.approx(0.5) and score["am"] == pytest.approx(1.75 / 3)
    with pytest.raises(ValueError, match="returned 1 answers to 3 questions"):
        prompt_sets.geneval2_score("image", COWS, lambda image, questions: [1.0])


# ----------------------------------------------------------------------------------------------------- DPG-Bench


def test_dpg_bench_and_its_first_row(file):
    path = file(DPG)
    a, b = prompt_sets.dpg_bench(path, skip_first=False)
    assert a["prompt"] == "a cat, on a mat" and b["prompt"] == "a red bus"
    assert [q["parents"] for q in a["questions"]] == [[], [], [1, 2], [3]]
    assert [q["category"] for q in a["questions"]] == ["entity", "entity", "relation", "attribute"]
    published = prompt_sets.dpg_bench(path)
    assert [q["id"] for q in published[0]["questions"]] == [2, 3, 4] and published[1] == b
    assert PromptSet(published)[1].metadata["item_id"] == "b"
    odd = prompt_sets.dpg_bench(file(DPG.replace("a red bus", "a red\u2028bus")), skip_first=False)
    assert odd[1]["prompt"] == "a red\u2028bus"  # only a newline ends a row


def test_dpg_zeroes_what_depends_on_a_no():
    parents = {1: [], 2: [], 3: [1, 2], 4: [3]}
    yes = {1: 1, 2: 1, 3: 1, 4: 1}
    assert prompt_sets.dpg_answers(yes, parents) == 1
    assert prompt_sets.dpg_answers({**yes, 4: 0}, parents) == 0.75
    assert prompt_sets.dpg_answers({**yes, 2: 0}, parents) == 0.25  # 3, and through it 4
    # The published order: a child before its parent's own zeroing keeps its answer.
    assert prompt_sets.dpg_answers({**yes, 1: 0}, {4: [3], 3: [1], 1: [], 2: []}) == 0.5
    assert prompt_sets.dpg_answers({3: 1, 4: 1}, {3: [1], 4: [3]}) == 1  # a parent that was not asked


def test_dpg_score(file):
    entry = prompt_sets.dpg_bench(file(DPG), skip_first=False)[0]
    answers = {"first": [0.9, 0.5, 0.6, 0.2], "second": [0.1, 0.8, 0.9, 0.9]}
    score = prompt_sets.dpg_score(["first", "second"], entry, lambda image, questions: answers[image])
    assert score["score"] == pytest.approx((0.75 + 0.25) / 2)
    assert score["categories"] == {"entity": 0.75, "relation": 1.0, "attribute": 0.5}  # before zeroing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DPG.replace("tuple", "triple"), "has no column tuple"),
        (DPG.replace(",2,0,", ",x,0,"), "data row 2: not a DPG-Bench question"),
        (DPG.replace('mat",,4', 'rug",,4'), "data row 4: item a has another text"),
        (DPG + "c,short\n", "data row 6: fewer cells than the header"),
        (DPG.split("\n")[0] + "\n", "holds no prompts"),
    ],
)
def test_dpg_bad_files(text, message, file):
    with pytest.raises(ValueError, match=message):
        prompt_sets.dpg_bench(file(text))


# ------------------------------------------------------------------------------------- T2I-CompBench++, DrawBench


def test_compbench(file, tmp_path):
    for category in prompt_sets.COMPBENCH:
        file(f"a {category}\n", f"{category}_val.txt")
    file("one on two\nrunning\nboth\n", "complex_val.txt")
    file("One on two.\n", "complex_val_spatial.txt")  # the published script compares up to the stop, in lower case
    file("running\n", "complex_val_action.txt")
    entries = prompt_sets.compbench(tmp_path)
    assert [e["tag"] for e in entries[:-3]] == list(prompt_sets.COMPBENCH[:-1])
    assert [e["kind"] for e in entries[-3:]] == ["spatial", "action", "spatial_action"]
    assert PromptSet(entries).columns == ("kind", "tag")
    (tmp_path / "texture_val.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"texture_val\.txt: download the benchmark"):
        prompt_sets.compbench(tmp_path)


def test_compbench_complex():
    assert prompt_sets.compbench_complex("spatial", 0.6, 0.2, 0.9) == pytest.approx(0.4)
    assert prompt_sets.compbench_complex("action", 0.6, 0.2, 0.9) == pytest.approx(0.75)
    assert prompt_sets.compbench_complex("spatial_action", 0.6, 0.3, 0.9) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="unknown kind 'both'; known: spatial, action"):
        prompt_sets.compbench_complex("both", 1, 1, 1)


def test_drawbench(file):
    path = file('Prompts,Category\n"A red book, closed.",Colors\nTwo cats.,Counting\n')
    assert prompt_sets.drawbench(path) == [
        {"prompt": "A red book, closed.", "tag": "Colors"},
        {"prompt": "Two cats.", "tag": "Counting"},
    ]
    with pytest.raises(ValueError, match="has no column Category, Prompts"):
        prompt_sets.drawbench(file("a,b\n1,2\n", "other"))
