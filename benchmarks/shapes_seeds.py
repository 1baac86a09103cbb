"""Held-out score of a shapes recipe before and after training, over several seeds.

    python benchmarks/shapes_seeds.py [RECIPE] [--seeds 0 1 2] [key=value ...]

Trains into runs/RECIPE-seed-N (finished runs are only read) and prints the table of the README, per task with the range
over seeds. The seed sets prompts, noise and evaluation images.
"""

from __future__ import annotations

import argparse
import statistics

from flowrl.evaluation.report import write_report
from flowrl.training.recipe import build_trainer, load_recipe


def run(recipe: str, seed: int, overrides: list[str]) -> dict:
    output = f"runs/{recipe}-seed-{seed}"
    trainer = build_trainer(load_recipe(recipe, [*overrides, f"training.seed={seed}", f"training.output_dir={output}"]))
    summary = trainer.train(resume="auto")
    write_report(trainer.output_dir)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="shapes-nft")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    summaries = [run(args.recipe, seed, args.overrides) for seed in args.seeds]
    tasks = {t: v["images"] for t, v in summaries[0]["before"]["per_task"].items()}
    print(f"\n| task | images | before | after | range over {len(summaries)} seeds |\n| --- | --- | --- | --- | --- |")
    for task in [*tasks, "overall"]:

        def score(when: str, s: dict, task: str = task) -> float:
            return s[when]["overall"] if task == "overall" else s[when]["per_task"][task]["score"]

        before, after = ([score(when, s) for s in summaries] for when in ("before", "after"))
        images = tasks.get(task, summaries[0]["before"]["images"])
        print(
            f"| {task} | {images} | {statistics.mean(before):.2f} | {statistics.mean(after):.2f} | "
            f"{min(after):.2f} - {max(after):.2f} |"
        )
    best = [f"{s['best']['overall']:.3f} (iteration {s['best']['iteration']})" for s in summaries]
    seconds = [f"{s['seconds']:.0f}" for s in summaries]
    print(f"\nbest held-out score on the way: {', '.join(best)}\nseconds: {', '.join(seconds)}")


if __name__ == "__main__":
    main()
