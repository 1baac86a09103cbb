"""Sampling with the unmodified pipeline, and replay.

Three generators: SD3 without and with guidance, and FLUX, each with random weights. Numbers such as 10.8 refer to the
specification of flow policy gradients, "invariant 9" to the design's list.
"""

import math

import pytest
import torch
from torch.distributions import Normal

from flowrl import CPS, CPWS, ODE, AllSteps, DanceSDE, FlowSDE, Window, noise
from flowrl.pipelines import recording
from flowrl.rollout import Conditioning, Prompt, Rollout
from flowrl.samplers import Explicit

# Rounding of fp32 matrix products in batches of another shape: about 1e-6 on outputs of order one.
BATCH_SHAPE = {"atol": 3e-5, "rtol": 0}


def flow_sde(t, t_next, sigma_1, a):
    """(A, C, std) of Flow-GRPO's step, in plain floats from section 1.1."""
    D = t - t_next
    sigma2 = a * a * t / (1 - (sigma_1 if t == 1 else t))
    return 1 - sigma2 * D / (2 * t), -D * (1 + sigma2 * (1 - t) / (2 * t)), math.sqrt(sigma2 * D)


def step_noise(shape, rows, step, seed=5, iteration=2):
    prompts, members = rows
    return noise.batch_normal(shape, seed, iteration, [p.index for p in prompts], members, step)


# ------------------------------------------------------------------------------------- the stock pipeline at noise 0


@pytest.mark.parametrize("kind", [ODE, FlowSDE])
def test_at_noise_zero_latents_and_images_are_the_stock_pipelines(
    generator, peft, kind, perturb, make_rows
):  # invariant 9
    policy, rows = perturb(generator.policy(peft)), make_rows()
    rollout = generator.sample(policy, rows, generator.sampler(kind, noise_level=0.0))
    assert torch.equal(rollout.latents, generator.stock(policy.pipe, rows))
    assert torch.equal(policy.decode(rollout.latents), generator.stock(policy.pipe, rows, output_type="pt").float())
    assert rollout.log_prob.shape == (4, 0) and rollout.states.shape == (4, 0, *rollout.latents.shape[1:])


def test_at_noise_zero_an_untrained_policy_is_the_stock_model(generator, peft, make_rows):
    policy, rows = generator.policy(peft), make_rows()
    ours = generator.sample(policy, rows, generator.sampler(ODE)).latents
    assert torch.equal(ours, generator.stock(generator.pipe(), rows))


