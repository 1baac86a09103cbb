"""Prompts in GenEval's grammar beside the benchmark's own."""

from collections import Counter

import pytest

from flowrl.rewards.geneval import GENEVAL_CLASSES, TASKS, benchmark_prompts, parse_metadata
from flowrl.rewards.geneval_prompts import (
    DRAWS,
    SEEN_CLASSES,
    TASK_WEIGHTS,
    UNSEEN_CLASSES,
    make_prompt,
    seen_prompts,
    train_prompts,
    unseen_prompts,
)
from flowrl.training.prompts import PromptSet


@pytest.fixture(scope="module")
def training():
    return train_prompts()


def classes_of(prompts):
    return {clause["class"] for p in prompts for clause in p["include"]}


def test_the_grammar_is_the_benchmarks():
    """Every prompt of the benchmark is made again from its parts."""
    for prompt in benchmark_prompts():
        clauses = prompt["include"][:: -1 if prompt["tag"] == "position" else 1]  # the text names the target last
        made = make_prompt(
            prompt["tag"],
            [c["class"] for c in clauses],
            [c["color"] for c in clauses if "color" in c],
            clauses[0].get("position", [""])[0],
            clauses[0]["count"],
        )
        assert made == prompt


def test_training_prompts_follow_the_mix_and_leave_the_benchmark_out(training):
    texts = [p["prompt"] for p in training]
    assert len(set(texts)) == len(texts) and not set(texts) & {p["prompt"] for p in benchmark_prompts()}
    weight = Counter()
    for prompt in training:
        weight[prompt["tag"]] += prompt["weight"]
    assert set(weight) == set(TASK_WEIGHTS)
    # What the removal takes: about 80 of 240 counting texts, 94 of 790 colours, next to nothing of the large tasks.
    left = {"position": 1.0, "counting": 2 / 3, "color_attr": 1.0, "colors": 1 - 94 / 790, "two_object": 1.0}
    for tag, share in TASK_WEIGHTS.items():
        assert weight[tag] == pytest.approx(DRAWS * share / 17 * left[tag], rel=0.05), tag
    assert 25_000 < len(training) < 30_000 and sum(weight.values()) > 44_000


def test_every_prompt_is_valid_and_the_draw_is_fixed(training):
    for prompt in training[::97]:
        kept = {k: v for k, v in prompt.items() if k != "weight"}
        assert parse_metadata(kept) == kept
    assert classes_of(training) == set(GENEVAL_CLASSES)
    assert not any(c["class"] == "person" and "color" in c for p in training for c in p["include"])


def test_the_split_by_class():
    assert len(SEEN_CLASSES) == 60 and len(UNSEEN_CLASSES) == 20 and not set(SEEN_CLASSES) & set(UNSEEN_CLASSES)
    assert classes_of(seen_prompts()) == set(SEEN_CLASSES)
    unseen = unseen_prompts()
    assert len(unseen) == len({p["prompt"] for p in unseen}) == 1024
    assert classes_of(unseen) == set(UNSEEN_CLASSES)
    assert Counter(p["tag"] for p in unseen) == {
        "single_object": 20, "two_object": 248, "counting": 60, "colors": 200, "position": 248, "color_attr": 248
    }  # fmt: skip
    assert all(parse_metadata(p) == p for p in unseen)


def test_recipes_know_them_by_name(training):
    named = PromptSet("geneval/train")
    assert len(named) == len(training) and named[5].weight == training[5]["weight"]
    assert named[5].text == training[5]["prompt"]  # the same draw every time
    assert len(PromptSet("geneval/test")) == 553
    assert {p.metadata["tag"] for p in PromptSet("geneval/test-unseen")} == set(TASKS)


def test_unknown_task():
    with pytest.raises(ValueError, match="unknown task 'colour'; known: single_object"):
        make_prompt("colour", ["cat"])
