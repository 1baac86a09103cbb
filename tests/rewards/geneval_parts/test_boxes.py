import math

import pytest
import torch

from flowrl.rewards.base import quantise
from flowrl.rewards.geneval import GENEVAL_CLASSES
from flowrl.rewards.geneval_parts import load_detector
from flowrl.rewards.geneval_parts.boxes import GroundingDino, ObjectDetection, detections
from flowrl.rewards.geneval_parts.pretrained import COCO_IDS

SIZE = (40, 56)


@pytest.fixture
def images():
    return torch.rand(2, 3, *SIZE, generator=torch.Generator().manual_seed(0))


def corners(box):
    """x1, y1, x2, y2 in pixels of a (centre, size) box in shares, cut to the image."""
    x, y, w, h = box
    at = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
    return [min(max(v, 0), 1) * SIZE[1 - i % 2] for i, v in enumerate(at)]


def labels(names):
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def check(found, expected):
    """found: detections; expected: (score, class, box), in any order."""
    expected = sorted(expected, reverse=True)
    assert len(found) == len(expected) > 0
    for a, (score, index, box) in zip(sorted(found, key=lambda d: -d.score), expected, strict=True):
        assert a.score == pytest.approx(score, abs=1e-5) and a.class_index == index and a.mask is None
        assert a.box == pytest.approx(box, abs=1e-2)


def test_boxes_are_cut_to_the_image():
    boxes = torch.tensor([[-5.0, 2, 70, 50], [60, 0, 70, 10], [3, 4, 5, 6]])
    found = detections(torch.tensor([0.5, 0.6, 0.7]), torch.tensor([1, 2, 3]), boxes, SIZE)
    assert [(d.class_index, d.box) for d in found] == [(1, (0, 2, 56, 40)), (3, (3, 4, 5, 6))]


@pytest.fixture(scope="module")
def rt_detr(tmp_path_factory):
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrImageProcessor, RTDetrResNetConfig

    stages = ["stage2", "stage3", "stage4"]
    widths = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "layer_type": "basic"}
    sizes = {"encoder_hidden_dim": 16, "encoder_in_channels": [8] * 3, "encoder_ffn_dim": 16, "d_model": 16}
    sizes |= {"decoder_in_channels": [16] * 3, "decoder_ffn_dim": 16, "decoder_layers": 2, "num_queries": 12}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "hidden_expansion": 0.5, "num_denoising": 0}
    config = RTDetrConfig(
        backbone_config=RTDetrResNetConfig(out_features=stages, **widths), **sizes, **labels(GENEVAL_CLASSES)
    )
    path = tmp_path_factory.mktemp("rt_detr")
    torch.manual_seed(0)
    model = RTDetrForObjectDetection(config).eval()
    model.save_pretrained(path)
    RTDetrImageProcessor(size={"height": 64, "width": 64}).save_pretrained(path)
    return path, model


def test_rt_detr_by_hand(rt_detr, images):
    path, model = rt_detr
    detector = load_detector(f"rt-detr@{path}")
    assert detector.threshold == 0.3
    detector.threshold = 0.0
    for image, found in zip(quantise(images), detector(images), strict=True):
        pixels = detector.processor(images=image.numpy(), return_tensors="pt")
        with torch.no_grad():
            out = model(**pixels)
        pairs = []
        for row, box in zip(out.logits[0].tolist(), out.pred_boxes[0].tolist(), strict=True):
            pairs += [(1 / (1 + math.exp(-v)), c, corners(box)) for c, v in enumerate(row)]
        check(found, sorted(pairs, reverse=True)[:12])
    alone = detector(images[1:])[0]
    assert [d.class_index for d in alone] == [d.class_index for d in detector(images)[1]]
    assert ObjectDetection(str(path), threshold=0.999)(images) == [[], []]