def test_at_noise_zero_bf16_is_the_stock_pipelines(generator, make_rows):
    policy, rows = generator.policy(dtype=torch.bfloat16), make_rows()
    rollout = generator.sample(policy, rows, generator.sampler(ODE))
    assert rollout.latents.dtype == torch.bfloat16
    assert torch.equal(rollout.latents, generator.stock(policy.pipe, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_difference_is_zero(generator, peft, dtype, make_rows):
    # In half precision too: otherwise every bf16 run would fail its preflight.
    assert generator.policy(peft, dtype=dtype).stock_difference(*make_rows(), generator.sampler(), seed=1) == 0


def test_stock_difference_ignores_the_samplers_own_grid(generator, make_rows):
    sampler = generator.sampler(steps=3).with_(schedule=Explicit((1, 0.7, 0.3, 0)))
    assert generator.policy().stock_difference(*make_rows(), sampler, seed=1) == 0


def test_stock_difference_holds_for_a_static_flux_schedule(make_flux_policy, make_flux_pipe, make_rows):
    # FLUX.1-schnell: the pipeline hands its own linspace to a scheduler whose config does not say so.
    policy = make_flux_policy(pipe=make_flux_pipe(shift="static"))
    assert policy.stock_difference(*make_rows(), FlowSDE(steps=3), seed=1) == 0


def test_stock_difference_holds_for_a_dynamic_sd3_schedule(make_sd3_policy, make_sd3_pipe, make_rows):
    # SD3 pipelines accept dynamic shifting: the shift follows the number of image tokens, without a linspace.
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = make_sd3_pipe()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=8, max_image_seq_len=64
    )
    assert make_sd3_policy(pipe=pipe).stock_difference(*make_rows(), FlowSDE(steps=3), seed=1) == 0


def test_stock_difference_refuses_a_generator_it_does_not_describe(generator, make_rows):
    policy = generator.policy()
    # A pipeline whose scheduler does something else than the Euler step.
    stock = policy.pipe.scheduler

    class Other(type(stock)):
        def step(self, model_output, timestep, sample, **kwargs):
            return (super().step(1.01 * model_output, timestep, sample, **kwargs)[0],)

    policy.pipe.scheduler = Other.from_config(stock.config)
    with pytest.raises(RuntimeError, match=r"(?s)at noise 0 our latents differ.*families"):
        policy.stock_difference(*make_rows(), generator.sampler(), seed=1)


def test_the_pipeline_gets_its_scheduler_and_hooks_back(generator, make_rows, monkeypatch):
    policy = generator.policy()
    stock = policy.pipe.scheduler
    generator.sample(policy, make_rows())
    assert policy.pipe.scheduler is stock and not policy.module._forward_pre_hooks

    def broken(*args, **kwargs):
        raise KeyError("inside the loop")

    monkeypatch.setattr(recording.RecordingScheduler, "step", broken)
    with pytest.raises(KeyError, match="inside the loop"):
        generator.sample(policy, make_rows())
    assert policy.pipe.scheduler is stock and not policy.module._forward_pre_hooks


# --------------------------------------------------------------------------------------------------------- ratio one


def test_ratio_is_exactly_one_before_an_update(generator, peft, perturb, make_rows):  # 10.8
    policy = perturb(generator.policy(peft))
    rollout = generator.sample(policy, make_rows())
    assert rollout.log_prob.shape == (4, 3) and rollout.log_prob.dtype == torch.float32
    for u in range(3):
        again = policy.evaluate(rollout, u, generator.sampler())
        assert torch.equal(again.log_prob, rollout.log_prob[:, u])
        assert torch.equal(again.distribution.mean, rollout.means[:, u])


@pytest.mark.parametrize("kind", [DanceSDE, CPS, CPWS])
def test_ratio_is_exactly_one_for_every_kernel(generator, kind, make_rows):
    policy, sampler = generator.policy(), generator.sampler(kind)
    rollout = generator.sample(policy, make_rows(), sampler)
    assert rollout.log_prob.shape[1] > 0
    for u in range(rollout.log_prob.shape[1]):
        assert torch.equal(policy.evaluate(rollout, u, sampler).log_prob, rollout.log_prob[:, u])


@pytest.mark.parametrize("size", [1, 3])
def test_ratio_is_one_to_rounding_for_other_micro_batches(generator, peft, size, perturb, make_rows):
    policy = perturb(generator.policy(peft))
    rollout, sampler = generator.sample(policy, make_rows()), generator.sampler()
    for u in range(3):
        parts = [
            policy.evaluate(rollout.rows(range(i, min(i + size, 4))), u, sampler).log_prob for i in range(0, 4, size)
        ]
        torch.testing.assert_close(torch.cat(parts), rollout.log_prob[:, u], atol=1e-6, rtol=0)


def test_ratio_is_not_one_when_the_weights_were_touched(generator, peft, perturb, make_rows):
    policy = perturb(generator.policy(peft))
    rollout = generator.sample(policy, make_rows())
    perturb(policy, scale=0.02, seed=9)
    for u in range(3):
        again = policy.evaluate(rollout, u, generator.sampler()).log_prob
        assert (again - rollout.log_prob[:, u]).abs().max() > 1e-4


def test_ratio_is_one_in_bf16_because_states_are_rounded_before_they_are_scored(generator, make_rows):
    policy, rows, sampler = generator.policy(dtype=torch.bfloat16), make_rows(), generator.sampler()
    rollout = generator.sample(policy, rows)
    assert rollout.actions.dtype == rollout.states.dtype == torch.bfloat16
    assert rollout.log_prob.dtype == rollout.means.dtype == torch.float32
    for u in range(3):
        again = policy.evaluate(rollout, u, sampler)
        assert torch.equal(again.log_prob, rollout.log_prob[:, u])
        # The failing case: score what the kernel drew instead of what the model will see.
        unrounded = again.distribution.sample(step_noise(rollout.latents.shape[1:], rows, u))
        assert torch.equal(unrounded.bfloat16(), rollout.actions[:, u])
        wrong = sampler.log_prob(again.distribution, unrounded)
        assert (wrong - rollout.log_prob[:, u]).abs().max() > 1e-6


def test_ratio_is_one_in_bf16_with_an_adapter(generator, perturb, make_rows):
    policy = perturb(generator.policy(True, dtype=torch.bfloat16))
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    rollout = generator.sample(policy, make_rows())
    for u in range(3):
        assert torch.equal(policy.evaluate(rollout, u, generator.sampler()).log_prob, rollout.log_prob[:, u])


def test_gradients_do_not_change_what_is_computed(generator, peft, perturb, make_rows):
    policy = perturb(generator.policy(peft))
    rollout = generator.sample(policy, make_rows())
    with torch.no_grad():
        without = policy.evaluate(rollout, 1, generator.sampler()).log_prob
    assert torch.equal(without, policy.evaluate(rollout, 1, generator.sampler()).log_prob)


# ------------------------------------------------------------------------------------------------- what is recorded


def test_recorded_transitions_follow_the_papers_formula(generator, make_rows, outputs_of):  # 1.1
    policy, rows = generator.policy(), make_rows()
    rollout, velocities = outputs_of(generator, policy, rows)
    grid = rollout.sigmas.double().tolist()
    assert len(velocities) == 4 and rollout.plans[0].trained_steps == (0, 1, 2)
    for u in range(3):
        A, C, std = flow_sde(grid[u], grid[u + 1], grid[1], 0.7)
        x, action = rollout.states[:, u].double(), rollout.actions[:, u].double()
        mean = A * x + C * velocities[u].double()
        torch.testing.assert_close(rollout.means[:, u].double(), mean, atol=1e-5, rtol=1e-5)
        drawn = step_noise(x.shape[1:], rows, u).double()
        torch.testing.assert_close(action, mean + std * drawn, atol=1e-5, rtol=1e-5)
        oracle = Normal(mean, std).log_prob(action).flatten(1).mean(1)
        torch.testing.assert_close(rollout.log_prob[:, u].double(), oracle, atol=1e-5, rtol=1e-5)


def test_recorded_log_prob_is_the_log_prob_of_the_recorded_mean(generator, make_rows):  # 10.6
    policy, sampler = generator.policy(), generator.sampler()
    rollout = generator.sample(policy, make_rows())
    for u in range(3):
        distribution = policy.evaluate(rollout, u, sampler).distribution
        normal = Normal(rollout.means[:, u].double(), distribution.std.double())
        oracle = normal.log_prob(rollout.actions[:, u].double()).flatten(1).mean(1)
        torch.testing.assert_close(rollout.log_prob[:, u].double(), oracle, atol=1e-6, rtol=0)


def test_states_chain_from_the_initial_noise_to_the_latents(generator, make_rows, outputs_of):
    policy, rows = generator.policy(), make_rows()
    rollout, velocities = outputs_of(generator, policy, rows)
    assert torch.equal(rollout.states[:, 0], step_noise(rollout.latents.shape[1:], rows, noise.INITIAL))
    assert torch.equal(rollout.states[:, 1:], rollout.actions[:, :-1])
    # The last step is the Euler step to sigma 0, and not trained.
    last = rollout.actions[:, -1] - rollout.sigmas[-2] * velocities[-1]
    torch.testing.assert_close(rollout.latents, last, atol=1e-6, rtol=1e-6)


def test_only_the_windows_steps_are_noisy_and_recorded(generator, make_rows, outputs_of):
    policy, rows = generator.policy(), make_rows()
    sampler = generator.sampler(plan=Window(2, (1, 3)))
    rollout, velocities = outputs_of(generator, policy, rows, sampler)
    assert rollout.plans[0].trained_steps == (1, 2) and rollout.states.shape[1] == 2
    first = step_noise(rollout.latents.shape[1:], rows, noise.INITIAL)
    second = first + (rollout.sigmas[1] - rollout.sigmas[0]) * velocities[0]
    assert torch.equal(rollout.states[:, 0], second)
    for u in range(2):
        assert torch.equal(policy.evaluate(rollout, u, sampler).log_prob, rollout.log_prob[:, u])


def test_a_multistep_solver_gets_the_previous_clean_estimate(generator, make_rows):
    policy, rows = generator.policy(), make_rows()
    euler, dpm2 = generator.sampler(ODE), generator.sampler(ODE, solver="dpm2")
    rollout = generator.sample(policy, rows, dpm2)
    x = step_noise(rollout.latents.shape[1:], rows, noise.INITIAL)
    previous = None
    with torch.no_grad():
        for i in range(4):
            v = policy.velocity(x, rollout.sigmas[i], rollout)
            clean = x - rollout.sigmas[i] * v
            x = dpm2.transition(x, v, rollout.sigmas, i, previous=previous).mean
            previous = rollout.sigmas[i].item(), clean
    torch.testing.assert_close(rollout.latents, x, atol=1e-5, rtol=1e-5)
    assert (rollout.latents - generator.sample(policy, rows, euler).latents).abs().max() > 1e-3


def test_a_rollout_carries_no_graph(generator, peft, perturb, make_rows):
    rollout = generator.sample(perturb(generator.policy(peft)), make_rows())
    tensors = [rollout.latents, rollout.states, rollout.actions, rollout.means, rollout.log_prob]
    assert not any(t.requires_grad for t in [*tensors, *rollout.calls.values()])


# ---------------------------------------------------------------------------------------------------- noise by index


@pytest.mark.parametrize("batch_size", [1, 3])
def test_any_batch_size_gives_the_same_samples(generator, batch_size, make_rows):
    policy, rows = generator.policy(), make_rows(2, 3)
    whole = generator.sample(policy, rows)
    parts = generator.sample(policy, rows, batch_size=batch_size)
    for name in ("latents", "states", "actions", "means", "log_prob"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), **BATCH_SHAPE)
    assert parts.prompts == whole.prompts and parts.members == whole.members
    for name, value in whole.calls.items():
        torch.testing.assert_close(parts.calls[name], value, **BATCH_SHAPE)


