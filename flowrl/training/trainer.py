"""The loop: draw prompts, roll out, score, compare within groups, update."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    convert_outputs_to_fp32,
    disable_fsdp_ram_efficient_loading,
    gather_object,
    set_seed,
)
from diffusers.optimization import get_scheduler
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from flowrl.core import AdvOut, Batch, Totals
from flowrl.objectives.base import Micro, Objective
from flowrl.pipelines.recording import DiffusersPolicy, load_pipeline
from flowrl.policy import Weights
from flowrl.rewards import RewardError, RewardSet
from flowrl.rewards.base import Scores
from flowrl.rollout import Prompt, Rollout
from flowrl.samplers.flow import ODE, FlowSampler
from flowrl.samplers.plans import StepPlan
from flowrl.training import bands, checkpoint, monitors
from flowrl.training.arguments import TrainingArguments
from flowrl.training.batch_plan import BatchPlan
from flowrl.training.prompts import PromptSet, PromptSource, columns_of
from flowrl.training.scoring import Scoring
from flowrl.training.tracking import Tracking, check_trackers, image_grid
from flowrl.training.weights import WeightCopies, ema_decay

EVALUATION = -1  # the "iteration" whose noise evaluations use: the same images' seeds every time


@dataclass
class Evaluation:
    """Scores of one evaluation. `overall` is the mean over tasks where prompts have a `tag`, else over images."""

    overall: float
    per_task: dict[str, dict[str, float]]
    """Task -> `score`, `images`, `prompts`."""
    rewards: dict[str, float]
    images: int
    seconds: float
    iteration: int
    grid: Tensor = field(repr=False)
    """`[N, 3, H, W]` the first sample of up to 24 prompts, spread over the tasks."""
    captions: list[str] = field(repr=False, default_factory=list)
    standard_error: float = 0.0
    """Of `overall`, for these prompts: sqrt(v sum_t 1 / n_t) / T with v the variance over all images."""

    def summary(self) -> dict[str, Any]:
        """Everything but the pictures."""
        keys = ("overall", "standard_error", "per_task", "rewards", "images", "seconds", "iteration")
        return {key: getattr(self, key) for key in keys}


class RatioError(RuntimeError):
    """The policy, scored again before any update, does not give the rollout's log-probabilities."""


