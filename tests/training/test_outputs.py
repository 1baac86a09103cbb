"""What a run leaves behind: logs, checkpoints, pictures, and weights that stock diffusers loads."""

import asyncio
import json

import pytest
import torch

from flowrl import noise
from flowrl.rewards import RewardOutput
from flowrl.training.trainer import EVALUATION
from flowrl.training.weights import ema_decay

HELD_OUT = [{"prompt": "red", "tag": "x"}, {"prompt": "a cat", "tag": "y"}, {"prompt": "moon", "tag": "y"}]
ALWAYS = {
    "iteration",
    "reward/mean",
    "reward/std",
    "reward/group_std",
    "reward/zero_spread_share",
    "reward/invalid_share",
    "reward/brightness/mean",
    "reward/brightness/std",
    "reward/task/shape",
    "advantage/std",
    "advantage/abs_max",
    "advantage/zero_share",
    "kl/old",
    "kl/old/step_00",
    "kl/reference",
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "time/rollout",
    "time/decode",
    "time/reward",
    "time/update",
    "time/monitor",
    "time/iteration",
    "images_per_second",
}
OF = {
    "grpo": {
        "ratio_check",
        "train/approx_kl",
        "train/clip_frac_high",
        "train/clip_frac_low",
        "train/ratio_max",
        "train/ratio_min",
        "train/kl",
        "train/step/approx_kl/00",
        "train/step/ratio/02_max",
    },
    "nft": {"train/pg_loss", "train/kl", "train/old_distance"},
}


def raw_rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("objective", ["grpo", "nft"])
def test_one_row_an_iteration_with_the_documented_keys(make_trainer, tmp_path, objective):
    trainer = make_trainer(tmp_path, objective, iterations=3, prompts_per_iteration=5, log_with=("tensorboard",))
    summary = trainer.train()
    rows = raw_rows(tmp_path)
    assert [r["iteration"] for r in rows] == [0, 1, 2]
    for row in rows:
        assert row.keys() >= ALWAYS, sorted(ALWAYS - row.keys())
        assert all(isinstance(v, int | float) for v in row.values())
        assert all(v == v and abs(v) != float("inf") for v in row.values())
    assert rows[0].keys() >= OF[objective], sorted(OF[objective] - rows[0].keys())
    assert list(tmp_path.rglob("events.out.tfevents.*"))
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["finished"] and summary["training_images"] == 60 and summary["processes"] == 1


def test_the_logged_numbers_are_the_runs(make_trainer, tmp_path):
    seen = []

    def brightness(images, prompts):
        values = images.flatten(1).mean(1)
        seen.append(values.mean().item())
        return values

    trainer = make_trainer(tmp_path, rewards=brightness, iterations=3, sample_batch_size=8)
    trainer.train()
    assert [r["reward/mean"] for r in raw_rows(tmp_path)] == pytest.approx(seen, rel=1e-6)


def test_evaluations_add_no_rows_and_nothing_is_logged_twice(make_trainer, tmp_path):
    settings = {"eval_prompts": HELD_OUT, "iterations": 4, "eval_every": 2, "save_every": 1}
    make_trainer(tmp_path, **settings | {"iterations": 3}).train()
    make_trainer(tmp_path, **settings).train(resume="auto")
    make_trainer(tmp_path, **settings).train(resume="auto")  # nothing left to do
    rows = raw_rows(tmp_path)
    assert [r["iteration"] for r in rows] == [0, 1, 2, 3]
    assert ["eval/overall" in r for r in rows] == [False, True, False, False]
    assert rows[1].keys() >= {"eval/task/x", "eval/task/y", "eval/reward/brightness"}


