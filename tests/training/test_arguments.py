"""Settings that cannot work are refused when they are made."""

import pytest

from flowrl import TrainingArguments


def test_the_defaults_are_accepted():
    args = TrainingArguments()
    assert args.group_size >= 2 and args.log_with == ("tensorboard",)


@pytest.mark.parametrize(
    "name",
    [
        "iterations",
        "prompts_per_iteration",
        "updates_per_iteration",
        "sample_batch_size",
        "micro_batch_size",
        "ema_every",
        "keep_last",
        "eval_images_per_prompt",
    ],
)
def test_counts_start_at_one(name):
    for value in (0, -3):
        with pytest.raises(ValueError, match=f"{name}.*{value}"):
            TrainingArguments(**{name: value})
    assert getattr(TrainingArguments(**{name: 1}), name) == 1


@pytest.mark.parametrize("name", ["eval_every", "save_every", "log_images_every", "monitor_samples", "warmup_updates"])
def test_intervals_may_be_zero_but_not_negative(name):
    assert getattr(TrainingArguments(**{name: 0}), name) == 0
    with pytest.raises(ValueError, match=f"{name}.*-1"):
        TrainingArguments(**{name: -1})


@pytest.mark.parametrize("value", [1, 0, -2])
def test_a_group_needs_two(value):
    with pytest.raises(ValueError, match=r"group_size.*at least 2"):
        TrainingArguments(group_size=value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": -1e-4}, "learning_rate"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"ema_decay": -0.1}, "ema_decay"),
    ],
)
def test_values_out_of_range(changes, match):
    with pytest.raises(ValueError, match=match):
        TrainingArguments(**changes)


def test_no_average_and_an_average_without_memory_are_allowed():
    assert TrainingArguments(ema_decay=None).ema_decay is None
    assert TrainingArguments(ema_decay=0).ema_decay == 0


def test_trackers_are_a_tuple_however_they_are_given():
    assert TrainingArguments(log_with="wandb").log_with == ("wandb",)
    assert TrainingArguments(log_with=["tensorboard", "wandb"]).log_with == ("tensorboard", "wandb")
    assert TrainingArguments(log_with=()).log_with == ()


def test_a_misspelt_name_is_refused():
    with pytest.raises(TypeError, match="learnig_rate"):
        TrainingArguments(learnig_rate=1e-4)