def test_any_order_of_rows_gives_the_same_samples(generator, make_rows):
    policy, (prompts, members) = generator.policy(), make_rows(2, 2)
    order = [2, 0, 3, 1]
    straight = generator.sample(policy, (prompts, members))
    shuffled = generator.sample(policy, ([prompts[i] for i in order], [members[i] for i in order]))
    expected = straight.rows(order)
    torch.testing.assert_close(shuffled.latents, expected.latents, **BATCH_SHAPE)
    torch.testing.assert_close(shuffled.log_prob, expected.log_prob, **BATCH_SHAPE)
    assert shuffled.group_id.tolist() == expected.group_id.tolist()


def test_a_sample_does_not_depend_on_its_neighbours(generator, make_rows):
    policy, (prompts, members) = generator.policy(), make_rows(2, 2)
    among = generator.sample(policy, (prompts, members))
    strangers = [Prompt(99, "nine dots"), prompts[2], Prompt(98, "no cat")]
    other = generator.sample(policy, (strangers, [7, members[2], 1]))
    torch.testing.assert_close(other.latents[1], among.latents[2], **BATCH_SHAPE)
    alone = generator.sample(policy, (prompts[2:3], members[2:3]))
    torch.testing.assert_close(alone.latents[0], among.latents[2], **BATCH_SHAPE)


