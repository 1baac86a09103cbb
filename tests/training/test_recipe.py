from pathlib import Path

import pytest
import yaml

from flowrl import recipes
from flowrl.objectives import DiffusionNFT, FlowGRPO
from flowrl.recipes import RecipeError
from flowrl.samplers import CPS, CPWS, ODE, FlowSDE, SchedulerConfig, SingleShift, Window
from flowrl.training.recipe import (
    AdapterConfig,
    ModelConfig,
    Stock,
    build_trainer,
    dump_recipe,
    evaluation_sampler,
    load_policy,
    load_recipe,
    recipe_from,
    resolved,
)

BASE = "shapes-flow-grpo"


@pytest.mark.parametrize("name", list(recipes.shipped()))
def test_every_shipped_recipe_loads_and_survives_a_round_trip(name, tmp_path):
    recipe = load_recipe(name)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(str(path)) == recipe
    assert recipe_from(yaml.safe_load(path.read_text())) == recipe  # any YAML reader will do
    recipe.objective.check(recipe.sampler.with_(schedule=SingleShift()))


def test_the_dump_spells_out_every_default():
    tree = yaml.safe_load(dump_recipe(load_recipe("shapes-nft", ["sampler.schedule=Stock"])))
    assert tree["objective"]["nft_beta"] == 1.0
    assert tree["training"]["adam_beta2"] == 0.999
    assert tree["sampler"]["schedule"] == {"name": "Stock", "linspace": None}
    assert tree["lora"] is None


def test_published_settings():
    sd35, flux = load_recipe("sd35-jpeg-flow-grpo"), load_recipe("flux-jpeg-flow-grpo")
    assert sd35.sampler == FlowSDE(steps=10, noise_level=0.7, guidance_scale=4.5, schedule=Stock())
    assert sd35.objective == FlowGRPO(clip_range=1e-4, kl=0.04, kl_form="flow_grpo")
    assert (sd35.lora, flux.lora) == (AdapterConfig(32, 64), AdapterConfig(64, 128))
    assert evaluation_sampler(sd35).steps == 40 and evaluation_sampler(flux).steps == 28
    assert flux.sampler == FlowSDE(steps=6, noise_level=0.9, guidance_scale=3.5, schedule=Stock())
    for recipe in (sd35, flux):
        assert (recipe.training.prompts_per_iteration, recipe.training.group_size) == (48, 24)
        assert "not run by us" in recipe.description


def test_overrides():
    recipe = load_recipe(
        BASE,
        [
            "training.iterations=7",
            "training.learning_rate=1e-5",
            "training.mixed_precision=no",
            "rewards.jpeg_compressibility=0.5",
            "rewards.my.package:reward=2",
            "lora.rank=8",
            "sampler.noise_level=null",
            "eval_sampler.steps=20",
            "sampler.plan={name: Window, size: 2, start_range: [0, 4]}",
            "eval_prompts=null",
        ],
    )
    assert (recipe.training.iterations, recipe.training.learning_rate) == (7, 1e-5)
    assert recipe.training.mixed_precision == "no"
    shipped = load_recipe(BASE)
    assert recipe.rewards == {**shipped.rewards, "jpeg_compressibility": 0.5, "my.package:reward": 2.0}
    assert recipe.lora == AdapterConfig(rank=8)
    assert recipe.sampler == shipped.sampler.with_(noise_level=FlowSDE().noise_level, plan=Window(2, (0, 4)))
    assert recipe.eval_sampler == ODE(steps=20, schedule=Stock())
    assert recipe.eval_prompts is None
    assert load_recipe("sd35-jpeg-flow-grpo", ["lora=null"]).lora is None


def test_another_class_keeps_the_fields_that_mean_the_same():
    recipe = load_recipe(
        "sd35-jpeg-flow-grpo",
        ["objective.adv_clip_max=3", "objective=DiffusionNFT", "objective.nft_beta=0.1", "sampler=ODE"],
    )
    # clip_range is unknown to DiffusionNFT, and its kl of another kind has another default.
    assert recipe.objective == DiffusionNFT(nft_beta=0.1, adv_clip_max=3.0)
    assert recipe.sampler == ODE(steps=10, guidance_scale=4.5, schedule=Stock())
    shipped = load_recipe(BASE).sampler
    same = {"steps": shipped.steps, "schedule": shipped.schedule}
    louder = [BASE, ["sampler.noise_level=0.9", "sampler=CPWS"]]
    assert load_recipe(*louder).sampler == CPWS(noise_level=0.9, **same)
    assert load_recipe(BASE, ["sampler.name=CPS"]).sampler == CPS(**same)
    assert load_recipe("sd35-jpeg-flow-grpo", ["sampler.schedule=SingleShift"]).sampler.schedule == SingleShift()


