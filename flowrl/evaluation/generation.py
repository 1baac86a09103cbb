"""Write a model's images for a list of prompts into GenEval's layout, one folder per prompt.

Every image has its own noise, a function of (seed, number of the prompt, number of the sample): the batch size, the
number of processes and what was already there do not change it. (GenEval's own script sets seed 42 again before each
prompt, so that all prompts start from the same noise.)
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image
from tqdm.auto import tqdm

from flowrl import noise
from flowrl.evaluation.geneval import processes
from flowrl.policy import Weights
from flowrl.rewards.base import to_pil
from flowrl.rewards.geneval import GENEVAL_CLASSES, parse_metadata
from flowrl.rollout import Prompt
from flowrl.samplers.flow import FlowSampler
from flowrl.training.prompts import PromptSet, PromptSource
from flowrl.training.trainer import EVALUATION

Draw: TypeAlias = Callable[[list[Prompt], list[int]], list[Image.Image]]
"""`(prompts, numbers of the samples) ->` their images."""
SETTINGS = "generation.json"


def read_prompts(
    source: PromptSource, classes: Sequence[str] = GENEVAL_CLASSES, limit: int | None = None
) -> list[Prompt]:
    """Prompts with checked GenEval metadata: all, or the first `limit` of each task under their numbers in the whole.

    source: as in `PromptSet`, such as "geneval" or a `.jsonl` file. Raises ValueError on a prompt without metadata,
    FileNotFoundError where there is no such file.
    """
    prompts, seen = [], dict[str, int]()
    for p in PromptSet(source):
        metadata = parse_metadata({**p.metadata, "prompt": p.text}, classes)
        seen[metadata["tag"]] = seen.get(metadata["tag"], 0) + 1
        if limit is None or seen[metadata["tag"]] <= limit:
            prompts.append(Prompt(p.index, p.text, metadata))
    return prompts


def from_pipeline(
    pipe: Any, seed: int, steps: int | None = None, guidance_scale: float | None = None, **options: Any
) -> Draw:
    """Images from a stock diffusers pipeline's own call; what is None is left to its defaults.

    options: more keywords of the call, such as max_sequence_length. Raises ValueError on a keyword that the call
    does not have.
    """
    given = {"num_inference_steps": steps, "guidance_scale": guidance_scale, **options}
    given = {k: v for k, v in given.items() if v is not None}
    if unknown := set(given) - set(inspect.signature(pipe.__call__).parameters):
        raise ValueError(f"{type(pipe).__name__} takes no {' or '.join(sorted(unknown))}")
    pipe.set_progress_bar_config(disable=True)

    def draw(prompts: list[Prompt], members: list[int]) -> list[Image.Image]:
        keys = zip(prompts, members, strict=True)
        generators = [noise.generator(seed, EVALUATION, p.index, m) for p, m in keys]
        return pipe(prompt=[p.text for p in prompts], generator=generators, output_type="pil", **given).images

    return draw


def from_policy(policy: Any, sampler: FlowSampler, seed: int, weights: Weights = "policy") -> Draw:
    """Images of a policy under a sampler, with the noise of the trainer's evaluations under this seed."""

    def draw(prompts: list[Prompt], members: list[int]) -> list[Image.Image]:
        n = len(prompts)
        with policy.use(weights):
            rollout = policy.sample(prompts, members, sampler, seed=seed, iteration=EVALUATION, batch_size=n)
            return to_pil(policy.decode(rollout.latents))

    return draw


def load_model(model: str, weights: str | Path | None = None, dtype: str | None = None) -> tuple[Any, dict[str, Any]]:
    """A stock pipeline and the keywords its prompts need: a folder, a hub id or a shipped model's name.

    weights: a folder with a pipeline or an adapter, as `save_pretrained` writes it, to take instead of the model's own.
    dtype: "float32", "float16" or "bfloat16"; None is diffusers' default. Raises FileNotFoundError where there is no
    model.
    """
    import torch

    from flowrl.pipelines.recording import load_pipeline
    from flowrl.training.recipe import ADAPTER_FILE, ModelConfig

    config = ModelConfig.of(model)
    folder = None if weights is None else Path(weights)
    adapter = folder is not None and (folder / ADAPTER_FILE).is_file()
    source = config.location if folder is None or adapter else folder
    pipe = load_pipeline(source, None if dtype is None else getattr(torch, dtype))
    if adapter:
        pipe.load_lora_weights(folder, weight_name=ADAPTER_FILE)
    shipped = config.location != model
    return pipe, {"max_sequence_length": config.max_sequence_length} if shipped else {}


def begin(folder: str | Path, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> None:
    """Make the folders and metadata, or check that they are there for the same images.

    settings: all that the images depend on beside the prompts; kept in `generation.json`. Raises ValueError naming what
    differs when the folder was begun with other settings or prompts, or by something else.
    """
    folder, state = Path(folder), processes()
    wanted = json.loads(json.dumps({**settings, "prompts": _hash(prompts)}))
    if (folder / SETTINGS).is_file():
        known = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        changed = [k for k in {**known, **wanted} if known.get(k) != wanted.get(k)]
        if changed:
            facts = "; ".join(f"{k} {known.get(k)!r}, now {wanted.get(k)!r}" for k in changed)
            raise ValueError(f"{folder} was begun with {facts}. Take another --output or delete it")
    elif folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir()):
        raise ValueError(f"{folder} holds images of unknown origin: take another --output, or score it with --images")
    state.wait_for_everyone()
    if state.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = (folder / SETTINGS).with_suffix(".tmp")
        temporary.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, folder / SETTINGS)
        for p in prompts:
            (_folder(folder, p) / "samples").mkdir(parents=True, exist_ok=True)
            (_folder(folder, p) / "metadata.jsonl").write_text(json.dumps(p.metadata), encoding="utf-8")
    state.wait_for_everyone()


def generate(
    draw: Draw, prompts: Sequence[Prompt], folder: str | Path, images_per_prompt: int = 4, batch_size: int = 4
) -> None:
    """Write every image that a folder made by `begin` lacks. A PNG appears whole or not at all.

    With several processes (`accelerate launch`, `torchrun`) each makes every n-th image that is missing.
    """
    folder, state = Path(folder), processes()
    jobs = [
        (p, member, _folder(folder, p) / "samples" / f"{member:05}.png")
        for p in prompts
        for member in range(images_per_prompt)
    ]
    missing = [job for job in jobs if not job[2].is_file()]
    state.wait_for_everyone()  # all have listed what is missing before anyone adds to it
    mine = missing[state.process_index :: state.num_processes]
    with tqdm(total=len(mine), desc="generating", disable=not state.is_main_process) as bar:
        for at in range(0, len(mine), batch_size):
            rows, members, paths = map(list, zip(*mine[at : at + batch_size], strict=True))
            for image, path in zip(draw(rows, members), paths, strict=True):
                temporary = path.with_suffix(".tmp")
                image.convert("RGB").save(temporary, format="PNG")
                os.replace(temporary, path)
            bar.update(len(rows))
    state.wait_for_everyone()


def _folder(folder: Path, prompt: Prompt) -> Path:
    return folder / f"{prompt.index:05}"


def _hash(prompts: Sequence[Prompt]) -> str:
    text = json.dumps([(p.index, p.metadata) for p in prompts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
