"""The generators that every statement about recording and replay is checked on."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from flowrl import FlowSDE, noise

STEPS = 4


@dataclass(frozen=True)
class Generator:
    """A tiny generator: `policy(...)` makes fresh ones, `sampler(...)` a sampler on its stock grid."""

    policy: Any
    pipe: Any
    guidance: float
    config: Any
    """Of the stock scheduler."""

    def sampler(self, kind=FlowSDE, **kw):
        kw = {"steps": STEPS, "guidance_scale": self.guidance} | kw
        return kind.from_config(self.config, **kw)

    def sample(self, policy, rows, sampler=None, *, seed=5, iteration=2, batch_size=None):
        prompts, members = rows
        return policy.sample(
            prompts,
            members,
            sampler or self.sampler(),
            seed=seed,
            iteration=iteration,
            batch_size=batch_size or len(prompts),
        )

    def stock(self, pipe, rows, *, seed=5, iteration=2, steps=STEPS, output_type="latent", **kw):
        """The untouched pipeline from the same initial noise.

        Each text is embedded by a call of its own: the text encoder's last bits depend on the batch.
        """
        prompts, members = rows
        sd3 = type(pipe).__name__ == "StableDiffusion3Pipeline"
        extra = {"prompt_3": None} if sd3 else {}
        with torch.no_grad():
            parts = [pipe.encode_prompt(prompt=p.text, prompt_2=None, max_sequence_length=20, **extra) for p in prompts]
        names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
        names = names if sd3 else ("prompt_embeds", "pooled_prompt_embeds")
        texts = {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(names)}
        shape = {"StableDiffusion3Pipeline": (4, 8, 8), "FluxPipeline": (16, 16)}[type(pipe).__name__]
        indices = [p.index for p in prompts]
        latents = noise.batch_normal(shape, seed, iteration, indices, members, noise.INITIAL)
        return pipe(
            **texts,
            latents=latents.to(pipe.transformer.dtype),
            num_inference_steps=steps,
            guidance_scale=self.guidance,
            height=16,
            width=16,
            output_type=output_type,
            return_dict=False,
            **kw,
        )[0]


@pytest.fixture(params=["sd3", "sd3-guided", "flux"])
def generator(request, make_sd3_policy, make_flux_policy, make_sd3_pipe, make_flux_pipe, _sd3_parts, _flux_parts):
    if request.param == "flux":
        return Generator(make_flux_policy, make_flux_pipe, 3.5, _flux_parts["scheduler"].config)
    guidance = 4.5 if request.param == "sd3-guided" else 1.0
    return Generator(make_sd3_policy, make_sd3_pipe, guidance, _sd3_parts["scheduler"].config)


@pytest.fixture(params=[None, True], ids=["full", "lora"])
def peft(request):
    return request.param


@pytest.fixture(scope="session")
def outputs_of():
    """(policy, sampler, rows, **kw) -> (rollout, velocities): the network's output in each step, guided, float32."""

    def run(generator, policy, rows, sampler=None, **kw):
        raw = []
        handle = policy.module.register_forward_hook(lambda module, args, output: raw.append(output[0]))
        try:
            rollout = generator.sample(policy, rows, sampler, **kw)
        finally:
            handle.remove()
        if generator.guidance > 1 and type(policy.pipe).__name__ == "StableDiffusion3Pipeline":
            halves = [x.chunk(2) for x in raw]
            raw = [u + generator.guidance * (c - u) for u, c in halves]
        return rollout, [x.float() for x in raw]

    return run


@pytest.fixture(scope="session")
def gradients():
    """(policy, scalar) -> {name: gradient or None} of the trained parameters."""

    def compute(policy, scalar):
        named = policy.trainable()
        found = torch.autograd.grad(scalar, list(named.values()), allow_unused=True)
        return dict(zip(named, found, strict=True))

    return compute


@pytest.fixture(scope="session")
def swap_calls():
    """(rollout, other rows) -> the rollout's states with the conditioning of other rows."""
    return lambda rollout, index: replace(rollout, calls=rollout.rows(index).calls)
