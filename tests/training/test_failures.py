"""Nothing fails silently: what is wrong is said, nothing is updated, earlier checkpoints stay whole."""

import hashlib
import json
import re
import shutil

import pytest
import torch

from flowrl.rewards import RewardError, RewardOutput
from flowrl.training import checkpoint


def contents(folder):
    """Name and hash of every file below a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


class Failing:
    """The brightness, except for what `answer(values)` makes of it after `at` calls."""

    name = "brightness"

    def __init__(self, answer=None, at=1):
        self.answer, self.at, self.calls = answer, at, 0

    def __call__(self, images, prompts):
        values = images.flatten(1).mean(1)
        self.calls += 1
        return self.answer(values) if self.answer and self.calls == self.at + 1 else values


def nan_at_two(values):
    values[2] = torch.nan
    return values


def infinite(values):
    return (values / 0).tolist()


def too_short(values):
    return values[:-1]


def raises(values):
    raise ConnectionError("the judge is away")


def not_numbers(values):
    return ["good"] * len(values)


def all_invalid(values):
    return RewardOutput(values, torch.zeros(len(values), dtype=torch.bool), {"reason": ["time-out"] * len(values)})


@pytest.mark.parametrize(
    ("answer", "message", "rows"),
    [
        (nan_at_two, "nan.*rows \\[2\\]", [2]),
        (infinite, "inf", list(range(8))),
        (too_short, r"shape \[7\] for 8 images", list(range(8))),
        (raises, "ConnectionError: the judge is away", list(range(8))),
        (not_numbers, "'good'", list(range(8))),
        (all_invalid, "max_invalid_share.*time-out", list(range(8))),
    ],
)
@pytest.mark.parametrize("objective", ["grpo", "nft"])
def test_a_failing_reward_stops_the_step_and_keeps_the_samples(
    make_trainer, count_updates, state_of, identical, tmp_path, answer, message, rows, objective
):
    trainer = make_trainer(tmp_path, objective, rewards=Failing(answer), save_every=1, sample_batch_size=8)
    steps = count_updates(trainer)
    with pytest.raises(RewardError, match=message) as failure:
        trainer.train()
    assert "'brightness'" in str(failure.value)
    assert steps == [0, 0]  # both updates of the first iteration, none of the second
    folder = tmp_path / "failed" / "iteration-000001-0"
    assert str(folder) in str(failure.value)
    report = json.loads((folder / "error.json").read_text())
    assert [s["row"] for s in report["samples"]] == rows
    assert all((folder / s["image"]).is_file() and s["prompt"] for s in report["samples"])
    # The checkpoint before it is whole, and from it the run goes on as if nothing had happened.
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest.name == "iteration-000001"
    again = make_trainer(tmp_path, objective, rewards=Failing(), iterations=2, sample_batch_size=8)
    again.train(resume="auto")
    if answer is raises:
        whole = make_trainer(tmp_path / "whole", objective, rewards=Failing(), iterations=2, sample_batch_size=8)
        whole.train()
        identical(state_of(whole), state_of(again))


def test_a_failing_reward_in_the_first_iteration_leaves_no_checkpoint(make_trainer, tmp_path):
    with pytest.raises(RewardError):
        make_trainer(tmp_path, rewards=Failing(raises, at=0)).train()
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "final").exists()


@pytest.mark.parametrize("peft", [True, False])
def test_a_reward_that_fails_in_an_evaluation_restores_the_weights(make_trainer, state_of, identical, tmp_path, peft):
    settings = {"eval_prompts": ["red"], "iterations": 2, "sample_batch_size": 8}
    trainer = make_trainer(tmp_path, peft=peft, rewards=Failing(raises, at=4), **settings)
    trainer.train()  # scores four times: before, twice in training, after
    before = state_of(trainer)
    with pytest.raises(RewardError, match="the judge is away"):
        trainer.evaluate(weights="reference")
    identical(before, state_of(trainer))
    assert all(p.requires_grad for p in trainer.policy.trainable().values())
    assert trainer.evaluate(weights="reference").images == 1


# ------------------------------------------------------------------------------- refused before any work


@pytest.fixture
def no_model(monkeypatch):
    """Fails the test when a model is built: these refusals must come first."""

    def loud(*args, **kwargs):
        raise AssertionError("a model was built before the refusal")

    monkeypatch.setattr("flowrl.training.trainer.DiffusersPolicy", loud)
    monkeypatch.setattr("flowrl.training.trainer.load_pipeline", loud)


def needs_boxes(images, prompts, boxes):
    return [0.0] * len(prompts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "group_size is 1"),
        ({"prompts_per_iteration": 3, "group_size": 3}, r"9 do not divide.*prompts_per_iteration = 2 or 4"),
        ({"prompts_per_iteration": 7}, "only 6 prompts"),
        ({"log_with": ("tensorbord",)}, "unknown tracker 'tensorbord'"),
        ({"rewards": needs_boxes}, r"'needs_boxes' needs the prompt columns \['boxes'\]"),
        ({"rewards": "pickscoree"}, "unknown reward 'pickscoree'"),
        ({"rewards": {}}, "no reward"),
        ({"prompts": []}, "no prompts"),
        ({"processes": 2}, r"asks for 2 process\(es\) and the launcher started 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_construction(make_trainer, no_model, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path / "run", policy="somewhere/model", **changes)
    assert not (tmp_path / "run").exists()


def test_samplers_without_a_density_are_refused_for_flow_grpo(make_trainer, no_model, tmp_path):
    from flowrl import ODE, FlowSDE

    for sampler in (ODE(steps=4), FlowSDE(steps=4, noise_level=0.0)):
        with pytest.raises(ValueError, match=f"FlowGRPO scores stochastic steps.*{type(sampler).__name__}.*FlowSDE"):
            make_trainer(tmp_path, policy="somewhere/model", sampler=sampler)


def test_diffusion_nft_takes_an_ode(make_trainer, rows_of, tmp_path):
    from flowrl import ODE

    trainer = make_trainer(tmp_path, "nft", sampler=ODE(steps=3), iterations=2)
    trainer.train()
    rows = rows_of(trainer)
    assert rows[-1]["drift/velocity_mse_reference"] > 0 and "kl/old" not in rows[-1]
    assert rows[0]["train/loss"] > 0


def test_a_single_step_has_no_stochastic_step_to_train(make_trainer, tmp_path):
    """The last step of a grid is always deterministic; with one step nothing is left."""
    from flowrl import FlowSDE

    with pytest.raises(ValueError, match="stochastic"):
        make_trainer(tmp_path, sampler=FlowSDE(steps=1)).train()


def test_a_reward_of_the_evaluation_needs_its_columns_too(make_trainer, no_model, tmp_path):
    from flowrl import FlowGRPO, FlowSDE, Trainer, TrainingArguments

    with pytest.raises(ValueError, match=r"'needs_boxes'.*\['boxes'\]"):
        Trainer(
            "somewhere/model",
            FlowGRPO(),
            FlowSDE(),
            Failing(),
            ["a"] * 8,
            eval_prompts=["b"],
            eval_rewards=needs_boxes,
            args=TrainingArguments(output_dir=str(tmp_path / "run")),
        )


def test_a_folder_that_holds_a_run_is_not_overwritten(make_trainer, tmp_path):
    make_trainer(tmp_path, iterations=1).train()
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=r"holds a run \(checkpoint iteration-000001\).*resume='auto'"):
        make_trainer(tmp_path, iterations=1).train()
    assert contents(tmp_path) == before


# ------------------------------------------------------------------------------------------ broken numbers


def broken_loss(trainer, at, value=float("nan")):
    """Multiplies the loss of one iteration by `value`."""
    inner = trainer.objective.loss

    def loss(policy, sampler, micro):
        loss, metrics = inner(policy, sampler, micro)
        if trainer.iteration == at:
            loss = loss * value
            metrics = metrics | {"loss": loss.detach()}
        return loss, metrics

    trainer.objective.loss = loss
    return lambda: setattr(trainer.objective, "loss", inner)


@pytest.mark.parametrize("objective", ["grpo", "nft"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_loss_updates_nothing(make_trainer, count_updates, state_of, identical, tmp_path, objective, value):
    reference = make_trainer(tmp_path / "a", objective, iterations=1)
    reference.train()
    trainer = make_trainer(tmp_path / "b", objective, iterations=3, save_every=1)
    steps = count_updates(trainer)
    broken_loss(trainer, 1, value)
    with pytest.raises(
        RuntimeError, match=r"non-finite.*iteration 1.*first bad tensor: gradient of .*Nothing was"
    ) as e:
        trainer.train()
    # The name is that of the first parameter, in the network's order, whose gradient is broken.
    named = re.search(r"gradient of (\S+?)\.? Nothing", str(e.value))[1]
    assert named in trainer.policy.trainable()
    assert steps == [0, 0]
    identical(state_of(reference), state_of(trainer))
    assert checkpoint.latest(tmp_path / "b" / "checkpoints").name == "iteration-000001"


def test_after_a_broken_loss_the_same_trainer_can_go_on(make_trainer, state_of, identical, tmp_path):
    """No trace of the broken gradients is left in what follows."""
    whole = make_trainer(tmp_path / "a", iterations=3)
    whole.train()
    trainer = make_trainer(tmp_path / "b", iterations=3, save_every=1)
    mend = broken_loss(trainer, 1)
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer.train()
    mend()
    trainer.train(resume="auto")
    identical(state_of(whole), state_of(trainer))


def test_the_first_broken_tensor_is_the_cause_not_the_consequence(make_trainer, tmp_path):
    def broken(change):
        trainer = make_trainer(tmp_path)
        rollout, batch, advantage, _ = trainer.rollout(0)
        change(trainer, rollout, batch, advantage)
        with pytest.raises(RuntimeError, match="non-finite") as e:
            trainer.update(rollout, batch, advantage, 0, 0)
        return re.search(r"first bad tensor: (.*)\. Nothing", str(e.value))[1]

    def latents(trainer, rollout, batch, advantage):
        rollout.latents[0, 0, 0, 0] = torch.nan
        rollout.states[:] = torch.nan

    def log_prob(trainer, rollout, batch, advantage):
        rollout.log_prob[:] = torch.nan

    def advantages(trainer, rollout, batch, advantage):
        advantage.adv[:] = torch.inf

    def weight(trainer, rollout, batch, advantage):
        with torch.no_grad():
            trainer.policy.trainable()["transformer_blocks.0.attn.to_k.lora_A.default.weight"][0] = torch.nan

    assert broken(latents) == "latents"
    assert broken(log_prob) == "log_prob"
    assert broken(advantages) == "advantage"
    assert broken(weight) == "weight transformer_blocks.0.attn.to_k.lora_A.default.weight"


def test_a_disk_that_fails_while_saving_keeps_the_checkpoint_before(make_trainer, monkeypatch, tmp_path):
    trainer = make_trainer(tmp_path, save_every=1)
    inner = checkpoint.torch.save

    def full(obj, path, *args, **kwargs):
        if "000002" in str(path) and "optimizer" in str(path):
            raise OSError(28, "No space left on device")
        return inner(obj, path, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(checkpoint.torch, "save", full)
        trainer.train()
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest.name == "iteration-000001"
    checkpoint.read_manifest(newest, trainer.identity())
    shutil.rmtree(newest)
    assert checkpoint.latest(tmp_path / "checkpoints") is None
