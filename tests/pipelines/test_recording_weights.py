"""Other weights for a block (`use`), and what is saved and loaded."""

import shutil

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig

from flowrl import load_pipeline


class Interrupted(Exception):
    pass


def bits(policy):
    return {n: p.detach().clone() for n, p in policy.module.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(v, other[n]) for n, v in one.items())


@pytest.fixture
def trained(generator, perturb, make_rows):
    """(peft) -> (policy after some training, a rollout of it, velocity of a policy at the rollout's first state)."""

    def make(peft):
        policy = perturb(generator.policy(peft))
        rollout = generator.sample(policy, make_rows())

        @torch.no_grad()
        def velocity(who):
            return who.velocity(rollout.states[:, 0], rollout.sigmas[0], rollout)

        return policy, rollout, velocity

    return make


# --------------------------------------------------------------------------------------------------------------- use


def test_policy_weights_are_the_policys_own(trained):
    policy, _, velocity = trained(True)
    before = velocity(policy)
    with policy.use("policy"):
        assert torch.equal(velocity(policy), before)


def test_reference_of_an_adapter_is_the_base_model(generator, trained):
    policy, _, velocity = trained(True)
    base = velocity(generator.policy())
    with policy.use("reference"):
        assert torch.equal(velocity(policy), base)
    assert (velocity(policy) - base).abs().max() > 1e-3


@pytest.mark.parametrize("fails", [False, True])
def test_the_adapter_is_back_after_the_reference(generator, trained, gradients, fails):
    policy, rollout, velocity = trained(True)
    weights, before, names = bits(policy), velocity(policy), list(policy.trainable())
    try:
        with policy.use("reference"):
            velocity(policy)
            if fails:
                raise Interrupted
    except Interrupted:
        assert fails
    assert same(bits(policy), weights)
    assert list(policy.trainable()) == names
    assert torch.equal(velocity(policy), before)
    # Trap: peft leaves the adapter frozen, and a backward then does nothing without an error.
    found = gradients(policy, policy.evaluate(rollout, 0, generator.sampler()).log_prob.sum())
    assert all(g is not None for g in found.values()) and any(g.any() for g in found.values())


def test_a_graph_built_before_the_reference_pass_can_still_be_used(generator, trained, gradients):
    policy, rollout, velocity = trained(True)
    expected = gradients(policy, policy.evaluate(rollout, 0, generator.sampler()).log_prob.sum())
    log_prob = policy.evaluate(rollout, 0, generator.sampler()).log_prob.sum()
    with policy.use("reference"):
        velocity(policy)
    found = gradients(policy, log_prob)
    assert all(torch.equal(found[n], g) for n, g in expected.items())


def test_reference_blocks_do_not_nest(trained):
    policy, _, velocity = trained(True)
    before = velocity(policy)
    with pytest.raises(RuntimeError, match="nest"), policy.use("reference"), policy.use("reference"):
        pass
    assert torch.equal(velocity(policy), before) and policy.trainable()


@pytest.mark.parametrize("weights", ["reference", "old", "ema"])
def test_a_copy_that_nobody_made_is_an_error(generator, weights):
    policy = generator.policy()
    with pytest.raises(RuntimeError, match=rf"no copy '{weights}'.*Trainer"), policy.use(weights):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_copies_are_swapped_in_and_out_bit_by_bit(generator, peft, perturb, give_copies, make_rows, fails):
    policy = perturb(generator.policy(peft))
    rollout = generator.sample(policy, make_rows())
    give_copies(policy, "old", "reference")
    perturb(policy, seed=7)
    weights, sampler = bits(policy), generator.sampler()
    names = list(policy.trainable())
    moved = policy.evaluate(rollout, 0, sampler).log_prob
    try:
        with torch.no_grad(), policy.use("old"):
            assert torch.equal(policy.evaluate(rollout, 0, sampler).log_prob, rollout.log_prob[:, 0])
            if fails:
                raise Interrupted
    except Interrupted:
        assert fails
    assert same(bits(policy), weights) and list(policy.trainable()) == names
    assert torch.equal(policy.evaluate(rollout, 0, sampler).log_prob, moved)
    assert not torch.equal(moved, rollout.log_prob[:, 0])


def test_reference_of_a_full_policy_is_the_copy(generator, perturb, give_copies, make_rows):
    policy = generator.policy()
    rollout = generator.sample(policy, make_rows())
    give_copies(policy, "reference")
    perturb(policy)
    with torch.no_grad(), policy.use("reference"):
        again = policy.evaluate(rollout, 0, generator.sampler()).log_prob
    assert torch.equal(again, rollout.log_prob[:, 0])


def test_kl_to_the_reference_is_zero_at_adapter_init_only(generator, perturb, make_rows, gradients):  # 10.19
    policy, sampler = generator.policy(True), generator.sampler()
    rollout = generator.sample(policy, make_rows())

    def kl():
        with torch.no_grad(), policy.use("reference"):
            reference = policy.evaluate(rollout, 1, sampler).distribution
        return policy.evaluate(rollout, 1, sampler).distribution.kl(reference)

    assert torch.equal(kl(), torch.zeros(4))
    perturb(policy)
    assert kl().min() > 0
    found = gradients(policy, kl().sum())
    assert sum(bool(g.any()) for g in found.values()) >= len(found) - 4  # SD3 has 2 x 2 factors without effect


# ---------------------------------------------------------------------------------------------------- save and load

