"""Checkpoints: bit-exact, whole or refused, and never somebody else's."""

import hashlib
import json
import random
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig

from flowrl.training import checkpoint
from flowrl.training.checkpoint import CheckpointError


def saved(make_trainer, folder, objective="grpo", peft=True, iterations=2, **arguments):
    trainer = make_trainer(folder, objective, peft, iterations=iterations, **arguments)
    trainer.train()
    return trainer, checkpoint.latest(folder / "checkpoints")


@pytest.fixture(scope="module")
def run(make_trainer, tmp_path_factory):
    """A finished LoRA run and its checkpoint; tests that damage it work on a copy."""
    return saved(make_trainer, tmp_path_factory.mktemp("run"))


@pytest.fixture
def copy_of(run, tmp_path):
    return shutil.copytree(run[1], tmp_path / run[1].name)


def refresh_manifest(folder):
    """What someone who edits a checkpoint on purpose would do."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


# --------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("objective", ["grpo", "nft"])
@pytest.mark.parametrize("peft", [True, False])
def test_round_trip_is_bit_exact(make_trainer, state_of, identical, tmp_path, objective, peft):
    first, folder = saved(make_trainer, tmp_path / "a", objective, peft, iterations=3)
    names = {f.name for f in folder.iterdir()}
    expected = {"manifest.json", "model.safetensors", "optimizer.pt", "state.pt", "rng-0.pt", "copy-ema.safetensors"}
    expected |= {"copy-old.safetensors"} if objective == "nft" else set()
    expected |= set() if peft else {"copy-reference.safetensors"}
    assert names == expected

    second = make_trainer(tmp_path / "b", objective, peft)
    before = state_of(second)
    second.load_checkpoint(folder)
    a, b = state_of(first), state_of(second)
    identical(a, b)
    # It was not equal to begin with, and the moments are really there.
    changed = {k for k in a if k not in before or not torch.equal(a[k], before[k])}
    assert {k.split()[0] for k in changed} >= {"weight", "ema", "exp_avg", "exp_avg_sq", "step", "counters"}
    assert second.lr_scheduler.state_dict() == first.lr_scheduler.state_dict()
    assert (second.iteration, second.updates, second.best, second.history) == (3, 6, first.best, first.history)
    assert second.objective.state_dict() == first.objective.state_dict()
    assert all(p.requires_grad for p in second.policy.trainable().values())


def test_saving_changes_nothing(make_trainer, state_of, identical, tmp_path):
    trainer, _ = saved(make_trainer, tmp_path / "a", "nft", False)
    before = state_of(trainer)
    trainer.save_checkpoint()
    identical(state_of(trainer), before)


def test_saving_twice_gives_the_same_weights_file(make_trainer, tmp_path):
    trainer, folder = saved(make_trainer, tmp_path / "a")
    first = {n: (folder / n).read_bytes() for n in ("model.safetensors", "copy-ema.safetensors", "optimizer.pt")}
    assert trainer.save_checkpoint() == folder
    assert {n: (folder / n).read_bytes() for n in first} == first


def test_generator_states_come_back(make_trainer, tmp_path):
    """Rewards may use the global generators, whatever we do ourselves."""

    def seed(n):
        random.seed(n)
        np.random.seed(n)  # noqa: NPY002  the global state is what is tested
        torch.manual_seed(n)

    def draw():
        return random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()  # noqa: NPY002

    trainer = make_trainer(tmp_path / "a")
    seed(6)
    random.gauss(0, 1)  # these two keep a second number for the next call
    np.random.standard_normal()  # noqa: NPY002
    folder = trainer.save_checkpoint()
    expected = draw()
    seed(7)
    trainer.load_checkpoint(folder)
    assert draw() == expected


def test_only_trained_weights_are_stored(run):
    from safetensors.torch import load_file

    trainer, folder = run
    stored = load_file(folder / "model.safetensors")
    assert len(stored) == len(trainer.policy.trainable())
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in trainer.policy.trainable().values())


# ------------------------------------------------------------------------------------------------- damage


def refused(trainer, state_of, identical, folder, match):
    """The load raises the named error and has changed nothing."""
    before = state_of(trainer)
    with pytest.raises(CheckpointError, match=match) as refusal:
        trainer.load_checkpoint(folder)
    identical(state_of(trainer), before)
    assert str(folder) in str(refusal.value)


FILES = ["model.safetensors", "copy-ema.safetensors", "optimizer.pt", "state.pt", "rng-0.pt"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "byte", "gone", "longer"])
def test_a_damaged_file_is_found_before_anything_is_loaded(
    make_trainer, state_of, identical, tmp_path, copy_of, name, damage
):
    path = copy_of / name
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "longer":
        path.write_bytes(content + b"\0")
    elif damage == "byte":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    refused(make_trainer(tmp_path / "b"), state_of, identical, copy_of, f"{name} is missing, cut short or changed")


def test_a_folder_without_manifest_is_no_checkpoint(make_trainer, state_of, identical, tmp_path, copy_of):
    (copy_of / "manifest.json").unlink()
    refused(make_trainer(tmp_path / "b"), state_of, identical, copy_of, "no manifest")


@pytest.mark.parametrize("content", ["", '{"iteration": 2', "[]", '{"iteration": 2}', '{"files": {}}'])
def test_a_broken_manifest_is_named(make_trainer, state_of, identical, tmp_path, copy_of, content):
    (copy_of / "manifest.json").write_text(content)
    refused(make_trainer(tmp_path / "b"), state_of, identical, copy_of, "damaged")


def test_a_folder_that_does_not_exist(make_trainer, state_of, identical, tmp_path):
    refused(make_trainer(tmp_path / "b"), state_of, identical, tmp_path / "iteration-000009", "not a checkpoint")


def test_a_checkpoint_without_a_copy_the_objective_needs(make_trainer, state_of, identical, tmp_path, copy_of):
    manifest = json.loads((copy_of / "manifest.json").read_text())
    del manifest["files"]["copy-ema.safetensors"]
    (copy_of / "manifest.json").write_text(json.dumps(manifest))
    (copy_of / "copy-ema.safetensors").unlink()
    refused(make_trainer(tmp_path / "b"), state_of, identical, copy_of, r"lacks the copies \['ema'\]")


class Bomb:
    """Runs code when it is unpickled without care."""

    def __reduce__(self):
        return (exec, ("import builtins; builtins.flowrl_test_bomb = True",))


@pytest.mark.parametrize("name", ["state.pt", "optimizer.pt", "rng-0.pt"])
def test_pickled_code_is_never_run(make_trainer, tmp_path, copy_of, name):
    import builtins
    import pickle

    torch.save({"updates": Bomb()}, copy_of / name)
    refresh_manifest(copy_of)
    with pytest.raises(pickle.UnpicklingError):
        make_trainer(tmp_path / "b").load_checkpoint(copy_of)
    assert not hasattr(builtins, "flowrl_test_bomb")


# ----------------------------------------------------------------------------------------------- identity


OTHER_RUNS = {
    "seed": lambda make, to: make(to, seed=4),
    "learning_rate": lambda make, to: make(to, learning_rate=1e-4),
    "group_size": lambda make, to: make(to, group_size=2),
    "updates_per_iteration": lambda make, to: make(to, updates_per_iteration=1),
    "warmup_updates": lambda make, to: make(to, warmup_updates=5),
    "objective": lambda make, to: make(to, "nft"),
    "sampler": lambda make, to: make(to, sampler=_sampler(noise_level=0.5)),
    "rewards": lambda make, to: make(to, rewards={_ones: 1.0}),
    "prompts": lambda make, to: make(to, prompts=["another", "set"]),
    "parameters": lambda make, to: make(to, LoraConfig(r=2, lora_alpha=8)),
}


def _sampler(**changes):
    from flowrl import FlowSDE
    from flowrl.samplers.schedules import SingleShift

    return FlowSDE(**{"steps": 4, "noise_level": 0.7, "schedule": SingleShift(1.5)} | changes)


def _ones(images, prompts):
    return [1.0] * len(prompts)


@pytest.mark.parametrize("what", [k for k in OTHER_RUNS if k != "parameters"])
def test_a_checkpoint_of_another_run_is_refused(make_trainer, state_of, identical, tmp_path, run, what):
    refused(OTHER_RUNS[what](make_trainer, tmp_path / "b"), state_of, identical, run[1], f"another run.*{what}")


def test_another_adapter_is_refused(make_trainer, state_of, identical, tmp_path, run):
    other = make_trainer(tmp_path / "b", peft=LoraConfig(r=2, lora_alpha=8))
    refused(other, state_of, identical, run[1], "another run.*parameters")
    refused(make_trainer(tmp_path / "c", peft=False), state_of, identical, run[1], "another run.*parameters")


def test_another_scale_of_the_same_adapter_is_refused(make_trainer, state_of, identical, tmp_path, run):
    """lora_alpha is in no tensor, yet with another one the same weights are another policy."""
    other = make_trainer(tmp_path / "b", peft=LoraConfig(r=4, lora_alpha=16, init_lora_weights="gaussian"))
    refused(other, state_of, identical, run[1], "another run")


def test_other_weights_of_the_same_prompts_are_refused(make_trainer, state_of, identical, tmp_path):
    """They change which prompts the remaining iterations draw."""
    prompts = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]
    _, folder = saved(make_trainer, tmp_path / "a", iterations=1, prompts=prompts)
    other = make_trainer(tmp_path / "b", prompts=[*prompts[:2], {"prompt": "c", "weight": 5}])
    refused(other, state_of, identical, folder, "another run.*prompts")


def test_a_schedule_that_depends_on_the_length_refuses_another_length(make_trainer, state_of, identical, tmp_path):
    _, folder = saved(make_trainer, tmp_path / "a", lr_scheduler="linear")
    other = make_trainer(tmp_path / "b", lr_scheduler="linear", iterations=9)
    refused(other, state_of, identical, folder, r"another run \(training.iterations: \d+ there, 9 here\)")


def test_what_is_no_part_of_the_experiment_may_change(make_trainer, tmp_path, run):
    """Memory settings, logging, and with a constant learning rate the number of iterations."""
    other = make_trainer(
        tmp_path / "b", iterations=9, micro_batch_size=1, sample_batch_size=3, save_every=2, monitor_samples=0
    )
    other.load_checkpoint(run[1])
    assert other.iteration == 2


# --------------------------------------------------------------------------------------- folders of a run


def test_latest_takes_the_newest_whole_one(tmp_path, run):
    root = tmp_path / "checkpoints"
    assert checkpoint.latest(root) is None
    for n in (2, 10, 9):
        shutil.copytree(run[1], root / f"iteration-{n:06d}")
    (root / "iteration-000011").mkdir()  # no manifest
    shutil.copytree(run[1], root / ".iteration-000012.writing")  # a kill during writing leaves this
    (root / "iteration-notes.txt").write_text("")
    assert checkpoint.latest(root).name == "iteration-000010"


def test_prune_keeps_the_newest(tmp_path, run):
    root = tmp_path / "checkpoints"
    for n in (2, 10, 9, 100):
        shutil.copytree(run[1], root / f"iteration-{n:06d}")
    checkpoint.prune(root, 2)
    assert sorted(p.name for p in root.iterdir()) == ["iteration-000010", "iteration-000100"]
    checkpoint.prune(root, 5)
    assert len(list(root.iterdir())) == 2


def test_keep_last_is_obeyed_by_a_run(make_trainer, tmp_path):
    saved(make_trainer, tmp_path / "a", iterations=5, save_every=1, keep_last=3, updates_per_iteration=1)
    found = sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir())
    assert found == ["iteration-000003", "iteration-000004", "iteration-000005"]


def test_a_kill_while_writing_leaves_the_one_before(make_trainer, monkeypatch, state_of, identical, tmp_path):
    trainer, folder = saved(make_trainer, tmp_path / "a", iterations=1)
    before = state_of(trainer)

    class Killed(BaseException):
        pass

    def die(*args, **kwargs):
        raise Killed

    trainer.iteration = 2
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint.torch, "save", die)
        trainer.save_checkpoint()
    assert checkpoint.latest(tmp_path / "a" / "checkpoints") == folder
    again = make_trainer(tmp_path / "a", iterations=1)
    again.load_checkpoint(folder)
    identical(state_of(again), before)
    # What the kill left behind does not disturb the next save.
    trainer.save_checkpoint()
    assert checkpoint.latest(tmp_path / "a" / "checkpoints").name == "iteration-000002"


def test_a_kill_while_replacing_a_checkpoint_loses_nothing(make_trainer, monkeypatch, tmp_path):
    """Saving an iteration again (the end of a run may) must never leave a disk without a whole checkpoint."""
    trainer, folder = saved(make_trainer, tmp_path / "a", iterations=1)
    root, moments = folder.parent, 0

    class Killed(BaseException):
        pass

    for kill_after in range(20):
        calls = []

        def counted(inner, calls=calls, kill_after=kill_after):
            def call(*args, **kwargs):
                inner(*args, **kwargs)
                calls.append(args)
                if len(calls) > kill_after:
                    raise Killed

            return call

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.shutil, "rmtree", counted(shutil.rmtree))
            patch.setattr(checkpoint.os, "replace", counted(checkpoint.os.replace))
            try:
                trainer.save_checkpoint()
            except Killed:
                moments += 1
                whole = [p for p in root.iterdir() if (p / "manifest.json").is_file()]
                assert any(len(list(p.iterdir())) == 6 for p in whole), f"nothing left after {calls[-1]}"
            else:
                break
    assert moments >= 2
    assert checkpoint.latest(root) == folder
    make_trainer(tmp_path / "b", iterations=1).load_checkpoint(folder)
