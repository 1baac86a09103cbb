"""Size of the image as a JPEG: a reward that needs no model (Black et al. 2023, DDPO)."""

import io
from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.rewards.base import register, to_pil


def _kilobytes(images: Tensor) -> list[float]:
    sizes = []
    for image in to_pil(images):
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=95)
        sizes.append(buffer.tell() / 1000)
    return sizes


@register("jpeg_compressibility")
def jpeg_compressibility(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Reward small files: -kB / 500, kB = bytes / 1000 of the JPEG at quality 95.

    images: float [N, 3, H, W] in [0, 1]; the prompts are ignored. Returns N numbers below 0; a 512-px photo
    gives about -0.2. Scale of the Flow-GRPO code. Raises ValueError as `quantise` does.
    """
    return [-size / 500 for size in _kilobytes(images)]


@register("jpeg_incompressibility")
def jpeg_incompressibility(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Reward large files: +kB / 500, the exact opposite of `jpeg_compressibility` (DDPO itself uses plain
    kB)."""
    return [size / 500 for size in _kilobytes(images)]


def _flat_and_noise() -> tuple[Tensor, list[str], dict[str, list]]:
    noise = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.full_like(noise, 0.5), noise]), ["", ""], {}


def _noise_and_flat() -> tuple[Tensor, list[str], dict[str, list]]:
    images, prompts, columns = _flat_and_noise()
    return images.flip(0), prompts, columns


jpeg_compressibility.known_pair = _flat_and_noise  # ty: ignore
jpeg_incompressibility.known_pair = _noise_and_flat  # ty: ignore