def test_detr_and_its_91_ids(tmp_path, images):
    from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessor, ResNetConfig

    names = ["N/A"] * 91
    for index, name in zip(COCO_IDS, GENEVAL_CLASSES, strict=True):
        names[index] = name
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, layer_type="basic", out_features=["stage4"]
    )
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 9}
    sizes |= {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    torch.manual_seed(0)
    model = DetrForObjectDetection(DetrConfig(backbone_config=backbone, **sizes, **labels(names))).eval()
    model.save_pretrained(tmp_path)
    DetrImageProcessor(size={"shortest_edge": 64, "longest_edge": 96}).save_pretrained(tmp_path)
    detector = ObjectDetection(str(tmp_path), threshold=0.0)
    pixels = detector.processor(images=quantise(images[:1])[0].numpy(), return_tensors="pt")
    bias = detector.model.class_labels_classifier.bias
    for label, index in ((1, 0), (13, 11), (90, 79), (12, None), (91, None)):  # 12 is free, 91 is "no object"
        bias.zero_()[label] = 5.0
        with torch.no_grad():
            out = detector.model(**pixels)
        share = out.logits[0].softmax(-1)[:, :-1].max(-1).values.tolist()
        expected = [(p, index, corners(box)) for p, box in zip(share, out.pred_boxes[0].tolist(), strict=True)]
        found = detector(images[:1])[0]
        if index is not None:
            check(found, expected)
        else:
            assert found == [] if label == 12 else all(d.score < 0.2 for d in found)


@pytest.fixture(scope="module")
def grounding_dino(tmp_path_factory):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import (
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        GroundingDinoImageProcessor,
        PreTrainedTokenizerFast,
        SwinConfig,
    )

    words = sorted({word for name in GENEVAL_CLASSES for word in name.split()} - {"toothbrush"})
    vocabulary = ["[PAD]", *(f"[unused{i}]" for i in range(1, 1200))]
    vocabulary[100:103] = ["[UNK]", "[CLS]", "[SEP]"]
    vocabulary[200 : 200 + len(words)] = words
    vocabulary[1012] = "."  # where the model's separators are
    vocabulary[1100:1102] = ["tooth", "##brush"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 101), ("[SEP]", 102)])
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}

    text = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 16, "vocab_size": len(vocabulary)}
    swin = SwinConfig(
        embed_dim=8,
        depths=[1] * 4,
        num_heads=[1] * 4,
        window_size=4,
        out_features=["stage2", "stage3", "stage4"],
    )
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 11}
    path = tmp_path_factory.mktemp("grounding_dino")
    torch.manual_seed(0)
    model = GroundingDinoForObjectDetection(GroundingDinoConfig(backbone_config=swin, text_config=text, **sizes)).eval()
    model.save_pretrained(path)
    GroundingDinoImageProcessor(size={"shortest_edge": 64, "longest_edge": 96}).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    return path, model


def test_grounding_dino_by_hand(grounding_dino, images):
    path, model = grounding_dino
    detector = load_detector(f"grounding-dino@{path}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = " . ".join(GENEVAL_CLASSES) + " ."
    assert detector.tokens == tokenizer(prompt)["input_ids"] and len(detector.tokens) < 256
    assert torch.allclose(detector.spans.sum(1), torch.ones(80))
    detector.threshold = 0.0
    pixels = detector.processor(images=quantise(images[:1])[0].numpy(), return_tensors="pt")
    with torch.no_grad():
        ids = torch.tensor([detector.tokens])
        out = model(**pixels, input_ids=ids, attention_mask=torch.ones_like(ids))
    pairs = []
    for row, box in zip(out.logits[0].sigmoid().tolist(), out.pred_boxes[0].tolist(), strict=True):
        at = 1  # after [CLS]
        for index, name in enumerate(GENEVAL_CLASSES):
            n = len(name.split()) + (name == "toothbrush")
            pairs.append((sum(row[at : at + n]) / n, index, corners(box)))
            at += n + 1
        assert at == len(detector.tokens) - 1
    expected = sorted(pairs, reverse=True)[:300]
    found = detector(images[:1])[0]
    assert len(found) == 300
    assert [d.score for d in found] == pytest.approx([score for score, _, _ in expected], abs=1e-5)
    known = {(index, tuple(round(v, 1) for v in box)) for _, index, box in pairs}
    assert {(d.class_index, tuple(round(v, 1) for v in d.box)) for d in found} <= known


def test_other_models_are_refused(grounding_dino, rt_detr, tmp_path, monkeypatch):
    path, _ = grounding_dino
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer_config\.json"):
        GroundingDino(str(rt_detr[0]))
    with pytest.raises(ValueError, match="does not load as AutoModelForObjectDetection"):
        ObjectDetection(str(path))
    monkeypatch.setattr(GroundingDino, "_prompt", lambda self, tokenizer: ([1] * 257, torch.zeros(80, 257)))
    with pytest.raises(ValueError, match=r"the class names take 257 tokens, .* reads 256"):
        GroundingDino(str(path))