def test_every_index_matters_and_the_same_indices_repeat_exactly(generator, make_rows):
    policy, rows = generator.policy(), make_rows(1, 2)
    base = generator.sample(policy, rows)
    assert torch.equal(base.latents, generator.sample(policy, rows).latents)
    gap = lambda other: (other.latents - base.latents).abs().max().item()  # noqa: E731
    assert gap(generator.sample(policy, rows, seed=6)) > 0.1
    assert gap(generator.sample(policy, rows, iteration=3)) > 0.1
    assert gap(generator.sample(policy, (rows[0], [2, 3]))) > 0.1
    assert gap(generator.sample(policy, ([Prompt(77, p.text) for p in rows[0]], rows[1]))) > 0.1
    assert (base.latents[0] - base.latents[1]).abs().max() > 0.1


def test_torchs_global_generator_is_neither_read_nor_moved(generator, make_rows):
    policy, rows = generator.policy(), make_rows()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = generator.sample(policy, rows).latents
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(generator.sample(policy, rows).latents, first)


def test_rows_and_cat_are_inverse(generator, make_rows):
    rollout = generator.sample(generator.policy(), make_rows())
    again = Rollout.cat([rollout.rows([0]), rollout.rows([1, 2]), rollout.rows([3])])
    for name in ("latents", "states", "actions", "means", "log_prob"):
        assert torch.equal(getattr(again, name), getattr(rollout, name))
    assert all(torch.equal(again.calls[k], v) for k, v in rollout.calls.items())
    assert again.prompts == rollout.prompts and again.members == rollout.members
    swapped = rollout.rows([3, 0])
    assert torch.equal(swapped.log_prob, rollout.log_prob[[3, 0]])
    assert swapped.group_id.tolist() == [rollout.prompts[3].index, rollout.prompts[0].index]