def test_files_of_an_evaluated_run(make_trainer, tmp_path):
    trainer = make_trainer(
        tmp_path, eval_prompts=HELD_OUT, iterations=3, eval_every=1, log_images_every=2, save_every=1
    )
    trainer.train()
    names = {p.name for p in tmp_path.iterdir()}
    expected = {"before.json", "after.json", "eval.json", "summary.json", "metrics.jsonl"}
    assert names >= expected | {"checkpoints", "final", "samples", "sampler"}
    samples = {p.name for p in (tmp_path / "samples").iterdir()}
    assert samples >= {"train-000000.png", "train-000002.png", "before-000000.png", "after-000003.png"}
    before = json.loads((tmp_path / "before.json").read_text())
    assert before["images"] == 3 and set(before["per_task"]) == {"x", "y"}
    assert before["overall"] == pytest.approx(sum(t["score"] for t in before["per_task"].values()) / 2)
    assert before["per_task"]["y"] == {"score": before["per_task"]["y"]["score"], "images": 2, "prompts": 2}
    best = max(trainer.history, key=lambda h: h["overall"])
    assert trainer.best == {"overall": best["overall"], "iteration": best["iteration"]}
    from flowrl.samplers import FlowSampler

    assert FlowSampler.from_pretrained(tmp_path / "sampler") == trainer.sampler


def test_an_evaluation_repeats_itself(make_trainer, tmp_path):
    trainer = make_trainer(tmp_path, eval_prompts=HELD_OUT)
    a, b = trainer.evaluate(), trainer.evaluate()
    assert torch.equal(a.grid, b.grid) and a.overall == b.overall and a.captions == ["red", "a cat", "moon"]
    other = make_trainer(tmp_path, eval_prompts=HELD_OUT, sample_batch_size=2).evaluate()
    torch.testing.assert_close(other.grid, a.grid, rtol=0, atol=1e-5)


def test_evaluations_at_any_time_do_not_change_the_training(make_trainer, state_of, identical, tmp_path):
    plain = make_trainer(tmp_path / "a", iterations=3)
    plain.train()
    watched = make_trainer(
        tmp_path / "b", eval_prompts=["red", "a cat"], eval_every=1, iterations=3, log_images_every=1, save_every=1
    )
    watched.train()
    identical(state_of(plain), state_of(watched))


# ------------------------------------------------------------------------------------- average and final


def test_the_average_is_updated_at_its_interval(make_trainer, monkeypatch, tmp_path):
    trainer = make_trainer(tmp_path, iterations=4, ema_every=3, ema_decay=0.4)
    calls, inner = [], trainer.copies.blend

    def blend(name, decay):
        calls.append((trainer.updates, name, decay))
        inner(name, decay)

    monkeypatch.setattr(trainer.copies, "blend", blend)
    trainer.train()
    assert calls == [(n, "ema", ema_decay(n, 0.4)) for n in (0, 3, 6)]
    assert calls[0][2] == 0.1 and calls[2][2] == 0.4


