import hashlib
import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from flowrl.rewards import GenEvalReward, HSVColors, RewardError, RewardSet, geneval
from flowrl.rewards.geneval import (
    BENCHMARK_SHA256,
    COLORS,
    GENEVAL_CLASSES,
    TASKS,
    Detection,
    benchmark_prompts,
    load_prompts,
    parse_metadata,
    relation,
    summarise,
)

CAT, DOG, CUP = (GENEVAL_CLASSES.index(name) for name in ("cat", "dog", "cup"))
VARIANTS = ("official", "exact", "partial", "partial_flowgrpo")


def thing(index, score=0.95, x=0.0, y=0.0, size=100.0):
    return Detection(index, score, (x, y, x + size, y + size))


def spec(tag="two_object", include=(("cat", 1),), exclude=()):
    def clause(name, count, **more):
        return {"class": name, "count": count, **more}

    def clauses(given):
        return [clause(*c[:2], **(c[2] if len(c) > 2 else {})) for c in given]

    return parse_metadata({"tag": tag, "prompt": "p", "include": clauses(include), "exclude": clauses(exclude)})


def judge(metadata, detections, colors=None, **more):
    return geneval.score(metadata, detections, colors, **more)


TWO = spec(include=[("cat", 1), ("dog", 1)])
THREE = spec("counting", [("cat", 3)], [("cat", 4)])
LEFT = spec("position", [("dog", 1), ("cat", 1, {"position": ["left of", 0]})])
ATTR = spec("color_attr", [("cat", 1, {"color": "red"}), ("dog", 1, {"color": "blue"})])


