import json

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image
from torch.nn import functional as F

from flowrl.rewards import GenEvalReward
from flowrl.rewards.geneval import COLORS, GENEVAL_CLASSES, Detection
from flowrl.rewards.geneval_parts import clip_colors, load_colors
from flowrl.rewards.geneval_parts.clip_colors import CLIPColors, crop

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 28, "layers": 2, "width": 32, "head_width": 16, "patch_size": 7},
    "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random open_clip model as the hub stores one."""
    import open_clip
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": CONFIG, "preprocess_cfg": {}}))
    save_file(open_clip.CLIP(**CONFIG).state_dict(), path / "open_clip_model.safetensors")
    return str(path)


@pytest.fixture
def scene():
    """An image [3, 30, 50], an object with a mask and one without."""
    image = torch.rand(3, 30, 50, generator=torch.Generator().manual_seed(0))
    mask = np.zeros((30, 50), bool)
    mask[4:12, 10:40:2] = True
    return image, [Detection(1, 0.9, (10.0, 4.0, 39.0, 12.0), mask), Detection(1, 0.8, (20.4, 9.6, 31.5, 30.0))]


def test_crops_are_cut_out_on_grey(scene):
    image, (masked, boxed) = scene
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels)
    cut = np.asarray(crop(picture, masked))
    assert cut.shape == (8, 29, 3)
    assert np.array_equal(cut[:, ::2], pixels[4:12, 10:39:2]) and (cut[:, 1::2] == 0x99).all()
    # Pillow rounds each corner to the nearest integer, a half to the even one.
    assert np.array_equal(np.asarray(crop(picture, boxed)), pixels[10:30, 20:32])
    assert np.array_equal(np.asarray(picture), pixels)
    with pytest.raises(ValueError, match=r"mask of \(30, 50\) for an image of \(20, 50\)"):
        crop(picture.crop((0, 0, 50, 20)), masked)
    with pytest.raises(ValueError, match="without pixels"):
        crop(picture, Detection(1, 0.9, (3.0, 4.0, 3.2, 9.0)))


def by_hand(tower, image, found, name):
    """The published recipe, prompt by prompt and crop by crop."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    columns = []
    for color in COLORS:
        texts = [f"a photo of a {color} {name}", f"a photo of a {color}-colored {name}", f"a photo of a {color} object"]
        units = [F.normalize(tower.model.encode_text(tower.tokenizer([text]))[0], dim=0) for text in texts]
        columns.append(F.normalize(sum(units) / 3, dim=0))
    transform = image_transform_v2(PreprocessCfg(**tower.preprocess), is_train=False)
    picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    rows = [tower.model.encode_image(transform(crop(picture, one))[None])[0] for one in found]
    return torch.stack([100 * F.normalize(row, dim=0) @ torch.stack(columns, 1) for row in rows])


def test_the_colour_is_the_nearest_of_ten_averaged_texts(folder, scene):
    colors = load_colors(f"clip@{folder}")
    image, found = scene
    for name in ("bench", "computer mouse"):
        logits = by_hand(colors.tower, image, found, name)
        margin = logits.topk(2).values.diff().abs().min()
        assert margin > 1e-3  # so that the argmax is not decided by rounding
        assert colors(image, found, name) == [COLORS[i] for i in logits.argmax(1).tolist()]
        assert torch.allclose(colors._colors(name, torch.device("cpu")).norm(dim=1), torch.ones(10))
        assert colors(image, found[1:], name) == colors(image, found, name)[1:]
    assert colors(image, [], "bench") == []
    with torch.autocast("cpu", torch.bfloat16):
        assert colors(image, found, "bench") == [
            COLORS[i] for i in by_hand(colors.tower, image, found, "bench").argmax(1)
        ]


def test_the_texts_of_a_class_are_embedded_once(folder, scene, monkeypatch):
    image, found = scene
    colors, asked = CLIPColors(folder), []
    texts = type(colors.tower).texts
    monkeypatch.setattr(type(colors.tower), "texts", lambda self, p, d: asked.append(len(p)) or texts(self, p, d))
    for name in ("bench", "cup", "bench", "cup"):
        colors(image, found, name)
    assert asked == [30, 30]


class Everything:
    """A stub detector: one bench, the whole image."""

    classes = GENEVAL_CLASSES

    def __call__(self, images):
        height, width = images.shape[-2:]
        return [[Detection(GENEVAL_CLASSES.index("bench"), 0.9, (0.0, 0.0, width, height))] for _ in images]


def test_it_serves_the_reward(folder, scene):
    image, _ = scene
    reward = GenEvalReward(Everything(), CLIPColors(folder), variant="official")
    whole = [Detection(13, 0.9, (0.0, 0.0, 50.0, 30.0))]
    (seen,) = reward.color_classifier((image * 255).round() / 255, whole, "bench")
    clauses = [[{"class": "bench", "count": 1, "color": color}] for color in COLORS]
    out = reward(image.expand(10, -1, -1, -1), ["p"] * 10, tag=["colors"] * 10, include=clauses)
    assert [c for c, right in zip(COLORS, out.values.tolist(), strict=True) if right] == [seen]


def test_the_default_is_the_benchmarks_tower_and_offline_it_says_so(monkeypatch):
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(clip_colors, "load", lambda model, weights: asked.append((model, weights)))
        CLIPColors()
    assert asked == [("ViT-L-14-quickgelu", "openai")]

    def offline(repo, name):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: None)
    with pytest.raises(FileNotFoundError, match=r"timm/vit_large_patch14_clip_224.openai/open_clip_model.safetensors"):
        load_colors("clip")
    with pytest.raises(ValueError, match="QuickGELU mismatch"):
        CLIPColors("ViT-L-14", "openai")
