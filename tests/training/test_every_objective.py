"""Every objective on every plan: memory settings and processes do not change the gradient, and runs resume exactly."""

import pytest
import torch
from accelerate import debug_launcher

from flowrl import ODE, DiffusionNFT, FlowDPPO, FlowGRPO, FlowSDE, SuperFlow
from flowrl.objectives import EGRPO
from flowrl.samplers import AllSteps, Merged, RandomSteps, SingleShift, SlidingWindow, Window

STEPS = 5
OBJECTIVES = {
    "grpo": lambda: FlowGRPO(clip_range=1e-3, kl=0.01),
    "grpo-variance": lambda: FlowGRPO(clip_range=1e-3, allocation="variance", m_min=2),
    "dppo": lambda: FlowDPPO(delta=1e-4, kl=0.01),
    "superflow": lambda: SuperFlow(clip_range=1e-3, m_min=2),
    "e-grpo": lambda: EGRPO(clip_range=1e-3),
    "nft": lambda: DiffusionNFT(kl=1e-3),
}
PLANS = {
    "all": AllSteps(),
    "window": Window(2, (0, 4)),
    "window-per-prompt": Window(2, (0, 4), scope="prompt"),
    "window-per-sample": Window(2, (0, 4), scope="sample"),
    "window-branch": Window(2, (0, 4), branch=True),
    "random": RandomSteps(2, (0, 4)),
    "sliding": SlidingWindow(2, period=1),
    "flash": SlidingWindow(2, period=1, compression=0.5),
    "merged": Merged(active=(0, 1), merge=(1, 2)),
    "merged-granular": Merged(active=(1,), merge=(1,), granularities=(1, 2)),
}
BRANCHING = ("merged", "merged-granular")
CASES = [
    *[("grpo", plan) for plan in PLANS],
    *[(name, plan) for name in ("grpo-variance", "dppo", "superflow") for plan in PLANS if plan not in BRANCHING],
    *[("dppo", plan) for plan in BRANCHING],
    *[("e-grpo", plan) for plan in ("window-branch", *BRANCHING)],
    ("nft", "ode"),
]
cases = pytest.mark.parametrize(("objective", "plan"), CASES, ids=["-on-".join(case) for case in CASES])


def brightness(images, prompts):
    """In [0, 1], as a Beta tracker needs."""
    return images.flatten(1).mean(1)


def build(make_trainer, folder, objective, plan, **arguments):
    schedule = SingleShift(1.5)
    sampler = ODE(steps=STEPS, schedule=schedule)
    if plan != "ode":
        sampler = FlowSDE(steps=STEPS, noise_level=0.7, schedule=schedule, plan=PLANS[plan])
    settings = {"updates_per_iteration": 1, "max_grad_norm": 1e9, "monitor_samples": 0} | arguments
    return make_trainer(folder, OBJECTIVES[objective](), rewards=brightness, sampler=sampler, **settings)


def same(a, b):
    """Gradients equal up to rounding, relative to the largest entry of all."""
    scale = max(g.abs().max().item() for g in a.values() if g is not None)
    assert scale > 0
    for name in a:
        assert (a[name] is None) == (b[name] is None), name
        if a[name] is not None:
            assert (a[name] - b[name]).abs().max().item() <= 1e-4 * scale, name


@cases
def test_the_gradient_does_not_depend_on_memory_settings(make_trainer, step, tmp_path, objective, plan):
    runs = [
        step(build(make_trainer, tmp_path, objective, plan, micro_batch_size=micro, sample_batch_size=sample))
        for micro, sample in ((8, 8), (3, 5))
    ]
    (metrics, expected), (other, found) = runs
    same(expected, found)
    # Where all ratios are one the loss is minus the mean advantage: rounding, of rewards in batches of 8 or of 5.
    assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-3, abs=1e-5)


@cases
def test_runs_resume_exactly(make_trainer, state_of, rows_of, identical, tmp_path, objective, plan):
    def run(folder, iterations, **options):
        trainer = build(
            make_trainer, tmp_path / folder, objective, plan, iterations=iterations, updates_per_iteration=2
        )
        trainer.train(**options)
        return trainer

    whole = run("whole", 3)
    run("split", 1)
    torch.manual_seed(12345)  # a new process starts elsewhere
    resumed = run("split", 3, resume="auto")
    identical(state_of(whole), state_of(resumed))
    assert whole.objective.state_dict() == resumed.objective.state_dict()
    for x, y in zip(rows_of(whole), rows_of(resumed), strict=True):
        identical(x, y)


def all_steps(make_trainer, step, folder):
    """One update of every case, into one file: many small launches would take minutes."""
    found = {}
    for objective, plan in CASES:
        trainer = build(make_trainer, folder, objective, plan, micro_batch_size=2)
        metrics, gradients = step(trainer)
        found["-on-".join((objective, plan))] = {"loss": torch.tensor(metrics["loss"]), **gradients}
    torch.save(found, folder / f"{trainer.accelerator.process_index}.pt")


def child(make_trainer, step, folder):
    from accelerate.state import AcceleratorState, GradientState

    # A forked child inherits accelerate's global state, which says there is one process.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.set_num_threads(1)
    all_steps(make_trainer, step, folder)


@pytest.fixture(scope="module")
def one_and_two(make_trainer, step, tmp_path_factory):
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    all_steps(make_trainer, step, one)
    debug_launcher(child, (make_trainer, step, two), num_processes=2)
    return [torch.load(path, weights_only=True) for path in (one / "0.pt", two / "0.pt", two / "1.pt")]


@cases
def test_two_processes_take_the_step_of_one(one_and_two, objective, plan):
    single, *both = ({**run["-on-".join((objective, plan))]} for run in one_and_two)
    loss = single.pop("loss")
    for found in both:
        torch.testing.assert_close(found.pop("loss"), loss, rtol=1e-3, atol=1e-5)
        same(single, found)
