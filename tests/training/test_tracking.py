"""Logs: one row an iteration, pictures as PNG, trackers by name."""

import json

import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image

from flowrl.training.tracking import Tracking, check_trackers, read_metrics


def grid(value):
    return np.full((4, 6, 3), value, np.uint8)


def test_unknown_and_missing_trackers_are_refused(monkeypatch):
    check_trackers(())
    check_trackers(("tensorboard",))
    with pytest.raises(ValueError, match=r"unknown tracker 'tensorbord'.*tensorboard, wandb, trackio"):
        check_trackers(("tensorboard", "tensorbord"))
    monkeypatch.setattr("flowrl.training.tracking.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"flowrl-align\[wandb\]"):
        check_trackers(("wandb",))


def test_rows_are_appended_as_json(tmp_path):
    tracking = Tracking(Accelerator(), tmp_path / "run", {"x": 1}, 0)
    tracking.log({"reward/mean": 0.5, "n": 3}, 0)
    tracking.log({"reward/mean": float("nan")}, 1)
    tracking.close()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[0] == {"iteration": 0, "reward/mean": 0.5, "n": 3}
    assert rows[1]["iteration"] == 1 and rows[1]["reward/mean"] != rows[1]["reward/mean"]


def test_a_resumed_log_goes_on_where_the_checkpoint_stands(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"iteration": i, "r": i}) for i in range(5)]
    path.write_text("\n".join(lines) + '\n{"iteration": 5, "r"')  # a kill cut the last one short
    assert [r["iteration"] for r in read_metrics(path)] == [0, 1, 2, 3, 4]
    tracking = Tracking(Accelerator(), tmp_path, {}, 3)
    tracking.log({"r": 30}, 3)
    assert [(r["iteration"], r["r"]) for r in read_metrics(path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_pictures_are_written_losslessly(tmp_path):
    tracking = Tracking(Accelerator(), tmp_path, {}, 0)
    path = tracking.image("train", grid(77), 12)
    assert path == tmp_path / "samples" / "train-000012.png"
    assert np.array_equal(np.asarray(Image.open(path)), grid(77))


def test_tensorboard_gets_numbers_and_pictures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = Tracking(Accelerator(log_with="tensorboard", project_dir=tmp_path), tmp_path, {"seed": 1}, 0)
    for i in range(3):
        tracking.log({"reward/mean": i / 2}, i)
    tracking.image("before", grid(9), 0)
    tracking.close()
    event_file = min(tmp_path.rglob("events.out.tfevents.*"), key=lambda p: len(p.parts))  # others: hyperparameters
    events = EventAccumulator(str(event_file.parent))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert events.Images("before")[0].width == 6


def test_only_the_main_process_writes(tmp_path):
    class Other:
        is_main_process = False

    tracking = Tracking(Other(), tmp_path / "run", {}, 0)
    tracking.log({"a": 1}, 0)
    assert tracking.image("train", grid(0), 0) is None
    assert not (tmp_path / "run").exists()
