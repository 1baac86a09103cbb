import json
import re

import numpy as np
import pytest
from PIL import Image

from flowrl.evaluation.report import Run, task_rows, write_report

CAPTIONS = ['a "red" <circle>', "a blue square", "two crosses"]


def evaluation(score: float, iteration: int) -> dict:
    task = {"score": score, "images": 4, "prompts": 2}
    return {
        "overall": score,
        "per_task": {"colors": task, "two_object": {**task, "score": 1 - score}},
        "rewards": {"r": score},
        "images": 8,
        "seconds": 1.0,
        "iteration": iteration,
    }


@pytest.fixture
def folder(tmp_path):
    """A finished run of 40 iterations, by hand."""
    before, after = evaluation(0.25, 0), evaluation(0.75, 40)
    rows = [{"iteration": 0, "eval/overall": 0.25, "eval/task/colors": 0.25}]
    for i in range(40):
        rows.append(
            {
                "iteration": i,
                "reward/mean": i / 40,
                "reward/task/colors": i / 50,
                "reward/zero_spread_share": 0.1,
                "kl/reference": 1e-4 * i,
                "kl/reference/step_00": 1e-5 * i,
                "kl/reference/step_01": 2e-4 * i,
                "train/ratio_mean": 1.0,
                "train/ratio_min": 0.999,
                "train/ratio_max": 1.001,
                "train/clip_frac_high": 0.1,
                "train/clip_frac_low": 0.2,
                "train/grad_norm": 0.5,
                "images_per_second": 10.0,
                "time/iteration": 2.0,
                "time/rollout": 1.0,
                "time/update": 0.5,
            }
        )
    rows[20]["eval/overall"] = 0.5
    rows.append({"iteration": 39, "eval/overall": 0.75, "eval/task/colors": 0.75})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "samples").mkdir()
    for name, entry in (("before", before), ("after", after)):
        (tmp_path / f"{name}.json").write_text(json.dumps(entry | {"captions": CAPTIONS}))
        grid = np.zeros((20, 8 * 20, 3), np.uint8)
        for i in range(3):
            grid[:, 20 * i : 20 * i + 20] = 80 * (i + 1)
        Image.fromarray(grid).save(tmp_path / "samples" / f"{name}-{entry['iteration']:06d}.png")
    summary = {
        "finished": True,
        "iterations": 40,
        "seed": 7,
        "before": before,
        "after": after,
        "training_images": 1234,
        "seconds": 90.0,
        "phases": {"rollout": 60.0, "update": 20.0},
        "processes": 2,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "recipe.yaml").write_text(
        "description: a & b\nobjective: {name: FlowGRPO}\nsampler: {name: FlowSDE}\ntraining: {iterations: 40}\n"
    )
    return tmp_path


def test_the_report_tells_the_run_in_one_file(folder):
    path = write_report(folder)
    text = path.read_text()
    assert path == folder / "report.html"
    assert "0.250 <i>→</i> 0.750" in text and "+0.500" in text
    for said in ("finished, 40 iterations", "a &amp; b", "FlowGRPO with FlowSDE", "1,234", "1.5 min", "two object"):
        assert said in text
    assert "75.0%" in text  # rollout's share of the time
    for figure in ("Training reward", "Held-out score", "KL to the model before", "Importance ratio", "Clipped share"):
        assert f"<h3>{figure}" in text
    assert "no request" not in text and not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert "<script" not in text


def test_health_is_a_coloured_table(folder):
    assert "Health" not in write_report(folder).read_text()  # a run without bands
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "reward/mean" in row:
            level = int(row["iteration"] >= 20) + int(row["iteration"] >= 36)
            row |= {"images/change/diversity": -0.4 * level, "health/images/change/diversity": level}
            row |= {"train/effective_sample_size": 0.99, "health/train/effective_sample_size": 0}
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"alarms": ["diversity fell < half"]}))
    text = write_report(folder).read_text()
    assert "<h2>Health</h2>" in text and "Alarm: diversity fell &lt; half" in text
    assert "images/change/diversity</td><td class=red>-0.8</td>" in text
    assert "<td>50%</td><td>40%</td><td>10%</td></tr>" in text
    assert "sample_size</td><td class=green>0.99</td>" in text
    assert "<h3>Effective sample size" in text


def test_pictures_are_paired_with_their_captions(folder):
    images = Run(folder).pictures("before")
    assert [im.getpixel((8, 8)) for im in images] == [(80,) * 3, (160,) * 3, (240,) * 3]
    text = write_report(folder).read_text()
    assert text.count("<figure><div><img") == 3
    assert 'alt="before: a &quot;red&quot; &lt;circle&gt;"' in text
    assert 'title="after: two crosses"' in text


def test_evaluations_stand_at_the_iterations_done(folder):
    assert [(x, r["eval/overall"]) for x, r in Run(folder).evaluations] == [(0, 0.25), (20, 0.5), (40, 0.75)]


def test_an_unfinished_run_has_a_report_too(folder):
    for name in ("summary.json", "after.json", "samples/after-000040.png"):
        (folder / name).unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 40, "rew')  # cut short by a kill
    text = write_report(folder).read_text()
    assert "unfinished, 40 of 40 iterations" in text
    assert "held-out score before training" in text
    assert "66.7%" in text  # phases added up from the log
    assert "after: " not in text


def test_a_run_that_has_only_begun(folder):
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "metrics.jsonl":
            path.unlink()
    (folder / "metrics.jsonl").write_text("")
    assert "unfinished, 0 of ? iterations" in write_report(folder).read_text()
    with pytest.raises(FileNotFoundError, match="holds no run"):
        write_report(folder / "samples")


def test_task_rows():
    rows = task_rows(evaluation(0.25, 0), evaluation(0.75, 40))
    assert rows[0] == {"task": "colors", "prompts": 2, "images": 4, "before": 0.25, "after": 0.75, "change": 0.5}
    assert [r["task"] for r in rows] == ["colors", "two_object", "overall"]
    assert rows[-1]["prompts"] == 4 and rows[-1]["images"] == 8
    assert task_rows(evaluation(0.25, 0), None)[0]["change"] is None
    assert task_rows(None, None) == []
    plain = {**evaluation(0.5, 0), "per_task": {"all": {"score": 0.5, "images": 8, "prompts": 4}}}
    assert [r["task"] for r in task_rows(plain, plain)] == ["overall"]
