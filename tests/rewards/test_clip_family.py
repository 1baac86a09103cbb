import ast
import copy
import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch.nn import functional as F

from flowrl.rewards import AestheticReward, CLIPScore, HPSv21, PickScore, RewardError, RewardSet, clip_family, scaled
from flowrl.rewards.clip_family import CLIPLogit, PaperCLIPScore, linear_head, rounded
from flowrl.rewards.towers import Tower, fetch, load, locate, resized

SIZE, WIDTH, DIM = 28, 32, 16
CONFIG = {
    "embed_dim": DIM,
    "vision_cfg": {"image_size": SIZE, "layers": 2, "width": WIDTH, "head_width": 16, "patch_size": 7},
    "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": WIDTH, "heads": 2, "layers": 2},
}
PROMPTS = ["a red cube", "two dogs", "a red cube", "a photo of a very old cat", "snow"]


def write_folder(folder, **changes):
    """A random open_clip model as the hub stores one."""
    import open_clip
    from safetensors.torch import save_file

    folder.mkdir()
    torch.manual_seed(0)
    model = open_clip.CLIP(**CONFIG | changes)
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": CONFIG | changes, "preprocess_cfg": {}}))
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("clip") / "tiny")


@pytest.fixture(scope="module")
def tiny(folder):
    return load(folder, None)


@pytest.fixture
def images():
    coarse = torch.rand(5, 3, 6, 7, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, (40, 52), mode="bilinear")


def by_hand(tower, images, prompts, pixels=None):
    """Cosines [N] from the model's own methods."""
    pixels = resized(rounded(images), SIZE) if pixels is None else pixels
    mean, std = (torch.tensor(tower.preprocess[k]).reshape(3, 1, 1) for k in ("mean", "std"))
    image = tower.model.encode_image((pixels - mean) / std)
    text = tower.model.encode_text(tower.tokenizer(list(prompts)))
    return F.cosine_similarity(image, text)


# pixels


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("shape", [(40, 52), (75, 31), (20, 24), (28, 28)])
def test_resize_is_close_to_the_pillow_transform_of_open_clip(mode, shape):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    from flowrl.rewards import to_pil

    cfg = PreprocessCfg(size=SIZE, resize_mode=mode, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    images = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(1))
    if shape[0] > shape[1]:  # Pillow's order of the axes depends on its version, which shows where bicubic overshoots
        images = 0.3 + 0.4 * images
    pillow = torch.stack([image_transform_v2(cfg, is_train=False)(image) for image in to_pil(images)])
    difference = (resized(rounded(images), SIZE, mode) - pillow).abs() * 255
    assert difference.max() < 1.5 and difference.mean() < 0.5


