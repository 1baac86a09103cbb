"""Shared by the tests of the trainer: tiny runs on the tiny SD3 of `tests/conftest.py`.

Fixtures:

    make_trainer   (output_dir, objective="grpo", peft=True, *, rewards=None, prompts=None, sampler=None, policy=None,
                   eval_prompts=None, **arguments) -> a `Trainer` on a fresh policy. Usable in a forked child.
    step           (trainer, iteration=0, update=0) -> (metrics, gradients) of one update, taken before the weights
                   move; `advance=True` lets the optimizer step as well.
    state_of       (trainer) -> every tensor that a run must carry: weights, copies, optimizer moments.
    rows_of        (trainer or folder) -> the rows of metrics.jsonl without timings.
    identical      (a, b) -> asserts that two such dictionaries are equal bit for bit.
    count_updates  (trainer) -> a list that grows by one entry per optimizer step.
"""

import math
import os
from pathlib import Path

import pytest
import torch

PROMPTS = [
    {"prompt": "red square", "tag": "shape"},
    {"prompt": "two blue circles", "tag": "count"},
    {"prompt": "a green cat", "tag": "shape"},
    {"prompt": "nine dots", "tag": "count"},
    {"prompt": "a pale moon", "tag": "shape"},
    {"prompt": "black", "tag": "shape"},
]


def brightness(images, prompts):
    """Mean of the pixels."""
    return images.flatten(1).mean(1)


def redness(images, prompts):
    """Red above the mean of the other two channels."""
    return (images[:, 0] - images[:, 1:].mean(1)).flatten(1).mean(1)


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """accelerate keeps one global state a process; without a reset a second precision would be refused."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


@pytest.fixture(scope="session")
def objectives():
    from flowrl import DiffusionNFT, FlowGRPO

    return {
        "grpo": lambda **kw: FlowGRPO(**{"clip_range": 1e-3, "kl": 0.01} | kw),
        "nft": lambda **kw: DiffusionNFT(**{"kl": 1e-3} | kw),
    }


@pytest.fixture(scope="session")
def make_trainer(make_sd3_policy, objectives):
    from flowrl import FlowSDE, Trainer, TrainingArguments
    from flowrl.samplers.schedules import SingleShift

    def make(
        output_dir,
        objective="grpo",
        peft=True,
        *,
        rewards=brightness,
        prompts=PROMPTS,
        sampler=None,
        policy=None,
        eval_prompts=None,
        recipe=None,
        **arguments,
    ):
        defaults = {
            "seed": 3,
            "iterations": 4,
            "prompts_per_iteration": 2,
            "group_size": 4,
            "updates_per_iteration": 2,
            "sample_batch_size": 4,
            "micro_batch_size": 4,
            "learning_rate": 3e-3,
            "ema_every": 2,
            "save_every": 0,
            "log_with": (),
            "log_images_every": 0,
            "monitor_samples": 2,
            "eval_images_per_prompt": 1,
        }
        return Trainer(
            policy or make_sd3_policy(peft or None),
            objectives[objective]() if isinstance(objective, str) else objective,
            sampler or FlowSDE(steps=4, noise_level=0.7, schedule=SingleShift(1.5)),
            rewards,
            prompts,
            eval_prompts=eval_prompts,
            args=TrainingArguments(output_dir=str(output_dir), **defaults | arguments),
            recipe=recipe,
        )

    return make


@pytest.fixture(scope="session")
def state_of():
    def read(trainer):
        tensors = {f"weight {n}": p.detach().clone() for n, p in trainer.policy.trainable().items()}
        names = list(trainer.copies.parameters)
        for copy in trainer.copies.names:
            with trainer.copies.swapped(copy):
                now = trainer.copies.parameters
                tensors |= {f"{copy} {n}": now[n].detach().clone() for n in names}
        plain = trainer._plain_optimizer()
        parameters = [p for g in plain.param_groups for p in g["params"]]
        for n, p in zip(names, parameters, strict=True):
            tensors |= {f"{k} {n}": torch.as_tensor(v).clone() for k, v in plain.state.get(p, {}).items()}
        tensors["learning rate"] = torch.tensor([g["lr"] for g in plain.param_groups])
        tensors["counters"] = torch.tensor([trainer.iteration, trainer.updates])
        return tensors

    return read


@pytest.fixture(scope="session")
def identical():
    def compare(a, b):
        assert a.keys() == b.keys()
        different = [k for k in a if not (torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k])]
        assert not different, different

    return compare


@pytest.fixture(scope="session")
def rows_of():
    from flowrl.training.tracking import read_metrics

    def read(where):
        folder = where if isinstance(where, Path) else where.output_dir
        rows = read_metrics(folder / "metrics.jsonl")
        timed = ("time/", "images_per_second")
        return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]

    return read


@pytest.fixture(scope="session")
def count_updates():
    def watch(trainer):
        steps, inner = [], trainer.optimizer.step

        def step(*args, **kwargs):
            steps.append(trainer.iteration)
            return inner(*args, **kwargs)

        trainer.optimizer.step = step
        return steps

    return watch


@pytest.fixture(scope="session")
def step():
    def run(trainer, iteration=0, update=0, *, change=None, advance=False):
        """`change(rollout, batch)` may tamper with what the update sees."""
        rollout, batch, advantage, _ = trainer.rollout(iteration)
        if change is not None:
            change(rollout, batch)
        gradients, inner = {}, trainer.optimizer.step

        def capture(*args, **kwargs):
            for n, p in trainer.policy.trainable().items():
                gradients[n] = None if p.grad is None else p.grad.clone()
            if advance:
                inner()

        trainer.optimizer.step = capture
        try:
            metrics = trainer.update(rollout, batch, advantage, iteration, update)
        finally:
            trainer.optimizer.step = inner
        assert gradients and all(math.isfinite(v) for k, v in metrics.items())
        return metrics, gradients

    return run