# ---------------------------------------------------------------------------------------------------------- velocity


def test_velocity_at_recorded_states_is_the_recorded_calls(generator, peft, perturb, make_rows, outputs_of):
    policy = perturb(generator.policy(peft))
    rollout, recorded = outputs_of(generator, policy, make_rows())
    for u, step in enumerate(rollout.plans[0].trained_steps):
        v = policy.velocity(rollout.states[:, u], rollout.sigmas[step], rollout)
        assert v.dtype == torch.float32 and torch.equal(v, recorded[step])


def test_velocity_takes_one_sigma_per_sample(generator, make_rows):
    policy = generator.policy()
    rollout = generator.sample(policy, make_rows())
    x, sigma = rollout.states[:, 1], torch.tensor([0.9, 0.1, 0.5, 1.0])
    with torch.no_grad():
        mixed = policy.velocity(x, sigma, rollout)
        for i in range(4):
            one = policy.velocity(x[i : i + 1], sigma[i], rollout.rows([i]))[0]
            torch.testing.assert_close(mixed[i], one, **BATCH_SHAPE)
        assert torch.equal(policy.velocity(x, torch.full((4,), 0.5), rollout)[2:3], mixed[2:3])
        assert (policy.velocity(x, torch.tensor(0.5), rollout)[0] - mixed[0]).abs().max() > 1e-2


def test_velocity_uses_each_rows_own_conditioning(generator, make_rows, swap_calls):
    policy = generator.policy()
    rollout = generator.sample(policy, make_rows(2, 2))
    x, sigma = rollout.states[:, 0], rollout.sigmas[0]
    with torch.no_grad():
        own = policy.velocity(x, sigma, rollout)
        other = policy.velocity(x, sigma, swap_calls(rollout, [0, 1, 0, 1]))
    assert torch.equal(own[:2], other[:2]) and (own[2:] - other[2:]).abs().amax((1, 2)).min() > 1e-2


def test_velocity_uses_the_rollouts_guidance(generator, make_rows):
    policy = generator.policy()
    rollout = generator.sample(policy, make_rows())
    stronger = generator.sample(policy, make_rows(), generator.sampler(guidance_scale=generator.guidance + 2))
    x, sigma = rollout.states[:, 0], rollout.sigmas[0]
    with torch.no_grad():
        gap = policy.velocity(x, sigma, stronger) - policy.velocity(x, sigma, rollout)
    assert gap.abs().max() > 1e-3
    branches = {v.shape[1] for v in rollout.calls.values()}
    assert branches == ({2} if generator.guidance == 4.5 else {1})


def unused_by_construction(name, generator):
    """SD3's last block throws its text stream away: its text queries get a gradient of exactly zero."""
    return generator.guidance != 3.5 and any(
        f"transformer_blocks.1.attn.{part}" in name for part in ("add_q_proj", "norm_added_q")
    )


