import sys

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from flowrl.rewards import GenEvalReward, RewardSet, geneval_parts, names
from flowrl.rewards.geneval import GENEVAL_CLASSES, HSVColors
from flowrl.rewards.geneval_parts import load_colors, load_detector, pretrained
from flowrl.rewards.geneval_parts.pretrained import COCO_IDS, coco_classes, folder_of

DARKNET = {"motorcycle": "motorbike", "airplane": "aeroplane", "couch": "sofa", "potted plant": "pottedplant"}
DARKNET |= {"dining table": "diningtable", "tv": "tvmonitor", "computer mouse": "mouse", "tv remote": "remote"}
DARKNET |= {"computer keyboard": "keyboard"}


class Blind:
    classes = GENEVAL_CLASSES

    def __call__(self, images):
        return [[] for _ in images]


class Factory:
    @staticmethod
    def detector():
        return Blind()


@pytest.fixture(autouse=True)
def fresh():
    geneval_parts._made.cache_clear()
    yield
    geneval_parts._made.cache_clear()


# names


def test_parts_are_loaded_by_name(monkeypatch):
    assert isinstance(load_colors("hsv"), HSVColors)
    monkeypatch.setitem(geneval_parts.DETECTORS, "rt-detr", f"{__name__}:Named")
    monkeypatch.setattr(geneval_parts.importlib, "import_module", lambda name: sys.modules[__name__])
    assert load_detector("rt-detr@/some/folder").model == "/some/folder"
    assert load_detector("rt-detr").model == "default"
    assert load_detector("rt-detr") is load_detector("rt-detr")  # rewards share a model
    assert isinstance(load_detector("mine:Factory.detector"), Blind)


class Named:
    def __init__(self, model="default"):
        self.model = model


@pytest.mark.parametrize(
    ("load", "name", "message"),
    [
        (load_detector, "mask2fromer", "unknown detector 'mask2fromer'; did you mean 'mask2former'"),
        (load_detector, "x", "known: mask2former, rt-detr, grounding-dino, yolov3-tiny.*'module:function'"),
        (load_detector, "no_such_module:f", "cannot load detector 'no_such_module:f'"),
        (load_detector, "mask2former@", "nothing follows the '@'"),
        (load_colors, "hsv@x", "hsv takes nothing after the '@'"),
        (load_colors, "clap", "unknown colour classifier 'clap'; did you mean 'clip'"),
    ],
)
def test_bad_names_are_refused(load, name, message):
    with pytest.raises(ValueError, match=message):
        load(name)


# the reward


def test_the_reward_takes_names_and_variants_are_registered(monkeypatch):
    made = []
    monkeypatch.setattr(geneval_parts, "load_detector", lambda name: made.append(name) or Blind())
    monkeypatch.setattr(geneval_parts, "load_colors", lambda name: made.append(name) or HSVColors())
    wanted = {"geneval": "partial", "geneval@official": "official", "geneval@exact": "exact"}
    wanted["geneval@flowgrpo"] = "partial_flowgrpo"
    assert set(wanted) <= set(names())
    columns = {"tag": ["counting"], "include": [[{"class": "cat", "count": 2}]]}
    for name, variant in wanted.items():
        rewards = RewardSet(name)
        assert rewards.rewards[0].call.variant == variant and list(rewards.weights) == [name]
        assert rewards.score(torch.rand(1, 3, 8, 8), ["a photo of two cats"], columns).total.item() == 0
    assert made == ["mask2former", "clip"] * 4
    GenEvalReward("yolov3-tiny", HSVColors())
    assert made[8:] == ["yolov3-tiny"]


# classes


def test_coco_labels_map_by_index():
    assert len(COCO_IDS) == 80 and COCO_IDS[-1] == 90
    plain = coco_classes(dict(enumerate(GENEVAL_CLASSES)), "m")
    assert plain == {i: i for i in range(80)}
    assert coco_classes({i: DARKNET.get(n, n) for i, n in enumerate(GENEVAL_CLASSES)}, "m") == plain
    sparse = {i: "N/A" for i in range(91)} | dict(zip(COCO_IDS, GENEVAL_CLASSES, strict=True))
    assert coco_classes({str(i): n for i, n in sparse.items()}, "m") == {i: k for k, i in enumerate(COCO_IDS)}
    assert coco_classes(sparse, "m")[90] == 79 and 12 not in coco_classes(sparse, "m")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (GENEVAL_CLASSES[:79], "m knows 79 classes; GenEval needs COCO's 80"),
        ([*GENEVAL_CLASSES, *"abc"], "m knows 83 classes"),
        ([f"LABEL_{i}" for i in range(80)], "class 0 of m is 'LABEL_0', not 'person'"),
        (sorted(GENEVAL_CLASSES), "class 0 of m is 'airplane', not 'person': its classes are not in COCO order"),
        ([*GENEVAL_CLASSES, *["N/A"] * 11], "class 1 of m is 'bicycle', not 'person'"),
    ],
)
def test_other_classes_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        coco_classes(dict(enumerate(labels)), "m")


# weights


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert folder_of(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json; give a folder that `save_pretrained` wrote"):
        folder_of(str(tmp_path), "tokenizer.json")
    with pytest.raises(FileNotFoundError, match="'no/such/folder' is neither a folder nor a hub id"):
        folder_of("no/such/folder")

    def offline(repo, name):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: None)
    with pytest.raises(
        FileNotFoundError, match=r"facebook/mask2former-swin-small-coco-instance/model.safetensors .*HF_.*: NAME@FOLDER"
    ):
        load_detector("mask2former")
    with pytest.raises(FileNotFoundError, match=r"PekingU/rtdetr_r50vd/preprocessor_config.json"):
        load_detector("rt-detr")
    with pytest.raises(FileNotFoundError, match=r"facebook/mask2former-swin-small-coco-instance"):
        RewardSet("geneval")  # before any image is made


def test_a_hub_model_is_the_folder_of_its_files(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(pretrained, "fetch", lambda repo, *names, instead: asked.append(names) or tmp_path / names[0])
    assert folder_of("me/model", "tokenizer.json") == tmp_path
    assert asked == [("tokenizer.json",), ("model.safetensors", "pytorch_model.bin"), ("config.json",)]
