"""Half precision: what is refused, float32 where the optimizer works, and steps that a gradient scaler skips."""

import pytest
import torch
from accelerate import Accelerator


def test_the_launchers_precision_must_be_the_runs(make_trainer, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match=r"asks for mixed_precision 'bf16' and the run for 'no'.*precision=bf16"):
        make_trainer(tmp_path)


def test_the_launchers_default_leaves_it_to_the_run(make_trainer, monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert make_trainer(tmp_path, mixed_precision="bf16").accelerator.mixed_precision == "bf16"


def test_float16_on_the_cpu_is_refused(make_trainer, tmp_path):
    with pytest.raises(ValueError, match="would compute in float32 on cpu: use 'bf16' or 'no'"):
        make_trainer(tmp_path, mixed_precision="fp16")


def test_the_optimizer_works_on_float32_weights(make_trainer, make_sd3_policy, tmp_path):
    policy = make_sd3_policy(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16 and would round the optimizer's steps away.*'bf16'"):
        make_trainer(tmp_path, policy=policy)


def test_mixed_precision_trains_float32_copies_of_bfloat16_weights(make_trainer, make_sd3_policy, step, tmp_path):
    policy = make_sd3_policy(dtype=torch.bfloat16)
    rounded = {n: p.detach().clone() for n, p in policy.trainable().items()}
    trainer = make_trainer(tmp_path, "nft", policy=policy, mixed_precision="bf16")
    for n, p in policy.trainable().items():
        assert p.dtype == torch.float32 and torch.equal(p.detach(), rounded[n].float())
    step(trainer, advance=True)
    # Some steps are smaller than bfloat16 could tell apart.
    assert any(not torch.equal(p.detach(), p.detach().bfloat16().float()) for p in policy.trainable().values())


# ---------------------------------------------------------------------------------------------- skipped steps


@pytest.fixture
def make_scaled(make_trainer, monkeypatch, tmp_path):
    """A trainer in float16 with torch's scaler, which accelerate has for accelerators only."""

    class Scaled(Accelerator):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")

    monkeypatch.setattr("flowrl.training.trainer.Accelerator", Scaled)

    def make(folder="run", **settings):
        usual = {"mixed_precision": "fp16", "ema_every": 1, "lr_scheduler": "linear", "adam_epsilon": 1e-2}
        return make_trainer(tmp_path / folder, "nft", False, **usual | settings)

    return make


def break_gradients(trainer, updates, value=torch.inf):
    """One element of one gradient becomes `value` in these updates."""
    inner, calls = trainer.accelerator.clip_grad_norm_, []

    def clip(parameters, limit):
        parameters = list(parameters)
        if len(calls) in updates:
            parameters[0].grad.view(-1)[0] = value
        calls.append(None)
        return inner(parameters, limit)

    trainer.accelerator.clip_grad_norm_ = clip


def set_scale(trainer, scale):
    scaler = trainer.accelerator.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale})


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_skipped_step_leaves_everything_as_it_was(make_scaled, state_of, identical, rows_of, value):
    trainer = make_scaled(iterations=1)
    break_gradients(trainer, {1}, value)
    rollout, batch, advantage, _ = trainer.rollout(0)
    trainer.update(rollout, batch, advantage, 0, 0)
    before, schedule = state_of(trainer), trainer.lr_scheduler.state_dict()
    assert trainer.updates == 1 and trainer.accelerator.scaler.get_scale() == 2.0**16
    metrics = trainer.update(rollout, batch, advantage, 0, 1)
    assert metrics["step_skipped"] == 1.0
    identical(before, state_of(trainer))
    assert trainer.lr_scheduler.state_dict() == schedule
    assert trainer.accelerator.scaler.get_scale() == 2.0**15
    metrics = trainer.update(rollout, batch, advantage, 0, 1)
    assert metrics["step_skipped"] == 0.0 and trainer.updates == 2
    assert trainer.lr_scheduler.state_dict() != schedule


def test_a_scaled_run_is_the_unscaled_one(make_scaled, state_of):
    """The scale is taken out before gradients are clipped and used. It is a power of two: only underflow differs."""
    states = []
    for scale in (2.0**6, 2.0**10):
        trainer = make_scaled(f"{scale}", iterations=1, max_grad_norm=0.5)
        set_scale(trainer, scale)
        trainer.train()
        states.append(state_of(trainer))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=2e-5, msg=name)
    assert states[0]["counters"].tolist() == [1, 2]


def test_a_factor_on_the_learning_rate_goes_with_the_skipped_step(make_scaled):
    trainer = make_scaled(iterations=1)
    break_gradients(trainer, {0})
    inner = trainer.objective.loss

    def loss(*args):
        value, metrics = inner(*args)
        return value, metrics | {"lr_scale": torch.tensor(0.5)}

    trainer.objective.loss = loss
    rollout, batch, advantage, _ = trainer.rollout(0)
    rate = trainer.optimizer.param_groups[0]["lr"]
    assert trainer.update(rollout, batch, advantage, 0, 0)["learning_rate"] == 0.5 * rate
    assert trainer.optimizer.param_groups[0]["lr"] == rate


def test_a_run_with_a_skipped_step_resumes_exactly(make_scaled, state_of, identical):
    whole, first, second = (make_scaled(name, iterations=3, save_every=1) for name in ("a", "b", "c"))
    break_gradients(whole, {1})
    whole.train()
    break_gradients(first, {1})
    first.train(on_iteration=lambda metrics: True)
    second.train(resume=first.output_dir / "checkpoints" / "iteration-000001")
    assert whole.updates == second.updates == 5
    identical(state_of(whole), state_of(second))
    assert whole.accelerator.scaler.state_dict() == second.accelerator.scaler.state_dict()


def test_a_loss_that_is_not_finite_is_no_overflow(make_scaled):
    """No scale mends it: the run stops, and the trainer can go on from there."""
    trainer = make_scaled(iterations=1)
    rollout, batch, advantage, _ = trainer.rollout(0)
    inner = trainer.objective.loss

    def loss(*args):
        value, metrics = inner(*args)
        return value * torch.nan, metrics | {"loss": metrics["loss"] * torch.nan}

    trainer.objective.loss = loss
    with pytest.raises(RuntimeError, match="non-finite loss"):
        trainer.update(rollout, batch, advantage, 0, 0)
    trainer.objective.loss = inner
    assert trainer.update(rollout, batch, advantage, 0, 0)["step_skipped"] == 0.0 and trainer.updates == 1


def test_gradients_that_overflow_at_any_scale_stop_the_run(make_scaled):
    trainer = make_scaled(iterations=1)
    set_scale(trainer, 4.0)
    break_gradients(trainer, range(100))
    rollout, batch, advantage, _ = trainer.rollout(0)
    for _ in range(3):  # with scales 4, 2, 1
        assert trainer.update(rollout, batch, advantage, 0, 0)["step_skipped"] == 1.0
    with pytest.raises(RuntimeError, match="non-finite"):
        trainer.update(rollout, batch, advantage, 0, 0)
    assert trainer.updates == 0
