import copy
import io
import itertools

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch.nn import functional as F

from flowrl.rewards import ImageReward, RewardError, RewardSet, image_reward, scaled
from flowrl.rewards.clip_family import rounded
from flowrl.rewards.image_reward import Blip, load, renamed
from flowrl.rewards.towers import resized

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cube", "two", "dog", "##s", "very", "old", "cat"]
WORDS += ["snow", "!", ","]
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 7}
TEXT = {"vocab_size": len(WORDS) + 2, "hidden_size": 24, "encoder_hidden_size": 32, "intermediate_size": 40}
TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 40}
RELEASED_VISION, RELEASED_TEXT = image_reward.VISION, image_reward.TEXT
PROMPTS = ["a red cube", "two dogs", "a red cube", "Very, VERY old cats!", "snow"]


def linear(name, inside, outside):
    return {f"{name}.weight": (outside, inside), f"{name}.bias": (outside,)}


def norm(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def released_shapes(vision, text):
    """Names and shapes in `ImageReward.pt`: timm's ViT, BLIP's BERT with cross-attention, the head."""
    d, w = vision["hidden_size"], text["hidden_size"]
    patch, side = vision["patch_size"], vision["image_size"] // vision["patch_size"]
    v, t = "blip.visual_encoder", "blip.text_encoder"
    shapes = {f"{v}.cls_token": (1, 1, d), f"{v}.pos_embed": (1, 1 + side**2, d)}
    shapes |= {f"{v}.patch_embed.proj.weight": (d, 3, patch, patch), f"{v}.patch_embed.proj.bias": (d,)}
    for i in range(vision["num_hidden_layers"]):
        block = f"{v}.blocks.{i}"
        shapes |= norm(f"{block}.norm1", d) | linear(f"{block}.attn.qkv", d, 3 * d) | linear(f"{block}.attn.proj", d, d)
        shapes |= norm(f"{block}.norm2", d) | linear(f"{block}.mlp.fc1", d, vision["intermediate_size"])
        shapes |= linear(f"{block}.mlp.fc2", vision["intermediate_size"], d)
    shapes |= norm(f"{v}.norm", d)
    shapes |= {f"{t}.embeddings.position_ids": (1, text["max_position_embeddings"])}
    shapes |= {f"{t}.embeddings.word_embeddings.weight": (text["vocab_size"], w)}
    shapes |= {f"{t}.embeddings.position_embeddings.weight": (text["max_position_embeddings"], w)}
    shapes |= norm(f"{t}.embeddings.LayerNorm", w)
    for i in range(text["num_hidden_layers"]):
        layer = f"{t}.encoder.layer.{i}"
        for kind, source in (("attention", w), ("crossattention", text["encoder_hidden_size"])):
            shapes |= linear(f"{layer}.{kind}.self.query", w, w) | linear(f"{layer}.{kind}.self.key", source, w)
            shapes |= linear(f"{layer}.{kind}.self.value", source, w)
            shapes |= linear(f"{layer}.{kind}.output.dense", w, w) | norm(f"{layer}.{kind}.output.LayerNorm", w)
        shapes |= linear(f"{layer}.intermediate.dense", w, text["intermediate_size"])
        shapes |= linear(f"{layer}.output.dense", text["intermediate_size"], w) | norm(f"{layer}.output.LayerNorm", w)
    shapes |= linear("blip.vision_proj", d, 256) | linear("blip.text_proj", w, 256)
    for number, (inside, outside) in zip("02467", itertools.pairwise((w, 1024, 128, 64, 16, 1)), strict=True):
        shapes |= linear(f"mlp.layers.{number}", inside, outside)
    return shapes


def random_checkpoint():
    generator, state = torch.Generator().manual_seed(0), {}
    for key, shape in released_shapes(VISION, TEXT).items():
        scale = 0.15 if key.startswith("mlp") else 0.3
        state[key] = scale * torch.randn(shape, generator=generator) + ("norm" in key.lower() and "weight" in key)
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    return state


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_reward, "VISION", image_reward.VISION | VISION)
        patch.setattr(image_reward, "TEXT", image_reward.TEXT | TEXT)
        yield