def test_gradients_reach_exactly_the_trainable_parameters(generator, peft, perturb, make_rows, gradients):
    policy = perturb(generator.policy(peft))
    rollout = generator.sample(policy, make_rows())
    transition = policy.evaluate(rollout, 1, generator.sampler())
    transition.log_prob.sum().backward()
    trained = policy.trainable()
    assert all(("lora" in n) == (peft is True) for n in trained)
    for name, p in policy.module.named_parameters():
        assert (p.grad is not None) == (name in trained), name
    dead = [n for n, p in trained.items() if not p.grad.any()]
    assert dead == [n for n in trained if unused_by_construction(n, generator)]
    for component in ("vae", "text_encoder", "text_encoder_2"):
        module = policy.pipe.components[component]
        assert not any(p.requires_grad or p.grad is not None for p in module.parameters())


def test_a_new_adapter_gets_gradients_in_its_second_factor_only(generator, make_rows, gradients):
    policy = generator.policy(True)
    rollout = generator.sample(policy, make_rows())
    found = gradients(policy, policy.evaluate(rollout, 1, generator.sampler()).log_prob.sum())
    moving = {n for n, g in found.items() if g.any()}
    assert moving == {n for n in found if "lora_B" in n and not unused_by_construction(n, generator)}


def test_full_training_trains_every_weight_of_the_transformer(generator):
    policy = generator.policy()
    assert policy.trainable().keys() == dict(policy.module.named_parameters()).keys()
    assert not policy.module.training


def test_velocitys_gradient_is_a_finite_difference(generator, perturb, make_rows, gradients):
    policy = perturb(generator.policy(True))
    rollout = generator.sample(policy, make_rows())
    x, sigma = rollout.states[:, 1], torch.tensor([0.9, 0.2, 0.5, 0.7])
    weight = step_noise(x.shape[1:], make_rows(), 0)

    def objective():
        return (policy.velocity(x, sigma, rollout) * weight).sum()

    # Along the gradient itself the slope is its norm, far above fp32 rounding.
    found = gradients(policy, objective())
    norm = sum(g.double().square().sum() for g in found.values()).sqrt().item()
    values, h = [], 1e-3
    with torch.no_grad():
        for shift in (h, -2 * h):  # to +h, then to -h
            for n, p in policy.trainable().items():
                p.add_(found[n], alpha=shift / norm)
            values.append(objective().item())
    assert (values[0] - values[1]) / (2 * h) == pytest.approx(norm, rel=2e-2)


# ------------------------------------------------------------------------------------------------------ conditioning


@pytest.fixture
def encoder_calls():
    """(policy) -> a list that grows with every pass of a text encoder."""
    handles = []

    def watch(policy):
        calls = []
        for name in ("text_encoder", "text_encoder_2"):
            module = policy.pipe.components[name]
            hook = lambda *_, name=name: calls.append(name)  # noqa: E731
            handles.append(module.register_forward_hook(hook))
        return calls

    yield watch
    for handle in handles:
        handle.remove()


def test_the_second_call_runs_no_text_encoder(generator, encoder_calls, make_rows):
    policy, (prompts, _) = generator.policy(), make_rows(3, 2)
    calls = encoder_calls(policy)
    first = policy.encode(prompts, generator.guidance)
    passes = len(calls)
    assert passes > 0
    again = policy.encode(prompts[::-1], generator.guidance)
    assert len(calls) == passes
    for name, value in first.arguments.items():
        assert torch.equal(again.arguments[name], value.flip(0))
    generator.sample(policy, make_rows(3, 2))
    assert len(calls) == passes
    policy.encode([Prompt(1, "something new")], generator.guidance)
    assert len(calls) > passes


def test_cached_rows_are_fresh_ones(generator, make_rows):
    policy, (prompts, _) = generator.policy(), make_rows(3, 1)
    policy.encode(prompts[:1], generator.guidance)
    policy.encode(prompts, generator.guidance)
    cached = policy.encode(prompts, generator.guidance).arguments
    for i, prompt in enumerate(prompts):
        fresh = generator.policy().encode([prompt], generator.guidance).arguments
        assert fresh.keys() == cached.keys()
        for name, value in fresh.items():
            torch.testing.assert_close(cached[name][i : i + 1], value, atol=1e-6, rtol=0)


