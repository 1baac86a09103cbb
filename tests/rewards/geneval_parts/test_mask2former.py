import math

import numpy as np
import pytest
import torch

from flowrl.rewards.geneval import GENEVAL_CLASSES
from flowrl.rewards.geneval_parts import load_detector, mask2former
from flowrl.rewards.geneval_parts.mask2former import Mask2Former, instances, prepare


def bilinear(a, size):
    """One pixel after the other; coordinates are those of pixel centres, the border is repeated."""
    out = np.zeros(size)
    for i in range(size[0]):
        for j in range(size[1]):
            at = []
            for k, n, m in ((i, a.shape[0], size[0]), (j, a.shape[1], size[1])):
                x = max((k + 0.5) * n / m - 0.5, 0.0)
                low = min(int(x), n - 1)
                at.append((low, min(low + 1, n - 1), x - low))
            (t, b, v), (left, right, u) = at
            upper, lower = ((1 - u) * a[r, left] + u * a[r, right] for r in (t, b))
            out[i, j] = (1 - v) * upper + v * lower
    return out


def slowly(class_logits, mask_logits, padded, inside, size):
    """Every (score, class, box, mask) from loops over the definition, best class probability first."""
    pairs = []
    for q, row in enumerate(class_logits):
        total = sum(math.exp(v) for v in row)
        pairs += [(math.exp(v) / total, q, c) for c, v in enumerate(row[:-1])]
    found = []
    for p, q, c in sorted(pairs, reverse=True)[:100]:
        whole = bilinear(mask_logits[q], padded)
        logit = bilinear(whole[: inside[0], : inside[1]], size)
        on = [(y, x) for y in range(size[0]) for x in range(size[1]) if logit[y, x] > 0]
        if on:
            mean = sum(1 / (1 + math.exp(-logit[at])) for at in on) / (len(on) + 1e-6)
            ys, xs = zip(*on, strict=True)
            found.append((p * mean, c, (min(xs), min(ys), max(xs) + 1, max(ys) + 1), logit > 0))
    return found


@pytest.mark.parametrize(
    ("grid", "padded", "inside", "size"),
    [
        ((4, 4), (16, 16), (16, 16), (16, 16)),
        ((4, 6), (16, 24), (13, 24), (11, 19)),  # odd sizes, padding below
        ((5, 3), (20, 12), (20, 9), (33, 15)),  # padding at the right, a larger image
    ],
)
def test_instances_are_those_of_a_slow_loop(grid, padded, inside, size):
    generator = torch.Generator().manual_seed(0)
    classes = torch.randn(5, 4, generator=generator)
    masks = torch.randn(5, *grid, generator=generator)
    masks[1], masks[2] = -1.0, 2.0  # an empty mask and a full one
    found = instances(classes, masks, padded, inside, size, threshold=0.0)
    expected = slowly(classes.double().tolist(), masks.double().numpy(), padded, inside, size)
    assert len(found) == len(expected) == 4 * 3  # five queries, three classes, one mask is empty
    for a, (score, index, box, mask) in zip(found, expected, strict=True):
        assert (a.class_index, a.box) == (index, box) and a.score == pytest.approx(score, rel=1e-5)
        assert a.mask.dtype == bool and np.array_equal(a.mask, mask)
    assert any(a.box == (0, 0, size[1], size[0]) for a in found)
    kept = instances(classes, masks, padded, inside, size, threshold=0.4)
    assert [a.box for a in kept] == [a.box for a in found][: len(kept)] and 0 < len(kept) < len(found)


def test_the_hundred_best_pairs_of_query_and_class_count():
    classes = torch.randn(30, 81, generator=torch.Generator().manual_seed(1))
    found = instances(classes, torch.ones(30, 2, 2), (8, 8), (8, 8), (8, 8), threshold=0.0)
    best = classes.softmax(-1)[:, :-1].flatten().sort(descending=True)
    assert [a.class_index for a in found] == (best.indices[:100] % 80).tolist()
    assert found[0].score == pytest.approx(best.values[0].item() / (1 + math.exp(-1)), rel=1e-5)


@pytest.mark.parametrize(
    ("size", "inside", "padded"),
    [
        ((384, 384), (800, 800), (800, 800)),
        ((1024, 1024), (800, 800), (800, 800)),
        ((480, 640), (800, 1067), (800, 1088)),
        ((768, 1344), (762, 1333), (768, 1344)),  # the long edge binds
        ((1344, 768), (1333, 762), (1344, 768)),
    ],
)
def test_images_are_prepared_as_in_mmdet(size, inside, padded):
    x, got = prepare(torch.tensor([255.0, 0.0, 128.0])[:, None, None].expand(3, *size))
    assert got == inside and x.shape[-2:] == padded
    wanted = torch.tensor([(255 - 123.675) / 58.395, (0 - 116.28) / 57.12, (128 - 103.53) / 57.375])
    assert torch.allclose(x[0, :, : inside[0], : inside[1]], wanted[:, None, None], atol=1e-5)
    grey = torch.tensor([(128 - m) / s for m, s in zip(mask2former.MEAN, mask2former.STD, strict=True)])
    for outside in (x[0, :, inside[0] :], x[0, :, :, inside[1] :]):
        assert torch.allclose(outside, grey[:, None, None], atol=1e-5)


