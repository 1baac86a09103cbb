"""How much an iteration costs beyond the transformer passes it cannot do without.

    python benchmarks/overhead.py [--threads 2] [--iterations 3] [--model FOLDER]

For each objective: run whole training iterations and, alternating with them in the same process, the bare transformer
forwards and backwards that such an iteration makes (counted by a hook: same batch sizes, same arguments, same order).
Prints the ratio of the two and where the rest goes. Machines are noisy: read the ratio, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

import flowrl
from flowrl.miniature.shapes import WEIGHTS


def trainer_of(name: str, model: Path, directory: str) -> flowrl.Trainer:
    policy = flowrl.DiffusersPolicy(flowrl.load_pipeline(model), max_sequence_length=0)
    config = policy.pipe.scheduler.config
    objective, sampler = {
        "FlowGRPO": (flowrl.FlowGRPO(clip_range=1e-3), flowrl.FlowSDE.from_config(config, steps=8)),
        "DiffusionNFT": (flowrl.DiffusionNFT(), flowrl.ODE.from_config(config, steps=8)),
    }[name]
    args = flowrl.TrainingArguments(
        output_dir=directory,
        prompts_per_iteration=12,
        group_size=12,
        sample_batch_size=144,
        micro_batch_size=72,
        updates_per_iteration=2 if name == "FlowGRPO" else 1,
        log_with=(),
    )
    return flowrl.Trainer(policy, objective, sampler, "shapes", "shapes/train", args=args)


def iterate(trainer: flowrl.Trainer, iteration: int) -> dict[str, float]:
    """One iteration as `Trainer.train` does it, without evaluation and logging; seconds per phase."""
    before = dict(trainer.seconds)
    rollout, batch, advantage, _ = trainer.rollout(iteration)
    with trainer._timed("update"):
        for index in range(trainer.args.updates_per_iteration):
            stats = trainer.update(rollout, batch, advantage, iteration, index)
    trainer.objective.after_update(trainer.copies, iteration, stats)
    return {k: v - before.get(k, 0.0) for k, v in trainer.seconds.items()}


def bare(module: torch.nn.Module, calls: list[tuple[bool, dict]]) -> float:
    """Seconds of the recorded transformer calls alone, with a backward where there was one."""
    start = time.perf_counter()
    for grad, kwargs in calls:
        with torch.set_grad_enabled(grad):
            output = module(**kwargs)[0]
            if grad:
                output.mean().backward()
    module.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def measure(name: str, model: Path, iterations: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_of(name, model, directory)
        module = trainer.policy.module
        calls: list[tuple[bool, dict]] = []
        handle = module.register_forward_pre_hook(
            lambda m, args, kwargs: calls.append((torch.is_grad_enabled(), dict(kwargs))), with_kwargs=True
        )
        iterate(trainer, 0)  # warm-up, and the record of what an iteration calls
        handle.remove()
        whole, alone, phases = [], [], []
        for i in range(1, iterations + 1):
            start = time.perf_counter()
            phases.append(iterate(trainer, i))
            whole.append(time.perf_counter() - start)
            alone.append(bare(module, calls))
        # Rollouts are forwards only, so their own overhead is measured against those forwards.
        rollout_alone = statistics.median(
            bare(module, [c for c in calls[: trainer.sampler.steps]]) for _ in range(iterations)
        )
    samples = trainer.plan.samples
    count = lambda grad: sum(len(k["hidden_states"]) for g, k in calls if g is grad) / samples  # noqa: E731
    return {
        "objective": name,
        "ratio": statistics.median(w / a for w, a in zip(whole, alone, strict=True)),
        "seconds_iteration": statistics.median(whole),
        "seconds_bare": statistics.median(alone),
        "forwards_per_image": count(False),
        "forward_backwards_per_image": count(True),
        "phases": {k: statistics.median(p[k] for p in phases) for k in phases[0]},
        "rollout_bare": rollout_alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = [measure(n, args.model, args.iterations) for n in ("FlowGRPO", "DiffusionNFT")]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for r in results:
        p, unit = r["phases"], r["seconds_bare"] / 100
        update_bare = r["seconds_bare"] - r["rollout_bare"]
        print(
            f"{r['objective']}: iteration / bare transformer passes = {r['ratio']:.3f} "
            f"({r['seconds_iteration']:.2f} s / {r['seconds_bare']:.2f} s; per image "
            f"{r['forwards_per_image']:.0f} forwards, {r['forward_backwards_per_image']:.0f} forward+backwards)\n"
            f"  where the rest goes, in % of the bare passes: "
            f"VAE decode {p['decode'] / unit:.1f}, reward {p['reward'] / unit:.1f}, "
            f"rollout beyond its passes {(p['rollout'] - r['rollout_bare']) / unit:.1f}, "
            f"update beyond its passes {(p['update'] - update_bare) / unit:.1f}"
        )


if __name__ == "__main__":
    main()
