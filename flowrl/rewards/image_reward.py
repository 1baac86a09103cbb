"""ImageReward v1.0 (Xu et al. 2023): how well people would like an image for its prompt. Differentiable in the pixels.

The released package pins versions of timm and fairscale that exclude open_clip, so its checkpoint is read into the BLIP
of transformers. As in its code, the text encoder starts with [CLS], not with the [ENC] of BLIP's own matching head. The
port was checked with random weights under the released names; the released checkpoint itself has not been loaded by the
authors of this module, though its size in bytes is that of this architecture.
"""

import functools
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.rewards.base import register
from flowrl.rewards.clip_family import _TowerReward
from flowrl.rewards.combinators import scaled
from flowrl.rewards.towers import locate, read, resized

VISION: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}
TEXT: dict[str, Any] = {
    "vocab_size": 30524,
    "hidden_size": 768,
    "encoder_hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "is_decoder": True,  # gives it cross-attention; the mask stays bidirectional
}
TOKENS = 35
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_MEAN, _STD = 0.16717362830052426, 1.0333394966054072  # of the raw scores

_RENAMES = {
    "blip.visual_encoder.cls_token": "vision.embeddings.class_embedding",
    "blip.visual_encoder.pos_embed": "vision.embeddings.position_embedding",
    "blip.visual_encoder.patch_embed.proj.": "vision.embeddings.patch_embedding.",
    "blip.visual_encoder.norm.": "vision.post_layernorm.",
    "blip.visual_encoder.blocks.": "vision.encoder.layers.",
    ".norm1.": ".layer_norm1.",
    ".norm2.": ".layer_norm2.",
    ".attn.qkv.": ".self_attn.qkv.",
    ".attn.proj.": ".self_attn.projection.",
    "blip.text_encoder.": "text.",
    "mlp.layers.": "head.",
}
_UNUSED = ("blip.vision_proj.", "blip.text_proj.", "blip.text_encoder.embeddings.position_ids")


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a released checkpoint under the names of `Blip`, without those that scoring does not use."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if key.startswith(_UNUSED):
            continue
        for old, new in _RENAMES.items():
            key = key.replace(old, new)
        found[key] = value
    return found


def tokenizer(vocabulary: Path):
    """BERT's tokenizer with BLIP's two tokens: a text becomes `TOKENS` ids, cut or filled up.

    Raises ValueError on another vocabulary than the encoder's.
    """
    from tokenizers import BertWordPieceTokenizer

    found = BertWordPieceTokenizer.from_file(str(vocabulary))
    found.add_special_tokens(["[DEC]", "[ENC]"])
    if found.get_vocab_size() != TEXT["vocab_size"]:
        raise ValueError(
            f"{vocabulary} holds {found.get_vocab_size() - 2} tokens, ImageReward was trained with the "
            f"{TEXT['vocab_size'] - 2} of bert-base-uncased; give that vocab.txt"
        )
    found.enable_truncation(TOKENS)
    found.enable_padding(length=TOKENS)
    return found


class Blip(nn.Module):
    """BLIP's image encoder, its text encoder with cross-attention, and ImageReward's linear head."""

    def __init__(self, vocabulary: Path):
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        self.tokenizer = tokenizer(vocabulary)
        self.vision = BlipVisionModel(BlipVisionConfig(**VISION))
        self.text = BlipTextModel(BlipTextConfig(**TEXT), add_pooling_layer=False)
        widths = (TEXT["hidden_size"], 1024, 128, 64, 16, 1)
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        self.head = nn.Sequential(OrderedDict(zip("02467", layers, strict=True)))  # dropout has the numbers between

    def images(self, pixels: Tensor, resize: str | None = None, clamp: bool = True) -> Tensor:
        """Embeddings `[N, 1 + patches, D]` of `[N, 3, H, W]` in [0, 1]."""
        x = resized(pixels, VISION["image_size"], resize or "shortest", clamp=clamp)
        mean, std = (x.new_tensor(moment).reshape(3, 1, 1) for moment in (_CLIP_MEAN, _CLIP_STD))
        return self.to(pixels.device).vision(pixel_values=(x - mean) / std).last_hidden_state

    def score(self, patches: Tensor, prompts: Sequence[str]) -> Tensor:
        """[N] scores of embedded images with their prompts."""
        texts = [self.tokenizer.encode(prompt) for prompt in prompts]
        ids, mask = (
            torch.tensor([getattr(text, name) for text in texts], device=patches.device)
            for name in ("ids", "attention_mask")
        )
        read = self.text(input_ids=ids, attention_mask=mask, encoder_hidden_states=patches)
        return (self.head(read.last_hidden_state[:, 0])[:, 0] - _MEAN) / _STD


@functools.cache
def load(weights: str, vocabulary: str) -> Blip:
    """The frozen float32 model; the same arguments give the same object.

    Torch's global CPU generator is put back to where it was, so nothing else should draw from it meanwhile.
    Raises FileNotFoundError when a file is absent, ValueError when one is not what the model needs.
    """
    path, words = locate(weights), locate(vocabulary, "vocabulary")
    with torch.random.fork_rng(devices=[]):  # random weights, replaced below, must not move the run's generator
        net = Blip(words)
    try:
        net.load_state_dict(renamed(read(path)))
    except RuntimeError as error:
        raise ValueError(f"the weights {path} are not those of ImageReward v1.0: {error}") from error
    return net.requires_grad_(False).eval()


@register("imagereward")
class ImageReward(_TowerReward):
    """The human-preference score of ImageReward v1.0, about -2.3 to 2 (Xu et al. 2023).

    The image is brought to 224 by its short side and cropped; of the prompt 35 tokens count.

    weights: `ImageReward.pt`, see `locate`. vocabulary: `vocab.txt` of bert-base-uncased. Both are read at the first
        call.
    batch_size: of a chunk; values do not depend on it.
    Values [N] carry the gradient to `images`. Raises as `load` and `quantise` do.
    """

    name = "imagereward"
    released = ("BLIP-L/16", "hf-hub:zai-org/ImageReward/ImageReward.pt")

    def __init__(
        self,
        weights: str | None = None,
        vocabulary: str = "hf-hub:google-bert/bert-base-uncased/vocab.txt",
        batch_size: int = 16,
    ):
        super().__init__(None, weights, batch_size)
        self.vocabulary = str(vocabulary)

    @property
    def tower(self) -> Blip:  # ty: ignore[incompatible-property-override]
        return load(str(self.weights), self.vocabulary)

    def value(self, image: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.tower.score(image, prompts)


register("imagereward@unirl")(scaled(ImageReward(), 1 / 4, 2 / 4))
