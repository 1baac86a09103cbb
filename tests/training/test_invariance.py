"""Memory settings, precision tricks and the order of things do not change what is computed."""

import pytest
import torch

from flowrl.rewards import RewardOutput


class Ranked:
    """Rewards that no rounding of an image can move: 0, 1, 2, 3, 4, 0, ... in the order of a run's samples."""

    name = "ranked"

    def __init__(self):
        self.seen = 0

    def __call__(self, images, prompts):
        self.seen += len(prompts)
        return torch.arange(self.seen - len(prompts), self.seen) % 5


def assert_close_gradients(a, b, tolerance=2e-5):
    """Equal up to `tolerance` of the largest entry of all gradients."""
    assert a.keys() == b.keys()
    scale = max(g.abs().max().item() for g in a.values() if g is not None)
    assert scale > 0
    for name in a:
        assert (a[name] is None) == (b[name] is None), name
        if a[name] is not None:
            assert (a[name] - b[name]).abs().max().item() <= tolerance * scale, name


MEMORY = [(1, 8), (3, 8), (8, 1), (8, 3), (2, 5), (64, 64)]  # micro-batch, sample batch


@pytest.mark.parametrize("objective", ["grpo", "nft"])
@pytest.mark.parametrize("peft", [True, False])
def test_the_gradient_does_not_depend_on_memory_settings(make_trainer, step, tmp_path, objective, peft):
    def run(micro, sample):
        trainer = make_trainer(
            tmp_path,
            objective,
            peft,
            rewards=Ranked(),
            updates_per_iteration=1,
            micro_batch_size=micro,
            sample_batch_size=sample,
            max_grad_norm=1e9,
        )
        return step(trainer)

    metrics, expected = run(8, 8)
    for micro, sample in MEMORY if peft else MEMORY[:3]:
        found_metrics, found = run(micro, sample)
        assert_close_gradients(expected, found)
        assert found_metrics.keys() == metrics.keys()
        for key in ("loss", "kl", "grad_norm"):
            assert found_metrics[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("objective", ["grpo", "nft"])
def test_weights_after_two_iterations_do_not_depend_on_memory_settings(make_trainer, state_of, tmp_path, objective):
    """A large Adam epsilon keeps the steps proportional to the gradients, so that rounding stays rounding."""

    def run(micro, sample):
        name = f"{micro}-{sample}"
        trainer = make_trainer(
            tmp_path / name,
            objective,
            rewards=Ranked(),
            iterations=2,
            micro_batch_size=micro,
            sample_batch_size=sample,
            adam_epsilon=1e-2,
        )
        start = state_of(trainer)
        trainer.train()
        return start, state_of(trainer)

    start, expected = run(4, 8)
    moved = max((expected[k] - start[k]).abs().max().item() for k in start if k.startswith("weight"))
    for micro, sample in ((1, 3), (3, 1)):
        _, found = run(micro, sample)
        for key in expected:
            if key.startswith(("weight", "ema", "old")):
                torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-3 * moved)


@pytest.mark.parametrize("objective", ["grpo", "nft"])
@pytest.mark.parametrize("peft", [True, False])
def test_gradient_checkpointing_gives_the_same_gradient(make_trainer, step, tmp_path, objective, peft):
    settings = {"max_grad_norm": 1e9}
    plain = make_trainer(tmp_path / "a", objective, peft, rewards=Ranked(), **settings)
    thrifty = make_trainer(tmp_path / "b", objective, peft, rewards=Ranked(), gradient_checkpointing=True, **settings)
    assert thrifty.policy.module.is_gradient_checkpointing and not plain.policy.module.is_gradient_checkpointing
    recomputed = []
    block = thrifty.policy.module.transformer_blocks[0]
    block.register_forward_hook(lambda *_: recomputed.append(torch.is_grad_enabled()))
    (_, a), (_, b) = step(plain), step(thrifty)
    assert sum(recomputed) > 0
    assert_close_gradients(a, b, 1e-6)


@pytest.mark.parametrize("objective", ["grpo", "nft"])
def test_an_iteration_is_a_function_of_its_number(make_trainer, identical, tmp_path, objective):
    """Whatever was drawn, encoded or computed before: resume and several processes rest on it."""
    fresh, used = make_trainer(tmp_path / "a", objective), make_trainer(tmp_path / "b", objective)
    for iteration in (0, 1, 2):
        used.rollout(iteration)
    torch.manual_seed(77)
    a, b = fresh.rollout(3), used.rollout(3)
    for name in ("latents", "states", "actions", "log_prob", "media"):
        assert torch.equal(getattr(a[0], name), getattr(b[0], name)), name
    assert torch.equal(a[1].reward, b[1].reward) and torch.equal(a[2].adv, b[2].adv)
    identical(a[3], b[3])


def test_the_embedding_of_a_text_does_not_depend_on_its_company(make_sd3_policy):
    from flowrl.rollout import Prompt

    texts = ["red", "a cat", "moon", "black", "dots", "two", "nine"]
    prompts = [Prompt(i, t) for i, t in enumerate(texts)]
    together = make_sd3_policy().encode(prompts).arguments
    for i, p in enumerate(prompts):
        alone = make_sd3_policy().encode([p]).arguments
        for key, value in alone.items():
            assert torch.equal(value[0], together[key][i]), (p.text, key)


