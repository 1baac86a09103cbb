"""Exact resume: N + M iterations equal N, a new process's worth of fresh objects, and M more, bit for bit."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrl.training import checkpoint

JOB = Path(__file__).with_name("job.py")
KINDS = [(o, p) for o in ("grpo", "nft") for p in (True, False)]
kinds = pytest.mark.parametrize(("objective", "peft"), KINDS, ids=[f"{o}-{'lora' if p else 'full'}" for o, p in KINDS])


@kinds
def test_a_resumed_run_equals_the_uninterrupted_one(
    make_trainer, state_of, rows_of, identical, tmp_path, objective, peft
):
    whole = make_trainer(tmp_path / "whole", objective, peft, iterations=5)
    whole.train()
    first = make_trainer(tmp_path / "split", objective, peft, iterations=2)
    first.train()
    torch.manual_seed(12345)  # a new process starts elsewhere
    second = make_trainer(tmp_path / "split", objective, peft, iterations=5)
    second.train(resume="auto")

    identical(state_of(whole), state_of(second))
    a, b = rows_of(whole), rows_of(second)
    assert [r["iteration"] for r in b] == [0, 1, 2, 3, 4]
    for x, y in zip(a, b, strict=True):
        identical(x, y)
    # Not vacuous: the run moved between the checkpoint and the end.
    after_first, after_second = state_of(first), state_of(second)
    assert any(not torch.equal(after_first[k], after_second[k]) for k in after_first if k.startswith("weight"))
    for name in ("model.safetensors", "copy-ema.safetensors"):
        one, two = (load_file(t.output_dir / "checkpoints" / "iteration-000005" / name) for t in (whole, second))
        identical(one, two)


def test_resuming_from_a_folder_in_the_middle(make_trainer, state_of, identical, rows_of, tmp_path):
    whole = make_trainer(tmp_path / "a", iterations=4, save_every=1, keep_last=10)
    whole.train()
    for start in (1, 3):
        again = make_trainer(tmp_path / f"b{start}", iterations=4)
        again.train(resume=tmp_path / "a" / "checkpoints" / f"iteration-{start:06d}")
        identical(state_of(whole), state_of(again))
        assert [r["iteration"] for r in rows_of(again)] == list(range(start, 4))


def test_a_resume_from_further_back_replaces_the_rows_after_it(make_trainer, rows_of, identical, tmp_path):
    whole = make_trainer(tmp_path / "a", iterations=4, save_every=1, keep_last=10)
    whole.train()
    expected = rows_of(whole)
    make_trainer(tmp_path / "a", iterations=4).train(resume=tmp_path / "a" / "checkpoints" / "iteration-000001")
    found = rows_of(whole)
    assert [r["iteration"] for r in found] == [0, 1, 2, 3]
    for x, y in zip(expected, found, strict=True):
        identical(x, y)


def test_other_memory_settings_resume_to_the_same_run_within_rounding(make_trainer, state_of, tmp_path):
    whole = make_trainer(tmp_path / "a", iterations=3)
    whole.train()
    make_trainer(tmp_path / "b", iterations=1).train()
    other = make_trainer(tmp_path / "b", iterations=3, micro_batch_size=3, sample_batch_size=8)
    other.train(resume="auto")
    a, b = state_of(whole), state_of(other)
    for key in a:
        if key.startswith(("weight", "ema")):
            torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-4)  # of steps of 3e-3


def test_a_learning_rate_schedule_and_its_warm_up_resume(make_trainer, rows_of, identical, tmp_path):
    settings = {"lr_scheduler": "cosine", "warmup_updates": 3, "save_every": 2, "keep_last": 9, "iterations": 4}
    whole = make_trainer(tmp_path / "a", **settings)
    whole.train()
    again = make_trainer(tmp_path / "b", **settings)
    again.train(resume=tmp_path / "a" / "checkpoints" / "iteration-000002")
    rates = [r["train/learning_rate"] for r in rows_of(whole)]
    assert len(set(rates)) > 2
    assert [r["train/learning_rate"] for r in rows_of(again)] == rates[2:]


def test_resume_auto_without_a_checkpoint_starts_anew(make_trainer, state_of, identical, tmp_path):
    a, b = make_trainer(tmp_path / "a", iterations=1), make_trainer(tmp_path / "b", iterations=1)
    a.train(resume="auto")
    b.train()
    identical(state_of(a), state_of(b))


def test_a_finished_run_resumes_to_nothing(make_trainer, state_of, rows_of, identical, count_updates, tmp_path):
    first = make_trainer(tmp_path / "a", iterations=2)
    first.train()
    again = make_trainer(tmp_path / "a", iterations=2)
    steps = count_updates(again)
    summary = again.train(resume="auto")
    assert steps == [] and summary["finished"] and summary["iterations"] == 2
    identical(state_of(first), state_of(again))
    assert [r["iteration"] for r in rows_of(again)] == [0, 1]


def test_a_damaged_newest_checkpoint_is_named_not_skipped(make_trainer, tmp_path):
    make_trainer(tmp_path / "a", iterations=2, save_every=1).train()
    newest = checkpoint.latest(tmp_path / "a" / "checkpoints")
    (newest / "state.pt").write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match=r"state\.pt.*Delete .*iteration-000002"):
        make_trainer(tmp_path / "a", iterations=2).train(resume="auto")


def test_history_and_best_survive(make_trainer, tmp_path):
    held_out = [{"prompt": "red", "tag": "x"}, {"prompt": "cat", "tag": "y"}]
    settings = {"eval_prompts": held_out, "eval_every": 1, "iterations": 4, "updates_per_iteration": 1}
    whole = make_trainer(tmp_path / "a", **settings)
    summary = whole.train()
    make_trainer(tmp_path / "b", **settings | {"iterations": 2}).train()
    again = make_trainer(tmp_path / "b", **settings)
    resumed = again.train(resume="auto")

    def scores(history):
        # The first part's own closing evaluation is the same state's as "eval" of the whole run.
        kept = {(h["iteration"], h["overall"], tuple(sorted(h["rewards"].items()))) for h in history}
        return sorted(kept)

    assert scores(whole.history) == scores(again.history)
    for key in ("before", "after"):
        timeless = [{k: v for k, v in s[key].items() if k != "seconds"} for s in (summary, resumed)]
        assert timeless[0] == timeless[1]
    assert whole.best == again.best


# ---------------------------------------------------------------------------------------------- real deaths


@pytest.fixture(scope="module")
def job():
    """job.py as a module: the same run inside this process."""
    spec = importlib.util.spec_from_file_location("job", JOB)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def killed_and_resumed_equals_whole(tmp_path, sd3_folder, job, rows_of, identical, objective, peft):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DIE_IN_ITERATION": "3"}
    command = [sys.executable, str(JOB), str(tmp_path / "killed"), str(sd3_folder), objective, peft, "5", ""]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    root = tmp_path / "killed" / "checkpoints"
    assert [p.name for p in sorted(root.iterdir())] == ["iteration-000002"]
    assert [r["iteration"] for r in rows_of(tmp_path / "killed")] == [0, 1, 2]  # one is beyond the checkpoint
    job(str(tmp_path / "killed"), str(sd3_folder), objective, peft, "5", "auto")
    job(str(tmp_path / "whole"), str(sd3_folder), objective, peft, "5", "")

    for name in ("model.safetensors", "copy-ema.safetensors"):
        one, two = (load_file(tmp_path / r / "checkpoints" / "iteration-000005" / name) for r in ("whole", "killed"))
        identical(one, two)
    moments = [
        torch.load(tmp_path / r / "checkpoints" / "iteration-000005" / "optimizer.pt", weights_only=True)["state"]
        for r in ("whole", "killed")
    ]
    for parameter, state in moments[0].items():
        identical(state, moments[1][parameter])
    for x, y in zip(rows_of(tmp_path / "whole"), rows_of(tmp_path / "killed"), strict=True):
        identical(x, y)


def test_killed_between_checkpoints(tmp_path, sd3_folder, job, rows_of, identical):
    killed_and_resumed_equals_whole(tmp_path, sd3_folder, job, rows_of, identical, "nft", "full")


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "peft"), [("grpo", "lora"), ("grpo", "full"), ("nft", "lora")])
def test_killed_between_checkpoints_in_the_other_kinds(tmp_path, sd3_folder, job, rows_of, identical, objective, peft):
    killed_and_resumed_equals_whole(tmp_path, sd3_folder, job, rows_of, identical, objective, peft)


class Interrupting:
    """A reward during whose call in iteration `at` a signal arrives, `times` times."""

    name = "brightness"

    def __init__(self, at=None, number=signal.SIGINT, times=1):
        self.at, self.number, self.times, self.trainer = at, number, times, None

    def __call__(self, images, prompts):
        if self.trainer is not None and self.trainer.iteration == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
                self._handled()
        return images.flatten(1).mean(1)

    def _handled(self):
        """Signals that come at once are one signal: wait until the trainer, in the main thread, has seen it."""
        end = time.monotonic() + 20
        while not self.trainer._interrupted and time.monotonic() < end:
            time.sleep(0.01)


def interrupted(make_trainer, folder, *args, at, number=signal.SIGINT, times=1, **settings):
    """A trainer that is interrupted while it waits for the rewards of its iteration `at`."""
    reward = Interrupting(at, number, times)
    reward.trainer = make_trainer(folder, *args, rewards=reward, sample_batch_size=8, **settings)
    return reward.trainer


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("objective", ["grpo", "nft"])
def test_an_interrupt_ends_with_a_checkpoint_that_resumes_exactly(
    make_trainer, state_of, rows_of, identical, tmp_path, objective, number, capsys
):
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    settings = {"iterations": 4, "sample_batch_size": 8}
    whole = make_trainer(tmp_path / "a", objective, rewards=Interrupting(), **settings)
    whole.train()
    first = interrupted(make_trainer, tmp_path / "b", objective, at=1, number=number, iterations=4)
    summary = first.train()
    assert {s: signal.getsignal(s) for s in handlers} == handlers
    assert not summary["finished"] and summary["iterations"] == 2
    assert checkpoint.latest(tmp_path / "b" / "checkpoints").name == "iteration-000002"
    assert not (tmp_path / "b" / "final").exists()
    assert "resume='auto'" in capsys.readouterr().out
    second = make_trainer(tmp_path / "b", objective, rewards=Interrupting(), **settings)
    assert second.train(resume="auto")["finished"]
    identical(state_of(whole), state_of(second))
    for x, y in zip(rows_of(whole), rows_of(second), strict=True):
        identical(x, y)


def test_a_second_interrupt_stops_at_once(make_trainer, tmp_path):
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    trainer = interrupted(make_trainer, tmp_path / "a", at=1, times=2, save_every=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert {s: signal.getsignal(s) for s in handlers} == handlers
    assert checkpoint.latest(tmp_path / "a" / "checkpoints").name == "iteration-000001"


def test_an_interrupted_trainer_goes_on_when_told_to(make_trainer, state_of, identical, tmp_path):
    """The same object, in a notebook: interrupt, look, continue."""
    whole = make_trainer(tmp_path / "a", rewards=Interrupting(), iterations=3, sample_batch_size=8)
    whole.train()
    trainer = interrupted(make_trainer, tmp_path / "b", at=0, iterations=3)
    assert trainer.train()["iterations"] == 1
    assert trainer.train(resume="auto")["finished"]
    identical(state_of(whole), state_of(trainer))