@pytest.fixture(scope="module")
def state():
    return random_checkpoint()


@pytest.fixture(scope="module")
def files(tmp_path_factory, state):
    """(weights, vocabulary) of a random model, as the constructor takes them."""
    folder = tmp_path_factory.mktemp("imagereward")
    torch.save(state, folder / "ImageReward.pt")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return str(folder / "ImageReward.pt"), str(folder / "vocab.txt")


@pytest.fixture
def images():
    coarse = torch.rand(5, 3, 6, 7, generator=torch.Generator().manual_seed(0))
    return F.interpolate(coarse, (40, 52), mode="bilinear")


# An independent reading of the architecture, on the released names.


def attend(q, k, v, heads, mask=None):
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask.bool()[:, None, None])
    return mixed.transpose(1, 2).flatten(2)


class Reference:
    def __init__(self, state):
        self.state = state

    def linear(self, name, x):
        return F.linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def norm(self, name, x, eps):
        return F.layer_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.state[f"{name}.bias"], eps)

    def vit(self, x):
        v, s = "blip.visual_encoder", self.state
        x = F.conv2d(x, s[f"{v}.patch_embed.proj.weight"], s[f"{v}.patch_embed.proj.bias"], VISION["patch_size"])
        x = torch.cat([s[f"{v}.cls_token"].expand(len(x), -1, -1), x.flatten(2).mT], 1) + s[f"{v}.pos_embed"]
        for i in range(VISION["num_hidden_layers"]):
            block = f"{v}.blocks.{i}"
            qkv = self.linear(f"{block}.attn.qkv", self.norm(f"{block}.norm1", x, 1e-6)).chunk(3, -1)
            x = x + self.linear(f"{block}.attn.proj", attend(*qkv, VISION["num_attention_heads"]))
            inner = F.gelu(self.linear(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", x, 1e-6)))
            x = x + self.linear(f"{block}.mlp.fc2", inner)
        return self.norm(f"{v}.norm", x, 1e-6)

    def attention(self, name, x, source, mask=None):
        q, k, v = (
            self.linear(f"{name}.self.{part}", y) for part, y in (("query", x), ("key", source), ("value", source))
        )
        out = self.linear(f"{name}.output.dense", attend(q, k, v, TEXT["num_attention_heads"], mask))
        return self.norm(f"{name}.output.LayerNorm", x + out, 1e-12)

    def bert(self, ids, mask, patches):
        e, s = "blip.text_encoder.embeddings", self.state
        x = s[f"{e}.word_embeddings.weight"][ids] + s[f"{e}.position_embeddings.weight"][: ids.shape[1]]
        x = self.norm(f"{e}.LayerNorm", x, 1e-12)
        for i in range(TEXT["num_hidden_layers"]):
            layer = f"blip.text_encoder.encoder.layer.{i}"
            x = self.attention(f"{layer}.attention", x, x, mask)
            x = self.attention(f"{layer}.crossattention", x, patches)
            inner = F.gelu(self.linear(f"{layer}.intermediate.dense", x))
            x = self.norm(f"{layer}.output.LayerNorm", x + self.linear(f"{layer}.output.dense", inner), 1e-12)
        return x

    def score(self, x, ids, mask):
        x = self.bert(ids, mask, self.vit(x))[:, 0]
        for number in "02467":
            x = self.linear(f"mlp.layers.{number}", x)
        return (x[:, 0] - 0.16717362830052426) / 1.0333394966054072


def encoded(prompts):
    """Ids and mask by hand: lower case, punctuation apart, the plural split off."""
    rows = []
    for prompt in prompts:
        pieces = prompt.lower().replace("!", " !").replace(",", " ,").split()
        ids = [WORDS.index("[CLS]")]
        for piece in pieces:
            ids += [WORDS.index(piece)] if piece in WORDS else [WORDS.index(piece[:-1]), WORDS.index("##s")]
        ids.append(WORDS.index("[SEP]"))
        rows.append(ids + [0] * (35 - len(ids)))
    ids = torch.tensor(rows)
    return ids, (ids != 0).long()


def prepared(images):
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).reshape(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).reshape(3, 1, 1)
    return (resized(rounded(images), 28) - mean) / std


def test_the_port_scores_as_an_independent_reading_of_the_released_names(files, state, images):
    reward, reference = ImageReward(*files), Reference(state)
    expected = reference.score(prepared(images), *encoded(PROMPTS))
    found = reward(images, PROMPTS)
    assert expected.std() > 0.05
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(reward.tower.images(rounded(images)), reference.vit(prepared(images)), atol=1e-5)
    # Both inputs matter, so that equality says something.
    assert (reward(images, PROMPTS[1:] + PROMPTS[:1]) - found).abs().max() > 1e-2
    assert (reward(images.flip(0), PROMPTS)[0] - found[0]).abs() > 1e-2


def test_gradients_are_those_of_the_reference(files, state, images):
    ours, theirs = (images.clone().requires_grad_() for _ in range(2))
    ImageReward(*files)(ours, PROMPTS).sum().backward()
    Reference(state).score(prepared(theirs), *encoded(PROMPTS)).sum().backward()
    assert theirs.grad.abs().max() > 1e-4
    assert (ours.grad - theirs.grad).abs().max() < 1e-4 * theirs.grad.abs().max()


def test_the_gradient_is_right(files):
    """Against central differences in float64, through resize, normalisation and both encoders (not the rounding)."""
    double = copy.deepcopy(load(*files)).double()
    generator = torch.Generator().manual_seed(3)
    x = (0.3 + 0.4 * torch.rand(1, 3, 33, 40, generator=generator)).double().requires_grad_()
    direction = torch.randn(x.shape, generator=generator).double()

    def score(pixels):
        return double.score(double.images(pixels), PROMPTS[:1]).sum()

    (gradient,) = torch.autograd.grad(score(x), x)
    with torch.no_grad():
        slope = (score(x + 1e-5 * direction) - score(x - 1e-5 * direction)) / 2e-5
    assert torch.isclose((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-9)


def test_gradients_reach_the_pixels_of_their_own_image_only(files, images):
    plain = RewardSet(ImageReward(*files)).score(images, PROMPTS).total
    leaf = images.clone().requires_grad_()
    total = RewardSet(scaled(ImageReward(*files), 2.0)).score(leaf, PROMPTS).total
    assert torch.allclose(total / 2, plain, atol=1e-5)
    total[1].backward()
    assert leaf.grad[1].abs().sum() > 0 and torch.isfinite(leaf.grad).all()
    assert leaf.grad[[0, 2, 3, 4]].abs().sum() == 0


def test_values_do_not_depend_on_the_batch(files, images):
    together = ImageReward(*files)(images, PROMPTS)
    for size in (1, 2, 5):
        assert torch.allclose(ImageReward(*files, batch_size=size)(images, PROMPTS), together, atol=1e-5)
    order = [3, 0, 4, 2, 1]
    assert torch.allclose(ImageReward(*files)(images[order], [PROMPTS[i] for i in order]), together[order], atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(ImageReward(*files)(images, PROMPTS), together, atol=1e-5)


def test_the_model_is_shared_frozen_and_leaves_the_generator_alone(files, state):
    load.cache_clear()
    random = torch.get_rng_state()
    model = load(*files)
    assert torch.equal(torch.get_rng_state(), random)
    assert ImageReward(*files).tower is model and not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(model.state_dict()[k], v) for k, v in renamed(state).items())


def test_tokens(files, tmp_path):
    tokenizer = load(*files).tokenizer
    ids, mask = encoded(PROMPTS)
    assert [tokenizer.encode(p).ids for p in PROMPTS] == ids.tolist()
    assert [tokenizer.encode(p).attention_mask for p in PROMPTS] == mask.tolist()
    cut = tokenizer.encode("cat " * 50)
    assert len(cut.ids) == 35 and cut.tokens[0] == "[CLS]" and cut.tokens[33:] == ["cat", "[SEP]"]
    assert tokenizer.encode("[DEC] [ENC]").ids[1:3] == [len(WORDS), len(WORDS) + 1]
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "more"]))
    with pytest.raises(ValueError, match=rf"{len(WORDS) + 1} tokens, ImageReward was trained with the {len(WORDS)} of"):
        load(files[0], str(tmp_path / "vocab.txt"))


