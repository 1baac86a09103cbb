"""Colours of numbers, and the truth table of the reward-hacking alarm."""

import io
import math
from dataclasses import asdict

import pytest
import torch

from flowrl.training import bands
from flowrl.training.bands import BANDS, Band, Watch
from flowrl.training.trainer import Evaluation

NAN = float("nan")

# ------------------------------------------------------------------------------------------------- bands


@pytest.mark.parametrize(
    ("band", "values"),
    [
        (Band(1, 2), {-9: "green", 1: "green", 1.1: "amber", 2: "amber", 2.1: "red", NAN: "red"}),
        (Band(0.9, 0.5, "below"), {1: "green", 0.9: "green", 0.8: "amber", 0.5: "amber", 0.4: "red", NAN: "red"}),
        (Band(-0.5, -1, "below"), {3: "green", -0.5: "green", -0.6: "amber", -1.1: "red"}),
        (Band(1, 2, "both"), {-1: "green", 1: "green", -1.5: "amber", 1.5: "amber", -3: "red", 3: "red", NAN: "red"}),
    ],
)
def test_colours(band, values):
    assert {v: band.colour(v) for v in values} == values


def test_every_band_lies_in_order():
    for name, band in BANDS.items():
        assert (band.red < band.amber) == (band.side == "below"), name


def test_only_what_has_a_band_is_judged():
    metrics = {"kl/old": 0.0, "kl/old/step_00": 9e9, "train/effective_sample_size": 0.6, "reward/invalid_share": 1.0}
    colours = bands.judge(metrics)
    assert colours == {
        "kl/old": "green",
        "train/effective_sample_size": "amber",
        "reward/invalid_share": "red",
    }
    assert bands.headline(colours) == "red (reward/invalid_share)"
    assert bands.headline({"a": "amber", "b": "green", "c": "amber"}) == "amber (a, c)"
    assert bands.headline({}) == bands.headline({"a": "green"}) == "green"


# ------------------------------------------------------------------------------------------------- alarm


def run(watch, trained, held_out, error=0.01, images=None):
    """One evaluation before training and after each iteration; the alarms of each iteration."""
    if not watch.evaluations:
        watch.evaluated(held_out[0], error, {})
        held_out = held_out[1:]
    raised = []
    for i, (reward, score) in enumerate(zip(trained, held_out, strict=True)):
        metrics = {"reward/mean": reward} | ({"images/high_frequency": images[i]} if images else {})
        metrics |= watch.observe(metrics)
        metrics |= watch.evaluated(score, error, {}) | {"eval/overall": score}
        raised.append(watch.alarms(metrics))
    return raised


# The fall must exceed 2 standard errors of a difference: 2 sqrt(2) .01 = .028.
@pytest.mark.parametrize(
    ("trained", "held_out", "alarms"),
    [
        ([1, 2, 3, 4], [0.5, 0.6, 0.7, 0.8, 0.9], []),  # both rise
        ([1, 2, 3, 4], [0.5, 0.6, 0.5, 0.4, 0.3], [2]),  # the second evaluation below the best; once only
        ([1, 2, 3, 4], [0.5, 0.4, 0.3, 0.2, 0.1], [2]),  # from the start; one iteration has not risen yet
        ([1, 2, 3, 4], [0.5, 0.5, 0.48, 0.48, 0.48], []),  # within the noise
        ([1, 2, 3, 4], [0.5, 0.5, 0.46, 0.46, 0.46], [2]),  # a step down that stays is beyond it
        ([1, 2, 3, 4], [0.5, 0.4, 0.5, 0.4, 0.5], []),  # not twice in a row
        ([4, 3, 2, 1], [0.5, 0.6, 0.5, 0.4, 0.3], []),  # training failed: no hacking
        ([1, 1, 1, 1], [0.5, 0.6, 0.5, 0.4, 0.3], []),  # nothing was gained
    ],
)
def test_trained_up_and_held_out_down(trained, held_out, alarms):
    raised = run(Watch(), trained, held_out)
    assert [i for i, messages in enumerate(raised) if messages] == alarms
    for messages in raised:
        for message in messages:
            assert "held-out score fell" in message and "standard errors below its best" in message


