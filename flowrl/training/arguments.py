"""`TrainingArguments`: every number of a run that is not the objective's, the sampler's or the adapter's."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal


@dataclass
class TrainingArguments:
    """Settings of a run. What defines the experiment never depends on the number of processes or on memory.

    Args:
        output_dir: folder of the run: logs, checkpoints, report.
        seed: everything random is a function of it and of indices.
        iterations: rollout-and-update rounds.
        prompts_per_iteration: P, distinct prompts drawn each iteration.
        group_size: G >= 2, samples per prompt.
        updates_per_iteration: optimizer steps on each rollout, each on its own share of the samples.
        sample_batch_size: samples per pipeline call and process, and images per call of a reward. Memory only.
        micro_batch_size: samples per forward and backward and process. Memory only.
        learning_rate, adam_beta1, adam_beta2, weight_decay, adam_epsilon: AdamW.
        lr_scheduler, warmup_updates: a name of diffusers' `get_scheduler`, over all updates of the run.
        max_grad_norm: gradient norm clip.
        ema_decay: decay of the averaged copy used for evaluation, min((1 + n) / (10 + n), ema_decay); None for none.
        ema_every: optimizer steps between its updates.
        mixed_precision: "no", "fp16" or "bf16", through accelerate.
        gradient_checkpointing: trade a forward for memory.
        processes: number of processes the run must have; None takes what the launcher started.
        ratio_tolerance: largest |log ratio| before the first update; None for 1e-5 in float32, 1e-2 in half precision.
        max_invalid_share: share of samples a reward may fail to score before the step stops.
        eval_every: iterations between evaluations; 0 evaluates before and after only.
        eval_images_per_prompt: samples per held-out prompt.
        save_every: iterations between checkpoints; 0 saves at the end only.
        keep_last, keep_best: how many recent and whether the best checkpoint stay.
        log_with: accelerate trackers ("tensorboard", "wandb", "trackio"); None takes TensorBoard where it is installed.
            metrics.jsonl is always written.
        log_images_every: iterations between logged grids of training samples; 0 for none.
        monitor_samples: samples on which exact drift (KL per step to old and reference) is measured each iteration.
        on_reward_hacking: what follows when the training reward rises while the held-out score falls, or the images
            drift into a red band: "warn", "stop" (with a checkpoint; a resumed run goes on) or "ignore".
    """

    output_dir: str = "runs/default"
    seed: int = 0
    iterations: int = 100
    prompts_per_iteration: int = 8
    group_size: int = 8
    updates_per_iteration: int = 1
    sample_batch_size: int = 64
    micro_batch_size: int = 16
    learning_rate: float = 3e-4
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = 1e-4
    adam_epsilon: float = 1e-8
    lr_scheduler: str = "constant"
    warmup_updates: int = 0
    max_grad_norm: float = 1.0
    ema_decay: float | None = 0.9
    ema_every: int = 8
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    gradient_checkpointing: bool = False
    processes: int | None = None
    ratio_tolerance: float | None = None
    max_invalid_share: float = 0.5
    eval_every: int = 0
    eval_images_per_prompt: int = 4
    save_every: int = 50
    keep_last: int = 2
    keep_best: bool = True
    log_with: tuple[str, ...] | None = None
    log_images_every: int = 25
    monitor_samples: int = 8
    on_reward_hacking: Literal["warn", "stop", "ignore"] = "warn"

    def __post_init__(self) -> None:
        for name in (
            "iterations",
            "prompts_per_iteration",
            "updates_per_iteration",
            "sample_batch_size",
            "micro_batch_size",
            "ema_every",
            "keep_last",
            "eval_images_per_prompt",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("eval_every", "save_every", "log_images_every", "monitor_samples", "warmup_updates"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.group_size < 2:
            raise ValueError(
                f"group_size is {self.group_size}: advantages compare the samples of one prompt, so a group needs "
                "at least 2 (24 published for Flow-GRPO)."
            )
        if self.learning_rate <= 0 or self.max_grad_norm <= 0:
            raise ValueError("learning_rate and max_grad_norm must be positive")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must lie in [0, 1), not {self.ema_decay}")
        if self.on_reward_hacking not in ("warn", "stop", "ignore"):
            raise ValueError(f"on_reward_hacking must be 'warn', 'stop' or 'ignore', not {self.on_reward_hacking!r}")
        if self.log_with is None:
            self.log_with = ("tensorboard",) if find_spec("tensorboard") else ()
        self.log_with = (self.log_with,) if isinstance(self.log_with, str) else tuple(self.log_with)
