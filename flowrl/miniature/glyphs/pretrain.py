"""Train the shipped base model of the world "glyphs" from scratch.

    python -m flowrl.miniature.glyphs.pretrain --output DIR

Random words, none of them held out, through the stages of `flowrl.miniature.pretrain`. Some letters of the pictures
are wrong on purpose: with faithful captions the model spells 99 % of held-out words after 4,000 steps, and RL has
nothing to do.
"""

from __future__ import annotations

import numpy as np
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from transformers import CLIPTokenizer

from flowrl.miniature import pretrain
from flowrl.miniature.glyphs import world
from flowrl.rewards.ocr import read_line

TEXT_TOKENS = 10
SHARES = {2: 0.2, 3: 0.35, 4: 0.45}
"""How often words of each length are shown."""
SLIPS = 0.2
"""Chance that a letter is drawn as a random one."""


def scenes(count: int, seed: int, cycle: int) -> tuple[np.ndarray, list[str]]:
    """Random words, misspelt in places: uint8 `[count, 24, 48, 3]` and their captions."""
    rng = np.random.default_rng(seed)
    images = np.empty((count, world.HEIGHT, world.WIDTH, 3), np.uint8)
    captions = []
    for i, length in enumerate(rng.choice(list(SHARES), p=list(SHARES.values()), size=count)):
        words = world.words(int(length))
        word = words[rng.integers(len(words))]
        drawn = [str(rng.choice(list(world.LETTERS))) if rng.random() < SLIPS else letter for letter in word]
        images[i] = world.render("".join(drawn), rng)
        captions.append(world.caption(word))
    return images, captions


def agreement(images: np.ndarray, other: np.ndarray) -> float:
    """Share of image pairs, among the first 60, in which the reader reads the same."""

    def read(some: np.ndarray) -> list[str]:
        return read_line(torch.from_numpy(some[:60]).permute(0, 3, 1, 2) / 255)

    return float(np.mean([a == b for a, b in zip(read(images), read(other), strict=True)]))


def tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer with one token for each letter of the word to draw."""
    return pretrain.tokenizer(["the", "word", '"'], TEXT_TOKENS, world.LETTERS.lower())


def autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(16, 24, 40, 48),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=world.WIDTH,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )


def transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=6,
        patch_size=1,
        in_channels=8,
        out_channels=8,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=128,
        caption_projection_dim=96,
        pooled_projection_dim=128,
        pos_embed_max_size=6,
        qk_norm="rms_norm",
    )


WORLD = pretrain.World(
    scenes,
    agreement,
    tokenizer,
    autoencoder,
    transformer,
    ema_decay=0.996,
    scene_count=20_000,
    batch=32,
    vae_steps=1_250,
    flow_steps=(1_500, 1_200),
)

if __name__ == "__main__":
    pretrain.main(WORLD, __doc__ or "")