def test_noise_differs_between_iterations_members_and_prompts(make_trainer, tmp_path):
    trainer = make_trainer(tmp_path)
    latents = torch.cat([trainer.rollout(i)[0].latents for i in (0, 1)]).flatten(1)
    assert len(torch.unique(latents, dim=0)) == 16


# ---------------------------------------------------------------------------------------------- zero spread


def test_equal_rewards_give_a_gradient_of_exactly_zero(make_trainer, step, objectives, tmp_path):
    objective = objectives["grpo"](kl=0.0)
    trainer = make_trainer(tmp_path, objective, rewards=lambda images, prompts: [0.1] * len(prompts))
    metrics, gradients = step(trainer)
    assert all(g is None or (g == 0).all() for g in gradients.values())
    assert any(g is not None for g in gradients.values())
    assert metrics["grad_norm"] == 0.0 and metrics["pg_loss"] == 0.0


def test_equal_rewards_leave_the_weights_alone_and_are_logged(make_trainer, state_of, rows_of, objectives, tmp_path):
    trainer = make_trainer(
        tmp_path,
        objectives["grpo"](kl=0.0),
        False,
        rewards=lambda images, prompts: [3.7] * len(prompts),
        weight_decay=0.0,
        iterations=2,
    )
    before = state_of(trainer)
    trainer.train()
    after = state_of(trainer)
    assert all(torch.equal(before[k], after[k]) for k in before if k.startswith("weight"))
    for row in rows_of(trainer):
        assert row["reward/zero_spread_share"] == 1.0 and row["advantage/zero_share"] == 1.0
        assert row["reward/group_std"] == 0.0 and row["train/grad_norm"] == 0.0


def test_a_group_without_spread_beside_one_with(make_trainer, tmp_path):
    def half(images, prompts):
        return [0.5 if p == first else float(i) for i, p in enumerate(prompts)]

    trainer = make_trainer(tmp_path, rewards=half)
    first = trainer.prompts.draw(3, 0, 2)[0].text
    _, batch, advantage, metrics = trainer.rollout(0)
    flat = batch.group_id == next(p.index for p in trainer.prompts if p.text == first)
    assert flat.sum() == 4
    assert (advantage.adv[flat] == 0).all() and (advantage.adv[~flat] != 0).all()
    assert metrics["reward/zero_spread_share"] == 0.5


def test_advantages_sum_to_zero_in_every_group(make_trainer, tmp_path):
    for objective in ("grpo", "nft"):
        trainer = make_trainer(tmp_path, objective)
        _, batch, advantage, _ = trainer.rollout(0)
        for group in batch.group_id.unique():
            assert advantage.adv[batch.group_id == group].sum(0).abs().max() < 1e-4
        assert advantage.adv.abs().max() > 0.1


# --------------------------------------------------------------------------------------------- invalid rows


class PartlyInvalid(Ranked):
    """Marks the samples at `rows` of a run as impossible to score."""

    name = "partly"

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __call__(self, images, prompts):
        values = super().__call__(images, prompts).float()
        valid = torch.tensor([i not in self.rows for i in range(self.seen - len(prompts), self.seen)])
        return RewardOutput(values.masked_fill(~valid, torch.nan), valid)


@pytest.mark.parametrize("objective", ["grpo", "nft"])
@pytest.mark.parametrize("micro", [1, 4])
def test_invalid_rows_get_no_gradient(make_trainer, step, tmp_path, objective, micro):
    """Whatever those samples look like: the gradient keeps every bit."""
    rows = [0, 2]  # of the first update's four

    def run(change=None):
        trainer = make_trainer(
            tmp_path, objective, rewards=PartlyInvalid(rows), micro_batch_size=micro, max_grad_norm=1e9
        )
        return step(trainer, change=change)

    def spoil(which):
        def change(rollout, batch):
            for name in ("latents", "states", "actions", "log_prob"):
                getattr(rollout, name)[which] *= 1.5

        return change

    _, expected = run()
    _, spoiled = run(spoil(rows))
    assert any(g.abs().max() > 0 for g in expected.values())
    for name, g in expected.items():
        assert torch.equal(g, spoiled[name]), name
    # The instrument works: the same on a valid row is seen.
    _, seen = run(spoil([1]))
    assert any(not torch.equal(g, seen[name]) for name, g in expected.items())


def test_invalid_rows_leave_the_statistics(make_trainer, tmp_path):
    trainer = make_trainer(tmp_path, rewards=PartlyInvalid([0, 2]))
    _, batch, advantage, metrics = trainer.rollout(0)
    assert batch.valid.sum() == 6 and metrics["reward/invalid_share"] == 0.25
    assert (advantage.adv[~batch.valid] == 0).all()
    assert metrics["reward/mean"] == pytest.approx(batch.reward[batch.valid].mean().item())


