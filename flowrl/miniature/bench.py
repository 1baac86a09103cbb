"""The comparison on "shapes": every objective, and every sampler with Flow-GRPO, under one budget.

A run is an ordinary `Trainer` of a recipe with constant learning rate. It goes on until both budgets, transformer
forwards and seconds, are spent, so that one run serves both tables. What is counted:

    forwards   rows of the batch through the transformer while sampling rollouts and updating. Evaluation, monitoring
               and the check before the first update are not counted. A guided step has two rows.
    work       the same with rows that carry a gradient counted three times: a backward costs about two forwards
    seconds    sampling, decoding, rewards and updates, by the trainer's own clock
    kl         KL(base || policy) of a whole Flow-SDE generation, nats per image: the sum over its stochastic steps of
               the exact Gaussian KL on states that the base visited; 16 held-out prompts, one generation each
    diversity  root mean square pixel distance ([0, 1]) between two images of one prompt: 16 held-out prompts x 4 images
    zero_spread_share   share of training groups with one reward for all, mean since the last evaluation

Score, kl and diversity are of the averaged weights, at the same noise in every evaluation of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowrl.samplers import FlowSDE

if TYPE_CHECKING:
    from flowrl.training.recipe import Recipe
    from flowrl.training.trainer import Trainer


@dataclass(frozen=True)
class Variant:
    """One method of the comparison: data only.

    Args:
        recipe, overrides: what it runs; `COMMON` comes in between.
        coefficient, values: its main coefficient (a recipe key) and the two values that tuning tries.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...]
    coefficient: str
    values: tuple[float, float]


COMMON = (
    "rewards={shapes_official: 0.66, shapes: 0.33}",  # the recipes' mix in [0, 1], which a Beta tracker needs
    "training.iterations=1000000",  # the budget ends a run
    "training.lr_scheduler=constant",
    "training.ema_decay=0.9",
    "training.eval_images_per_prompt=8",
    "training.save_every=0",
    "training.keep_best=false",
    "training.log_images_every=0",
    "training.monitor_samples=0",
)
# With one update on each rollout no ratio leaves one: neither a clip nor a trust region would ever act.
_TWO = "training.updates_per_iteration=2"
_KL = ("objective.kl", (0.0, 0.04))

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("flow-grpo", "shapes-flow-grpo", (_TWO,), *_KL),
        # Log-ratios averaged over the 128 latent elements spread as sqrt(2 delta / 128): 1e-4 is about the clip 1e-3.
        Variant("flow-dppo", "shapes-flow-dppo", (_TWO,), "objective.delta", (1e-5, 1e-4)),
        # Of the 7 steps the first half may be left; at tau 3 every one of them is merged.
        Variant(
            "e-grpo",
            "shapes-flow-grpo",
            (_TWO, "objective=EGRPO", "sampler.plan={name: Merged, active: [0, 1, 2]}"),
            "sampler.plan.tau",
            (2.2, 3.0),
        ),
        Variant("superflow", "shapes-flow-grpo", (_TWO, "objective=SuperFlow"), *_KL),
        Variant("diffusion-nft", "shapes-nft", ("objective.old_schedule=1",), "objective.nft_beta", (1.0, 0.1)),
        Variant("cps", "shapes-flow-grpo", (_TWO, "sampler=CPS"), *_KL),
        Variant("dance", "shapes-flow-grpo", (_TWO, "sampler=DanceSDE"), *_KL),
        Variant("fast", "shapes-flow-grpo", (_TWO, "sampler.plan={name: Window, size: 2, start_range: [0, 6]}"), *_KL),
        # Four positions of a window of 3; it stays on each for a quarter of some 60 iterations.
        Variant("mix", "shapes-flow-grpo", (_TWO, "sampler.plan={name: SlidingWindow, size: 3, period: 15}"), *_KL),
    )
}
SAMPLERS = ("flow-grpo", "cps", "dance", "fast", "mix")  # the rest are objectives, and so is the first
LEARNING_RATES = (1e-4, 3e-4, 1e-3)
TUNING_SHARE = 0.25  # of the budget of forwards
TIE = 0.02  # about the standard error of a setting's score
TUNING_PROMPTS = f"{__name__}:tuning_prompts"


@dataclass(frozen=True)
class Budget:
    """When a run has spent enough: both of its budgets; `every` is the number of iterations between evaluations."""

    forwards: int = 200_000
    seconds: float = 300.0
    every: int = 5

    def spent(self, forwards: int, seconds: float) -> float:
        """Share of the budget that is spent, of the one that lasts longer; at 1 the run ends."""
        shares = [forwards / self.forwards, *([seconds / self.seconds] if self.seconds else [])]
        return min(1.0, *shares)