CONFIGS = {
    "alpha": dict(r=8, lora_alpha=16),
    "rslora": dict(r=8, lora_alpha=16, use_rslora=True),
    "patterns": dict(r=4, lora_alpha=12, rank_pattern={"to_q": 2}, alpha_pattern={"to_q": 5}),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_adapter_loads_in_the_stock_pipeline(generator, perturb, make_rows, tmp_path, config):
    policy, rows = perturb(generator.policy(LoraConfig(**config))), make_rows()
    ours = generator.stock(policy.pipe, rows, output_type="pt")
    policy.save_pretrained(tmp_path / "new" / "folder")
    fresh = generator.pipe()
    base = generator.stock(fresh, rows, output_type="pt")
    assert (base - ours).abs().max() > 1e-3
    fresh.load_lora_weights(
        tmp_path / "new" / "folder", weight_name="pytorch_lora_weights.safetensors", use_safetensors=True
    )
    assert torch.equal(generator.stock(fresh, rows, output_type="pt"), ours)


def test_saving_leaves_the_policy_as_it_was(generator, peft, trained, tmp_path):
    policy, _, velocity = trained(peft)
    weights, before, names = bits(policy), velocity(policy), list(policy.trainable())
    policy.save_pretrained(tmp_path)
    assert same(bits(policy), weights) and list(policy.trainable()) == names
    assert torch.equal(velocity(policy), before)


def test_a_full_policy_loads_as_a_pipeline(make_sd3_policy, perturb, make_rows, tmp_path):
    from flowrl import ODE

    policy = perturb(make_sd3_policy())
    policy.save_pretrained(tmp_path)
    prompts, members = make_rows()
    sampler = ODE(steps=2)

    def latents(pipe):
        again = pipe if pipe is policy else make_sd3_policy(pipe=pipe)
        return again.sample(prompts, members, sampler, seed=1, iteration=0, batch_size=4).latents

    assert torch.equal(latents(load_pipeline(tmp_path)), latents(policy))
    stock = DiffusionPipeline.from_pretrained(tmp_path, text_encoder_3=None, tokenizer_3=None)
    assert torch.equal(latents(stock), latents(policy))
    assert not torch.equal(latents(make_sd3_policy().pipe), latents(policy))
    assert list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*.bin"))


def test_a_full_flux_policy_loads_as_a_pipeline(make_flux_policy, perturb, tmp_path):
    policy = perturb(make_flux_policy())
    policy.save_pretrained(tmp_path)
    loaded = load_pipeline(tmp_path)
    assert same(dict(loaded.transformer.named_parameters()), bits(policy))


# ----------------------------------------------------------------------------------------------------- load_pipeline


def test_load_pipeline_knows_which_components_were_left_out(sd3_folder, make_sd3_pipe):
    pipe = load_pipeline(sd3_folder)
    assert type(pipe).__name__ == "StableDiffusion3Pipeline" and pipe.text_encoder_3 is None
    assert same(dict(pipe.transformer.named_parameters()), dict(make_sd3_pipe().transformer.named_parameters()))
    assert type(load_pipeline(str(sd3_folder))) is type(pipe)


def test_load_pipeline_takes_a_dtype_and_the_librarys_keywords(sd3_folder):
    pipe = load_pipeline(sd3_folder, torch_dtype=torch.bfloat16, vae=None)
    assert pipe.transformer.dtype == torch.bfloat16 and pipe.vae is None


def test_a_folder_without_an_index_is_named(tmp_path):
    (tmp_path / "transformer").mkdir()
    with pytest.raises(FileNotFoundError) as error:
        load_pipeline(tmp_path)
    message = str(error.value)
    assert str(tmp_path) in message and "model_index.json" in message and "save_pretrained" in message


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder_2"])
def test_a_component_without_weights_is_named(sd3_folder, tmp_path, component):
    folder = tmp_path / "copy"
    shutil.copytree(sd3_folder, folder)
    for file in (folder / component).glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError) as error:
        load_pipeline(folder)
    message = str(error.value)
    assert str(folder / component) in message and "safetensors" in message and "again" in message


@pytest.mark.parametrize("component", ["transformer", "scheduler", "tokenizer"])
def test_a_missing_component_folder_is_named(sd3_folder, tmp_path, component):
    folder = tmp_path / "copy"
    shutil.copytree(sd3_folder, folder)
    shutil.rmtree(folder / component)
    with pytest.raises(FileNotFoundError, match=rf"{component}.*incomplete"):
        load_pipeline(folder)


def test_a_component_that_is_replaced_need_not_be_there(sd3_folder, tmp_path):
    shutil.copytree(sd3_folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "text_encoder")
    pipe = load_pipeline(tmp_path / "copy", text_encoder=None)
    assert pipe.text_encoder is None and pipe.text_encoder_2 is not None


@pytest.mark.parametrize("path", ["nowhere", "/nowhere/at/all", "./one/two/three"])
def test_a_folder_that_does_not_exist_is_named_with_a_remedy(path):
    with pytest.raises(FileNotFoundError, match=r"no model folder .*(nowhere|three).*Pass an existing folder"):
        load_pipeline(path)


@pytest.mark.parametrize("path", ["./runs/final", "runs/../runs/final", "/nowhere"])
def test_what_is_plainly_a_path_is_not_looked_up_on_the_hub(path):
    with pytest.raises(FileNotFoundError, match="no model folder"):
        load_pipeline(path)
