"""Train a miniature world's base model from scratch: what the worlds' own `pretrain` modules share.

Stages: images -> AutoencoderKL -> SD3Transformer2DModel with its two CLIP text encoders, joined into an ordinary
`StableDiffusion3Pipeline` that `from_pretrained` loads. Every stage is seeded.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer


@dataclass(frozen=True)
class World:
    """What a world brings to the stages.

    scenes: `(count, seed, cycle)` -> images uint8 `[count, H, W, 3]` and their captions; `cycle` counts the flow
        model's learning rate cycles.
    agreement: images, reconstructions -> share of pairs in which the world's judge sees the same.
    tokenizer, autoencoder, transformer: make the parts, untrained; the two text encoders follow from the tokenizer.
    ema_decay: of the flow model's averaged weights, which are what is kept.
    scene_count, batch, vae_steps, flow_steps: the defaults of the command line; the autoencoder takes half a batch.
    """

    scenes: Callable[[int, int, int], tuple[np.ndarray, list[str]]]
    agreement: Callable[[np.ndarray, np.ndarray], float]
    tokenizer: Callable[[], CLIPTokenizer]
    autoencoder: Callable[[], AutoencoderKL]
    transformer: Callable[[], SD3Transformer2DModel]
    ema_decay: float
    scene_count: int
    batch: int
    vae_steps: int
    flow_steps: Sequence[int]


def tokenizer(words: Sequence[str], max_length: int, letters: str = "") -> CLIPTokenizer:
    """A CLIP tokenizer that knows `words` whole, one token a word, and spells others out of `letters` and theirs."""
    symbols = sorted({*letters, *(c for w in words for c in w)})
    vocab: dict[str, int] = {}
    merges: list[tuple[str, str]] = []

    def add(token: str) -> None:
        vocab.setdefault(token, len(vocab))

    def merged(pieces: list[str]) -> list[str]:
        """BPE with the merges so far: the earliest of them first, all its places."""
        for pair in iter(lambda: min((p for p in pairwise(pieces) if p in rank), key=rank.get, default=None), None):
            i = 0
            while i < len(pieces) - 1:
                if (pieces[i], pieces[i + 1]) == pair:
                    pieces[i : i + 2] = ["".join(pair)]
                i += 1
        return pieces

    for c in symbols:
        add(c)
        add(c + "</w>")
    rank: dict[tuple[str, str], int] = {}
    for word in words:
        # Later merges rank lower, so they never take apart what is already whole.
        pieces = merged([*word[:-1], word[-1] + "</w>"])
        while len(pieces) > 1:
            pair = (pieces[0], pieces[1])
            rank[pair] = len(rank)
            merges.append(pair)
            add("".join(pair))
            pieces = merged(["".join(pair), *pieces[2:]])
    add("<|startoftext|>")
    add("<|endoftext|>")
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=max_length)


def text_encoder(vocabulary: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """An untrained text encoder; two of them give the transformer 128 features a token."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            projection_dim=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=vocabulary.model_max_length,
            bos_token_id=vocabulary.bos_token_id,
            eos_token_id=vocabulary.eos_token_id,
            pad_token_id=vocabulary.pad_token_id,
        )
    )


