"""What differs between model families, a few lines each.

A family says how its diffusers pipeline is fed and read. Everything else (sampling, recording, replay, guidance) is
shared. The entry is checked against the stock pipeline by `DiffusersPolicy.check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Family:
    encode: Callable[[Any, list[str], str | None, dict[str, Any]], dict[str, Tensor]]
    """`(pipe, texts, negative, options) ->` keywords of `pipe.__call__`, one row per text."""
    latent_shape: Callable[[Any, int, int], tuple[int, ...]]
    """Shape of one sample's latents as the pipeline's `latents=` expects them, for a height and width in pixels."""
    model_time: Callable[[Tensor, Any], Tensor]
    """`(sigma, dtype) ->` the time argument of the transformer."""
    unpack: Callable[[Any, Tensor, int, int], Tensor]
    """Latents -> what the VAE decodes, before scaling."""
    batched: tuple[str, ...]
    """Transformer arguments with a batch dimension, besides the latents and the time."""
    doubled_guidance: bool
    """Guidance above 1 as one call on [unconditional, conditional] (True) or as an embedded scale (False)."""
    lora_targets: tuple[str, ...]
    """Linear layers that the published recipes adapt."""
    image_tokens: Callable[[Any, tuple[int, ...]], int]
    """`(pipe, latent shape) ->` number of image tokens, for schedules that depend on it."""
    linspace_sigmas: bool
    """Whether the pipeline hands its scheduler `linspace(1, 1/steps, steps)` (see `SchedulerConfig`)."""


def _encode_sd3(pipe, texts, negative, options) -> dict[str, Tensor]:
    prompt, negative_prompt, pooled, negative_pooled = pipe.encode_prompt(
        prompt=texts,
        prompt_2=None,
        prompt_3=None,
        negative_prompt=None if negative is None else [negative] * len(texts),
        do_classifier_free_guidance=negative is not None,
        **options,
    )
    result = {"prompt_embeds": prompt, "pooled_prompt_embeds": pooled}
    if negative is not None:
        result |= {
            "negative_prompt_embeds": negative_prompt,
            "negative_pooled_prompt_embeds": negative_pooled,
        }
    return result


def _encode_flux(pipe, texts, negative, options) -> dict[str, Tensor]:
    prompt, pooled, _ = pipe.encode_prompt(prompt=texts, prompt_2=None, **options)
    return {"prompt_embeds": prompt, "pooled_prompt_embeds": pooled}


def _flux_grid(pipe, height: int, width: int) -> tuple[int, int]:
    return height // (2 * pipe.vae_scale_factor), width // (2 * pipe.vae_scale_factor)


_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)

FAMILIES: dict[str, Family] = {
    "StableDiffusion3Pipeline": Family(
        encode=_encode_sd3,
        latent_shape=lambda pipe, height, width: (
            pipe.transformer.config.in_channels,
            height // pipe.vae_scale_factor,
            width // pipe.vae_scale_factor,
        ),
        model_time=lambda sigma, dtype: sigma * 1000,
        unpack=lambda pipe, latents, height, width: latents,
        batched=("encoder_hidden_states", "pooled_projections"),
        doubled_guidance=True,
        lora_targets=_ATTENTION,
        image_tokens=lambda pipe, shape: shape[1] * shape[2] // pipe.transformer.config.patch_size**2,
        linspace_sigmas=False,
    ),
    "FluxPipeline": Family(
        encode=_encode_flux,
        latent_shape=lambda pipe, height, width: (
            _flux_grid(pipe, height, width)[0] * _flux_grid(pipe, height, width)[1],
            pipe.transformer.config.in_channels,
        ),
        # The pipeline rounds 1000 sigma to the latents' dtype before it divides.
        model_time=lambda sigma, dtype: (sigma * 1000).to(dtype) / 1000,
        unpack=lambda pipe, latents, height, width: pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor),
        batched=("encoder_hidden_states", "pooled_projections", "guidance"),
        doubled_guidance=False,
        lora_targets=(*_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
        image_tokens=lambda pipe, shape: shape[0],
        linspace_sigmas=True,
    ),
}


def family_of(pipe: Any) -> Family:
    """The family of a pipeline object.

    Raises:
        TypeError: the pipeline's class has no entry; the message lists those that have.
    """
    for cls in type(pipe).__mro__:
        if cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__]
    raise TypeError(
        f"{type(pipe).__name__} is not a known family ({', '.join(FAMILIES)}). "
        "Add an entry to flowrl.pipelines.families.FAMILIES; `flowrl check` then verifies it."
    )