def test_weights_that_do_not_fit_are_named(files, state, tmp_path):
    def fails(changed, match):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"
        torch.save(changed, path)
        with pytest.raises(ValueError, match=match):
            load(str(path), files[1])

    missing = "blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"
    fails({k: v for k, v in state.items() if k != missing}, r"(?s)ImageReward v1.0: .*Missing.*crossattention.self.key")
    fails(state | {"blip.itm_head.weight": torch.zeros(2, 24)}, r"(?s)Unexpected key.*blip.itm_head.weight")
    fails(state | {"mlp.layers.7.weight": torch.zeros(1, 8)}, r"(?s)size mismatch for head.7.weight")
    fails({"state_dict": ImageReward}, "not a plain state dict")


def test_offline_messages_name_the_file_and_its_command(monkeypatch, files, images):
    def offline(repo, name):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: None)
    expected = r"zai-org/ImageReward/ImageReward.pt .*`hf download zai-org/ImageReward ImageReward.pt`.*HF_HOME"
    with pytest.raises(RewardError, match=expected):
        RewardSet("imagereward").score(images, PROMPTS)
    with pytest.raises(FileNotFoundError, match=r"`hf download google-bert/bert-base-uncased vocab.txt`.*vocabulary='"):
        ImageReward(files[0])(images, PROMPTS)


