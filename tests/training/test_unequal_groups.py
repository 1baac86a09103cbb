"""Groups of different sizes through the whole trainer: sampling, updates, logs, exact resume."""

import os

import pytest
import torch
from accelerate import debug_launcher

from flowrl import DanceSDE, FlowGRPO, SuperFlow
from flowrl.samplers.schedules import SingleShift

PROMPTS = ["solved", "a cat", "moon"]
BOUNDS = {"m_min": 2, "m_max": 8}


def solved_or_brightness(images, prompts):
    """1 for the prompt "solved", the mean of the pixels for others."""
    return torch.where(torch.tensor([p == "solved" for p in prompts]), 1.0, images.flatten(1).mean(1).cpu())


def sizes(batch):
    return batch.group_id.bincount().tolist()


@pytest.mark.parametrize(
    "objective",
    [lambda: SuperFlow(clip_range=1e-3, kl=0.01, **BOUNDS), lambda: FlowGRPO(allocation="variance", **BOUNDS)],
    ids=["superflow", "flow_grpo"],
)
def test_unequal_groups_train_and_resume_bit_for_bit(make_trainer, state_of, rows_of, identical, tmp_path, objective):
    def trainer(folder, iterations):
        settings = {"rewards": solved_or_brightness, "prompts": PROMPTS, "iterations": iterations}
        return make_trainer(tmp_path / folder, objective(), **settings)

    whole = trainer("whole", 5)
    whole.train()
    first = trainer("split", 2)
    first.train()
    torch.manual_seed(12345)  # a new process starts elsewhere
    second = trainer("split", 5)
    second.train(resume="auto")

    identical(state_of(whole), state_of(second))
    tracker = whole.objective.algorithm.state["tracker"]
    assert tracker == second.objective.algorithm.state["tracker"] != first.objective.algorithm.state["tracker"]
    a, b = rows_of(whole), rows_of(second)
    for x, y in zip(a, b, strict=True):
        identical(x, y)
    assert (a[0]["allocation/group_min"], a[0]["allocation/group_max"]) == (4, 4)  # nothing seen yet
    unequal = [r for r in a if r["allocation/group_min"] < r["allocation/group_max"]]
    assert unequal and any(r["iteration"] >= 2 for r in unequal)  # also after the checkpoint
    assert all(r["allocation/group_min"] + r["allocation/group_max"] == 8 for r in a)  # two prompts, eight samples


def test_the_solved_prompt_gets_fewer_samples(make_trainer, tmp_path):
    objective = SuperFlow(**BOUNDS)
    trainer = make_trainer(
        tmp_path,
        objective,
        rewards=solved_or_brightness,
        prompts=PROMPTS,
        prompts_per_iteration=3,
        sample_batch_size=12,
    )
    assert sizes(trainer.rollout(0)[1]) == [4, 4, 4]
    trainer.rollout(1)
    rollout, batch, _, metrics = trainer.rollout(2)
    small, *others = sizes(batch)
    assert small < 4 <= min(others) and small + sum(others) == 12
    assert (metrics["allocation/group_min"], metrics["allocation/group_max"]) == (small, max(others))
    assert sorted(zip((p.index for p in rollout.prompts), rollout.members, strict=True)) == [
        (i, m) for i, n in enumerate(sizes(batch)) for m in range(n)
    ]


def test_the_neutral_run_is_flow_grpos_bit_for_bit(make_trainer, state_of, identical, tmp_path):
    states = []
    for i, objective in enumerate((SuperFlow(baseline="group", kl=0.01, **BOUNDS), FlowGRPO(kl=0.01))):
        sampler = DanceSDE(steps=4, noise_level=0.3, schedule=SingleShift(1.5))
        trainer = make_trainer(tmp_path / str(i), objective, sampler=sampler, iterations=1, monitor_samples=0)
        before = state_of(trainer)
        trainer.train()
        states.append(state_of(trainer))
    identical(*states)
    assert any(not torch.equal(before[k], states[0][k]) for k in before if k.startswith("weight"))


def tracked(make_trainer, folder, forked=False):
    """Train three iterations and write down what this process tracked and how it divided the samples."""
    if forked:  # the parent's accelerator says there is one process
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    settings = {"iterations": 3, "prompts_per_iteration": 3, "monitor_samples": 0, "adam_epsilon": 1e-2}
    trainer = make_trainer(
        folder / "run", SuperFlow(**BOUNDS), rewards=solved_or_brightness, prompts=PROMPTS, **settings
    )
    divided, inner = [], trainer.objective.allocate

    def allocate(prompts, samples):
        divided.append(inner(prompts, samples))
        return divided[-1]

    trainer.objective.allocate = allocate
    trainer.train()
    result = {"sizes": divided, "tracker": trainer.objective.algorithm.state["tracker"]}
    torch.save(result, folder / f"result-{trainer.accelerator.process_index}.pt")


def test_two_processes_track_and_divide_as_one(make_trainer, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    tracked(make_trainer, tmp_path / "one")
    debug_launcher(tracked, (make_trainer, tmp_path / "two", True), num_processes=2)
    one, first, second = (torch.load(tmp_path / f) for f in ("one/result-0.pt", "two/result-0.pt", "two/result-1.pt"))
    assert first == second  # every process saw all rewards, in one order
    assert first["sizes"] == one["sizes"] and any(len(set(s)) > 1 for s in one["sizes"])
    assert first["tracker"].keys() == one["tracker"].keys()
    for key, pair in one["tracker"].items():
        assert first["tracker"][key] == pytest.approx(pair, abs=1e-3)


def test_a_group_size_outside_the_bounds_is_refused_before_a_model_is_loaded(make_trainer, tmp_path):
    for bounds, message in (
        ({"m_min": 5}, "8 samples cannot give 2 groups"),
        ({"m_min": 2, "m_max": 3}, "8 samples exceed"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, SuperFlow(**bounds), policy="no such model")


def test_rewards_outside_the_unit_interval_stop_the_first_iteration(make_trainer, tmp_path):
    trainer = make_trainer(tmp_path, SuperFlow(**BOUNDS), rewards=lambda images, prompts: [3.0] * len(prompts))
    with pytest.raises(ValueError, match=r"rewards in \[0, 1\].*affine"):
        trainer.train()
    assert trainer.updates == 0