def test_texts_are_encoded_once_each_and_one_at_a_time(make_sd3_policy, encoder_calls):
    policy = make_sd3_policy()
    calls = encoder_calls(policy)
    prompts = [Prompt(i, f"number {i % 40}") for i in range(80)]
    rows = policy.encode(prompts).arguments["prompt_embeds"]
    assert len(rows) == 80 and calls.count("text_encoder") == 40
    assert torch.equal(rows[:40], rows[40:])
    assert all((rows[i] - rows[0]).abs().max() > 1e-3 for i in range(1, 40))


def test_guided_and_unguided_embeddings_are_kept_apart(make_sd3_policy, make_rows):
    policy, (prompts, _) = make_sd3_policy(), make_rows(2, 1)
    plain = policy.encode(prompts, 1.0).arguments
    guided = policy.encode(prompts, 4.5).arguments
    assert set(plain) == {"prompt_embeds", "pooled_prompt_embeds"}
    assert set(guided) - set(plain) == {"negative_prompt_embeds", "negative_pooled_prompt_embeds"}
    assert policy.encode(prompts, 1.0).arguments.keys() == plain.keys()


def test_the_negative_prompt_is_used(make_sd3_policy, make_rows):
    sampler = FlowSDE(steps=2, guidance_scale=4.5)
    prompts, members = make_rows(1, 1)
    run = lambda policy: policy.sample(prompts, members, sampler, seed=0, iteration=0, batch_size=1)  # noqa: E731
    assert (run(make_sd3_policy()).latents - run(make_sd3_policy(negative_prompt="blur")).latents).abs().max() > 1e-2


def test_conditioning_rows():
    both = Conditioning({"a": torch.arange(4), "b": torch.arange(8).reshape(4, 2)})
    part = both.rows(slice(1, 3)).arguments
    assert part["a"].tolist() == [1, 2] and part["b"].tolist() == [[2, 3], [4, 5]]


# ------------------------------------------------------------------------------------------------------------ decode


def test_decode_gives_images(generator, make_rows):
    policy = generator.policy()
    latents = generator.sample(policy, make_rows()).latents
    image = policy.decode(3 * latents)  # large latents, so that the range is reached
    assert image.shape == (4, 3, 16, 16) and image.dtype == torch.float32 and not image.requires_grad
    assert image.min() >= 0 and image.max() <= 1 and image.std() > 0.05


def test_decode_in_chunks_equals_the_whole(generator, make_rows):
    policy = generator.policy()
    latents = generator.sample(policy, make_rows()).latents
    whole = policy.decode(latents)
    for size in (1, 3):
        parts = torch.cat([policy.decode(part) for part in latents.split(size)])
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)


def test_decode_takes_half_precision_latents(generator, make_rows):
    policy = generator.policy(dtype=torch.bfloat16)
    image = policy.decode(generator.sample(policy, make_rows()).latents)
    assert image.dtype == torch.float32 and image.min() >= 0 and image.max() <= 1


# ----------------------------------------------------------------------------------------------------------- options


def test_the_default_size_is_the_pipelines(make_sd3_policy):
    policy = make_sd3_policy(height=None, width=None)
    assert (policy.height, policy.width) == (16, 16)


def test_height_and_width_may_differ(generator, make_rows):
    policy = generator.policy(height=16, width=8)
    rollout = generator.sample(policy, make_rows())
    assert rollout.latents[0].numel() == 16 * 8 // 4 * 4
    assert policy.decode(rollout.latents).shape == (4, 3, 16, 8)
    assert torch.equal(policy.evaluate(rollout, 0, generator.sampler()).log_prob, rollout.log_prob[:, 0])


def test_a_sampler_that_trains_no_step_records_none(generator, make_rows):
    policy = generator.policy()
    rollout = generator.sample(policy, make_rows(), generator.sampler(steps=1, plan=AllSteps()))
    assert rollout.log_prob.shape == (4, 0) and rollout.means.shape[:2] == (4, 0)
    assert torch.isfinite(rollout.latents).all()