def test_preset(files, monkeypatch, images):
    model = load(*files)
    monkeypatch.setattr(image_reward, "load", lambda weights, vocabulary: model)
    rewards = RewardSet({"imagereward@unirl": 1.0})
    assert rewards.differentiable
    found = rewards.score(images, PROMPTS).parts["imagereward@unirl"]
    assert torch.allclose(found, (ImageReward(*files)(images, PROMPTS) + 2) / 4, atol=1e-6)
    pair, prompts, _ = ImageReward().known_pair()
    assert pair[0, 0].mean() > pair[1, 0].mean() and prompts[0] == prompts[1] and "red" in prompts[0]


def test_the_architecture_has_the_size_of_the_released_file(monkeypatch, tmp_path):
    """1,786,880,927 bytes: 4 for each number, 4 more for a position id, some hundred of the archive for each tensor."""
    shapes = released_shapes(RELEASED_VISION, RELEASED_TEXT)
    data = 4 * sum(torch.Size(shape).numel() for shape in shapes.values()) + 4 * 512
    empty = io.BytesIO()
    torch.save({key: torch.zeros(1) for key in shapes}, empty)
    assert abs(1_786_880_927 - data - len(empty.getvalue())) < 64 * len(shapes)  # padding and names in the archive
    monkeypatch.setattr(image_reward, "VISION", RELEASED_VISION)
    monkeypatch.setattr(image_reward, "TEXT", RELEASED_TEXT)
    monkeypatch.setattr(image_reward, "tokenizer", lambda vocabulary: None)
    with torch.device("meta"):
        model = Blip(tmp_path)
    state = renamed({key: torch.empty(shape, device="meta") for key, shape in shapes.items()})
    assert {key: value.shape for key, value in state.items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert sum(p.numel() for p in model.parameters()) == 446_206_689
    heads_and_eps = [(c["num_attention_heads"], c["layer_norm_eps"]) for c in (RELEASED_VISION, RELEASED_TEXT)]
    assert heads_and_eps == [(16, 1e-6), (12, 1e-12)]  # what shapes do not tell
