"""A training run in a process of its own, for tests that kill it: `python job.py FOLDER PIPELINE OBJECTIVE PEFT`.

The settings must be those of `run` in test_resume.py. With `DIE_IN_ITERATION=n` the process kills itself with SIGKILL
while iteration n is being scored.
"""

import os
import signal
import sys

import torch

torch.set_num_threads(1)


class Brightness:
    """Mean of the pixels; kills the process at its n-th call."""

    name = "brightness"

    def __init__(self, die_at: int | None) -> None:
        self.die_at, self.calls = die_at, 0

    def __call__(self, images, prompts):
        if self.calls == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls += 1
        return images.flatten(1).mean(1)


def main(folder: str, pipeline: str, objective: str, peft: str, iterations: str, resume: str) -> None:
    from peft import LoraConfig

    from flowrl import DiffusersPolicy, DiffusionNFT, FlowGRPO, FlowSDE, Trainer, TrainingArguments, load_pipeline
    from flowrl.samplers.schedules import SingleShift

    die = os.environ.get("DIE_IN_ITERATION")
    torch.manual_seed(0)
    trainer = Trainer(
        DiffusersPolicy(
            load_pipeline(pipeline),
            LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian") if peft == "lora" else None,
            height=16,
            width=16,
            max_sequence_length=20,
        ),
        FlowGRPO(clip_range=1e-3, kl=0.01) if objective == "grpo" else DiffusionNFT(kl=1e-3),
        FlowSDE(steps=4, noise_level=0.7, schedule=SingleShift(1.5)),
        Brightness(int(die) if die else None),
        ["red", "a cat", "moon", "black"],
        args=TrainingArguments(
            output_dir=folder,
            seed=3,
            iterations=int(iterations),
            prompts_per_iteration=2,
            group_size=4,
            updates_per_iteration=2,
            sample_batch_size=8,
            micro_batch_size=4,
            learning_rate=3e-3,
            ema_every=2,
            save_every=2,
            log_with=(),
            log_images_every=0,
            monitor_samples=2,
        ),
    )
    trainer.train(resume=resume or False)


if __name__ == "__main__":
    main(*sys.argv[1:])