# the golden table: case, metadata, detections, colours, upstream score, fixed score
GOLDEN = {
    "two_object, one missing": (TWO, [thing(CAT)], None, 0.5, 0.5),
    "two_object, A doubled": (TWO, [thing(CAT), thing(CAT), thing(DOG)], None, 0.5, 0.5),
    "counting 3, found 2": (THREE, [thing(CAT)] * 2, None, 2 / 3, 2 / 3),
    "position, wrong side": (LEFT, [thing(CAT, x=300), thing(DOG)], None, 0.75, 2 / 3),
    "position, target missing": (LEFT, [thing(CAT)], None, 1 / 3, 1 / 3),
    "color_attr, one wrong": (ATTR, [thing(CAT), thing(DOG)], ["red", "green"], 0.75, 0.75),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_table(case):
    metadata, detections, colors, upstream, fixed = GOLDEN[case]
    assert judge(metadata, detections, colors, variant="partial_flowgrpo").score == pytest.approx(upstream)
    verdict = judge(metadata, detections, colors, variant="partial")
    assert verdict.score == pytest.approx(fixed) == pytest.approx(sum(verdict.terms) / len(verdict.terms))
    assert not verdict.exact and verdict.reason
    assert judge(metadata, detections, colors, variant="exact").score == 0
    # Only the doubled object is good enough for GenEval, which asks for at least the count.
    assert judge(metadata, detections, colors).correct == ("doubled" in case)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_perfect_image_scores_one(variant):
    perfect = [
        (TWO, [thing(CAT), thing(DOG)], None),
        (THREE, [thing(CAT)] * 3, None),
        (LEFT, [thing(CAT), thing(DOG, x=300)], None),
        (ATTR, [thing(CAT), thing(DOG)], ["red", "blue"]),
    ]
    for metadata, detections, colors in perfect:
        verdict = judge(metadata, detections, colors, variant=variant)
        assert (verdict.correct, verdict.exact, verdict.score, verdict.reason) == (True, True, 1.0, "")


def test_terms_are_bounded_below_only_in_ours():
    metadata = spec("single_object")
    many = [thing(CAT) for _ in range(20)]  # 16 count
    assert judge(metadata, many, variant="partial_flowgrpo").score == -14
    assert judge(metadata, many, variant="partial_flowgrpo", clamp_min=0.0).score == 0
    assert judge(metadata, many, variant="partial").score == 0
    assert judge(metadata, many, variant="partial", clamp_min=-math.inf).score == -14
    assert judge(TWO, [*many, thing(DOG)], variant="partial").score == 0.5


# official decisions


def test_thresholds_are_strict_and_counting_has_its_own():
    one = spec("single_object")
    assert not judge(one, [thing(CAT, 0.3)]).correct
    assert judge(one, [thing(CAT, 0.31)]).correct
    assert not judge(THREE, [thing(CAT, 0.95), thing(CAT, 0.95), thing(CAT, 0.9)]).correct
    assert judge(THREE, [thing(CAT, 0.95), thing(CAT, 0.95), thing(CAT, 0.91)]).correct
    assert judge(THREE, [*[thing(CAT, 0.95)] * 3, thing(CAT, 0.89)]).correct


def test_exclude_makes_counting_exact_and_sees_all_detections():
    assert judge(THREE, [thing(CAT)] * 3).correct
    four = judge(THREE, [thing(CAT)] * 4)
    assert not four.correct and four.reason == "cat: wanted fewer than 4, found 4"
    without = spec("counting", [("cat", 3)])
    assert judge(without, [thing(CAT)] * 4).correct
    no_dog = spec("single_object", exclude=[("dog", 1)])
    assert judge(no_dog, [thing(CAT)]).correct
    both = judge(no_dog, [thing(CAT), thing(DOG)])
    assert not both.correct and not both.exact
    assert judge(no_dog, [thing(CAT), thing(DOG)], variant="partial").score == 1  # the server does not look


def test_official_truncates_to_the_best_and_exact_does_not():
    # The best cat is red and left of the dog; a weaker one is neither.
    best, spare, dog = thing(CAT, 0.9), thing(CAT, 0.5, x=600), thing(DOG, x=300)
    red = spec("colors", [("cat", 1, {"color": "red"})])
    asked = []

    def colors(name, found):
        asked.append((name, list(found)))
        return ["red" if d is best else "blue" for d in found]

    assert judge(red, [spare, best], colors).correct
    assert asked == [("cat", [best])]  # once for both walks, best first
    assert judge(LEFT, [spare, best, dog]).correct
    for metadata, found, given in ((red, [spare, best], colors), (LEFT, [spare, best, dog], None)):
        for variant, score in (("exact", 0.0), ("partial", None)):
            verdict = judge(metadata, found, given, variant=variant)
            assert not verdict.exact and verdict.correct
            assert score is None or verdict.score == score
    assert judge(LEFT, [spare, best, dog], variant="partial").terms == (1.0, 0.0, 0.0)


def test_every_pair_must_show_the_relation():
    cats = spec("position", [("dog", 1), ("cat", 2, {"position": ["left of", 0]})])
    dogs = spec("position", [("dog", 2), ("cat", 1, {"position": ["left of", 0]})])
    assert judge(cats, [thing(DOG, x=600), thing(CAT), thing(CAT, y=50)]).correct
    assert not judge(cats, [thing(DOG, x=600), thing(CAT), thing(CAT, x=900)]).correct
    assert not judge(dogs, [thing(CAT, x=300), thing(DOG, x=600), thing(DOG)]).correct


def test_a_failed_target_fails_the_position():
    metadata = spec("position", [("dog", 1, {"color": "red"}), ("cat", 1, {"position": ["left of", 0]})])
    verdict = judge(metadata, [thing(CAT), thing(DOG, x=300)], ["white", "blue"])
    assert not verdict.correct
    assert verdict.reason == "dog: wanted 1 red, saw blue; cat: nothing to be left of, as dog failed"


def test_position_is_asked_only_while_the_clause_holds():
    metadata = spec("position", [("dog", 1), ("cat", 1, {"color": "red", "position": ["left of", 0]})])
    found = [thing(CAT), thing(DOG, x=300)]
    for variant in ("partial", "partial_flowgrpo"):
        assert judge(metadata, found, ["blue", "white"], variant=variant).terms == (1.0, 1.0, 0.0)


def test_colours_are_needed_and_checked():
    red = spec("colors", [("cat", 1, {"color": "red"})])
    assert not judge(red, []).correct  # not asked for without an object
    with pytest.raises(ValueError, match="colour of 'cat'"):
        judge(red, [thing(CAT)])
    with pytest.raises(ValueError, match="2 colours for 1 detections"):
        judge(red, [thing(CAT)], ["red", "red"])
    for wrong in ([], ["crimson"]):
        with pytest.raises(ValueError, match="wanted 1 colours of red"):
            judge(red, [thing(CAT)], lambda name, found, wrong=wrong: wrong)


def test_bad_detections_and_variant():
    for index in (-1, 80):
        with pytest.raises(ValueError, match="80 classes"):
            judge(TWO, [thing(index)])
    for bad in (thing(CAT, math.nan), thing(CAT, x=math.inf)):
        with pytest.raises(ValueError, match="must be finite"):
            judge(TWO, [bad])
    for make in (lambda: judge(TWO, [], variant="oficial"), lambda: GenEvalReward(None, None, "oficial")):
        with pytest.raises(ValueError, match="variant must be one of official, exact"):
            make()


@pytest.mark.parametrize("seed", range(3))
def test_variants_agree_on_random_scenes(seed):
    """Exact implies correct, a full partial score means exact, the upstream bug only ever adds."""
    rng = np.random.default_rng(seed)
    checked = Counter()
    for metadata in benchmark_prompts():
        wanted = [(c["class"], c["count"]) for c in metadata["include"]]
        found, colors = [], []
        for name, count in wanted:
            for _ in range(max(0, count + int(rng.choice([-1, 0, 0, 0, 1])))):
                x, y = rng.uniform(0, 400, 2)
                found.append(thing(GENEVAL_CLASSES.index(name), rng.uniform(0.85, 1), x, y))
                colors.append(str(rng.choice([c.get("color", "red") for c in metadata["include"]])))
        by = {variant: judge(metadata, found, colors, variant=variant) for variant in VARIANTS}
        official, partial = by["official"], by["partial"]
        assert official.correct or not official.exact
        assert official.score == float(official.correct) and by["exact"].score == float(official.exact)
        assert (partial.score == 1) == official.exact and 0 <= partial.score <= 1
        upstream = judge(metadata, found, colors, variant="partial_flowgrpo", clamp_min=0.0).score
        assert upstream >= partial.score
        checked[official.correct, official.exact] += 1
    assert len(checked) == 3  # all but (wrong, exact)


# relations


def square(x, y, size=100):
    return (x, y, x + size, y + size)


def test_forty_pixel_rule():
    assert relation(square(0, 0), square(40, 0)) == set()
    assert relation(square(0, 0), square(40.5, 0)) == {"left of"}
    assert relation(square(40.5, 0), square(0, 0)) == {"right of"}
    assert relation(square(0, 0), square(0, 40.5)) == {"above"}
    assert relation(square(0, 40.5), square(0, 0)) == {"below"}


def test_diagonals_hold_two_relations_and_identical_boxes_none():
    assert relation(square(0, 0), square(300, 300)) == {"left of", "above"}
    assert relation(square(300, 0), square(0, 300)) == {"right of", "above"}
    assert relation(square(7, 7), square(7, 7)) == set()
    assert relation(square(0, 0), square(19, 19)) == set()  # within the shrink on both axes


def test_relation_is_antisymmetric():
    opposite = dict(zip(geneval.RELATIONS, ("right of", "left of", "below", "above"), strict=True))
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (square(*rng.uniform(0, 300, 2), rng.uniform(10, 150)) for _ in range(2))
        assert {opposite[r] for r in relation(a, b)} == relation(b, a)


# prompts


def test_benchmark_prompts():
    prompts = benchmark_prompts()
    assert Counter(p["tag"] for p in prompts) == dict(zip(TASKS, (80, 99, 80, 94, 100, 100), strict=True))
    assert list(dict.fromkeys(p["tag"] for p in prompts)) == list(TASKS)
    text = "".join(p["prompt"] + "\n" for p in prompts)
    assert hashlib.sha256(text.encode()).hexdigest() == BENCHMARK_SHA256
    assert len({p["prompt"] for p in prompts}) == 553
    numbers = Counter(p["include"][0]["count"] for p in prompts if p["tag"] == "counting")
    assert numbers == {2: 26, 3: 28, 4: 26}
    assert not any(p["include"][0]["class"] == "person" for p in prompts if p["tag"] == "colors")
    clauses = {p["prompt"]: p["include"] for p in prompts}
    assert clauses["a photo of a dog right of a teddy bear"] == [
        {"class": "teddy bear", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}
    ]  # fmt: skip
    assert clauses["a photo of a purple wine glass and a black apple"] == [
        {"class": "wine glass", "count": 1, "color": "purple"}, {"class": "apple", "count": 1, "color": "black"}
    ]  # fmt: skip
    for p in prompts:
        assert parse_metadata(json.dumps(p)) == p
        if p["tag"] == "counting":
            assert p["exclude"] == [{**p["include"][0], "count": p["include"][0]["count"] + 1}]


def test_a_changed_generator_is_noticed(monkeypatch):
    monkeypatch.setattr(geneval, "GENEVAL_CLASSES", GENEVAL_CLASSES[::-1])
    with pytest.raises(RuntimeError, match="differ from the benchmark"):
        benchmark_prompts()


def test_load_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    some = benchmark_prompts()[::50]
    path.write_text("\n".join(json.dumps(p) for p in some) + "\n\n")
    assert load_prompts(path) == some
    path.write_text(json.dumps(some[0]) + '\n\n{"tag": "colour"}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:3: bad GenEval prompt: unknown tag 'colour'; did you mean"):
        load_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        load_prompts(path)


GOOD = {"tag": "position", "prompt": "p", "include": [{"class": "cat", "count": 1}], "exclude": []}


def include(**changes):
    return {**GOOD, "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, **changes}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ({**GOOD, "tag": "postion"}, "unknown tag 'postion'; did you mean 'position'"),
        ({k: v for k, v in GOOD.items() if k != "tag"}, "unknown tag None"),
        ({**GOOD, "prompt": " "}, "'prompt' must be"),
        ({**GOOD, "prompt": None}, "'prompt' must be"),
        ({**GOOD, "include": []}, "'include' must list at least one"),
        ({**GOOD, "include": None}, "'include' must list at least one"),
        ({**GOOD, "include": "cat"}, "'include' must be a list of objects"),
        ({**GOOD, "include": ["cat"]}, "'include' must be a list of objects"),
        ({**GOOD, "exclude": 0}, "'exclude' must be a list of objects"),
        ({**GOOD, "exclud": []}, "unknown key 'exclud'; did you mean 'exclude'"),
        ({**GOOD, "include": [{"class": "cat"}]}, "needs 'class' and 'count'"),
        (
            {**GOOD, "exclude": [{"class": "cat", "count": 1, "color": "red"}]},
            "unknown field of 'exclude' 'color'",
        ),
        (include(**{"class": "kat"}), "unknown class 'kat'; did you mean 'cat'"),
        (include(count=0), "count of 'cat' must be an integer from 1, got 0"),
        (include(count=1.0), "must be an integer"),
        (include(count=True), "must be an integer"),
        (include(colour="red"), "unknown field of 'include' 'colour'; did you mean 'color'"),
        (include(color="crimson"), "unknown colour 'crimson'; known: red, orange"),
        (include(position="left of"), "a position is"),
        (include(position=["left", 0]), "unknown relation 'left'; did you mean 'left of'"),
        (include(position=["left of", 1]), "must point to an earlier clause"),
        (include(position=["left of", -1]), "must point to an earlier clause"),
        (include(position=["left of", "0"]), "must point to an earlier clause"),
    ],
)
def test_bad_metadata(line, message):
    with pytest.raises(ValueError, match=f"bad GenEval prompt: .*{message}.*The line: ") as caught:
        parse_metadata(line)
    assert (line if isinstance(line, str) else str(line)) in str(caught.value)


def test_absent_fields_may_be_none_and_other_keys_stay():
    parsed = parse_metadata({**include(color=None, position=None), "exclude": None, "id": 7})
    assert parsed["include"][1] == {"class": "cat", "count": 1}
    assert parsed["exclude"] == [] and parsed["id"] == 7


# summary


def test_summary():
    table = summarise(["counting"] * 4 + ["colors"] * 2, [True, False, False, False, True, True], [0, 0, 1, 1, 2, 2])
    assert table == {
        "tasks": {"counting": 0.25, "colors": 1.0},
        "overall": 0.625,
        "images": 0.5,
        "prompts": pytest.approx(2 / 3),
    }
    for bad in (
        ([], [], []),
        (["colors"], [True, False], [0]),
        (["colors"], [True], []),
        (["hue"], [True], [0]),
    ):
        with pytest.raises(ValueError):
            summarise(*bad)


# colours and the reward

RGB = {
    "red": (220, 20, 20),
    "orange": (255, 140, 0),
    "yellow": (250, 230, 20),
    "green": (20, 160, 40),
    "blue": (30, 60, 220),
    "purple": (128, 0, 128),
    "pink": (255, 182, 193),
    "brown": (139, 69, 19),
    "black": (10, 10, 10),
    "white": (245, 245, 245),
}


def paint(objects, size=128):
    """White-grey canvas with one coloured square per (colour, x, y, side)."""
    image = torch.full((3, size, size), 0.6)
    for color, x, y, side in objects:
        image[:, y : y + side, x : x + side] = torch.tensor(RGB[color]).div(255)[:, None, None]
    return image


@pytest.mark.parametrize("color", COLORS)
def test_hsv_names_the_ten_colours(color):
    image = paint([(color, 20, 30, 40)])
    assert HSVColors()(image, [thing(0, x=20, y=30, size=40)], "square") == [color]
    mask = np.zeros((128, 128), bool)
    mask[30:70, 20:60] = True
    assert HSVColors()(image, [Detection(0, 1.0, (0, 0, 128, 128), mask)], "square") == [color]


@pytest.mark.parametrize(("rgb", "color"), [((255, 105, 180), "pink"), ((165, 42, 42), "brown"), ((139, 0, 0), "red")])
def test_hsv_neighbours(rgb, color):
    image = torch.tensor(rgb).div(255)[:, None, None].expand(3, 4, 4)
    assert HSVColors()(image, [thing(0, size=4)], "x") == [color]


def test_hsv_majority_and_errors():
    image = paint([("red", 0, 0, 40), ("blue", 0, 0, 10)])
    assert HSVColors()(image, [thing(0, size=40.0)], "square") == ["red"]
    assert HSVColors()(image, [], "square") == []
    with pytest.raises(ValueError, match="without pixels"):
        HSVColors()(image, [thing(0, x=500)], "square")
    with pytest.raises(ValueError, match=r"mask of \(4, 4\)"):
        HSVColors()(image, [Detection(0, 1.0, (0, 0, 9, 9), np.ones((4, 4), bool))], "square")


class Shapes:
    """A detector of a miniature world: it knows where the shapes are."""

    classes = ("circle", "square", "triangle")

    def __init__(self, scenes):
        self.scenes = scenes

    def __call__(self, images):
        return self.scenes


SCENE = dict(
    tag=["position", "color_attr", "counting"],
    include=[
        [{"class": "square", "count": 1}, {"class": "circle", "count": 1, "position": ["above", 0]}],
        [{"class": "square", "count": 1, "color": "red"}, {"class": "circle", "count": 1, "color": "green"}],
        [{"class": "triangle", "count": 2}],
    ],
    exclude=[None, [], [{"class": "triangle", "count": 3}]],
)


def test_reward_in_a_world_of_shapes():
    images = torch.stack(
        [
            paint([("red", 40, 80, 30), ("blue", 40, 10, 30)]),
            paint([("red", 0, 0, 40), ("blue", 60, 60, 40)]),
            paint([]),
        ]
    )
    scenes = [
        [thing(1, x=40, y=80, size=30), thing(0, x=40, y=10, size=30)],
        [thing(1, size=40), thing(0, x=60, y=60, size=40)],
        [thing(2, x=x, size=20) for x in (0, 40, 80)],
    ]
    reward = GenEvalReward(Shapes(scenes), HSVColors(), "partial")
    rewards = RewardSet(reward)
    rewards.check_columns(SCENE)
    with pytest.raises(ValueError, match=r"'geneval_partial' needs the prompt columns \['include'\]"):
        rewards.check_columns(["tag"])
    scores = rewards.score(images, ["a", "b", "c"], SCENE)
    assert scores.total.tolist() == [1.0, 0.75, 0.5]
    details = scores.details["geneval_partial"]
    assert details["correct"].tolist() == details["exact"].tolist() == [True, False, False]
    assert details["reason"][1:] == [
        "circle: wanted 1 green, saw blue",
        "triangle: wanted exactly 2, found 3; triangle: wanted fewer than 3, found 3",
    ]
    official = RewardSet(GenEvalReward(Shapes(scenes), HSVColors(), "official")).score(images, ["a", "b", "c"], SCENE)
    assert list(official.parts) == ["geneval"] and official.total.tolist() == [1.0, 0.0, 0.0]


def test_reward_shows_the_detector_what_a_png_holds():
    seen = []

    class Spy(Shapes):
        def __call__(self, images):
            seen.append(images)
            return [[]]

    one = dict(tag=["single_object"], include=[[{"class": "circle", "count": 1}]])
    images = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    RewardSet(GenEvalReward(Spy([]), HSVColors())).score(images, ["p"], one)
    assert torch.equal(seen[0], (images * 255).round() / 255)


def test_reward_errors_name_the_line():
    one = dict(tag=["single_object"], include=[[{"class": "cat", "count": 1}]])
    image = torch.zeros(1, 3, 8, 8)
    with pytest.raises(RewardError, match=r"unknown class 'cat'; known: circle, square, triangle"):
        RewardSet(GenEvalReward(Shapes([[]]), HSVColors())).score(image, ["p"], one)
    one["include"] = [[{"class": "circle", "count": 1}]]
    with pytest.raises(RewardError, match="0 lists for 1 images"):
        RewardSet(GenEvalReward(Shapes([]), HSVColors())).score(image, ["p"], one)


def test_class_list():
    assert len(GENEVAL_CLASSES) == len(set(GENEVAL_CLASSES)) == 80
    assert (GENEVAL_CLASSES[0], GENEVAL_CLASSES[64], GENEVAL_CLASSES[79]) == (
        "person",
        "computer mouse",
        "toothbrush",
    )
    assert all(name == name.strip() for name in itertools.chain(GENEVAL_CLASSES, COLORS))