def _pixels(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def to_uint8(decoded: Tensor) -> np.ndarray:
    """Decoder output `[N, 3, H, W]` in [-1, 1] as uint8 `[N, H, W, 3]`."""
    return decoded.add(1).mul(127.5).clamp(0, 255).round().byte().permute(0, 2, 3, 1).numpy()


class Cosine:
    """Warm up over the first 2 %, then a cosine to zero, by share of the time or step budget."""

    def __init__(self, optimizer: torch.optim.Optimizer, peak: float) -> None:
        self.optimizer, self.peak = optimizer, peak

    def __call__(self, progress: float) -> None:
        scale = min(progress / 0.02 + 1e-3, 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * scale


def train_autoencoder(world: World, images: np.ndarray, steps: int, batch: int, seed: int) -> AutoencoderKL:
    """Reconstruct the images but the last 500, on which progress is reported; ends frozen, its scaling factor set."""
    torch.manual_seed(seed)
    vae = world.autoencoder().to(memory_format=torch.channels_last)  # a fifth faster on CPU
    data, held_out = images[:-500], images[-500:]
    optimizer = torch.optim.AdamW(vae.parameters(), weight_decay=1e-4)
    schedule, start = Cosine(optimizer, 2e-3), time.time()
    for step in range(steps):
        schedule(step / steps)
        x = _pixels(data[torch.randint(len(data), (batch,)).numpy()]).contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(x).latent_dist
        z = posterior.sample()
        # A little extra noise on the latents makes the decoder forgive what the flow model gets slightly wrong.
        decoded = vae.decode(z + 0.1 * torch.randn_like(z)).sample
        error = decoded - x
        loss = error.abs().mean() + error.pow(2).mean() + 1e-3 * posterior.kl().mean() / z[0].numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 249 or step == steps - 1:
            with torch.no_grad():
                again = to_uint8(vae.decode(vae.encode(_pixels(held_out)).latent_dist.mode()).sample)
            print(
                f"vae step {step + 1} loss {loss.item():.4f} "
                f"agreement {world.agreement(held_out, again):.3f} {time.time() - start:.0f}s",
                flush=True,
            )
    with torch.no_grad():
        z = torch.cat([vae.encode(x).latent_dist.sample() for x in _pixels(data[:4096]).split(256)])
    vae.register_to_config(scaling_factor=float(1 / z.std()), shift_factor=float(z.mean()))
    return vae.eval().requires_grad_(False)


@torch.no_grad()
def latents_of(vae: AutoencoderKL, images: np.ndarray) -> Tensor:
    """Scaled latents, sampled from the posterior once per image."""
    c: Any = vae.config
    parts = [vae.encode(_pixels(x)).latent_dist.sample() for x in np.array_split(images, len(images) // 500)]
    return (torch.cat(parts) - c.shift_factor) * c.scaling_factor


def train_flow(
    pipe: StableDiffusion3Pipeline,
    ema_decay: float,
    latents: Tensor,
    captions: list[str],
    steps: int,
    batch: int,
    seed: int,
    output: Path,
) -> None:
    """Rectified flow on the latents with logit-normal times; EMA weights are what is kept."""
    torch.manual_seed(seed)
    model, encoders = pipe.transformer, (pipe.text_encoder, pipe.text_encoder_2)
    unique = sorted(set(captions)) + [""]
    index = {c: i for i, c in enumerate(unique)}
    caption = torch.tensor([index[c] for c in captions])
    ids = pipe.tokenizer(
        unique, padding="max_length", max_length=pipe.tokenizer.model_max_length, truncation=True, return_tensors="pt"
    ).input_ids

    def embed(which: Tensor) -> tuple[Tensor, Tensor]:
        # What StableDiffusion3Pipeline.encode_prompt computes, with gradients.
        out = [e(ids[which], output_hidden_states=True) for e in encoders]
        return torch.cat([o.hidden_states[-2] for o in out], -1), torch.cat([o[0] for o in out], -1)

    modules = nn.ModuleList([model, *encoders])
    average = torch.optim.swa_utils.AveragedModel(
        modules, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(ema_decay)
    )
    decay = [p for p in modules.parameters() if p.ndim > 1]
    rest = [p for p in modules.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    schedule, start, running = Cosine(optimizer, 1.5e-3), time.time(), 0.0
    modules.train()
    for step in range(steps):
        schedule(step / steps)
        # SD3 pads the absent T5 with 256 zero tokens unless told otherwise: a few small batches teach the model
        # to ignore them, so that the stock pipeline works with its default arguments too.
        padded = step % 32 == 31
        rows = torch.randint(len(latents), (batch // 4 if padded else batch,))
        which = torch.where(torch.rand(len(rows)) < 0.1, len(unique) - 1, caption[rows])
        tokens, pooled = embed(which)
        if padded:
            tokens = F.pad(tokens, (0, 0, 0, 256))
        x0 = latents[rows]
        noise = torch.randn_like(x0)
        t = torch.sigmoid(torch.randn(len(rows)) + 0.5)
        xt = torch.lerp(x0, noise, t[:, None, None, None])
        v = model(xt, encoder_hidden_states=tokens, pooled_projections=pooled, timestep=1000 * t).sample
        loss = F.mse_loss(v, noise - x0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(modules)
        running = loss.item() if step == 0 else 0.99 * running + 0.01 * loss.item()
        if step % 500 == 499 or step == steps - 1:
            print(f"flow step {step + 1} loss {running:.4f} {time.time() - start:.0f}s", flush=True)
        if step % 1000 == 999 or step == steps - 1:
            keep = {k: v.clone() for k, v in modules.state_dict().items()}
            modules.load_state_dict(average.module.state_dict())
            modules.eval()
            pipe.save_pretrained(output, safe_serialization=True)
            modules.load_state_dict(keep)
            modules.train()
    modules.load_state_dict(average.module.state_dict())
    modules.eval()


def main(world: World, description: str) -> None:
    """The command line of a world's `pretrain` module; `description` is its docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the pipeline to write")
    parser.add_argument("--scenes", type=int, default=world.scene_count)
    parser.add_argument("--vae-steps", type=int, default=world.vae_steps)
    parser.add_argument(
        "--flow-steps",
        type=int,
        nargs="+",
        default=list(world.flow_steps),
        help="steps of each cosine cycle; a cycle starts from the averaged weights of the one before",
    )
    parser.add_argument("--batch", type=int, default=world.batch)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vae", type=Path, help="take a trained autoencoder from this folder")
    parser.add_argument("--start", type=Path, help="go on from this pipeline after the cycles its pretrain.json names")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)

    images, captions = world.scenes(args.scenes, args.seed, 0)
    print(f"{len(images)} scenes, {len(set(captions))} captions", flush=True)
    if args.vae:
        vae = AutoencoderKL.from_pretrained(args.vae).eval().requires_grad_(False)
        vae.register_to_config(_name_or_path="")
    else:
        vae = train_autoencoder(world, images, args.vae_steps, args.batch // 2, args.seed)
        vae.save_pretrained(args.output / "vae", safe_serialization=True)
    torch.manual_seed(args.seed + 1)
    vocabulary = world.tokenizer()
    pipe = StableDiffusion3Pipeline(
        transformer=world.transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.5),
        vae=vae,
        text_encoder=text_encoder(vocabulary),
        tokenizer=vocabulary,
        text_encoder_2=text_encoder(vocabulary),
        tokenizer_2=vocabulary,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    count = sum(p.numel() for p in pipe.transformer.parameters())
    print(f"transformer {count / 1e6:.2f} M, vae {sum(p.numel() for p in vae.parameters()) / 1e6:.2f} M parameters")
    done = 0
    if args.start:
        done = len(json.loads((args.start / "pretrain.json").read_text())["flow_steps"])
        for name in ("transformer", "text_encoder", "text_encoder_2"):
            part = getattr(pipe, name)
            part.load_state_dict(type(part).from_pretrained(args.start / name).state_dict())
    for cycle, steps in enumerate(args.flow_steps[done:], done):
        if cycle > 0:
            images, captions = world.scenes(args.scenes, args.seed + 100 * cycle, cycle)
        torch.manual_seed(args.seed + 2 + 100 * cycle)
        latents = latents_of(vae, images)
        train_flow(pipe, world.ema_decay, latents, captions, steps, args.batch, args.seed + 3 + cycle, args.output)
    pipe.save_pretrained(args.output, safe_serialization=True)
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path) and v is not None}
    (args.output / "pretrain.json").write_text(json.dumps(settings, indent=2) + "\n")
