"""How much of a slow reward hides behind the sampling.

    python benchmarks/reward_overlap.py [--threads 1] [--iterations 2] [--share 0.8]

A reward server in a process of its own sleeps a fixed time per image and scores one request after the other. The world
"shapes" trains on it, in turn with the rewards called on each batch while the next is sampled (as the trainer does) and
on all images after the last one, in one process and on the same iterations. The time per image is set so that scoring
takes `share` of the sampling. With K batches at most (K - 1) / K of it can hide: the last batch has nothing to hide
behind. Machines are noisy: read the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from overhead import iterate

import flowrl
from flowrl.miniature import shapes
from flowrl.rewards import RemoteReward, RewardServer, RewardSet

BATCHES, BATCH = 6, 12


def sleeper(seconds: float):
    """A reward that takes `seconds` per image."""

    def sleep(images, prompts):
        time.sleep(seconds * len(prompts))
        return images.mean((1, 2, 3))

    return sleep


class AtOnce(RewardSet):
    """Scored like a group-wise set: in one call, when all is sampled."""

    groupwise = True


def trainer_in(directory: str) -> flowrl.Trainer:
    policy = shapes.load_policy()
    args = flowrl.TrainingArguments(
        output_dir=directory,
        prompts_per_iteration=BATCHES,
        group_size=BATCH,
        sample_batch_size=BATCH,
        micro_batch_size=BATCH,
        log_with=(),
    )
    sampler = flowrl.ODE.from_config(policy.pipe.scheduler.config, steps=8)
    return flowrl.Trainer(policy, flowrl.DiffusionNFT(), sampler, sleeper(0.0), "shapes/train", args=args)


def measure(share: float, iterations: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_in(directory)
        phases = iterate(trainer, 0)
        sampling = phases["rollout"] + phases["decode"]
        seconds = share * sampling / (BATCHES * BATCH)
        command = [sys.executable, __file__, "--serve", str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().partition(" at ")[2].partition(";")[0]  # "serving ... at URL; ..."
                compare(trainer, url, sampling, seconds, iterations)
            finally:
                server.terminate()


def compare(trainer: flowrl.Trainer, url: str, sampling: float, seconds: float, iterations: int) -> None:
    reward = RemoteReward(url)
    ways = {"overlapped": RewardSet(reward), "at once": AtOnce(reward)}
    phases: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for iteration in range(1, iterations + 1):
        for way, trainer.rewards in ways.items():
            phases[way].append(iterate(trainer, iteration))
    median = lambda of, *which: statistics.median(of(p) for way in which for p in phases[way])  # noqa: E731
    rollout = {way: median(lambda p: p["rollout"] + p["decode"] + p["reward"], way) for way in ways}
    waited = {way: median(lambda p: p["reward"], way) for way in ways}
    update = median(lambda p: p["update"], *ways)  # the same work either way
    scoring, before, after = BATCHES * BATCH * seconds, rollout["at once"], rollout["overlapped"]
    for way in ways:
        print(f"{way:>10}: rollout {rollout[way]:.2f} s, of which waiting for rewards {waited[way]:.2f} s")
    print(
        f"{BATCHES} batches of {BATCH}: sampling {sampling:.2f} s, scoring {scoring:.2f} s, update {update:.2f} s\n"
        f"overlapped / at once: rollout {after / before:.3f}, iteration {(after + update) / (before + update):.3f}\n"
        f"hidden {1 - waited['overlapped'] / waited['at once']:.0%} of the scoring, "
        f"at most {(1 - 1 / BATCHES) * min(1.0, sampling / scoring):.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.8, help="time to score / time to sample")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return RewardServer(sleeper(args.serve), port=0).serve()
    torch.set_num_threads(args.threads)
    measure(args.share, args.iterations)


if __name__ == "__main__":
    main()