def test_longest_without_clamp_is_the_float_resize_of_hpsv2():
    from torchvision.transforms import functional as tv

    images = (torch.rand(2, 3, 40, 52, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    small = tv.resize(images, [22, 28], tv.InterpolationMode.BICUBIC, antialias=True)
    expected = tv.pad(small, [0, 3, 0, 3])
    ours = resized(images, SIZE, "longest", clamp=False)
    assert torch.allclose(ours, expected, atol=1e-6) and ours.max() > 1.01


def test_unknown_resize_mode():
    with pytest.raises(ValueError, match="'longest' or 'squash'"):
        resized(torch.zeros(1, 3, 8, 8), 4, "crop")


def test_rounding_gives_equal_values_with_and_without_gradient():
    images = torch.rand(2, 3, 8, 8) * 1.2 - 0.1
    leaf = images.clone().requires_grad_()
    out = rounded(leaf)
    assert torch.allclose(out, rounded(images), atol=1e-7)
    assert torch.allclose(out * 255, (out * 255).round(), atol=1e-4)
    out.sum().backward()
    assert torch.equal(leaf.grad, ((images >= 0) & (images <= 1)).float())


# towers


def test_open_clip_is_imported_only_inside_functions():
    for name in ("towers", "clip_family"):
        tree = ast.parse((Path(clip_family.__file__).parent / f"{name}.py").read_text())
        names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
        assert not {n.split(".")[0] for n in names} & {"open_clip", "torchvision", "huggingface_hub"}


def test_a_tower_is_shared_frozen_and_has_the_weights_of_its_folder(folder, tiny):
    from safetensors.torch import load_file

    assert load(folder, None) is tiny and CLIPScore(folder).tower is HPSv21(folder).tower is tiny
    assert not tiny.model.training and not any(p.requires_grad for p in tiny.model.parameters())
    stored = load_file(f"{folder}/open_clip_model.safetensors")
    assert all(torch.equal(tiny.model.state_dict()[k], v) for k, v in stored.items())


def test_loading_leaves_the_generator_alone(folder, tmp_path):
    state = torch.get_rng_state()
    load(folder, folder)  # another key of the cache than (folder, None)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_training_checkpoint_loads(folder, tiny, tmp_path):
    state = {f"module.{k}": v + (k == "logit_scale") for k, v in tiny.model.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "HPS.pt")
    tower = load(folder, str(tmp_path / "HPS.pt"))
    assert tower.model.logit_scale == tiny.model.logit_scale + 1
    assert torch.equal(tower.model.visual.proj, tiny.model.visual.proj)


@pytest.fixture(scope="module")
def transformers_clip(tmp_path_factory):
    """A random transformers CLIPModel of the same shape, and its folder."""
    from transformers import CLIPConfig, CLIPModel

    common = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    common |= {"hidden_act": "gelu", "projection_dim": DIM, "attention_dropout": 0.0}
    torch.manual_seed(1)
    config = CLIPConfig(
        text_config=common | {"max_position_embeddings": 20, "vocab_size": 49408, "eos_token_id": 49407},
        vision_config=common | {"image_size": SIZE, "patch_size": 7},
        projection_dim=DIM,
    )
    model = CLIPModel(config).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide a mix-up
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    folder = tmp_path_factory.mktemp("hf") / "clip"
    model.save_pretrained(folder)
    return model, folder


def test_transformers_weights_give_the_same_embeddings_and_pickscore(folder, transformers_clip, images):
    model, weights = transformers_clip
    reward = PickScore(folder, weights)
    tower = reward.tower
    pixels = resized(rounded(images), SIZE)
    mean, std = (torch.tensor(tower.preprocess[k]).reshape(3, 1, 1) for k in ("mean", "std"))
    with torch.no_grad():
        out = model(input_ids=tower.tokenizer(PROMPTS), pixel_values=(pixels - mean) / std)
    assert torch.allclose(tower.images(rounded(images)), out.image_embeds, atol=1e-5)
    assert torch.allclose(tower.texts(PROMPTS, torch.device("cpu")), out.text_embeds, atol=1e-5)
    assert torch.allclose(reward(images, PROMPTS), out.logits_per_image.diagonal(), atol=1e-4)


def test_quickgelu_mismatch_is_an_error(folder, transformers_clip, tmp_path):
    with pytest.raises(ValueError, match=r"QuickGELU mismatch.*'ViT-L-14-quickgelu'"):
        load("ViT-L-14", "openai")  # before anything is fetched
    _, weights = transformers_clip
    state = (weights / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(state)
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"hidden_act": "quick_gelu"}}))
    with pytest.raises(ValueError, match=r"uses GELU, the weights .* were trained with QuickGELU"):
        load(folder, str(tmp_path))
    quick = write_folder(tmp_path / "quick", quick_gelu=True)
    load(quick, str(tmp_path))
    with pytest.raises(ValueError, match=r"uses QuickGELU, the weights .* were trained with GELU"):
        load(quick, str(weights))


def test_weights_that_do_not_fit_or_are_not_plain(folder, tmp_path):
    torch.save({"a.weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt are not those of"):
        load(folder, str(tmp_path / "other.pt"))
    torch.save({"state_dict": Path("x")}, tmp_path / "object.pt")
    with pytest.raises(ValueError, match="not a plain state dict"):
        load(folder, str(tmp_path / "object.pt"))


def test_absent_things_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'laion400m_e99' of ViT-B-32: no such file.*'laion400m_e32'"):
        load("ViT-B-32", "laion400m_e99")
    with pytest.raises(ValueError, match="has no 'ViT-Z-99'"):
        load("ViT-Z-99", "openai")
    with pytest.raises(FileNotFoundError, match=r"no open_clip_config.json; name the architecture"):
        load(str(tmp_path), None)
    with pytest.raises(FileNotFoundError, match=r"a folder that holds one of \['open_clip_model.safetensors'"):
        locate(tmp_path)


def test_offline_message(monkeypatch, tmp_path, images):
    def offline(repo, name):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: None)
    expected = r"weights xswu/HPSv2/HPS_v2.1_compressed.pt .*`hf download xswu/HPSv2 HPS_v2.1_compressed.pt`.*HF_HOME"
    with pytest.raises(RewardError, match=expected):
        RewardSet("hpsv2_1").score(images, PROMPTS)
    with pytest.raises(FileNotFoundError, match=r"timm/vit_large_patch14_clip_224.openai/open_clip_model.safetensors"):
        load("ViT-L-14-quickgelu", "openai")
    with pytest.raises(FileNotFoundError, match=r"give the reward a folder that has it: model='/path/to/folder'"):
        load("hf-hub:me/model", None)
    with pytest.raises(FileNotFoundError, match=r"give the reward a file: head='/path/to/aesthetic-model.pth'"):
        AestheticReward().head  # noqa: B018