def test_the_numbers_of_an_evaluation_by_hand():
    watch = Watch()
    assert watch.evaluated(0.5, 0.03, {"a": 0.2, "judge": 3.0}) == {}
    first = {"reward/mean": 1.0, "reward/a/mean": 0.3, "reward/a/std": 0.4, "reward/flat/std": 0.0}
    watch.observe(first)
    watch.observe(first | {"reward/mean": 2.0, "reward/a/mean": 0.8})
    # Averages: 1 + .2 (2 - 1) and .3 + .2 (.8 - .3). Gap: (.1 - (.25 - .2)) / .4; the judge is not trained on.
    found = watch.evaluated(0.3, 0.04, {"a": 0.25, "judge": 1.0})
    assert watch.smooth["reward/mean"] == pytest.approx(1.2)
    assert found == pytest.approx({"held_out/fall": 0.2 / 0.05, "held_out/suspect": 1, "held_out/gap": 0.125})
    assert watch.evaluated(0.3, 0.04, {}, keep=False)["held_out/suspect"] == 2
    assert watch.evaluated(0.6, 0.04, {}) == pytest.approx({"held_out/fall": -2.0, "held_out/suspect": 0})


def test_change_of_the_images_is_measured_in_powers_of_two():
    watch = Watch()
    assert watch.observe({"images/saturation": 0.2, "train/loss": 1.0}) == {"images/change/saturation": 0.0}
    change = watch.observe({"images/saturation": 1.2})["images/change/saturation"]
    assert change == pytest.approx(math.log2(0.4 / 0.2), abs=1e-4)
    assert watch.observe({"images/saturation": NAN}) == {"images/change/saturation": change}
    assert watch.first == {"images/saturation": 0.2}


def test_images_that_drift_alarm_once():
    raised = run(Watch(), [1] * 12, [0.5] * 13, images=[1.0] + 11 * [0.0])
    # .8^n < 2^-1.5 from n = 5 on
    assert [i for i, messages in enumerate(raised) if messages] == [5]
    assert "high frequency went from 1 to 0.3277" in raised[5][0]