def test_the_resize_is_opencvs(monkeypatch):
    """Bilinear without antialiasing, rounded to 8 bits; here down from 20 x 26."""
    monkeypatch.setattr(mask2former, "SHORT_EDGE", 14)
    pixels = torch.randint(0, 256, (3, 20, 26), generator=torch.Generator().manual_seed(0)).float()
    x, inside = prepare(pixels)
    mean, std = (np.array(v)[:, None, None] for v in (mask2former.MEAN, mask2former.STD))
    wanted = np.stack([bilinear(channel.numpy(), inside) for channel in pixels])
    assert inside == (14, 18)
    got = x[0, :, :14, :18].numpy() * std + mean
    assert np.abs(got - np.round(got)).max() < 1e-3 and np.abs(got - wanted).max() <= 0.5 + 1e-3


# the model


def tiny_model(**changes):
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    stages = ["stage1", "stage2", "stage3", "stage4"]
    swin = SwinConfig(embed_dim=12, depths=[1, 1, 1, 1], num_heads=[1, 2, 3, 3], window_size=4, out_features=stages)
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_attention_heads": 4, "num_queries": 10}
    sizes |= {"encoder_layers": 1, "decoder_layers": 2, "encoder_feedforward_dim": 24, "dim_feedforward": 40}
    labels = {"id2label": dict(enumerate(GENEVAL_CLASSES)), "label2id": {n: i for i, n in enumerate(GENEVAL_CLASSES)}}
    torch.manual_seed(0)
    return Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=swin, **sizes | labels | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mask2former")
    tiny_model().save_pretrained(path)
    return path


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(mask2former, "SHORT_EDGE", 64)


def same(one, other):
    assert [(a.class_index, a.box) for a in one] == [(a.class_index, a.box) for a in other]
    assert all(np.array_equal(a.mask, b.mask) for a, b in zip(one, other, strict=True))
    assert np.allclose([a.score for a in one], [b.score for b in other], rtol=1e-5)


def test_the_detector_is_preparation_model_and_instances(folder, small):
    state = torch.get_rng_state()
    detector = load_detector(f"mask2former@{folder}")
    assert torch.equal(torch.get_rng_state(), state)
    assert not detector.model.training and not any(p.requires_grad for p in detector.model.parameters())
    detector.threshold = 0.0
    images = torch.rand(2, 3, 45, 61, generator=torch.Generator().manual_seed(2))
    found = detector(images)
    for image, mine in zip((images * 255).round(), found, strict=True):
        x, inside = prepare(image)
        assert x.shape == (1, 3, 64, 96) and inside == (64, 87)
        with torch.no_grad():
            out = tiny_model().eval()(x)
        logits = out.class_queries_logits[0], out.masks_queries_logits[0]
        same(mine, instances(*logits, (64, 96), inside, (45, 61), 0.0))
        assert mine and all(a.mask.shape == (45, 61) for a in mine)
    same(detector(images[1:])[0], found[1])
    with torch.autocast("cpu", torch.bfloat16):
        same(detector(images)[0], found[0])
    assert Mask2Former(str(folder), threshold=0.99)(images) == [[], []]


def test_other_models_are_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    labels = {"id2label": {i: f"LABEL_{i}" for i in range(80)}, "label2id": {f"LABEL_{i}": i for i in range(80)}}
    tiny_model(**labels).save_pretrained(tmp_path / "labels")
    with pytest.raises(ValueError, match=r"class 0 of .*labels is 'LABEL_0', not 'person'"):
        Mask2Former(str(tmp_path / "labels"))
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "config.json").write_bytes((folder / "config.json").read_bytes())
    state = load_file(folder / "model.safetensors")
    unused = [key for key in state if ".swin.layernorm." in key or key == "criterion.empty_weight"]
    assert len(unused) == 3
    for key in unused:  # released checkpoints lack them
        del state[key]
    save_file(state, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    Mask2Former(str(tmp_path / "part"))
    del state["class_predictor.bias"]
    save_file(state, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 1 weights of Mask2FormerForUniversalSegmentation: class_predictor.bias"
    ):
        Mask2Former(str(tmp_path / "part"))
    (tmp_path / "part" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="does not load as Mask2Former"):
        Mask2Former(str(tmp_path / "part"))