def test_fetch_takes_the_first_name_that_exists(monkeypatch):
    def hub(repo, name):
        if name == "a":
            raise FileNotFoundError("404")
        return f"/cache/{repo}/{name}"

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: None)
    assert fetch("me/model", "a", "b") == Path("/cache/me/model/b")
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda repo, name: "/cached" if name == "c" else None
    )
    assert fetch("me/model", "a", "b", "c") == Path("/cached")
    assert locate("hf-hub:me/model/sub/c") == Path("/cache/me/model/sub/c")


# rewards


def test_clipscore_is_the_cosine_and_its_forms(folder, tiny, images):
    cosine = by_hand(tiny, images, PROMPTS)
    assert torch.allclose(CLIPScore(folder)(images, PROMPTS), cosine, atol=1e-6)
    assert torch.allclose(CLIPLogit(folder)(images, PROMPTS), cosine * tiny.model.logit_scale.exp(), atol=1e-5)
    prefixed = by_hand(tiny, images, [f"A photo depicts {p}" for p in PROMPTS])
    assert torch.allclose(PaperCLIPScore(folder)(images, PROMPTS), 2.5 * prefixed.clamp(min=0), atol=1e-6)


def test_hpsv2_is_the_cosine_of_the_padded_image(folder, tiny, images):
    pixels = resized(rounded(images), SIZE, "longest", clamp=False)
    assert torch.allclose(HPSv21(folder)(images, PROMPTS), by_hand(tiny, images, PROMPTS, pixels), atol=1e-6)


def laion_head(path):
    torch.manual_seed(2)
    widths, numbers = [DIM, 12, 10, 8, 4, 1], [0, 2, 4, 6, 7]  # dropout has the numbers between
    state = {}
    for number, wide, narrow in zip(numbers, widths, widths[1:], strict=False):
        state |= {f"layers.{number}.weight": torch.randn(narrow, wide), f"layers.{number}.bias": torch.randn(narrow)}
    torch.save(state, path)
    return state


def test_aesthetic_is_a_linear_stack_on_unit_embeddings(folder, tiny, images, tmp_path):
    state = laion_head(tmp_path / "head.pth")
    expected = F.normalize(tiny.images(rounded(images)), dim=-1)
    for number in (0, 2, 4, 6, 7):
        expected = expected @ state[f"layers.{number}.weight"].T + state[f"layers.{number}.bias"]
    reward, generator = AestheticReward(folder, head=tmp_path / "head.pth"), torch.get_rng_state()
    assert torch.allclose(reward(images, PROMPTS), expected[:, 0], atol=1e-4)
    assert torch.equal(torch.get_rng_state(), generator)  # a reward that loads late must not change the run
    torch.save({"layers.0.weight": torch.zeros(2, 3), "layers.0.bias": torch.zeros(2)}, tmp_path / "two.pth")
    with pytest.raises(ValueError, match="one output"):
        linear_head(tmp_path / "two.pth")


def test_another_head_plugs_in(folder, tiny, images):
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(DIM).float())
            self.dropout = torch.nn.Dropout(0.9)

        def forward(self, embedding):
            return self.dropout(embedding @ self.weight[:, None])

    expected = tiny.images(rounded(images)) @ torch.arange(DIM).float()
    assert torch.allclose(AestheticReward(folder, head=Head())(images, PROMPTS), expected, atol=1e-5)
    assert torch.allclose(
        AestheticReward(folder, head=lambda e: e.sum(1))(images, PROMPTS),
        tiny.images(rounded(images)).sum(1),
        atol=1e-6,
    )