def test_the_loss_is_a_mean_over_valid_rows_only(make_trainer, step, tmp_path):
    """With a KL term alone, dropping rows must not shrink the loss towards zero."""
    from flowrl import DiffusionNFT

    def run(rows):
        trainer = make_trainer(tmp_path, DiffusionNFT(kl=0.0), rewards=PartlyInvalid(rows))
        return step(trainer)[0]["pg_loss"]

    assert run([0, 2]) == pytest.approx(run([]), rel=0.5)


# -------------------------------------------------------------------------------------------- half precision


@pytest.mark.parametrize("objective", ["grpo", "nft"])
@pytest.mark.parametrize("peft", [True, False])
def test_bf16_runs_and_passes_the_ratio_check(make_trainer, rows_of, tmp_path, objective, peft):
    trainer = make_trainer(tmp_path, objective, peft, mixed_precision="bf16", iterations=2)
    seen = []
    trainer.policy.module.transformer_blocks[0].attn.to_q.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    trainer.train()
    assert torch.bfloat16 in seen, "nothing ran in bf16"
    assert all(p.dtype == torch.float32 for p in trainer.policy.trainable().values())
    rows = rows_of(trainer)
    assert [r["iteration"] for r in rows] == [0, 1]
    # Recorded in float32 with equal batch shapes: the replay is exact in spite of the half precision inside.
    assert rows[0]["ratio_check"] <= 1e-6


def test_bf16_with_other_batch_shapes_stays_within_its_tolerance(make_trainer, tmp_path):
    trainer = make_trainer(tmp_path, mixed_precision="bf16", micro_batch_size=3, sample_batch_size=8)
    rollout, *_ = trainer.rollout(0)
    assert trainer.check_ratio(rollout) <= 1e-2


# ---------------------------------------------------------------------------------------------- ratio check


def test_the_ratio_is_one_before_the_first_update(make_trainer, tmp_path):
    for peft in (True, False):
        trainer = make_trainer(tmp_path, peft=peft)
        assert trainer.check_ratio(trainer.rollout(0)[0]) == 0.0
    other = make_trainer(tmp_path, micro_batch_size=3, sample_batch_size=8)
    assert other.check_ratio(other.rollout(0)[0]) <= 1e-5
    assert make_trainer(tmp_path, "nft").check_ratio(other.rollout(0)[0]) == 0.0  # has no ratio


def tampered(trainer, monkeypatch, change):
    """The trainer with `change(policy, rollout)` between its rollout and what follows."""
    inner = trainer.rollout

    def rollout(iteration):
        out = inner(iteration)
        change(trainer.policy, out[0])
        return out

    monkeypatch.setattr(trainer, "rollout", rollout)
    return trainer


def touch_weights(policy, rollout):
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(0.05)


def spoil_step(policy, rollout):
    rollout.log_prob[:, 1] += 0.5


def not_a_number(policy, rollout):
    rollout.log_prob[0, 2] = torch.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (touch_weights, r"at step \d.*all steps are off.*weights touched"),
        (spoil_step, r"\|log ratio\| is 0\.5 at step 1.*only some steps"),
        (not_a_number, r"nan at step 2.*only some steps"),
    ],
)
def test_a_tampered_policy_is_refused_before_any_update(
    make_trainer, monkeypatch, count_updates, tmp_path, change, message
):
    from flowrl.training.trainer import RatioError

    trainer = tampered(make_trainer(tmp_path), monkeypatch, change)
    steps = count_updates(trainer)
    with pytest.raises(RatioError, match=message):
        trainer.train()
    assert steps == []
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "final").exists()


def test_dropout_in_training_is_found_out(make_trainer, tmp_path):
    from peft import LoraConfig

    from flowrl.training.trainer import RatioError

    trainer = make_trainer(tmp_path, peft=LoraConfig(r=4, lora_alpha=64, lora_dropout=0.5, init_lora_weights=False))
    rollout, *_ = trainer.rollout(0)
    assert trainer.check_ratio(rollout) == 0.0  # everything is in evaluation mode
    trainer.policy.module.train()
    with pytest.raises(RatioError, match="dropout"):
        trainer.check_ratio(rollout)


def test_the_tolerance_is_the_users(make_trainer, monkeypatch, tmp_path):
    trainer = tampered(make_trainer(tmp_path, iterations=1, ratio_tolerance=0.6), monkeypatch, spoil_step)
    assert trainer.train()["finished"]


def test_preflight_measures_and_changes_nothing(make_trainer, state_of, identical, tmp_path, capsys):
    from flowrl import FlowSDE

    trainer = make_trainer(
        tmp_path, sampler=FlowSDE.from_config(make_trainer(tmp_path).policy.pipe.scheduler.config, steps=4)
    )
    before = state_of(trainer)
    report = trainer.check()
    assert report["stock_difference"] <= 1e-6 and report["max_abs_log_ratio"] == 0.0
    assert list(report["rewards"]) == ["brightness"] and len(report["rewards"]["brightness"]) == 4
    assert "check passed" in capsys.readouterr().out
    identical(before, state_of(trainer))
