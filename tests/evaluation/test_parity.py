"""The levels of parity, against a stand-in for the original: its file layout and function names, our own words."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.cli import main
from flowrl.evaluation import parity
from flowrl.rewards.geneval import GENEVAL_CLASSES, Detection, HSVColors, benchmark_prompts
from flowrl.rewards.geneval_parts.mask2former import Mask2Former, instances

# What a checkout looks like: a file that cannot be imported here, the rule as functions, the numbers as defaults.
STAND_IN = """
import mmdet
assert DEVICE == "cuda"

def compute_iou(a, b):
    raise NotImplementedError

def relative_position(one, other):
    (ax, ay), (bx, by) = [((o[0][0] + o[0][2]) / 2, (o[0][1] + o[0][3]) / 2) for o in (one, other)]
    names = []
    length = ((ax - bx) ** 2 + (ay - by) ** 2) ** 0.5
    for gap, i, low, high in ((ax - bx, 0, "left of", "right of"), (ay - by, 1, "above", "below")):
        slack = POSITION_THRESHOLD * sum(o[0][i + 2] - o[0][i] for o in (one, other))
        part = max(abs(gap) - slack, 0) / length if length else 0
        if part > 0.5:
            names.append(low if gap < 0 else high)
    return names

def evaluate(image, objects, metadata):
    groups = []
    for need in metadata["include"]:
        have = objects.get(need["class"], [])[: need["count"]]
        good = len(have) == need["count"]
        if good and "color" in need:
            good = all(c == need["color"] for c in color_classification(image, have, need["class"]))
        if good and "position" in need:
            where, target = need["position"]
            good = groups[target] is not None and all(
                where in relative_position(a, b) for a in have for b in groups[target]
            )
        groups.append(have if good else None)
    over = any(len(objects.get(no["class"], [])) >= no["count"] for no in metadata.get("exclude", []))
    return None not in groups and not over, ""

def evaluate_image(filepath, metadata):
    boxes, masks = inference_detector(object_detector, filepath)
    image = ImageOps.exif_transpose(Image.open(filepath))
    sure = COUNTING_THRESHOLD if metadata["tag"] == "counting" else THRESHOLD
    objects = {}
    for name, rows, marks in zip(classnames, boxes, masks):
        found = sorted(((row, mark) for row, mark in zip(rows, marks) if row[4] > sure), key=lambda x: -x[0][4])
        objects[name] = found[: 16 if NMS_THRESHOLD == 1 else 0][:MAX_OBJECTS]
    return {"correct": evaluate(image, objects, metadata)[0]}

if __name__ == "__main__":
    THRESHOLD = float(args.options.get("threshold", 0.3))
    COUNTING_THRESHOLD = float(args.options.get("counting_threshold", 0.9))
    MAX_OBJECTS = int(args.options.get("max_objects", 16))
    NMS_THRESHOLD = float(args.options.get("max_overlap", 1.0))
    POSITION_THRESHOLD = float(args.options.get("position_threshold", 0.1))
"""
# Flow-GRPO's server nests the functions, names its numbers, and scores in part; written here without its extra 1.
SERVER = """
import mmdet