@pytest.mark.parametrize("kind", [CLIPScore, CLIPLogit, HPSv21])
def test_values_do_not_depend_on_the_batch(kind, folder, images):
    together = kind(folder)(images, PROMPTS)
    for size in (1, 2, 5):
        assert torch.allclose(kind(folder, batch_size=size)(images, PROMPTS), together, atol=1e-5)
    order = [3, 0, 4, 2, 1]
    assert torch.allclose(kind(folder)(images[order], [PROMPTS[i] for i in order]), together[order], atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(kind(folder)(images, PROMPTS), together, atol=1e-5)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        kind(folder, batch_size=0)


@pytest.mark.parametrize("kind", [CLIPScore, CLIPLogit, HPSv21, AestheticReward])
def test_gradients_reach_the_pixels_of_their_own_image_only(kind, folder, images):
    reward = kind(folder, head=lambda e: e[:, 0]) if kind is AestheticReward else kind(folder)
    plain = RewardSet(reward).score(images, PROMPTS).total
    leaf = images.clone().requires_grad_()
    total = RewardSet(scaled(reward, 2.0)).score(leaf, PROMPTS).total
    assert torch.allclose(total / 2, plain, atol=1e-5)
    total[1].backward()
    assert leaf.grad[1].abs().sum() > 0 and torch.isfinite(leaf.grad).all()
    assert leaf.grad[[0, 2, 3, 4]].abs().sum() == 0


def test_the_gradient_is_right(tiny):
    """Against central differences in float64, through resize, normalisation and tower (not the rounding)."""
    double = Tower(copy.deepcopy(tiny.model).double(), tiny.preprocess, tiny.tokenizer_name)
    text = double.texts(PROMPTS[:1], torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    # Away from 0 and 1, where the clamp after the resize has kinks.
    x = (0.3 + 0.4 * torch.rand(1, 3, 33, 40, generator=generator)).double().requires_grad_()
    direction = torch.randn(x.shape, generator=generator).double()

    def score(pixels):
        return (double.images(pixels) * text).sum()

    (gradient,) = torch.autograd.grad(score(x), x)
    with torch.no_grad():
        slope = (score(x + 1e-5 * direction) - score(x - 1e-5 * direction)) / 2e-5
    assert torch.isclose((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("preset", "raw", "scale", "offset"),
    [
        ("clipscore@flowgrpo", CLIPLogit, 1 / 30, 0),
        ("clipscore@diffusionnft", CLIPLogit, 1 / 100, 0),
        ("pickscore@flowgrpo", PickScore, 1 / 26, 0),
        ("pickscore@mixgrpo", PickScore, 1 / 8, -18 / 8),
    ],
)
def test_presets_scale_the_raw_score(preset, raw, scale, offset, monkeypatch, tiny, folder, images):
    monkeypatch.setattr(clip_family, "load", lambda model, weights: tiny)
    rewards = RewardSet({preset: 1.0})
    assert rewards.differentiable
    found = rewards.score(images, PROMPTS).parts[preset]
    assert torch.allclose(found, raw(folder)(images, PROMPTS) * scale + offset, atol=1e-5)


def test_what_is_released():
    assert (PickScore().model, HPSv21().model) == ("ViT-H-14", "ViT-H-14")
    assert (CLIPScore().model, CLIPScore().weights) == ("ViT-L-14-quickgelu", "openai")
    assert (PickScore(weights="/w.bin").model, PickScore(weights="/w.bin").weights) == ("ViT-H-14", "/w.bin")
    assert CLIPScore("hf-hub:apple/DFN5B-CLIP-ViT-H-14-384").weights is None


# self-tests


class Colours:
    """A stub tower: an image is its mean colour, every text is one colour."""

    def __init__(self, text):
        self.text = torch.tensor(text)

    def images(self, pixels, resize, clamp):
        return F.normalize(pixels.mean((2, 3)), dim=-1)

    def texts(self, prompts, device):
        return self.text.expand(len(prompts), 3)


def test_self_test_ranks_the_known_pair(monkeypatch):
    monkeypatch.setattr(clip_family, "load", lambda model, weights: Colours([1.0, 0.0, 0.0]))
    found = RewardSet({"clipscore": 1.0, "jpeg_compressibility": 0.0}).self_test()
    assert list(found) == ["clipscore", "jpeg_compressibility"] and found["clipscore"][0] > found["clipscore"][1]
    # A reward derived from it is tested at its source, whatever the sign of the scale.
    assert RewardSet([scaled("hpsv2_1", -1.0), RewardSet("clipscore")]).self_test().keys() == {"hpsv2_1", "clipscore"}
    monkeypatch.setattr(clip_family, "load", lambda model, weights: Colours([0.0, 0.0, 1.0]))
    with pytest.raises(RewardError, match=r"'clipscore': self-test failed: .*weights, architecture or preprocessing"):
        RewardSet("clipscore").self_test()


def test_the_aesthetic_pair_is_a_picture_before_noise():
    images, prompts, columns = AestheticReward().known_pair()
    roughness = (images[..., 1:] - images[..., :-1]).abs().mean((1, 2, 3))
    assert images.shape == (2, 3, 224, 224) and len(prompts) == 2 and not columns
    assert images.min() >= 0 and images.max() <= 1 and 0 < roughness[0] < 0.1 * roughness[1]