BAD = {
    "iterations=3": "unknown key 'iterations'; did you mean 'training.iterations'?",
    "training.iteratons=3": "unknown key 'training.iteratons'; did you mean 'training.iterations'?",
    "trainig.iterations=3": "unknown key 'trainig'; did you mean 'training'?",
    "lora.rang=8": "did you mean 'lora.rank'?",
    "objective.clip_rang=1": "did you mean 'objective.clip_range'?",
    "objective.nft_beta=1": "unknown key 'objective.nft_beta': it belongs to DiffusionNFT",
    "objective=FlowGRP": "unknown objective 'FlowGRP'; did you mean 'FlowGRPO'?",
    "objective=3": "objective must be a class's name or a mapping with `name`, got 3",
    "objective={name: [FlowGRPO]}": "unknown objective ['FlowGRPO']",
    "sampler.plan=Windw": "unknown sampler.plan 'Windw'; did you mean 'Window'?",
    "sampler.plan=Window": "missing: sampler.plan.size, sampler.plan.start_range",
    "sampler.schedule={name: SingleShift, shft: 3}": "did you mean 'sampler.schedule.shift'?",
    "sampler.schedule.name=SchedulerConfig": "unknown sampler.schedule 'SchedulerConfig'",
    "training.iterations=abc": "training.iterations must be int, got 'abc'",
    "training.iterations=1.5": "training.iterations must be int, got 1.5",
    "training.iterations=0": "training: iterations must be at least 1, not 0",
    "training.mixed_precision=fp8": "training.mixed_precision must be 'no' or 'fp16' or 'bf16', got 'fp8'",
    "training.log_with=tensorboard": "training.log_with must be a list or null, got 'tensorboard'",
    "model.dtype=fp16": "model.dtype must be 'float32' or 'float16' or 'bfloat16' or null, got 'fp16'",
    "model=shapes": "model must be a mapping with keys from path,",
    "model.path.x=3": "model.path is 'shapes' and has no keys",
    "rewards.shapes=abc": "rewards must be dict[str, float], got {",
    "rewards=null": "missing: rewards",
    "lora=5": "lora must be a mapping with keys from rank,",
    "objective.clip_range=abc": "objective.clip_range must be float, got 'abc'",
    "objective.clip_range=-1": "objective: clip_range and adv_clip_max must be positive",
    "sampler.steps=0": "sampler: steps must be an integer of at least 1, not 0",
    "training": "'training' is not key=value, such as training.iterations=10",
    "training.seed=[1": "'[1' is not a YAML value",
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_override_says_what_to_write(override):
    with pytest.raises(RecipeError) as error:
        load_recipe(BASE, [override])
    assert BAD[override] in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shapes-nf", "no recipe 'shapes-nf'; did you mean 'shapes-nft'?"),
        ("zzz", f"there are {', '.join(recipes.shipped())}"),
        ("here/shapes-nfd.yaml", "no recipe file here/shapes-nfd.yaml; did you mean 'shapes-nft'?"),
    ],
)
def test_an_unknown_recipe(name, message):
    with pytest.raises(RecipeError) as error:
        load_recipe(name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n b: 2\n", "recipe.yaml, line 2, column 3: mapping values are not allowed here"),
        ("a: 1\nb: 2\na: 3\n", "recipe.yaml, line 3, column 1: key 'a' is given twice"),
        ("- a\n- b\n", "recipe.yaml holds no mapping"),
        ("", "recipe.yaml holds no mapping"),
        ("description: x\n", "missing: model, objective, sampler, rewards, prompts"),
        ("descriptoin: x\n", "unknown key 'descriptoin'; did you mean 'description'?"),
    ],
)
def test_a_broken_file_is_named_with_the_line(text, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path))
    assert message in str(error.value) and str(path) in str(error.value)


def test_plain_scalars_are_read_as_yaml_1_2():
    read = recipes.read_value
    assert [read(x) for x in ("no", "on", "1e-4", ".5", "3", "true", "null", "2001-01-01", "-1.5e3", "1_0")] == [
        *("no", "on", 1e-4, 0.5, 3, True, None, "2001-01-01", -1500.0, 10)
    ]


def test_the_stock_schedule_is_the_models_own():
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.5}
    sampler = FlowSDE(steps=4, schedule=Stock(linspace=True))
    assert resolved(sampler, config).schedule == SchedulerConfig(config, linspace=True)
    own = FlowSDE(steps=4, schedule=SingleShift())
    assert resolved(own, config) is own
    with pytest.raises(RuntimeError, match="known only with the model"):
        sampler.sigmas()


def test_a_combination_that_cannot_work_is_refused_before_a_model_is_loaded():
    nowhere = "model.path=no/such/folder"
    with pytest.raises(ValueError, match="FlowGRPO scores stochastic steps, and ODE"):
        build_trainer(load_recipe(BASE, [nowhere, "sampler=ODE"]))
    with pytest.raises(ValueError, match="unknown reward 'shaps'; did you mean 'shapes'"):
        build_trainer(load_recipe(BASE, [nowhere, "rewards={shaps: 1}"]))
    with pytest.raises(FileNotFoundError, match="no prompt file"):
        build_trainer(load_recipe(BASE, [nowhere, "prompts=shapes/tran"]))
    with pytest.raises(FileNotFoundError, match="no model folder"):
        build_trainer(load_recipe(BASE, [nowhere]))


def test_a_shipped_model_is_a_name(tmp_path):
    model = ModelConfig.of("shapes")
    assert model.max_sequence_length == 0
    assert Path(model.location).name == "weights"
    assert ModelConfig.of("a/b").location == "a/b"
    with pytest.raises(FileNotFoundError, match="holds no saved model"):
        load_policy(model, weights=tmp_path)