def load_geneval():
INDENTED
    def evaluate_reward(image, objects, metadata):
        terms = []
        for need in metadata["include"]:
            terms.append(1 - abs(need["count"] - len(objects.get(need["class"], []))) / need["count"])
        return all(t == 1 for t in terms), sum(terms) / len(terms), ""

    def evaluate_image(image_pils, metadatas, only_strict):
        boxes, masks = inference_detector(object_detector, [np.array(x) for x in image_pils])[0]
        sure = COUNTING_THRESHOLD if metadatas[0]["tag"] == "counting" else THRESHOLD
        objects = {}
        for name, rows, marks in zip(classnames, boxes, masks):
            found = sorted(((r, m) for r, m in zip(rows, marks) if r[4] > sure), key=lambda x: -x[0][4])
            objects[name] = found[:MAX_OBJECTS]
        strict, score, _ = evaluate_reward(None, objects, metadatas[0])
        correct = evaluate(None, objects, metadatas[0])[0]
        return [{"correct": correct, "strict_correct": strict, "score": score}]

    THRESHOLD = 0.3
    COUNTING_THRESHOLD = 0.9
    MAX_OBJECTS = 16
    NMS_THRESHOLD = 1.0
    POSITION_THRESHOLD = 0.1
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "geneval"
    (folder / "evaluation").mkdir(parents=True)
    (folder / "prompts").mkdir()
    (folder / "evaluation/evaluate_images.py").write_text(STAND_IN)
    (folder / "evaluation/object_names.txt").write_text("\n".join(GENEVAL_CLASSES) + "\n")
    lines = [json.dumps({k: v for k, v in p.items() if k != "exclude" or v}) for p in benchmark_prompts()]
    (folder / "prompts/evaluation_metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def replace(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def run(capsys, *argv, code=0):
    assert main(["eval", "parity", *map(str, argv), "--json"]) == code
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------------- level 0


def test_logic_agrees_with_a_checkout(checkout, tmp_path, capsys):
    found = run(capsys, "--original", checkout, "--cases", 240, "--output", tmp_path / "parity.json")["0"]
    assert found["passed"] and found["disagreements"] == 0 and found["cases"] == 240
    assert 0.2 < found["share_correct"] < 0.8  # neither answer is the easy one
    assert found["equal"] == {"constants": True, "classes": True, "prompts": True}
    assert json.loads((tmp_path / "parity.json").read_text())["0"] == found


@pytest.mark.parametrize(
    ("old", "new", "cases"),
    [
        ("part > 0.5", "part > 0.7", 440),  # the tasks come in their order
        ("where in relative_position(a, b) for a in have", "where in relative_position(b, a) for a in have", 370),
        (">= no", "> no", 250),
        ('[: need["count"]]\n', "\n", 60),
        ('"counting" else THRESHOLD', '"none" else THRESHOLD', 230),
    ],
)
def test_a_difference_in_the_rule_is_found(checkout, old, new, cases):
    replace(checkout / "evaluation/evaluate_images.py", old, new)
    found = parity.logic(checkout, cases)
    assert found["disagreements"] > 0 and not found["passed"]
    example = found["examples"][0]
    assert example["correct"]["ours"] != example["correct"]["theirs"] and example["detections"] is not None


def test_a_difference_in_the_facts_is_found(checkout):
    replace(checkout / "evaluation/evaluate_images.py", '"max_objects", 16', '"max_objects", 15')
    (checkout / "evaluation/object_names.txt").write_text("cup\n")
    replace(checkout / "prompts/evaluation_metadata.jsonl", '"a photo of a bench"', '"a photo of a bank"')
    found = parity.logic(checkout, cases=3)
    assert found["equal"] == {"constants": False, "classes": False, "prompts": False} and not found["passed"]


def test_the_reward_server_is_read_too(tmp_path):
    (tmp_path / "reward_server").mkdir()
    start, end = STAND_IN.index("def compute_iou"), STAND_IN.index("def evaluate_image")
    nested = "".join(f"    {line}" if line.strip() else line for line in STAND_IN[start:end].splitlines(True))
    (tmp_path / "reward_server/gen_eval.py").write_text(SERVER.replace("INDENTED\n", nested))
    found = parity.logic(tmp_path, cases=300)
    assert found["equal"] == {"constants": True, "classes": None, "prompts": None}
    # The stand-in's partial score has only counts: it differs from the first prompts on that ask for more.
    tags = {p["prompt"]: p["tag"] for p in benchmark_prompts()}
    assert found["disagreements"] > 0 and {tags[e["prompt"]] for e in found["examples"]} == {"colors"}
    assert all("correct" not in e for e in found["examples"])


def test_what_is_not_a_checkout(checkout, tmp_path, capsys):
    def fails(*argv):
        assert main(["eval", "parity", *map(str, argv)]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    assert "has neither evaluation/evaluate_images.py nor" in fails("--original", tmp_path)
    replace(checkout / "evaluation/evaluate_images.py", "def relative_position", "def relation")
    assert "lacks relative_position" in fails("--original", checkout)
    assert "nothing to compare: give --original, --dump or --results" in fails()
    assert "level 2 needs --images and --detector" in fails("--level", 2, "--dump", tmp_path)
    assert "holds no *.npz" in fails("--dump", tmp_path)
    assert "holds no colors.jsonl" in fails("--level", 3, "--dump", tmp_path, "--colors", "hsv")
    assert "no results file" in fails("--results", tmp_path / "a", tmp_path / "b")


# -------------------------------------------------------------------------------------------------- levels 1 to 3

SIZE, PADDED, INSIDE = (24, 32), (64, 96), (64, 85)


@pytest.fixture
def logits():
    """Three queries sure of a cup, a dog and nothing; the masks are the left and right thirds."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.full((3, 81), -9.0)
    for query, index in enumerate((41, 16, 80)):
        classes[query, index] = 3.0 + query
    masks = torch.randn(3, 16, 24, generator=generator) * 0.1 - 2
    masks[0, :, :7] += 5
    masks[1, 4:, 15:20] += 5
    return classes, masks


def write_dump(folder, logits, found):
    folder.mkdir(exist_ok=True)
    np.savez_compressed(
        folder / "00000.npz",
        image="00000/samples/00000.png",
        size=np.array(SIZE),
        padded=np.array(PADDED),
        inside=np.array(INSIDE),
        class_logits=logits[0].numpy(),
        mask_logits=logits[1].numpy(),
        boxes=np.array([d.box for d in found]),
        scores=np.array([d.score for d in found]),
        labels=np.array([d.class_index for d in found]),
        masks=np.packbits(np.array([d.mask for d in found]).reshape(len(found), -1), axis=1),
    )
    return folder


def test_post_processing(logits, tmp_path):
    found = instances(*logits, PADDED, INSIDE, SIZE, 0.0)
    assert [d.class_index for d in found[:2]] == [16, 41] and len(found) > 2
    dump = write_dump(tmp_path / "dump", logits, found)
    result = parity.post_processing(dump)
    assert result == {
        "images": 1, "matched": 2, "unmatched": 0, "max_score": 0, "max_box": 0, "min_overlap": 1, "passed": True
    }  # fmt: skip

    first, second, *rest = found
    moved = Detection(first.class_index, first.score, tuple(v + 1 for v in first.box), np.roll(first.mask, 1, 0))
    other = Detection(17, second.score, second.box, second.mask)
    result = parity.post_processing(write_dump(dump, logits, [moved, second, *rest]))
    assert result["max_box"] == 1 and 0.5 < result["min_overlap"] < 1 and not result["passed"]
    result = parity.post_processing(write_dump(dump, logits, [first, other, *rest]))
    assert result["unmatched"] == 2 and not result["passed"]


def test_weights(logits, tmp_path):
    folder = tmp_path / "images"
    (folder / "00000/samples").mkdir(parents=True)
    Image.new("RGB", SIZE[::-1]).save(folder / "00000/samples/00000.png")
    detector = Mask2Former.__new__(Mask2Former)
    detector.threshold = 0.3

    class Model:
        shift = 0.0

        def to(self, device):
            return self

        def __call__(self, pixel_values):
            classes, masks = logits
            return SimpleNamespace(class_queries_logits=classes[None] + self.shift, masks_queries_logits=masks[None])

    detector.model = Model()
    black = torch.zeros(1, 3, *SIZE)
    dump = write_dump(tmp_path / "dump", logits, detector(black)[0])
    result = parity.weights(dump, folder, detector)
    assert result["passed"] and result["max_logit"] == 0 and result["matched"] == 2
    detector.model.shift = 0.01  # a shift of all classes changes the logits only
    result = parity.weights(dump, folder, detector)
    assert result["max_logit"] == pytest.approx(0.01, rel=1e-3) and result["min_overlap"] == 1 and not result["passed"]
    with pytest.raises(TypeError, match="level 2 compares the logits of Mask2Former"):
        parity.weights(dump, folder, HSVColors())


def test_colors(tmp_path):
    (tmp_path / "crops").mkdir()
    lines = []
    for i, (color, said) in enumerate([("red", "red"), ("blue", "blue"), ("lime", "red")]):
        Image.new("RGB", (9, 5), color).save(tmp_path / f"crops/{i}.png")
        lines.append(json.dumps({"crop": f"crops/{i}.png", "class": "cup", "color": said}))
    (tmp_path / "colors.jsonl").write_text("\n".join(lines))
    result = parity.colors(tmp_path, HSVColors())
    assert result["equal"] == pytest.approx(2 / 3) and not result["passed"]
    assert result["examples"] == [{"crop": "crops/2.png", "class": "cup", "color": "red", "ours": "green"}]
    (tmp_path / "colors.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no crops"):
        parity.colors(tmp_path, HSVColors())


# ------------------------------------------------------------------------------------------------------- level 4


def results(path, rows, theirs=False):
    """rows: (number of the prompt, tag, decisions on its images)."""
    lines = []
    for number, tag, decisions in rows:
        for k, correct in enumerate(decisions):
            file = f"{number:05}/samples/{k:05}.png"
            text = f"prompt {number}"
            row = {"tag": tag, "correct": correct, "reason": "" if correct else "missed"}
            lines.append({**row, "filename": f"/data/{file}", "prompt": text} if theirs else
                         {**row, "file": file, "text": text, "prompt": number})  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_end_to_end(tmp_path, capsys):
    ours = results(
        tmp_path / "images.jsonl",
        [(0, "counting", [1, 1, 0, 0]), (1, "counting", [1, 1, 1, 1]), (2, "colors", [0, 0]), (3, "colors", [1, 1])],
    )
    theirs = results(
        tmp_path / "results.jsonl",
        [(3, "colors", [1, 1]), (2, "colors", [0, 0]), (1, "counting", [1, 1, 1, 0]), (0, "counting", [1, 0, 0, 0])],
        theirs=True,
    )
    found = run(capsys, "--results", ours, theirs, "--output", tmp_path / "p.json", code=1)["4"]
    counting, colors, overall = found["tasks"]
    assert (counting["ours"], counting["theirs"], counting["difference"]) == (0.75, 0.5, 0.25)
    # 6 of 8 agree; by chance 0.75 * 0.5 + 0.25 * 0.5 = 0.5 would.
    assert counting["kappa"] == pytest.approx(0.5) and colors["kappa"] == 1
    assert counting["interval"] == [0.25, 0.25]  # both prompts differ by one image in four
    assert colors["difference"] == 0 and colors["interval"] == [0, 0]
    assert overall["difference"] == 0.125 and overall["images"] == 12
    assert found["disagreements"] == 2 and not found["passed"]
    assert found["images"][0] == {
        "file": "0/00001.png", "prompt": "prompt 0", "ours": "", "theirs": "missed"
    }  # fmt: skip
    same = parity.end_to_end(theirs, theirs)
    assert same["passed"] and same["disagreements"] == 0 and same["tasks"][-1]["kappa"] == 1


def test_the_interval_is_over_prompts_and_paired():
    """Whole prompts differ by -1, 0 or 1: the spread of their mean is sd / sqrt(n), whatever the images per prompt."""
    rng = np.random.default_rng(0)
    per_prompt = rng.choice([-1.0, 0.0, 1.0], size=100)
    means = parity._bootstrap(np.repeat(np.arange(100), 4).tolist(), np.repeat(per_prompt, 4), rng)
    assert means.std() == pytest.approx(per_prompt.std() / 10, rel=0.1)
    assert means.mean() == pytest.approx(per_prompt.mean(), abs=0.02)


def test_levels_gather_in_one_file(tmp_path, capsys):
    one, output = results(tmp_path / "a", [(0, "colors", [1, 1])]), tmp_path / "deep/parity.json"
    parity.keep(output, {"0": {"passed": True}})
    assert run(capsys, "--results", one, one, "--output", output)["4"]["passed"]
    assert list(json.loads(output.read_text())) == ["0", "4"]
    assert main(["eval", "parity", "--results", str(one), str(one), "--output", str(output)]) == 0
    assert "level 2: not run, it needs --dump and --images and --detector" in capsys.readouterr().out
    for content in ("{", "[]", '{"scores": 1}'):
        output.write_text(content)
        assert main(["eval", "parity", "--results", str(one), str(one), "--output", str(output)]) == 2
        assert "holds no results of parity: give another --output" in capsys.readouterr().err
        assert output.read_text() == content


def test_kappa():
    a, b = np.array([1, 1, 0, 0, 1], bool), np.array([1, 0, 0, 0, 1], bool)
    assert parity.kappa(a, b) == pytest.approx((0.8 - 0.48) / 0.52)
    assert parity.kappa(a, ~a) < 0 and parity.kappa(a | True, a | True) == 1


def test_results_of_other_images(tmp_path):
    one = results(tmp_path / "a", [(0, "colors", [1, 1])])
    with pytest.raises(ValueError, match="1 images are in one file only, such as"):
        parity.end_to_end(one, results(tmp_path / "b", [(0, "colors", [1])]))
    with pytest.raises(ValueError, match="2 images have another prompt"):
        parity.end_to_end(one, results(tmp_path / "b", [(0, "counting", [1, 1])]))
    (tmp_path / "c").write_text('{"file": "x.png"}\n')
    with pytest.raises(ValueError, match="c, line 1: not a result of GenEval"):
        parity.end_to_end(one, tmp_path / "c")