def tuning_prompts() -> list[dict[str, Any]]:
    """Up to eight training prompts per task, spread evenly: tuning leaves the held-out prompts alone."""
    from flowrl.miniature.shapes.world import TASKS, train_prompts

    chosen = []
    for task in TASKS:
        every = [p for p in train_prompts() if p["tag"] == task]
        chosen += every[:: -(-len(every) // 8)]
    return chosen


# ------------------------------------------------------------------------------------------------------ measuring


class Forwards:
    """Counts rows of the batch through a trainer's transformer while it samples rollouts and updates.

    `rows`: "rollout", "update" (without gradient) and "gradient".
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.rows = {"rollout": 0, "update": 0, "gradient": 0}
        trainer.policy.module.register_forward_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kind = self.trainer.phase
        if kind == "update" and torch.is_grad_enabled():
            kind = "gradient"
        if kind in self.rows:
            self.rows[kind] += len(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    @property
    def total(self) -> int:
        return sum(self.rows.values())

    @property
    def work(self) -> int:
        return self.total + 2 * self.rows["gradient"]


class Probe:
    """KL to the base and diversity on fixed prompts and noise; made before the first update."""

    def __init__(self, trainer: Trainer, prompts: int = 16, images: int = 4) -> None:
        self.trainer, self.images = trainer, images
        every = trainer.eval_prompts
        assert every is not None
        self.prompts = [every[round(i * (len(every) - 1) / (prompts - 1))] for i in range(prompts)]
        self.sampler = FlowSDE(steps=trainer.sampler.steps, schedule=trainer.sampler.schedule)
        self.base = self._sample(1, self.sampler)

    def _sample(self, images: int, sampler: Any) -> Any:
        from flowrl.training.trainer import EVALUATION

        rows = [p for p in self.prompts for _ in range(images)]
        members = list(range(images)) * len(self.prompts)
        return self.trainer.policy.sample(
            rows, members, sampler, seed=0, iteration=EVALUATION, batch_size=self.trainer.args.sample_batch_size
        )

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        policy = self.trainer.policy
        with policy.use("ema" if "ema" in self.trainer.copies else "policy"):
            kl = 0.0
            for unit in range(self.base.units):
                now = policy.evaluate(self.base, unit, self.sampler).distribution
                start = type(now)(self.base.means[:, unit], now.std)
                kl += start.kl(now, reduce="sum").mean().item()
            latents = self._sample(self.images, self.trainer.eval_sampler).latents
            pixels = policy.decode(latents).flatten(1).reshape(len(self.prompts), self.images, -1)
        distance = torch.stack([torch.pdist(group) for group in pixels]) / pixels.shape[2] ** 0.5
        return {"kl": kl, "diversity": distance.mean().item()}


class Curve:
    """What a run is worth as it goes on: give `after` to `Trainer.train`, then read `points`."""

    def __init__(self, trainer: Trainer, budget: Budget, report: Callable[[float], None]) -> None:
        self.trainer, self.budget, self.report = trainer, budget, report
        self.forwards, self.probe = Forwards(trainer), Probe(trainer)
        self.spent = 0.0
        self._measured: list[dict[str, Any]] = []
        self._zero_spread: list[float] = []
        self._measure()

    def after(self, metrics: Mapping[str, float]) -> bool:
        """Measure when the trainer has just evaluated; True when the budget is spent."""
        self._zero_spread.append(metrics["reward/zero_spread_share"])
        if len(self.trainer.history) > len(self._measured):
            self._measure()
        self.spent = self.budget.spent(self.forwards.total, self.seconds)
        self.report(self.spent)
        return self.spent >= 1

    @property
    def seconds(self) -> float:
        return sum(self.trainer.seconds[phase] for phase in ("rollout", "decode", "reward", "update"))

    def _measure(self) -> None:
        shares, self._zero_spread = self._zero_spread, []
        self._measured.append(
            {
                "iteration": self.trainer.iteration,
                "forwards": self.forwards.total,
                "work": self.forwards.work,
                "seconds": round(self.seconds, 3),
                "zero_spread_share": sum(shares) / len(shares) if shares else None,
                **self.probe.measure(),
            }
        )

    @property
    def points(self) -> list[dict[str, Any]]:
        """One per evaluation, the one before training first: `overall`, `per_task` and what is counted."""
        return [
            {**m, "overall": e["overall"], "per_task": {t: v["score"] for t, v in e["per_task"].items()}}
            for m, e in zip(self._measured, self.trainer.history, strict=False)  # a run can break between the two
        ]


def measured_run(recipe: Recipe, budget: Budget, report: Callable[[float], None]) -> dict[str, Any]:
    """Train until the budget is spent: the curve's `points`, and `failure`, the message of what ended it early or None.

    Args:
        report: called after every iteration with the share of the budget that is spent.

    Raises:
        KeyboardInterrupt: interrupted by Ctrl-C or SIGTERM.
    """
    from flowrl.training.recipe import build_trainer

    curve = failure = None
    try:
        curve = Curve(build_trainer(recipe), budget, report)
        curve.trainer.train(on_iteration=curve.after)
        if curve.spent < 1:
            raise KeyboardInterrupt
    except Exception as error:  # a run that breaks is a result
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {"points": curve.points if curve else [], "failure": failure}


def cost(variant: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Transformer forwards per training image, counted in one iteration on the shipped model.

    Returns `steps` (of the sampler), `group_size`, "rollout", "update" (without gradient), "gradient", their sum
    `forwards`, and `work`, in which a row with gradient counts three times.
    """
    from flowrl.training.recipe import build_trainer

    small = ("eval_prompts=null", "training.prompts_per_iteration=2")
    with tempfile.TemporaryDirectory() as folder, _quiet(Path(os.devnull)):
        trainer = build_trainer(recipe_of(VARIANTS[variant], {}, [*small, *overrides, f"training.output_dir={folder}"]))
        forwards = Forwards(trainer)
        trainer.train(on_iteration=lambda metrics: True)
    images = trainer.plan.samples
    rows = {**forwards.rows, "forwards": forwards.total, "work": forwards.work}
    batch = {"steps": trainer.sampler.steps, "group_size": trainer.args.group_size}
    return {**batch, **{k: round(v / images, 3) for k, v in rows.items()}}


# -------------------------------------------------------------------------------------------------------- running


def recipe_of(variant: Variant, setting: Mapping[str, float], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a variant with a setting of its tuned keys; `overrides` come last.

    Raises:
        RecipeError: as `load_recipe`.
    """
    from flowrl.training.recipe import load_recipe

    chosen = [f"{key}={value}" for key, value in setting.items()]
    return load_recipe(variant.recipe, [*COMMON, *variant.overrides, *chosen, *overrides])


def select(only: Iterable[str] | None) -> list[Variant]:
    """The variants of these names, all of them for None.

    Raises:
        ValueError: unknown name, with the nearest one.
    """
    from flowrl.recipes import nearest

    names = list(VARIANTS if only is None else only)
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"no method {name!r} in the benchmark{nearest(name, VARIANTS)}")
    return [VARIANTS[name] for name in names]


def comparison(
    output: Path,
    only: Iterable[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    budget: Budget = Budget(),
    overrides: Sequence[str] = (),
) -> list[Job]:
    """A job for every (seed, variant), with records in `output`.

    Settings come from `output/tuning.json` where it names the variant; samplers fall back on what it says of
    Flow-GRPO; else they are the recipe's.

    Raises:
        ValueError: an unknown variant or an override that does not fit, or `output` holds a record that was made with
            another budget or other settings.
    """
    tuning = _read(output / "tuning.json") or {}
    jobs = []
    for seed in seeds:
        for v in select(only):
            tuned = v.name if v.name in tuning or v.name not in SAMPLERS else SAMPLERS[0]
            chosen = tuning.get(tuned, {}).get("chosen", {})
            jobs.append(Job(output / v.name / f"seed-{seed}.json", v, seed, chosen, budget, overrides))
    return jobs


def search(
    output: Path,
    only: Iterable[str] | None = None,
    budget: Budget = Budget(),
    overrides: Sequence[str] = (),
) -> list[Job]:
    """The jobs of the same small search for every variant: 3 learning rates x 2 values of its coefficient, seed 0.

    Each has a quarter of the budget of forwards and is evaluated on training prompts. Raises as `comparison`.
    """
    short = Budget(max(1, int(budget.forwards * TUNING_SHARE)), 0.0, budget.every)
    overrides = [*overrides, f"eval_prompts={TUNING_PROMPTS}"]
    jobs = []
    for v in select(only):
        grid = [{"training.learning_rate": lr, v.coefficient: x} for lr in LEARNING_RATES for x in v.values]
        for i, setting in enumerate(grid):
            jobs.append(Job(output / "tuning" / v.name / f"{i}.json", v, 0, setting, short, overrides))
    return jobs


def choose(output: Path, jobs: Sequence[Job], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best setting of every variant that was searched; added to `output/tuning.json`, which is returned.

    A setting's score is the mean of the evaluations in the second half of its run; one that failed is never chosen. Of
    settings within `TIE` of the best, which a run this short cannot tell apart, the lowest learning rate wins, then the
    higher score. Returns variant -> `chosen`, `tried`.
    """
    tuning = _read(output / "tuning.json") or {}
    for name in dict.fromkeys(job.variant.name for job in jobs):
        pairs = [(j, r) for j, r in zip(jobs, records, strict=True) if j.variant.name == name]
        tried = [_tried(record, job.budget) for job, record in pairs]
        worked = [t for t in tried if t["score"] is not None]
        top = max((t["score"] for t in worked), default=0.0)
        close = [t for t in worked if t["score"] >= top - TIE]
        close.sort(key=lambda t: (t["setting"]["training.learning_rate"], -t["score"]))
        tuning[name] = {"chosen": close[0]["setting"] if close else {}, "tried": tried}
    _write(output / "tuning.json", tuning)
    return tuning


def _tried(record: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
    points = record["points"]
    late = [p for p in points if p["forwards"] >= budget.forwards / 2] or points[1:]
    ok = late and record["failure"] is None
    return {
        "setting": record["setting"],
        "base": points[0]["overall"] if points else None,
        "score": sum(p["overall"] for p in late) / len(late) if ok else None,
        "kl": points[-1]["kl"] if points else None,
        "failure": record["failure"],
    }


def collect(output: Path) -> dict[str, Any]:
    """What the records of a folder say together; written to its `results.json`.

    Raises:
        FileNotFoundError: there are no records.
    """
    records = [_read(path) for path in sorted(output.glob("*/seed-*.json"))]
    runs = sorted((r for r in records if r), key=lambda r: (list(VARIANTS).index(r["variant"]), r["seed"]))
    if not runs:
        raise FileNotFoundError(f"{output} holds no runs of the benchmark")
    if len({json.dumps(r["budget"]) for r in runs}) > 1:
        raise ValueError(f"the runs in {output} have different budgets: compare them in folders of their own")
    results = {"budget": runs[0]["budget"], "tuning": _read(output / "tuning.json"), "runs": runs}
    _write(output / "results.json", results)
    return results


@dataclass(frozen=True)
class Job:
    """A run to be made, or a finished one.

    Args:
        file: its record; the run's folder has the same name without suffix.
        variant, seed, setting, budget, overrides: what to run; `setting` are the tuned keys.

    Raises:
        ValueError: an override does not fit, or `file` was made with another budget or other settings.
    """

    file: Path
    variant: Variant
    seed: int
    setting: dict[str, float]
    budget: Budget
    overrides: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.recipe()
        record = self.record()
        if record is not None and {k: record.get(k) for k in self.identity} != self.identity:
            raise ValueError(
                f"{self.file} was made with another budget or other settings: choose another folder, or delete it"
            )

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "variant": self.variant.name,
            "seed": self.seed,
            "setting": self.setting,
            "budget": asdict(self.budget),
            "overrides": [*COMMON, *self.variant.overrides, *self.overrides],
        }

    def recipe(self) -> Recipe:
        own = (
            f"training.seed={self.seed}",
            f"training.eval_every={self.budget.every}",
            f"training.output_dir={self.file.with_suffix('')}",
        )
        return recipe_of(self.variant, self.setting, [*self.overrides, *own])

    def record(self) -> dict[str, Any] | None:
        """The finished run: identity, `points`, `failure`; None if it is still to be made."""
        return _read(self.file)

    def run(self, report: Callable[[float], None]) -> dict[str, Any]:
        """Train, and write the record. Raises as `measured_run`, and leaves no record then."""
        recipe, folder = self.recipe(), self.file.with_suffix("")
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
        folder.mkdir(parents=True)
        with _quiet(folder / "log.txt"):
            outcome = measured_run(recipe, self.budget, report)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        t = recipe.training
        record = {
            **self.identity,
            **outcome,
            "images_per_iteration": t.prompts_per_iteration * t.group_size,
            "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s), "
            f"{'CUDA' if torch.cuda.is_available() else 'CPU'}",
            "versions": {n: version(n) for n in ("flowrl-align", "torch", "diffusers")},
        }
        _write(self.file, record)
        return record


def work(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The records of the jobs, run where they are missing, with one progress bar for all of them.

    Raises:
        KeyboardInterrupt: interrupted; what is finished stays.
    """
    from tqdm.auto import tqdm

    records = [job.record() for job in jobs]
    missing = [i for i, record in enumerate(records) if record is None]
    form = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(total=float(len(missing)), bar_format=form, dynamic_ncols=True) as bar:
        for number, i in enumerate(missing):
            job = jobs[i]
            bar.set_description(f"{job.variant.name}, run {number + 1} of {len(missing)}")

            def report(share: float, start: int = number) -> None:
                bar.update(start + share - bar.n)

            record = records[i] = job.run(report)
            report(1.0)
            if record["failure"]:
                bar.write(f"{job.file.with_suffix('')} failed: {record['failure']}", file=sys.stderr)
    return [record for record in records if record is not None]


@contextlib.contextmanager
def _quiet(file: Path):
    """What a run prints goes to a file."""
    with file.open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield


def _read(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _write(file: Path, value: Any) -> None:
    """Whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.tmp")
    draft.write_text(json.dumps(value) + "\n", encoding="utf-8")
    draft.replace(file)