@pytest.mark.parametrize("peft", [True, False])
@pytest.mark.parametrize("objective", ["grpo", "nft"])
def test_final_loads_in_stock_diffusers_and_makes_the_evaluated_images(
    make_trainer, make_sd3_pipe, tmp_path, objective, peft
):
    from diffusers import StableDiffusion3Pipeline

    from flowrl import FlowSDE

    sampler = FlowSDE.from_config(make_sd3_pipe().scheduler.config, steps=4, noise_level=0.7)
    prompts = ["red", "a cat"]
    trainer = make_trainer(
        tmp_path, objective, peft, sampler=sampler, eval_prompts=prompts, iterations=3, learning_rate=2e-2
    )
    trainer.train()
    shown = trainer.evaluate()
    live = trainer.evaluate(weights="policy").grid
    assert (shown.grid - live).abs().max() > 1e-4, "the average is the policy: the test would prove nothing"

    if peft:
        pipe = make_sd3_pipe()
        pipe.load_lora_weights(tmp_path / "final", weight_name="pytorch_lora_weights.safetensors", use_safetensors=True)
    else:
        # The tiny model has no T5; stock diffusers wants to be told so.
        pipe = StableDiffusion3Pipeline.from_pretrained(tmp_path / "final", text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    images = pipe(
        prompts,
        latents=noise.batch_normal((4, 8, 8), 3, EVALUATION, [0, 1], [0, 0], noise.INITIAL),
        num_inference_steps=4,
        guidance_scale=1.0,
        height=16,
        width=16,
        **trainer.policy.options,
        output_type="pt",
    ).images
    torch.testing.assert_close(images, shown.grid, rtol=0, atol=1e-5)


def test_without_an_average_the_policy_is_saved(make_trainer, tmp_path):
    from safetensors.torch import load_file

    trainer = make_trainer(tmp_path, ema_decay=None, iterations=1)
    trainer.train()
    assert "ema" not in trainer.copies
    stored = load_file(tmp_path / "final" / "pytorch_lora_weights.safetensors")
    live = {n.replace(".default", ""): p for n, p in trainer.policy.trainable().items()}
    assert len(stored) == len(live)
    for name, value in stored.items():
        assert torch.equal(value, live[name.removeprefix("transformer.")]), name


def test_saving_and_evaluating_after_training(make_trainer, identical, tmp_path):
    """The README's order: train, then save elsewhere, then look."""
    from safetensors.torch import load_file

    trainer = make_trainer(tmp_path / "run", eval_prompts=["red"], iterations=1)
    trainer.train()
    trainer.save_pretrained(tmp_path / "out")
    assert trainer.evaluate().images == 1
    one, two = (load_file(tmp_path / f / "pytorch_lora_weights.safetensors") for f in ("run/final", "out"))
    identical(one, two)


# --------------------------------------------------------------------------------------- kinds of rewards


async def slow_red(images, prompts):
    await asyncio.sleep(0.001)
    return images[:, 0].flatten(1).mean(1)


def length(images, prompts, tag):
    return [float(len(p)) + (0.5 if t == "count" else 0.0) for p, t in zip(prompts, tag, strict=True)]


def partly(images, prompts):
    values = images[:, 2].flatten(1).mean(1)
    return RewardOutput(values, torch.arange(len(values)) != 1)


def test_rewards_of_every_kind_train(make_trainer, rows_of, tmp_path):
    trainer = make_trainer(
        tmp_path,
        rewards={slow_red: 2.0, length: 0.5, partly: 1.0, (lambda images, prompts: images.flatten(1).amax(1)): 0.0},
        iterations=2,
    )
    trainer.train()
    names = list(trainer.rewards.weights)
    assert names[:3] == ["slow_red", "length", "partly"] and trainer.rewards.weights[names[3]] == 0.0
    for row in rows_of(trainer):
        assert all(f"reward/{n}/mean" in row for n in names)
        assert row["reward/invalid_share"] == 2 / 8  # one of each batch of four
        assert row["train/grad_norm"] > 0


def test_the_total_is_the_weighted_sum(make_trainer, tmp_path):
    trainer = make_trainer(tmp_path, rewards={slow_red: 2.0, length: -0.5})
    rollout, batch, _, _ = trainer.rollout(0)
    order = torch.tensor(trainer.plan.rows(3, 0, 0)).argsort()
    red = rollout.media[:, 0].flatten(1).mean(1)[order]
    tags = [p.metadata["tag"] for p in rollout.prompts]
    words = torch.tensor(length(None, [p.text for p in rollout.prompts], tags))[order]
    torch.testing.assert_close(batch.reward, 2 * red - 0.5 * words)
    assert batch.group_id.tolist() == [rollout.prompts[i].index for i in order]


def test_a_reward_without_weight_does_not_train(make_trainer, state_of, tmp_path):
    def run(name, rewards):
        trainer = make_trainer(tmp_path / name, rewards=rewards, iterations=1)
        trainer.train()
        return state_of(trainer)

    a, b = run("a", {slow_red: 1.0}), run("b", {slow_red: 1.0, length: 0.0})
    assert all(torch.equal(a[k], b[k]) for k in a)
