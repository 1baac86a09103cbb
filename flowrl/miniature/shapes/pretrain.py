"""Train the shipped base model of the world "shapes" from scratch.

    python -m flowrl.miniature.shapes.pretrain --output DIR

Stages: scenes -> AutoencoderKL -> SD3Transformer2DModel with its two CLIP text encoders, joined into an ordinary
`StableDiffusion3Pipeline` that `from_pretrained` loads. Every stage is seeded; something like an hour on two
CPU cores. `flowrl.miniature.pretrain` holds the stages.
"""

from __future__ import annotations

import numpy as np
from diffusers import AutoencoderKL, SD3Transformer2DModel
from transformers import CLIPTokenizer

from flowrl.miniature import pretrain
from flowrl.miniature.shapes import world
from flowrl.miniature.shapes.detector import detect

TEXT_TOKENS = 12
# How often each cycle of the flow training shows each task. Relations are learned last: the second cycle is for them.
TASK_SHARES = (
    {"single_object": 0.1, "two_object": 0.15, "counting": 0.2, "colors": 0.15, "position": 0.2, "color_attr": 0.2},
    {"single_object": 0.1, "two_object": 0.1, "counting": 0.1, "colors": 0.1, "position": 0.5, "color_attr": 0.1},
)


def scenes(count: int, seed: int, cycle: int) -> tuple[np.ndarray, list[str]]:
    """Random scenes of all prompts: uint8 `[count, 32, 32, 3]` and their captions."""
    rng, shares = np.random.default_rng(seed), TASK_SHARES[min(cycle, 1)]
    prompts = world.train_prompts() + world.held_out_prompts()
    by_task = {tag: [p for p in prompts if p["tag"] == tag] for tag in world.TASKS}
    tags = rng.choice(list(shares), p=list(shares.values()), size=count)
    images = np.empty((count, world.CANVAS, world.CANVAS, 3), np.uint8)
    captions = []
    for i, tag in enumerate(tags):
        prompt = by_task[tag][rng.integers(len(by_task[tag]))]
        images[i] = world.render(world.sample_scene(prompt, rng))
        captions.append(prompt["prompt"])
    return images, captions


def tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that knows the world's words whole: one token a word."""
    prompts = world.train_prompts() + world.held_out_prompts()
    return pretrain.tokenizer(sorted({w for p in prompts for w in p["prompt"].split()}), TEXT_TOKENS)


def autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=(16, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=world.CANVAS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )


def transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=4,
        patch_size=1,
        in_channels=8,
        out_channels=8,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=4,
        qk_norm="rms_norm",
    )


def agreement(images: np.ndarray, other: np.ndarray) -> float:
    """Share of image pairs in which the judge sees the same objects with the same colours."""

    def seen(image: np.ndarray) -> list[tuple[int, str]]:
        found, colors = detect(image)
        return sorted((d.class_index, c) for d, c in zip(found, colors, strict=True) if d.score > 0.9)

    return float(np.mean([seen(a) == seen(b) for a, b in zip(images, other, strict=True)]))


WORLD = pretrain.World(
    scenes,
    agreement,
    tokenizer,
    autoencoder,
    transformer,
    ema_decay=0.999,
    scene_count=60_000,
    batch=64,
    vae_steps=3_000,
    flow_steps=(5_000, 2_500),
)

if __name__ == "__main__":
    pretrain.main(WORLD, __doc__ or "")