def test_a_watch_from_a_checkpoint_alarms_alike():
    trained, held_out = [1, 2, 3, 4, 5, 6, 7], [0.5, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    images = [1.0] + 6 * [0.0]
    whole = Watch()
    expected = run(whole, trained, held_out, images=images)
    assert sum(len(messages) for messages in expected) == 2
    for stop in range(1, 7):
        first = Watch()
        start = run(first, trained[:stop], held_out[: stop + 1], images=images[:stop])
        file = io.BytesIO()
        torch.save(asdict(first), file)
        file.seek(0)
        second = Watch(**torch.load(file, weights_only=True))
        assert start + run(second, trained[stop:], held_out[stop + 1 :], images=images[stop:]) == expected
        assert asdict(second) == asdict(whole)


# ----------------------------------------------------------------------------------------------- trainer


class Rising:
    """Brightness, and more with every iteration."""

    name = "brightness"

    def __call__(self, images, prompts):
        return images.flatten(1).mean(1) + self.trainer.iteration


@pytest.fixture
def hacked(make_trainer, tmp_path, monkeypatch):
    """(folder, **arguments) -> a trainer whose training reward rises; evaluations fall from the second on."""

    def make(folder, **arguments):
        reward = Rising()
        trainer = reward.trainer = make_trainer(
            tmp_path / folder,
            rewards=reward,
            eval_prompts=["red"],
            eval_every=1,
            save_every=1,
            keep_last=9,
            **arguments,
        )

        def evaluate(*_):
            score = 1 - 0.1 * abs(trainer.iteration - 1)
            grid = torch.zeros(1, 3, 8, 8)
            task = {"all": {"score": score, "images": 4, "prompts": 1}}
            return Evaluation(score, task, {"brightness": score}, 4, 0.0, trainer.iteration, grid, ["red"], 0.01)

        monkeypatch.setattr(trainer, "evaluate", evaluate)
        return trainer

    return make


def test_a_warning_with_its_remedy(hacked, rows_of, tmp_path, capsys):
    trainer = hacked("a")
    summary = trainer.train()
    said = capsys.readouterr().out
    assert said.count("reward hacking?") == len(summary["alarms"]) == 1
    for part in (
        "After iteration 3 the training reward rose",
        "0.8 now",
        "kl",
        "learning_rate",
        str(tmp_path / "a/best"),
    ):
        assert part in said
    assert summary["finished"]
    rows = rows_of(trainer)
    assert [r.get("held_out/suspect") for r in rows] == [0, 1, 2, None]  # the last evaluation has no row
    assert [r.get("health/held_out/fall") for r in rows] == [0, 2, 2, None]
    for row in rows:
        for name in ("high_frequency", "saturation", "sharpness", "diversity"):
            assert row[f"images/{name}"] > 0 and row[f"health/images/change/{name}"] == 0
        assert 0 < row["train/effective_sample_size"] <= 1
        assert "log_prob_gap/step_02" in row
    assert rows[0]["images/change/diversity"] == 0 != rows[1]["images/change/diversity"]


def test_ignored(hacked, capsys):
    assert hacked("a", on_reward_hacking="ignore").train()["alarms"] == []
    assert "reward hacking" not in capsys.readouterr().out


def test_a_stop_with_a_checkpoint_that_goes_on(hacked, state_of, rows_of, identical, capsys):
    whole = hacked("a")
    whole.train()
    capsys.readouterr()
    stopped = hacked("b", on_reward_hacking="stop")
    summary = stopped.train()
    assert not summary["finished"] and summary["iterations"] == 3
    said = capsys.readouterr().out
    assert "reward hacking?" in said and "stopped after iteration 3" in said
    again = hacked("b", on_reward_hacking="stop")
    summary = again.train(resume="auto")
    assert summary["finished"] and len(summary["alarms"]) == 1
    assert "reward hacking?" not in capsys.readouterr().out
    identical(state_of(whole), state_of(again))
    for x, y in zip(rows_of(whole), rows_of(again), strict=True):
        identical(x, y)


def test_a_resumed_run_alarms_at_the_same_iteration(hacked, rows_of, identical, tmp_path, capsys):
    whole = hacked("a")
    expected = whole.train()["alarms"]
    said = capsys.readouterr().out
    again = hacked("b")
    assert again.train(resume=tmp_path / "a/checkpoints/iteration-000002")["alarms"] == expected
    assert "After iteration 3" in said and "After iteration 3" in capsys.readouterr().out
    for x, y in zip(rows_of(whole)[2:], rows_of(again), strict=True):
        identical(x, y)
    assert asdict(whole.watch) == asdict(again.watch)


def test_a_shorter_runs_last_evaluation_leaves_no_trace(make_trainer, tmp_path):
    settings = {"eval_prompts": ["red", "a cat"], "eval_every": 2}
    make_trainer(tmp_path / "a", iterations=3, **settings).train()
    resumed, whole = (make_trainer(tmp_path / name, iterations=5, **settings) for name in "ab")
    resumed.train(resume="auto")
    whole.train()
    assert asdict(resumed.watch) == asdict(whole.watch)
    assert len(whole.watch.evaluations) == 3  # before, 2, 4


def test_the_standard_error_of_a_score(make_trainer, tmp_path):
    prompts = [{"prompt": "red", "tag": "x"}, {"prompt": "a cat", "tag": "y"}, {"prompt": "moon", "tag": "y"}]
    values = torch.tensor([1.0, 2.0, 6.0, 7.0, 3.0, 5.0])
    trainer = make_trainer(tmp_path, rewards=lambda images, prompts: values, eval_prompts=prompts, sample_batch_size=8)
    found = trainer.evaluate(images_per_prompt=2)
    assert found.overall == (1.5 + 5.25) / 2
    assert found.standard_error == pytest.approx((values.var(correction=0).item() * (1 / 2 + 1 / 4)) ** 0.5 / 2)
    assert found.summary()["standard_error"] == found.standard_error


def test_an_unknown_reaction_is_refused():
    from flowrl import TrainingArguments

    with pytest.raises(ValueError, match="on_reward_hacking must be 'warn', 'stop' or 'ignore', not 'panic'"):
        TrainingArguments(on_reward_hacking="panic")
