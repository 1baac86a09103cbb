"""Any diffusers flow pipeline as a policy: run it unmodified, record it, replay it.

Sampling calls the stock pipeline with cached prompt embeddings, explicit latents and two observers: a scheduler whose
`step` applies our transition and keeps (x, x', log-probability), and a forward pre-hook that keeps the arguments of the
transformer. Scoring again calls the transformer with the kept arguments under the current weights and recombines
guidance. The same arguments with another x and sigma give the velocity that forward-process objectives need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils import logging
from safetensors.torch import load_file
from torch import Tensor, nn

from flowrl import noise
from flowrl.pipelines.families import family_of
from flowrl.policy import Copies, Transition, Weights
from flowrl.rollout import Conditioning, Prompt, Rollout
from flowrl.samplers.flow import ODE, FlowSampler
from flowrl.samplers.plans import StepPlan
from flowrl.samplers.schedules import SchedulerConfig

ADAPTER = "default"


class RecordingScheduler(FlowMatchEulerDiscreteScheduler):
    """The pipeline's scheduler with our grid and our transition in `step`.

    Set `attach(...)` before each pipeline call; afterwards `states`, `actions`, `means`, `log_prob` hold one entry per
    trained step, and `visited` the (state, velocity) at each of the grid's indices in `keep`.
    """

    def attach(
        self,
        sampler: FlowSampler,
        sigmas: Tensor,
        plan: StepPlan,
        draw: Callable[[int], Tensor],
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self.sampler, self.grid, self.plan, self.draw, self.keep = sampler, sigmas, plan, draw, keep
        self.visited: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: list[Tensor] = []
        self.actions: list[Tensor] = []
        self.means: list[Tensor] = []
        self.log_prob: list[Tensor] = []
        self.previous: tuple[float, Tensor] | None = None
        self.position = 0  # in the plan's path
        last = max((k for k, noisy in enumerate(plan.stochastic) if noisy), default=-1)
        self.multistep_from = last + 1 if plan.solver == "dpm2" else len(plan.stochastic)

    @property
    def ahead(self) -> Tensor:
        """The sigmas still to be visited, from the current one on."""
        return self.grid[list(self.plan.path[self.position :])]

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None) -> None:
        """Take the plan's way through the sampler's grid, whatever the pipeline proposes."""
        self.sigmas = self.ahead.to(device)
        self.num_inference_steps = len(self.sigmas) - 1
        self.timesteps = self.sigmas[:-1] * self.config.num_train_timesteps
        self._step_index = self._begin_index = None

    def step(self, model_output, timestep, sample, *args, return_dict: bool = True, **kwargs):
        self._step_index = 1 + (self._step_index or 0)  # what pipelines and schedulers expect to find
        return (self.advance(sample, model_output),)

    def advance(self, sample: Tensor, model_output: Tensor) -> Tensor:
        """Take the next step of the plan and record it."""
        k = self.position
        self.position = k + 1
        (start, end), stochastic = self.plan.intervals[k], self.plan.stochastic[k]
        if start in self.keep:
            self.visited[start] = sample, model_output
        previous = self.previous if k >= self.multistep_from else None
        distribution = self.sampler.transition(
            sample, model_output, self.grid, start, stochastic, end=end, previous=previous
        )
        if stochastic:
            action = distribution.sample(self.draw(start).to(sample.device))
        elif previous is not None:
            action = distribution.mean
        else:  # the stock scheduler's own arithmetic: in half precision it rounds dt * v, which the mean does not
            action = sample.float() + (self.grid[end] - self.grid[start]) * model_output
        self.previous = self.grid[start].item(), self.sampler.clean_estimate(sample, model_output, self.grid, start)
        # Round to the model's dtype first and score what was really taken, or the ratio would not be one.
        action = action.to(model_output.dtype)
        if self.plan.trained[k]:
            self.states.append(sample)
            self.actions.append(action)
            self.means.append(distribution.mean)
            self.log_prob.append(self.sampler.log_prob(distribution, action))
        return action


class DiffusersPolicy:
    """A diffusers flow pipeline as a policy (see `flowrl.policy.Policy`).

    Args:
        pipe: a loaded pipeline of a family in `flowrl.pipelines.families`.
        peft_config: a `peft.LoraConfig` to train an adapter; None trains every weight of the transformer.
            `target_modules=None` in it takes the family's published targets.
        height, width: pixels; None takes the pipeline's default size.
        max_sequence_length: T5 tokens per prompt, as in the pipeline's call.
        negative_prompt: for guidance above 1 in families that guide by a second branch.
    """

    def __init__(
        self,
        pipe: Any,
        peft_config: Any | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        max_sequence_length: int = 128,
        negative_prompt: str = "",
    ) -> None:
        self.pipe = pipe
        self.family = family_of(pipe)
        default = pipe.default_sample_size * pipe.vae_scale_factor
        self.height, self.width = height or default, width or default
        self.options = {"max_sequence_length": max_sequence_length}
        self.negative_prompt = negative_prompt
        self.module: Any = pipe.transformer
        self._transformer_class = type(pipe.transformer)  # sharding makes a class of its own
        self.forward_module: Any = self.module
        self.copies: Copies | None = None
        self._cache: dict[tuple[str, bool], dict[str, Tensor]] = {}

        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()
        self.peft_config = peft_config
        if peft_config is None:
            self.module.requires_grad_(True)
        else:
            if peft_config.target_modules is None:
                # On a copy: the caller's config may serve a pipeline of another family next.
                self.peft_config = peft_config = copy(peft_config)
                peft_config.target_modules = list(self.family.lora_targets)
            self.module.add_adapter(peft_config, adapter_name=ADAPTER)
            self.module.eval()  # the new layers too: their dropout would break the ratio
            for p in self.module.parameters():
                if p.requires_grad:
                    p.data = p.data.float()
        pipe.set_progress_bar_config(disable=True)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name."""
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}

    # ------------------------------------------------------------------------------------------- conditioning

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], guidance_scale: float = 1.0) -> Conditioning:
        """The pipeline's own `encode_prompt`, one row per entry, cached by text."""
        guided = self.family.doubled_guidance and guidance_scale > 1
        missing = list(dict.fromkeys(p.text for p in prompts if (p.text, guided) not in self._cache))
        # The pipeline would walk through all its modules to find the device, for every text.
        options = self.options | ({"device": self.pipe._execution_device} if missing else {})
        for text in missing:  # one at a time: in a batch the last bits depend on the company
            arguments = self.family.encode(self.pipe, [text], self.negative_prompt if guided else None, options)
            self._cache[text, guided] = {k: v[0] for k, v in arguments.items()}
        rows = [self._cache[p.text, guided] for p in prompts]
        return Conditioning({k: torch.stack([r[k] for r in rows]) for k in rows[0]})

    # ----------------------------------------------------------------------------------------------- sampling

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Prompt],
        members: Sequence[int],
        sampler: FlowSampler,
        *,
        seed: int,
        iteration: int,
        batch_size: int,
        on_latents: Callable[[Tensor], None] | None = None,
    ) -> Rollout:
        """Generate one sample per (prompt, member) with the unmodified pipeline, `batch_size` at a time.

        Noise and plan are functions of `seed`, `iteration` and the indices, never of the batch. `on_latents` is given
        those of the first `batch_size` rows, of the next ones and so on, each batch as soon as it is there. Where
        samples walk several paths it is not the batch just sampled, and may come late.
        """
        sigmas = self.sigmas(sampler)
        plans = sampler.draw_plans(sigmas, seed, iteration, [p.index for p in prompts], members)
        anchors = self._anchors(prompts, plans, sampler, sigmas, seed, iteration, batch_size)
        alike: dict[StepPlan, list[int]] = {}  # a batch walks one path, whoever's noise its samples take
        for i, plan in enumerate(plans):
            alike.setdefault(replace(plan, noise_member=None, branch=0), []).append(i)
        order: list[int] = []
        parts: list[Rollout] = []
        batches = [range(at, min(at + batch_size, len(plans))) for at in range(0, len(plans), batch_size)]
        latents: dict[int, Tensor] = {}
        for rows in (path[at : at + batch_size] for path in alike.values() for at in range(0, len(path), batch_size)):
            drawn = [prompts[i] for i in rows], [members[i] for i in rows], [plans[i] for i in rows]
            parts.append(self._sample_chunk(*drawn, anchors, sampler, sigmas, seed, iteration))
            order += rows
            if on_latents is not None:
                latents |= zip(rows, parts[-1].latents, strict=True)
                while batches and latents.keys() >= set(batches[0]):
                    on_latents(torch.stack([latents.pop(i) for i in batches.pop(0)]))
        rollout = Rollout.cat(parts)
        if order == sorted(order):
            return rollout
        return rollout.rows(sorted(range(len(order)), key=order.__getitem__))

    def _anchors(
        self,
        prompts: Sequence[Prompt],
        plans: Sequence[StepPlan],
        sampler: FlowSampler,
        sigmas: Tensor,
        seed: int,
        iteration: int,
        batch_size: int,
    ) -> dict[int, dict[int, tuple[Tensor, Tensor]]]:
        """The trajectories that groups share: prompt index -> step -> (state, velocity) there, one forward for all."""
        keep = frozenset(plan.anchor for plan in plans if plan.anchor is not None)
        if not keep:
            return {}
        last = max(keep) + 1
        ode = StepPlan((False,) * last, (False,) * last)
        owners = list({p.index: p for p, plan in zip(prompts, plans, strict=True) if plan.anchor is not None}.values())
        shared: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        for at in range(0, len(owners), batch_size):
            chunk = owners[at : at + batch_size]
            draw = self._noise(seed, iteration, chunk, [0] * len(chunk))
            scheduler = RecordingScheduler.from_config(self.pipe.scheduler.config)
            scheduler.attach(sampler, sigmas, ode, draw, keep)
            self._run(scheduler, chunk, draw(noise.INITIAL), sampler)
            for k, prompt in enumerate(chunk):
                shared[prompt.index] = {n: (x[k], v[k]) for n, (x, v) in scheduler.visited.items()}
        return shared

    def _noise(self, seed: int, iteration: int, prompts: Sequence[Prompt], members: Sequence[int]):
        shape = self.family.latent_shape(self.pipe, self.height, self.width)

        def draw(step: int) -> Tensor:
            return noise.batch_normal(shape, seed, iteration, [p.index for p in prompts], members, step)

        return draw

    def sigmas(self, sampler: FlowSampler) -> Tensor:
        """The sampler's grid for this pipeline and resolution, float32 `[T + 1]` on the CPU."""
        shape = self.family.latent_shape(self.pipe, self.height, self.width)
        schedule = sampler.schedule
        if isinstance(schedule, SchedulerConfig) and schedule.linspace is None:
            schedule = replace(schedule, linspace=self.family.linspace_sigmas)
        return schedule(sampler.steps, self.family.image_tokens(self.pipe, shape)).cpu()

    def _sample_chunk(
        self,
        prompts: list[Prompt],
        members: list[int],
        plans: list[StepPlan],
        anchors: Mapping[int, Mapping[int, tuple[Tensor, Tensor]]],
        sampler: FlowSampler,
        sigmas: Tensor,
        seed: int,
        iteration: int,
    ) -> Rollout:
        """Samples whose plans walk one path (they may take other members' noise)."""
        plan = plans[0]
        takes = [m if p.noise_member is None else p.noise_member for m, p in zip(members, plans, strict=True)]
        draw = self._noise(seed, iteration, prompts, takes)
        scheduler = RecordingScheduler.from_config(self.pipe.scheduler.config)
        scheduler.attach(sampler, sigmas, plan, draw)
        if plan.anchor is None:
            start = draw(noise.INITIAL)
        else:  # the first step away from the anchor needs no forward of its own
            x, v = (torch.stack(parts) for parts in zip(*(anchors[p.index][plan.anchor] for p in prompts), strict=True))
            scheduler.position = plan.anchor
            start = scheduler.advance(x, v)
        ahead = scheduler.ahead
        latents, calls = self._run(scheduler, prompts, start, sampler)
        batched, shared = self._template(calls, len(prompts), ahead, latents.dtype)
        empty = latents.new_empty((len(prompts), 0, *latents.shape[1:]))
        stack = lambda xs: torch.stack(xs, 1) if xs else empty  # noqa: E731
        return Rollout(
            prompts=prompts,
            members=members,
            iteration=iteration,
            seed=seed,
            plans=plans,
            sigmas=sigmas,
            guidance_scale=sampler.guidance_scale,
            calls=batched,
            shared=shared,
            latents=latents,
            states=stack(scheduler.states),
            actions=stack(scheduler.actions),
            means=stack(scheduler.means).float(),
            log_prob=torch.stack(scheduler.log_prob, 1)
            if scheduler.log_prob
            else torch.zeros((len(prompts), 0), device=self.device),
        )

    def _run(
        self, scheduler: RecordingScheduler, prompts: Sequence[Prompt], latents: Tensor, sampler: FlowSampler
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """The unmodified pipeline from these latents along what the scheduler has ahead: (latents, recorded calls)."""
        with self._observed(scheduler) as calls:
            latents = self._generate(prompts, latents, len(scheduler.ahead) - 1, sampler.guidance_scale)
        return latents, calls

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt], latents: Tensor, steps: int, guidance_scale: float) -> Tensor:
        """The pipeline as it stands, from these latents to those at the end of its schedule."""
        arguments = self.encode(prompts, guidance_scale).arguments
        return self.pipe(
            **{k: v.to(self.device) for k, v in arguments.items()},
            latents=latents.to(self.device, next(iter(arguments.values())).dtype),
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            height=self.height,
            width=self.width,
            output_type="latent",
            return_dict=False,
        )[0]

    @contextmanager
    def _observed(self, scheduler: RecordingScheduler) -> Iterator[list[dict[str, Any]]]:
        """Swap the scheduler in and record the transformer's keyword arguments."""
        calls: list[dict[str, Any]] = []
        stock = self.pipe.scheduler

        def record(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            # Only the first call is kept whole: later ones differ in the latents and the time.
            calls.append(dict(kwargs) if not calls else {"timestep": kwargs["timestep"]})

        handle = self.module.register_forward_pre_hook(record, with_kwargs=True)
        self.pipe.scheduler = scheduler
        try:
            yield calls
        finally:
            self.pipe.scheduler = stock
            handle.remove()

    def _template(
        self, calls: list[dict[str, Any]], batch: int, sigmas: Tensor, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Split a recorded call into rows `[B, branches, ...]` and what all rows share."""
        kwargs = dict(calls[0])
        branches = kwargs.pop("hidden_states").shape[0] // batch
        kwargs.pop("timestep")
        kwargs.pop("return_dict", None)
        if len(calls) != len(sigmas) - 1:
            raise RuntimeError(
                f"{type(self.pipe).__name__} called its transformer {len(calls)} times in {len(sigmas) - 1} steps; "
                "replay needs one call per step. Switch off options that add calls (skip-layer or true guidance)."
            )
        for i, call in enumerate(calls):
            expected = self.family.model_time(sigmas[i].to(call["timestep"].device), dtype)
            if not torch.equal(call["timestep"].flatten()[0], expected.to(call["timestep"].dtype)):
                raise RuntimeError(
                    f"{type(self.pipe).__name__} passed time {call['timestep'].flatten()[0].item()} at step {i}, its "
                    f"entry in flowrl.pipelines.families says {expected.item()}: correct `model_time` there."
                )
        batched, shared = {}, {}
        for name, value in kwargs.items():
            if name in self.family.batched and isinstance(value, Tensor):
                batched[name] = value.unflatten(0, (branches, batch)).transpose(0, 1)
            else:
                shared[name] = value
        return batched, shared

    def stock_difference(
        self, prompts: Sequence[Prompt], members: Sequence[int], sampler: FlowSampler, seed: int
    ) -> float:
        """Largest difference of the latents at noise 0 to the untouched pipeline's, from the same noise.

        Raises:
            RuntimeError: they differ by more than 1e-4: the family's entry is wrong for this pipeline.
        """
        ode = ODE.from_config(self.pipe.scheduler.config, steps=sampler.steps, guidance_scale=sampler.guidance_scale)
        ours = self.sample(prompts, members, ode, seed=seed, iteration=0, batch_size=len(prompts))
        start = self._noise(seed, 0, prompts, members)(noise.INITIAL)
        stock = self._generate(prompts, start, ode.steps, ode.guidance_scale)
        difference = (stock.float() - ours.latents.float()).abs().max().item()
        if not difference <= 1e-4:
            raise RuntimeError(
                f"at noise 0 our latents differ from the stock {type(self.pipe).__name__}'s by {difference:.3g}: "
                "its entry in flowrl.pipelines.families does not describe it"
            )
        return difference

    # ---------------------------------------------------------------------------------------------- evaluation

    def velocity(self, x: Tensor, sigma: Tensor, rollout: Rollout) -> Tensor:
        """`v(x, sigma)` under the current weights with the rollout's conditioning and guidance, float32.

        Args:
            x: `[b, ...]` latents, rounded to the dtype of the rollout's.
            sigma: `[b]` or 0-dim noise level.
        """
        x = x.to(rollout.latents.dtype)
        branches = next(iter(rollout.calls.values())).shape[1]
        time = self.family.model_time(sigma.to(x.device, torch.float32).expand(len(x)), x.dtype)
        module = self.forward_module if torch.is_grad_enabled() else self.module
        output = module(
            hidden_states=torch.cat([x] * branches),
            timestep=torch.cat([time] * branches),
            **{k: v.transpose(0, 1).flatten(0, 1) for k, v in rollout.calls.items()},
            **rollout.shared,
            return_dict=False,
        )[0]
        if branches == 2:  # the pipeline's own order and arithmetic: [unconditional, conditional]
            unconditional, conditional = output.chunk(2)
            output = unconditional + rollout.guidance_scale * (conditional - unconditional)
        return output.float()

    def evaluate(self, rollout: Rollout, unit: int, sampler: FlowSampler) -> Transition:
        """Score the recorded action of column `unit` under the current weights; carries gradient."""
        start, end = rollout.interval(unit)
        x = rollout.states[:, unit]
        v = self.velocity(x, rollout.sigmas[start], rollout)
        distribution = sampler.transition(x, v, rollout.sigmas, start, end=end)
        return Transition(distribution, sampler.log_prob(distribution, rollout.actions[:, unit]), v)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images `[b, 3, H, W]` in [0, 1], float32."""
        vae = self.pipe.vae
        z = self.family.unpack(self.pipe, latents, self.height, self.width)
        z = z.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        image = vae.decode(z, return_dict=False)[0]
        return self.pipe.image_processor.postprocess(image, output_type="pt").float()

    # ------------------------------------------------------------------------------------------------- weights

    def use(self, weights: Weights) -> AbstractContextManager[None]:
        """Run a block, without gradients, with other weights.

        "reference" is the model before training: the adapter switched off, or a frozen copy. "old" and "ema" are the
        trainer's copies.

        Raises:
            RuntimeError: no trainer has provided the copy.
        """
        if weights == "policy":
            return nullcontext()
        if weights == "reference" and self.peft_config is not None:
            return self._adapter_off()
        if self.copies is None:
            raise RuntimeError(f"no copy {weights!r} of the weights: a Trainer provides it (Policy.copies)")
        return self.copies.swapped(weights)

    def equals(self, weights: Weights) -> bool:
        """Whether these weights are the policy's own, bit for bit; False where that is not known."""
        if weights == "policy":
            return True
        return self.copies is not None and self.copies.is_policy(weights)

    @contextmanager
    def _adapter_off(self) -> Iterator[None]:
        trained = list(self.trainable().values())
        if not trained:
            raise RuntimeError("the adapter is off already: reference blocks cannot be nested")
        self.module.disable_adapters()
        try:
            yield
        finally:
            self.module.enable_adapters()
            for p in trained:  # peft leaves them frozen, and a backward would then silently do nothing
                p.requires_grad_(True)

    def save_pretrained(self, directory: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write an adapter that `pipe.load_lora_weights(directory)` loads, or a whole pipeline folder.

        Args:
            weights: the transformer's state dict, where this process holds only a shard of it.

        Raises:
            RuntimeError: what lies on disk afterwards is not what the policy holds.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self.peft_config is None:
            with self._whole(weights) as module, _errors_only():  # diffusers warns of every component that is None
                self.pipe.save_pretrained(directory, safe_serialization=True)
                _verify(directory / "transformer", module.state_dict())
            return
        from peft.utils import get_peft_model_state_dict

        layers = get_peft_model_state_dict(self.module, state_dict=weights, adapter_name=ADAPTER)
        # Without the metadata diffusers forgets lora_alpha and the reloaded policy is another one.
        metadata = json.loads(json.dumps(self.peft_config.to_dict(), default=_jsonable))
        type(self.pipe).save_lora_weights(
            directory,
            transformer_lora_layers=layers,
            transformer_lora_adapter_metadata=metadata,
        )
        _verify(directory, {f"transformer.{k}": v for k, v in layers.items()})

    @contextmanager
    def _whole(self, weights: Mapping[str, Tensor] | None) -> Iterator[nn.Module]:
        """The transformer in the pipeline; one made of `weights` takes its place where they are given."""
        if weights is None:
            yield self.module
            return
        module = self._transformer_class.from_config(self.module.config)
        module.load_state_dict(weights, assign=True)
        self.pipe.transformer = module
        try:
            yield module
        finally:
            self.pipe.transformer = self.module


@contextmanager
def _errors_only() -> Iterator[None]:
    """Without the warnings of diffusers."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _verify(directory: Path, live: Mapping[str, Tensor]) -> None:
    """Compare the safetensors in a folder with the weights in memory, bit for bit."""
    saved: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        saved |= load_file(path)
    wrong = [k for k in live if k not in saved or not torch.equal(saved[k], live[k].cpu())]
    if wrong:
        raise RuntimeError(f"{directory} does not hold the weights that were saved ({len(wrong)} differ: {wrong[:3]})")


def _jsonable(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def load_pipeline(path: str | Path, torch_dtype: torch.dtype | str | None = None, **kwargs: Any) -> Any:
    """`DiffusionPipeline.from_pretrained` that also takes folders saved without some text encoder.

    Raises:
        FileNotFoundError: the folder lacks `model_index.json` or a component's weights; the message names it.
    """
    from diffusers import DiffusionPipeline

    folder = Path(path)
    if folder.is_dir():
        index_file = folder / "model_index.json"
        if not index_file.is_file():
            raise FileNotFoundError(
                f"{folder} is not a diffusers pipeline: it has no model_index.json. Pass a folder written by "
                "`pipe.save_pretrained(...)` or a model id."
            )
        for name, entry in json.loads(index_file.read_text()).items():
            if not isinstance(entry, list) or name in kwargs:
                continue
            if entry == [None, None]:
                kwargs[name] = None
            elif not (folder / name).is_dir():
                raise FileNotFoundError(
                    f"{index_file} lists {name}, and {folder} has no such folder: the download or copy is incomplete. "
                    f"Fetch the folder again, or pass {name}=None to do without."
                )
            elif (folder / name / "config.json").is_file() and not any((folder / name).glob("*.safetensors")):
                raise FileNotFoundError(
                    f"{folder / name} has a config but no *.safetensors weights: the download or copy is incomplete. "
                    "Fetch the folder again, or save it with safe_serialization=True."
                )
    elif len(folder.parts) != 2 or folder.is_absolute() or str(path).startswith((".", "~")):
        raise FileNotFoundError(
            f"no model folder {folder}. Pass an existing folder or a hub id such as "
            "'stabilityai/stable-diffusion-3.5-medium'."
        )
    return DiffusionPipeline.from_pretrained(path, torch_dtype=torch_dtype, **kwargs)