class Trainer:
    """Fine-tune a generator with a reward.

    Args:
        pipe: a diffusers pipeline, a folder or model id to load one from, or a ready `DiffusersPolicy`.
        objective: how rewards become a loss, e.g. `FlowGRPO()` or `DiffusionNFT()`.
        sampler: how rollouts are generated, e.g. `FlowSDE.from_config(pipe.scheduler.config)`.
        rewards: a callable, a name, or a mapping of these to weights (see `flowrl.rewards.RewardSet`).
        prompts: training prompts: a list, a `.jsonl` or `.txt` file, or a named set (see `PromptSet`).
        eval_prompts, eval_rewards, eval_sampler: held-out prompts (none: no evaluation), what scores them (default
            `rewards`) and how they are sampled (default: the ODE on the sampler's grid).
        peft_config: a `peft.LoraConfig` trains an adapter; None trains all weights of the transformer.
        args: `TrainingArguments`.
        recipe: what to write as the run's full recipe; the CLI passes it.

    Raises:
        ValueError: objective, sampler, rewards, prompts and arguments do not fit; the message says why and what to do.
    """

    def __init__(
        self,
        pipe: Any,
        objective: Objective,
        sampler: FlowSampler,
        rewards: Any,
        prompts: PromptSource | PromptSet,
        *,
        eval_prompts: PromptSource | PromptSet | None = None,
        eval_rewards: Any = None,
        eval_sampler: FlowSampler | None = None,
        peft_config: Any = None,
        args: TrainingArguments | None = None,
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        self.args = args = args or TrainingArguments()
        self.objective, self.sampler = objective, sampler
        self.eval_sampler = eval_sampler or ODE(
            steps=sampler.steps, guidance_scale=sampler.guidance_scale, schedule=sampler.schedule
        )
        # Everything that can be refused is refused before a model is loaded.
        objective.check(sampler)
        self.rewards = RewardSet(rewards, args.max_invalid_share)
        self.eval_rewards = self.rewards if eval_rewards is None else RewardSet(eval_rewards, args.max_invalid_share)
        self.prompts = _prompt_set(prompts)
        self.eval_prompts = None if eval_prompts is None else _prompt_set(eval_prompts)
        self.rewards.check_columns(self.prompts.columns, supplied=["group_id"])
        self.rewards.check_prompts([p.text for p in self.prompts])
        if getattr(objective, "tracks", False):
            self.rewards.check_range(0.0, 1.0, f"{type(objective).__name__}'s tracker")
        if self.eval_prompts is not None:
            self.eval_rewards.check_columns(self.eval_prompts.columns)
            self.eval_rewards.check_prompts([p.text for p in self.eval_prompts])
        if args.prompts_per_iteration > len(self.prompts):
            raise ValueError(
                f"prompts_per_iteration is {args.prompts_per_iteration}, but there are only {len(self.prompts)} prompts"
            )
        branches = sampler.plan.branches
        if args.group_size % branches or args.group_size < 2 * branches:
            raise ValueError(
                f"{type(sampler.plan).__name__} splits a group into {branches} parts that are compared within "
                f"themselves: group_size must be a multiple of {branches}, at least {2 * branches}, "
                f"not {args.group_size}"
            )
        trackers = tuple(args.log_with or ())
        check_trackers(trackers)
        self.output_dir = Path(args.output_dir)
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        # The launcher's default, for models that the first process alone loads and hands out: accelerate 1.15 stumbles
        # over the transformer's buffers there, and text encoders and rewards, which it hands to nobody, may stay empty.
        disable_fsdp_ram_efficient_loading()
        self.accelerator = Accelerator(
            cpu=launched > 1 and not torch.accelerator.is_available(),  # else accelerate ignores torchrun on CPU
            mixed_precision=args.mixed_precision,
            log_with=list(trackers) or None,
            project_dir=self.output_dir,
        )
        world = self.accelerator.num_processes
        if launched != world:
            raise ValueError(
                f"the launcher started {launched} processes and accelerate sees {world}: they would train apart. "
                "Unset ACCELERATE_* variables, or start with torchrun."
            )
        if args.processes is not None and args.processes != world:
            raise ValueError(
                f"the run asks for {args.processes} process(es) and the launcher started {world}. "
                f"Start it with `torchrun --nproc_per_node {args.processes} -m flowrl train ...` "
                "(`accelerate launch --cpu` starts one, whatever it is told)."
            )
        self._check_precision()
        self.plan = BatchPlan(
            args.prompts_per_iteration,
            args.group_size,
            args.updates_per_iteration,
            world,
            args.micro_batch_size,
        )
        objective.allocate(self.prompts[: args.prompts_per_iteration], self.plan.samples)  # refuses what does not fit

        set_seed(args.seed)  # an adapter's first weights
        if isinstance(pipe, str | Path):
            pipe = load_pipeline(pipe)
        self.policy = pipe if isinstance(pipe, DiffusersPolicy) else DiffusersPolicy(pipe, peft_config=peft_config)
        for component in self.policy.pipe.components.values():
            # accelerate places what is trained: a model to be sharded need not fit on one device.
            if isinstance(component, torch.nn.Module) and component is not self.policy.module:
                component.to(self.accelerator.device)
        if args.gradient_checkpointing:
            self.policy.module.enable_gradient_checkpointing()
        parameters = self.policy.trainable()
        for p in parameters.values():  # what the optimizer adds small steps to
            if args.mixed_precision == "no" and p.dtype != torch.float32:
                raise ValueError(
                    f"the trained weights are {p.dtype} and would round the optimizer's steps away: load the model in "
                    "float32, or set mixed_precision to 'bf16', which trains float32 weights."
                )
            p.data = p.data.float()
        self.optimizer = torch.optim.AdamW(
            parameters.values(),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.weight_decay,
            eps=args.adam_epsilon,
        )
        self._autocast_shards()
        self.model, self.optimizer = self.accelerator.prepare(self.policy.module, self.optimizer)
        self.policy.forward_module = self.model
        if self._sharded and not sampler.plan.in_step:
            raise ValueError(
                f"{sampler.plan} lets processes call the model a different number of times, and with a sharded model "
                "(FSDP2) they would wait for ever: use a window per iteration without branches, or DDP."
            )
        self.lr_scheduler = get_scheduler(
            args.lr_scheduler,
            self.optimizer,
            num_warmup_steps=args.warmup_updates,
            num_training_steps=args.iterations * args.updates_per_iteration,
        )
        names = []
        # The reference is also what drift is measured against, whether or not the objective needs it.
        if self.policy.peft_config is None and ("reference" in objective.requires or args.monitor_samples):
            names.append("reference")
        if "old" in objective.requires:
            names.append("old")
        if args.ema_decay is not None:
            names.append("ema")
        self.copies = WeightCopies(self.policy.trainable(), tuple(names), self.policy.module)
        self.policy.copies = self.copies

        self.iteration = 0
        self.updates = 0
        self.best: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.phase: str | None = None
        """The timed phase that is running: "rollout", "update", "evaluate", ...; a key of `seconds`."""
        self.watch = bands.Watch()
        self.recipe = dict(recipe or {})
        self._scored = False
        self._interrupted = False

    def _check_precision(self) -> None:
        """Refuse what accelerate would pass over in silence, and what the trainer does not support."""
        acc, asked = self.accelerator, os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if asked not in ("no", self.args.mixed_precision):
            raise ValueError(
                f"the launcher asks for mixed_precision {asked!r} and the run for {self.args.mixed_precision!r}: set "
                f"training.mixed_precision={asked}, or start it with `--mixed_precision {self.args.mixed_precision}`."
            )
        if self.args.mixed_precision == "fp16" and acc.scaler is None:
            raise ValueError(
                f"accelerate has mixed_precision 'fp16' on accelerators only and would compute in float32 on "
                f"{acc.device}: use 'bf16' or 'no'."
            )
        if acc.distributed_type == DistributedType.FSDP and not acc.is_fsdp2:
            raise ValueError("models are sharded by FSDP2, not by FSDP1: start it with `--fsdp_version 2`.")

    def _autocast_shards(self) -> None:
        """Half precision for a sharded model as accelerate has it for a whole one: autocast in a float32 frame.

        FSDP2's own policy rounds all that enters and leaves (the time 1000 sigma, the latents) and adds gradients up in
        half precision. It keeps its part: weights are gathered in half precision.
        """
        acc, module = self.accelerator, self.policy.module
        if not acc.is_fsdp2 or acc.mixed_precision == "no":
            return
        plugin: Any = acc.state.fsdp_plugin
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )
        module.forward = convert_outputs_to_fp32(acc.autocast()(module.forward))

    # --------------------------------------------------------------------------------------------- description

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that loads it."""
        a = self.args
        # All of an entry counts: weights decide what is drawn, columns what it is worth.
        entries = json.dumps([[p.text, p.weight, dict(p.metadata)] for p in self.prompts], default=str)
        adapter = ("lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
        # Schedules other than these stretch with the run.
        length = {} if a.lr_scheduler.startswith("constant") else {"iterations": a.iterations}
        return {
            "objective": repr(self.objective),
            "sampler": repr(self.sampler),
            "rewards": self.rewards.identity,
            "prompts": f"{len(self.prompts)} prompts {hashlib.sha256(entries.encode()).hexdigest()[:12]}",
            "parameters": {n: list(p.shape) for n, p in self.policy.trainable().items()},
            "adapter": {k: getattr(self.policy.peft_config, k, None) for k in adapter},
            "training": {
                k: v
                for k, v in asdict(a).items()
                if k
                in (
                    "seed",
                    "prompts_per_iteration",
                    "group_size",
                    "updates_per_iteration",
                    "learning_rate",
                    "adam_beta1",
                    "adam_beta2",
                    "weight_decay",
                    "adam_epsilon",
                    "lr_scheduler",
                    "warmup_updates",
                    "max_grad_norm",
                    "ema_decay",
                    "ema_every",
                    "mixed_precision",
                )
            }
            | length,
        }

    def describe(self) -> str:
        """What is about to run, in a few lines."""
        trained = sum(p.numel() for p in self.policy.trainable().values())
        total = sum(p.numel() for p in self.policy.module.parameters())
        return "\n".join(
            [
                f"{type(self.policy.pipe).__name__}, {self.policy.height} x {self.policy.width} px: "
                f"{trained / 1e6:.2f} M of {total / 1e6:.2f} M transformer parameters trained "
                f"({'LoRA' if self.policy.peft_config else 'all weights'})",
                f"objective {self.objective}",
                f"sampler   {type(self.sampler).__name__}, {self.sampler.steps} steps, "
                f"noise level {self.sampler.noise_level}, guidance {self.sampler.guidance_scale}",
                f"rewards   {self.rewards.weights}; {len(self.prompts)} prompts"
                + (f", {len(self.eval_prompts)} held out" if self.eval_prompts else ""),
                f"batch     {self.plan.describe()}",
                f"device    {self.accelerator.device}, {self.accelerator.num_processes} process(es), "
                f"precision {self.accelerator.mixed_precision}",
            ]
        )

    # ------------------------------------------------------------------------------------------------- rollout

    def rollout(self, iteration: int) -> tuple[Rollout, Batch, AdvOut, dict[str, float]]:
        """This process's samples of an iteration, and the rewards and advantages of all processes' samples.

        The batch's rows are in the order of the sample numbers, whatever the number of processes.
        """
        a, rank = self.args, self.accelerator.process_index
        drawn = self.prompts.draw(a.seed, iteration, a.prompts_per_iteration)
        sizes = self.objective.allocate(drawn, self.plan.samples)
        every = [p for p, n in zip(drawn, sizes, strict=True) for _ in range(n)]
        member = [m for n in sizes for m in range(n)]
        numbers = self.plan.rows(a.seed, iteration, rank)
        mine = [every[s] for s in numbers]
        thread = self.accelerator.device.type != "cpu"
        scoring = Scoring(self.rewards, mine, self.prompts.columns, numbers, thread=thread, first=not self._scored)
        with self._failed_saved(iteration), scoring:

            def decode(latents: Tensor) -> None:
                with self._timed("decode"):
                    images = self.policy.decode(latents)
                with self._timed("reward"):
                    scoring.add(images)

            with self._timed("rollout"), self.policy.use(self.objective.behaviour):
                rollout = self.policy.sample(
                    mine,
                    [member[s] for s in numbers],
                    self.sampler,
                    seed=a.seed,
                    iteration=iteration,
                    batch_size=a.sample_batch_size,
                    on_latents=decode,
                )
            rollout.media = scoring.media
            with self._timed("reward"):
                total, valid, parts = self._gather(numbers, scoring.result())
        self._scored = True
        columns = self.objective.columns(rollout)
        sigmas = self.policy.sigmas(self.sampler)
        plans = self.sampler.draw_plans(sigmas, a.seed, iteration, [p.index for p in every], member)
        branches = self.sampler.plan.branches
        weights = {n: w for n, w in self.rewards.weights.items() if w}
        extra: dict[str, Any] = {"reward_weights": tuple(weights.values()) or (1.0,)}
        extra["rewards"] = torch.stack([parts[n] for n in weights], 1) if weights else total[:, None]
        if "log_prob" in self.objective.requires:
            extra |= self.sampler.unit_table(sigmas, plans) | {"transition": _actions(every, member, plans)}
        batch = Batch(
            mask=torch.ones(self.plan.samples, columns, dtype=torch.bool),
            logp=torch.zeros(self.plan.samples, columns),
            old_logp=torch.zeros(self.plan.samples, columns),
            reward=total,
            group_id=torch.tensor([p.index * branches + plan.branch for p, plan in zip(every, plans, strict=True)]),
            valid=valid,
            extra=extra,
        )
        advantage = self.objective.advantages(batch)
        metrics = monitors.reward_metrics(every, parts, batch) | monitors.advantage_metrics(advantage, batch)
        return rollout, batch, advantage, metrics

    def _decode(self, latents: Tensor) -> Tensor:
        return torch.cat([self.policy.decode(x) for x in latents.split(self.args.sample_batch_size)])

    def _gather(self, numbers: list[int], scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Rewards of all processes, by sample number."""
        acc = self.accelerator
        table = torch.stack([scores.total, scores.valid.float(), *scores.parts.values()], 1)
        order = acc.gather(torch.tensor(numbers, device=acc.device)).cpu().argsort()
        table = acc.gather(table.to(acc.device)).cpu()[order]
        return table[:, 0], table[:, 1] > 0, {n: table[:, i + 2] for i, n in enumerate(scores.parts)}

    def _score(
        self,
        rewards: RewardSet,
        media: Tensor,
        prompts: Sequence[Prompt],
        columns: Sequence[str],
        iteration: int,
    ) -> Scores:
        """Score, or save the samples that a reward failed on and stop."""
        groups = {"group_id": [p.index for p in prompts]} if rewards.groupwise else {}
        with self._failed_saved(iteration), torch.no_grad():
            return rewards.score(media, [p.text for p in prompts], columns_of(prompts, columns) | groups)

    @contextmanager
    def _failed_saved(self, iteration: int) -> Iterator[None]:
        """Save the samples that a reward failed on."""
        try:
            yield
        except RewardError as error:
            folder = self.output_dir / "failed" / f"iteration-{iteration:06d}-{self.accelerator.process_index}"
            where = error.save(folder)
            error.args = (f"{error.args[0]} The samples are in {where.parent}.",)
            raise

    # -------------------------------------------------------------------------------------------------- update

    def update(self, rollout: Rollout, batch: Batch, advantage: AdvOut, iteration: int, index: int) -> dict[str, float]:
        """One optimizer step on the `index`-th share of the iteration's samples."""
        acc, plan, a = self.accelerator, self.plan, self.args
        share = [s for r in range(plan.processes) for s in self._share(iteration, index, r)]
        keep = batch.loss_rows if advantage.keep is None else batch.loss_rows & advantage.keep
        counts = Totals.of(batch.mask[share], keep[share])
        mine = self._share(iteration, index, acc.process_index)
        columns = batch.mask.shape[1]
        sums: dict[str, Tensor] = {}
        extremes: dict[str, Tensor] = {}
        slices = plan.micro_batches
        self.optimizer.zero_grad(set_to_none=True)  # an update that failed leaves its gradients behind
        for rows in slices:
            numbers = mine[rows]
            part = rollout.rows([index * plan.per_update + i for i in range(rows.start, rows.stop)])
            for unit in range(columns):
                where = torch.tensor(numbers)
                table = batch.slice(where, [unit])
                row_tokens = (batch.mask[where].sum(1) * keep[where]).float()
                table = replace(table, totals=Totals(counts.rows, counts.tokens, row_tokens))
                micro = Micro(
                    part,
                    unit,
                    _to(table, acc.device),
                    _to(advantage.slice(where, [unit]), acc.device),
                )
                last = rows is slices[-1] and unit == columns - 1
                with self._synchronised(last):
                    loss, metrics = self.objective.loss(self.policy, self.sampler, micro)
                    # DDP averages over processes; the loss is written to be summed.
                    acc.backward(loss * plan.processes)
                self._collect(metrics, unit, columns, sums, extremes)
        totals = {k: acc.reduce(v.to(acc.device), "sum").item() for k, v in sorted(sums.items())}
        for k, v in sorted(extremes.items()):
            gathered = acc.gather(v.to(acc.device).reshape(1))
            totals[k] = (gathered.min() if k.endswith("_min") else gathered.max()).item()
        if "ratio_square_mean" in totals:
            moments = totals["ratio_mean"], totals["ratio_square_mean"]
            totals["effective_sample_size"] = monitors.effective_sample_size(*moments)
        # Of all parameters, also those without a gradient: of a part accelerate unscales shards' gradients twice.
        norm = acc.clip_grad_norm_(self.model.parameters(), a.max_grad_norm)
        totals["grad_norm"] = float(norm)
        # fp16: gradients may overflow, the scaler then skips the step and halves its scale. Below 1 that is not why.
        may_skip = acc.scaler is not None and acc.scaler.get_scale() >= 1
        if not math.isfinite(totals["loss"]) or not (math.isfinite(totals["grad_norm"]) or may_skip):
            if acc.scaler is not None:
                acc.scaler.update()  # or it takes the next gradients for these ones
            bad = monitors.first_non_finite(
                {
                    "latents": rollout.latents,
                    "log_prob": rollout.log_prob,
                    "reward": batch.reward[batch.valid_rows],
                    "advantage": advantage.adv,
                },
                self.policy.module,
            )
            raise RuntimeError(
                f"non-finite loss ({totals['loss']}) or gradient ({float(norm)}) in iteration {iteration}; first bad "
                f"tensor: {bad}. Nothing was updated. Lower learning_rate, or use bf16 instead of fp16; resume from "
                "the last checkpoint."
            )
        lr_scale = totals.pop("lr_scale_min", 1.0)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= lr_scale
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        totals["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        skipped = acc.optimizer_step_was_skipped
        if acc.scaler is not None:
            totals["step_skipped"] = float(skipped)
        if skipped:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            return totals
        self.lr_scheduler.step()
        if a.ema_decay is not None and self.updates % a.ema_every == 0:
            self.copies.blend("ema", ema_decay(self.updates, a.ema_decay))
        self.updates += 1
        return totals

    def _share(self, iteration: int, index: int, rank: int) -> list[int]:
        n = self.plan.per_update
        return self.plan.rows(self.args.seed, iteration, rank)[index * n : (index + 1) * n]

    @contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Gradients cross processes with the last micro-batch only."""
        if last:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    @staticmethod
    def _collect(metrics, unit: int, columns: int, sums, extremes) -> None:
        """Add up a micro-batch's metrics; per step what is a statement about a step."""
        for name, value in metrics.items():
            if name == "lr_scale":
                extremes["lr_scale_min"] = value
            elif name.endswith("_min"):
                extremes[name] = torch.minimum(extremes.get(name, value), value)
            elif name.endswith("_max"):
                extremes[name] = torch.maximum(extremes.get(name, value), value)
                key = f"step/{name[:-4]}/{unit:02d}_max"
                extremes[key] = torch.maximum(extremes.get(key, value), value)
            else:
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
                if name in ("approx_kl", "ratio_mean", "clip_frac_high", "clip_frac_low"):
                    key = f"step/{name}/{unit:02d}"
                    sums[key] = sums.get(key, torch.zeros_like(value)) + columns * value

    # -------------------------------------------------------------------------------------------------- checks

    def check_ratio(self, rollout: Rollout) -> float:
        """Largest |log ratio| of the behaviour weights scored again, over all trained steps.

        Raises:
            RatioError: above the tolerance; the message names the step and the likely cause.
        """
        if "log_prob" not in self.objective.requires:
            return 0.0
        half = rollout.latents.dtype in (torch.float16, torch.bfloat16) or self.args.mixed_precision != "no"
        tolerance = self.args.ratio_tolerance
        if tolerance is None:
            tolerance = 1e-2 if half else 1e-5
        part = rollout.rows(range(min(self.args.micro_batch_size, len(rollout))))
        steps = part.steps
        with torch.no_grad(), self.policy.use(self.objective.behaviour):
            table = [
                (self.policy.evaluate(part, u, self.sampler).log_prob - part.log_prob[:, u]).abs()
                for u in range(part.units)
            ]
        gap = torch.stack(table, 1).cpu()
        errors = {s: gap[steps == s].max().item() for s in steps.unique().tolist()}
        worst = max(errors, key=lambda s: errors[s] if errors[s] == errors[s] else float("inf"))
        if not errors[worst] <= tolerance:
            every = all(not e <= tolerance for e in errors.values())
            cause = (
                "all steps are off: the network is not the one that sampled (dropout on, weights touched, a reward or "
                "callback changed the pipeline)"
                if every
                else "only some steps are off: rounding (time or states in half precision, very small std)"
            )
            raise RatioError(
                f"before any update |log ratio| is {errors[worst]:.3g} at step {worst} "
                f"(tolerance {tolerance:g}); {cause}. Training on it would be wrong. "
                "If the rounding is acceptable set ratio_tolerance."
            )
        return errors[worst]

    def check(self) -> dict[str, Any]:
        """Preflight without training: sample a few images, compare with the stock pipeline, score, replay.

        Returns what was measured. Raises the error that training would meet.
        """
        a = self.args
        self.accelerator.print(self.describe())
        report: dict[str, Any] = {"processes": self.accelerator.num_processes, "batch": self.plan.describe()}
        for rewards in dict.fromkeys((self.rewards, self.eval_rewards)):
            report.setdefault("self_test", {}).update(rewards.self_test(self.accelerator.device))
        prompts = self.prompts.draw(a.seed, 0, min(2, len(self.prompts)))
        rows = [p for p in prompts for _ in range(2)]
        members = [0, 1] * len(prompts)
        rollout = self.policy.sample(
            rows, members, self.sampler, seed=a.seed, iteration=0, batch_size=a.sample_batch_size
        )
        report["stock_difference"] = self.policy.stock_difference(rows, members, self.sampler, a.seed)
        rollout.media = self._decode(rollout.latents)
        scores = self._score(self.rewards, rollout.media, rows, self.prompts.columns, 0)
        report["rewards"] = {n: [round(x, 4) for x in v.tolist()] for n, v in scores.parts.items()}
        report["max_abs_log_ratio"] = self.check_ratio(rollout)
        for key, value in report.items():
            self.accelerator.print(f"  {key}: {value}")
        self.accelerator.print("check passed")
        return report

    # ---------------------------------------------------------------------------------------------------- loop

    def train(
        self,
        resume: bool | str | Path = False,
        on_iteration: Callable[[Mapping[str, float]], bool | None] | None = None,
    ) -> dict[str, Any]:
        """Run all iterations and return the summary that is also written to `summary.json`.

        Args:
            resume: "auto" continues from the newest checkpoint of `output_dir` if there is one; a path continues from
                that checkpoint; False starts anew and refuses a folder that holds checkpoints.
            on_iteration: called with the metrics of every iteration on every process; the run stops there when it
                returns True on any.
        """
        a, acc = self.args, self.accelerator
        self.resume(resume)
        self._describe_run()
        for rewards in dict.fromkeys((self.rewards, self.eval_rewards)):
            rewards.self_test(acc.device)
        tracking = Tracking(acc, self.output_dir, self._run_config(), self.iteration)
        before = self._restore_evaluation("before")
        if before is None and self.eval_prompts is not None:
            before = self.evaluate()
            self._publish(before, "before", tracking)
        first = self.iteration
        with self._progress() as bar, self._interruptible(bar):
            for iteration in range(first, a.iterations):
                start, phases = time.perf_counter(), dict(self.seconds)
                rollout, batch, advantage, metrics = self.rollout(iteration)
                if iteration == first:
                    self.check_ratio(rollout)
                with self._timed("update"):
                    # Each update's metrics; their mean is logged, the last one's is what controllers read.
                    stats = [
                        self.update(rollout, batch, advantage, iteration, u) for u in range(a.updates_per_iteration)
                    ]
                self.objective.after_update(self.copies, iteration, stats[-1])
                metrics = self._measured(metrics, rollout, stats)
                self.iteration = iteration + 1
                metrics |= self._times(start, phases)
                metrics |= self._shown(rollout, iteration, tracking)
                self._log(metrics, iteration, tracking, bar)
                if on_iteration is not None and on_iteration(metrics):
                    self._interrupted = True
                stop = self._agree_to_stop()
                if stop or (a.save_every and self.iteration % a.save_every == 0):
                    self.save_checkpoint()
                if stop:
                    break
        return self._finish(before, tracking)

    def _progress(self) -> tqdm:
        return tqdm(
            total=self.args.iterations,
            initial=self.iteration,
            desc="train",
            disable=not self.accelerator.is_main_process,
            dynamic_ncols=True,
        )

    def _measured(self, metrics: dict[str, float], rollout: Rollout, stats: list[dict[str, float]]) -> dict[str, float]:
        """The rollout's metrics with what the updates were like and what they did."""
        with self._timed("monitor"):
            if self.args.monitor_samples:
                part = rollout.rows(range(min(self.args.monitor_samples, len(rollout))))
                metrics |= monitors.drift(self.policy, self.sampler, part, "reference" in self._references())
            metrics |= self._image_metrics(rollout)
        metrics |= self.watch.observe(metrics)
        metrics |= {f"train/{k}": sum(s[k] for s in stats) / len(stats) for k in stats[0]}
        metrics["ratio_check"] = stats[0].get("log_ratio_max", 0.0)  # nothing had moved yet
        return metrics

    def _times(self, start: float, before: Mapping[str, float]) -> dict[str, float]:
        elapsed = time.perf_counter() - start
        metrics = {f"time/{k}": v - before.get(k, 0.0) for k, v in self.seconds.items()}
        return metrics | {"time/iteration": elapsed, "images_per_second": self.plan.samples / elapsed}

    def _shown(self, rollout: Rollout, iteration: int, tracking: Tracking) -> dict[str, float]:
        """A grid of the rollout and the metrics of an evaluation, when they are due."""
        a = self.args
        if a.log_images_every and iteration % a.log_images_every == 0 and rollout.media is not None:
            tracking.image("train", image_grid(rollout.media[:16]), iteration)
        due = a.eval_every and self.iteration % a.eval_every == 0 and self.iteration < a.iterations
        if due and self.eval_prompts is not None:
            return self._publish(self.evaluate(), "eval", tracking)
        return {}

    def _log(self, metrics: dict[str, float], iteration: int, tracking: Tracking, bar: tqdm) -> None:
        """Judge the metrics, raise the alarm, write the row."""
        colours = bands.judge(metrics)
        metrics |= {f"health/{name}": bands.COLOURS.index(colour) for name, colour in colours.items()}
        self._alarm(metrics)
        tracking.log(metrics, iteration)
        bar.set_postfix(reward=f"{metrics['reward/mean']:.3f}", health=bands.headline(colours), refresh=False)
        bar.update()

    def _finish(self, before: Evaluation | None, tracking: Tracking) -> dict[str, Any]:
        """Evaluate and save what a finished run has not yet; write the summary."""
        finished = self.iteration >= self.args.iterations
        after = self._restore_evaluation("after") if finished else None
        if finished and after is None:
            if self.eval_prompts is not None:
                after = self.evaluate()
                self._alarm(self._publish(after, "after", tracking))
            self.save_checkpoint()
            self.save_pretrained(self.output_dir / "final")
        summary = self._summary(before, after, finished)
        tracking.close()
        if not finished:
            self.accelerator.print(
                f"stopped after iteration {self.iteration}; continue with resume='auto' (CLI: --resume auto)"
            )
        return summary

    def resume(self, resume: bool | str | Path) -> None:
        """Load what the run goes on from, as `train(resume)` does; see there.

        Raises:
            FileExistsError: `output_dir` holds a run, and it is not to be continued.
            CheckpointError: the checkpoint does not fit; nothing has been changed then.
        """
        newest = checkpoint.latest(self.output_dir / "checkpoints")
        if resume == "auto" or resume is True:
            folder = newest
        elif resume:
            folder = Path(resume)
        else:
            folder = None
            if newest is not None and self.iteration == 0:
                raise FileExistsError(
                    f"{self.output_dir} holds a run (checkpoint {newest.name}). Continue it with resume='auto' (CLI: "
                    "--resume auto), or choose another output_dir."
                )
        if folder is not None:
            self.load_checkpoint(folder)
            self.accelerator.print(f"resumed from {folder}")

    def _describe_run(self) -> None:
        self.accelerator.print(self.describe())
        if self.accelerator.is_main_process:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.sampler.save_pretrained(self.output_dir / "sampler")
            if self.recipe:
                text = yaml.safe_dump(self.recipe, sort_keys=False, allow_unicode=True, width=110)
                (self.output_dir / "recipe.yaml").write_text(text, encoding="utf-8")
        self.accelerator.wait_for_everyone()

    def _references(self) -> tuple[str, ...]:
        return (*self.copies.names, *(["reference"] if self.policy.peft_config is not None else []))

    def _run_config(self) -> dict[str, Any]:
        return {"objective": repr(self.objective), "sampler": repr(self.sampler), **asdict(self.args)}

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to its phase, less those of phases within it."""
        start, before = time.perf_counter(), sum(self.seconds.values())
        outer, self.phase = self.phase, phase
        yield
        self.phase = outer
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        within = sum(self.seconds.values()) - before
        self.seconds[phase] += time.perf_counter() - start - within

    @contextmanager
    def _interruptible(self, bar: tqdm) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM ends the run after this iteration, with a checkpoint; the second at once."""
        self._interrupted = False  # of an earlier call

        def handle(number: int, frame: Any) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            bar.write("interrupted: finishing this iteration and saving; press Ctrl-C again to stop at once")

        try:
            previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: signals are somebody else's
            yield
            return
        try:
            yield
        finally:
            for s, h in previous.items():
                signal.signal(s, h)

    def _image_metrics(self, rollout: Rollout) -> dict[str, float]:
        """Of all processes' samples, so that each process sees the same numbers."""
        if rollout.media is None:
            return {}
        parts = rollout.media.split(self.args.sample_batch_size)
        tables = [monitors.image_statistics(x) | {"small": monitors.thumbnails(x)} for x in parts]
        every = {k: self.accelerator.gather(torch.cat([t[k] for t in tables])).cpu() for k in tables[0]}
        group_id = self.accelerator.gather(rollout.group_id.to(rollout.media.device)).cpu()
        diversity = monitors.group_diversity(every.pop("small"), group_id)
        found = {f"images/{k}": v.mean().item() for k, v in every.items()}
        return found if diversity is None else found | {"images/diversity": diversity}

    def _alarm(self, metrics: Mapping[str, float]) -> None:
        """Say what looks like reward hacking; with `on_reward_hacking="stop"` end the run as an interrupt would."""
        if self.args.on_reward_hacking == "ignore":
            return
        kept = self.output_dir / "best"
        use = f"the weights of the best evaluation ({kept})" if kept.is_dir() else "an earlier checkpoint"
        for what in self.watch.alarms(metrics):
            self.accelerator.print(
                f"\nreward hacking? After iteration {self.iteration} {what}. Raise the objective's kl, lower "
                f"learning_rate, or use {use}."
            )
            self._interrupted |= self.args.on_reward_hacking == "stop"

    def _agree_to_stop(self) -> bool:
        flag = torch.tensor([float(self._interrupted)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum").item())

    # ---------------------------------------------------------------------------------------------- evaluation

    def evaluate(
        self,
        prompts: PromptSource | PromptSet | None = None,
        images_per_prompt: int | None = None,
        weights: Weights | None = None,
    ) -> Evaluation:
        """Score held-out prompts with fixed seeds: the same noise in every evaluation of a run.

        Args:
            prompts: default `eval_prompts`.
            images_per_prompt: default `args.eval_images_per_prompt`.
            weights: "policy", "ema", "reference" or "old"; default "ema" where the run keeps one.
        """
        a, acc = self.args, self.accelerator
        which = self.eval_prompts if prompts is None else _prompt_set(prompts)
        if which is None:
            raise ValueError("no prompts to evaluate: pass eval_prompts to the Trainer or prompts to evaluate()")
        self.eval_rewards.check_columns(which.columns)
        self.eval_rewards.check_prompts([p.text for p in which])
        weights = weights or ("ema" if "ema" in self.copies else "policy")
        count = images_per_prompt or a.eval_images_per_prompt
        start = time.perf_counter()
        jobs = [(i, m) for i in range(len(which)) for m in range(count)]
        mine = jobs[acc.process_index :: acc.num_processes]
        if self._sharded:  # its processes call the model equally often; what one did twice counts once
            even = -(-len(jobs) // acc.num_processes)
            mine += jobs[:1] * (even - len(mine))
        records: list[tuple[int, int, float, dict[str, float]]] = []
        shown = _spread(which, 24)
        pictures: list[tuple[int, Tensor]] = []
        with self._timed("evaluate"), self.policy.use(weights):
            for at in range(0, len(mine), a.sample_batch_size):
                chunk = mine[at : at + a.sample_batch_size]
                rows = [which[i] for i, _ in chunk]
                rollout = self.policy.sample(
                    rows,
                    [m for _, m in chunk],
                    self.eval_sampler,
                    seed=a.seed,
                    iteration=EVALUATION,
                    batch_size=a.sample_batch_size,
                )
                media = self._decode(rollout.latents)
                scores = self._score(self.eval_rewards, media, rows, which.columns, self.iteration)
                for k, (i, m) in enumerate(chunk):
                    parts = {n: v[k].item() for n, v in scores.parts.items()}
                    records.append((i, m, scores.total[k].item(), parts))
                    if m == 0 and i in shown:
                        pictures.append((i, media[k].cpu()))
        records = sorted({r[:2]: r for r in gather_object(records)}.values(), key=lambda r: r[:2])
        pictures = sorted({p[0]: p for p in gather_object(pictures)}.values(), key=lambda p: p[0])
        return self._evaluation(which, records, pictures, time.perf_counter() - start)

    def _evaluation(self, prompts: PromptSet, records, pictures, seconds: float) -> Evaluation:
        by_task: dict[str, list[float]] = defaultdict(list)
        of_task: dict[str, set[int]] = defaultdict(set)
        for i, _, total, _ in records:
            if total == total:
                tag = str(prompts[i].metadata.get("tag") or "all")
                by_task[tag].append(total)
                of_task[tag].add(i)
        per_task = {
            tag: {"score": sum(v) / len(v), "images": len(v), "prompts": len(of_task[tag])}
            for tag, v in by_task.items()
        }
        valid = torch.tensor([total for *_, total, _ in records if total == total] or [0.0])
        inverse = sum(1 / len(v) for v in by_task.values())
        means = {n: [r[3][n] for r in records if r[3][n] == r[3][n]] for n in (records[0][3] if records else {})}
        return Evaluation(
            overall=sum(t["score"] for t in per_task.values()) / max(len(per_task), 1),
            per_task=per_task,
            rewards={n: sum(v) / max(len(v), 1) for n, v in means.items()},
            images=len(records),
            seconds=seconds,
            iteration=self.iteration,
            grid=torch.stack([p for _, p in pictures]),
            captions=[prompts[i].text for i, _ in pictures],
            standard_error=(valid.var(correction=0).item() * inverse) ** 0.5 / max(len(by_task), 1),
        )

    def _publish(self, result: Evaluation, name: str, tracking: Tracking) -> dict[str, float]:
        """Log an evaluation, keep it in the history, and the weights if they are the best so far."""
        metrics = {"eval/overall": result.overall}
        metrics |= {f"eval/task/{t}": v["score"] for t, v in result.per_task.items() if t != "all"}
        metrics |= {f"eval/reward/{n}": v for n, v in result.rewards.items()}
        # An evaluation that only a shorter run makes, at its end, must not change what a longer one remembers.
        keep = name != "after" or bool(self.args.eval_every and self.iteration % self.args.eval_every == 0)
        metrics |= self.watch.evaluated(result.overall, result.standard_error, result.rewards, keep)
        tracking.image(name, image_grid(result.grid), result.iteration)
        self.history.append({"name": name, **result.summary()})
        if self.accelerator.is_main_process:
            (self.output_dir / f"{name}.json").write_text(
                json.dumps({**result.summary(), "captions": result.captions}, indent=2) + "\n"
            )
        better = result.overall > self.best.get("overall", float("-inf"))
        if self.args.keep_best and better and self.iteration > 0:
            self.best = {"overall": result.overall, "iteration": self.iteration}
            self.save_pretrained(self.output_dir / "best")
        elif better:
            self.best = {"overall": result.overall, "iteration": self.iteration}
        self.accelerator.print(
            f"{name} (iteration {result.iteration}): overall {result.overall:.3f} on {result.images} images"
        )
        if name != "eval":  # no row of their own in metrics.jsonl: they have NAME.json
            self.accelerator.log(metrics, step=max(result.iteration - 1, 0))
        return metrics

    def _restore_evaluation(self, name: str) -> Evaluation | None:
        """An evaluation of this run made before it was resumed; an "after" of a shorter run is not it."""
        for entry in self.history:
            if entry["name"] == name and (name == "before" or entry["iteration"] == self.args.iterations):
                fields = {k: v for k, v in entry.items() if k != "name"}
                return Evaluation(**fields, grid=torch.zeros(0))
        return None

    # ---------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self) -> Path:
        """Everything that exact resume needs; see `flowrl.training.checkpoint`."""
        with self._timed("checkpoint"):
            scaler = self.accelerator.scaler
            state = {
                "updates": self.updates,
                "objective": self.objective.state_dict(),
                "lr_scheduler": self.lr_scheduler.state_dict(),
                "scaler": scaler.state_dict() if scaler is not None else None,
                "best": self.best,
                "history": self.history,
                "watch": asdict(self.watch),
                "seconds": dict(self.seconds),
            }
            root = self.output_dir / "checkpoints"
            folder = checkpoint.save(
                root,
                self.accelerator,
                self.model,
                self._plain_optimizer(),
                self.copies,
                state,
                self.identity(),
                self.iteration,
            )
            if self.accelerator.is_main_process:
                checkpoint.prune(root, self.args.keep_last)
        return folder

    def load_checkpoint(self, folder: str | Path) -> None:
        """Continue from a checkpoint.

        Raises:
            CheckpointError: damaged, cut short, or of another run; nothing has been changed then.
        """
        state = checkpoint.load(
            Path(folder), self.accelerator, self.model, self._plain_optimizer(), self.copies, self.identity()
        )
        self.iteration, self.updates = state["iteration"], state["updates"]
        self.objective.load_state_dict(state["objective"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        scaler = self.accelerator.scaler
        if state["scaler"] is not None and scaler is not None:
            scaler.load_state_dict(state["scaler"])
        self.best, self.history = state["best"], state["history"]
        self.watch = bands.Watch(**state["watch"])
        self.seconds = defaultdict(float, state["seconds"])

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the weights that are evaluated ("ema" where the run keeps one) for stock diffusers."""
        self.accelerator.wait_for_everyone()
        with self.policy.use("ema" if "ema" in self.copies else "policy"):
            adapter = self.policy.peft_config is not None
            weights = checkpoint.gathered(self.model, adapter) if self._sharded else None
            if self.accelerator.is_main_process:
                self.policy.save_pretrained(directory, weights)
        self.accelerator.wait_for_everyone()

    @property
    def _sharded(self) -> bool:
        return any(isinstance(p, DTensor) for p in self.policy.module.parameters())

    def _summary(self, before: Evaluation | None, after: Evaluation | None, finished: bool) -> dict[str, Any]:
        summary = {
            "finished": finished,
            "iterations": self.iteration,
            "seed": self.args.seed,
            "before": before.summary() if before else None,
            "after": after.summary() if after else None,
            "best": self.best or None,
            "alarms": list(self.watch.raised.values()),
            "training_images": self.iteration * self.plan.samples,
            "seconds": sum(self.seconds.values()),  # of the whole run, however often it was resumed
            "phases": dict(self.seconds),
            "processes": self.accelerator.num_processes,
            "device": str(self.accelerator.device),
            "versions": {n: version(n) for n in ("flowrl-align", "torch", "diffusers", "transformers", "peft")},
        }
        if self.accelerator.is_main_process:
            (self.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary


def _prompt_set(source: Any) -> PromptSet:
    return source if isinstance(source, PromptSet) else PromptSet(source)


def _spread(prompts: PromptSet, count: int) -> set[int]:
    """Up to `count` prompt positions, spread evenly over the set (and so over its tasks)."""
    return {round(i * (len(prompts) - 1) / max(count - 1, 1)) for i in range(count)}


def _actions(prompts: Sequence[Prompt], members: Sequence[int], plans: Sequence[StepPlan]) -> Tensor:
    """Ids `[B]`, equal for samples that took the same stochastic steps with the same noise."""
    ids: dict[tuple, int] = {}
    keys = [
        (prompt.index, plan.trained_intervals, member if plan.noise_member is None else plan.noise_member)
        for prompt, member, plan in zip(prompts, members, plans, strict=True)
    ]
    return torch.tensor([ids.setdefault(key, len(ids)) for key in keys])


def _to(x: Any, device: torch.device) -> Any:
    """A Batch or AdvOut on a device."""
    if device.type == "cpu":
        return x
    changed = {k: v.to(device) for k, v in vars(x).items() if isinstance(v, Tensor)}
    if getattr(x, "totals", None) is not None:
        changed["totals"] = replace(x.totals, row_tokens=x.totals.row_tokens.to(device))
    return replace(x, **changed)


__all__ = ["Evaluation", "RatioError", "Trainer"]
