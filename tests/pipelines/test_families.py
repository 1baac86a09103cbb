"""Each entry of the family table against the stock pipeline it describes, and what happens when it is wrong."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig

from flowrl import DiffusersPolicy, FlowSDE
from flowrl.pipelines import families
from flowrl.pipelines.families import FAMILIES, family_of


@pytest.fixture
def entry(monkeypatch):
    """(policy, **changes): give a policy a wrong entry."""

    def change(policy, **changes):
        policy.family = replace(policy.family, **changes)
        return policy

    return change


def test_an_unknown_pipeline_is_refused_with_the_known_ones():
    class PaintingPipeline:
        pass

    with pytest.raises(TypeError) as error:
        family_of(PaintingPipeline())
    message = str(error.value)
    assert "PaintingPipeline" in message and "FAMILIES" in message
    assert all(name in message for name in FAMILIES)
    with pytest.raises(TypeError, match="PaintingPipeline is not a known family"):
        DiffusersPolicy(PaintingPipeline())


def test_a_subclass_belongs_to_the_family_of_its_parent(make_flux_pipe):
    pipe = make_flux_pipe()
    pipe.__class__ = type("MyPipeline", (type(pipe),), {})
    assert family_of(pipe) is FAMILIES["FluxPipeline"]


def test_a_new_entry_is_found_by_name(monkeypatch):
    made = FAMILIES["FluxPipeline"]
    monkeypatch.setitem(families.FAMILIES, "PaintingPipeline", made)
    assert family_of(type("PaintingPipeline", (), {})()) is made


WRONG = {
    "scaled": lambda right: lambda s, d: right(s, d) * 1000,
    "reversed": lambda right: lambda s, d: right(1 - s, d),
    "a little off": lambda right: lambda s, d: right(s, d) * 0.9999,
    "off in late steps": lambda right: lambda s, d: right(torch.where(s < 0.9, s / 2, s), d),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_model_time_is_named(generator, entry, make_rows, wrong):
    policy = generator.policy()
    entry(policy, model_time=wrong(policy.family.model_time))
    with pytest.raises(RuntimeError, match=r"(?s)passed time [\d.]+ at step \d.*says [\d.]+: correct `model_time`"):
        generator.sample(policy, make_rows())


def test_flux_rounds_its_time_in_half_precision(make_flux_policy, make_rows, entry):
    # 1000 sigma rounded to bf16, then divided: at 10 steps this is not sigma rounded to bf16 (section 0.3).
    policy = make_flux_policy(dtype=torch.bfloat16)
    (prompts, members), key = make_rows(1, 1), {"seed": 0, "iteration": 0, "batch_size": 1}
    sampler = FlowSDE.from_config(policy.pipe.scheduler.config, steps=10)
    rollout = policy.sample(prompts, members, sampler, **key)
    for u in range(9):
        assert torch.equal(policy.evaluate(rollout, u, sampler).log_prob, rollout.log_prob[:, u])
    entry(policy, model_time=lambda sigma, dtype: sigma)
    with pytest.raises(RuntimeError, match="correct `model_time`"):
        policy.sample(prompts, members, sampler, **key)


def test_true_guidance_of_flux_adds_calls_and_is_refused(make_flux_pipe, make_flux_policy, make_rows):
    from diffusers import FluxPipeline

    class TrueGuidance(FluxPipeline):
        def __call__(self, **kw):
            negative = {
                "negative_prompt_embeds": torch.zeros_like(kw["prompt_embeds"]),
                "negative_pooled_prompt_embeds": torch.zeros_like(kw["pooled_prompt_embeds"]),
            }
            return super().__call__(**kw, **negative, true_cfg_scale=2.0)

    pipe = make_flux_pipe()
    pipe.__class__ = TrueGuidance
    policy = make_flux_policy(pipe=pipe)
    prompts, members = make_rows(1, 2)
    with pytest.raises(RuntimeError, match=r"called its transformer 6 times in 3 steps.*true guidance"):
        policy.sample(prompts, members, FlowSDE(steps=3), seed=0, iteration=0, batch_size=2)


def test_skip_layer_guidance_of_sd3_adds_calls_and_is_refused(make_sd3_pipe, make_sd3_policy, make_rows):
    from diffusers import StableDiffusion3Pipeline

    class SkipLayers(StableDiffusion3Pipeline):
        def __call__(self, **kw):
            return super().__call__(
                **kw, skip_guidance_layers=[1], skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0
            )

    pipe = make_sd3_pipe()
    pipe.__class__ = SkipLayers
    policy = make_sd3_policy(pipe=pipe)
    prompts, members = make_rows(1, 2)
    sampler = FlowSDE(steps=3, guidance_scale=4.5)
    with pytest.raises(RuntimeError, match=r"called its transformer \d times in 3 steps.*skip-layer"):
        policy.sample(prompts, members, sampler, seed=0, iteration=0, batch_size=2)


@pytest.mark.parametrize("size", [(16, 16), (16, 8), (8, 16)])
def test_latent_shape_is_the_pipelines_own(generator, size):
    policy = generator.policy()
    height, width = size
    made = policy.pipe.prepare_latents(2, 4, height, width, torch.float32, "cpu", torch.Generator(), None)
    latents = made[0] if isinstance(made, tuple) else made  # FLUX adds image ids
    assert latents.shape[1:] == policy.family.latent_shape(policy.pipe, height, width)


def test_image_tokens_are_the_transformers_sequence(generator, make_rows):
    policy = generator.policy(height=16, width=8)
    lengths = []
    # The layer that takes the image into the transformer's width.
    embed = policy.module.pos_embed if hasattr(policy.module.pos_embed, "proj") else policy.module.x_embedder
    embed.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    generator.sample(policy, make_rows(1, 1))
    shape = policy.family.latent_shape(policy.pipe, 16, 8)
    assert set(lengths) == {policy.family.image_tokens(policy.pipe, shape)} == {8}


def test_unpack_is_what_the_pipeline_decodes(generator, make_rows):
    policy, seen = generator.policy(), []
    rows = make_rows()
    latents = generator.stock(policy.pipe, rows)
    decode = policy.pipe.vae.decode
    try:
        policy.pipe.vae.decode = lambda z, **kw: seen.append(z) or decode(z, **kw)
        generator.stock(policy.pipe, rows, output_type="pt")
    finally:
        del policy.pipe.vae.decode
    z = policy.family.unpack(policy.pipe, latents, 16, 16)
    assert torch.equal(z / 1.3 + 0.1, seen[0])


def test_every_published_lora_target_is_in_the_model(generator):
    policy = generator.policy()
    linear = [n for n, m in policy.module.named_modules() if isinstance(m, torch.nn.Linear)]
    for target in policy.family.lora_targets:
        assert any(n.endswith(f".{target}") for n in linear), target


def test_an_adapter_takes_the_familys_targets(generator):
    policy = generator.policy(True)
    adapted = {n.split(".lora_")[0] for n in policy.trainable()}
    assert adapted == {
        n.removesuffix(".base_layer")
        for n, m in policy.module.named_modules()
        if isinstance(m, torch.nn.Linear)
        and n.removesuffix(".base_layer").endswith(tuple(f".{t}" for t in policy.family.lora_targets))
    }


def test_an_adapter_may_choose_its_own_targets(generator):
    policy = generator.policy(LoraConfig(r=2, target_modules=["to_q"]))
    assert policy.trainable() and all(".to_q.lora_" in n for n in policy.trainable())


def test_the_callers_lora_config_stays_as_it_was(make_sd3_policy, make_flux_policy):
    config = LoraConfig(r=2)
    make_sd3_policy(config)
    assert config.target_modules is None
    flux = make_flux_policy(config)  # would otherwise get SD3's targets, without the feed-forward layers
    assert any("ff.net" in n for n in flux.trainable())
