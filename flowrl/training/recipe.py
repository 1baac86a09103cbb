"""A run as one typed object: read from YAML, changed by `key=value`, written back whole, turned into a `Trainer`."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from flowrl import objectives, recipes, samplers
from flowrl.objectives import Objective
from flowrl.recipes import RecipeError
from flowrl.samplers import ODE, FlowSampler, Plan, Schedule, SchedulerConfig, SingleShift
from flowrl.training.arguments import TrainingArguments
from flowrl.training.prompts import WORLDS

if TYPE_CHECKING:
    from flowrl.pipelines.recording import DiffusersPolicy
    from flowrl.training.trainer import Trainer

ADAPTER_FILE = "pytorch_lora_weights.safetensors"


@dataclass
class ModelConfig:
    """Which generator, and how prompts enter it.

    Args:
        path: a diffusers pipeline folder, a hub id, or a miniature world's name ("shapes", "glyphs").
        dtype: dtype of the loaded weights; None keeps the folder's. Trained adapter weights are float32 in any case.
        height, width: pixels; None takes the pipeline's default.
        max_sequence_length: T5 tokens per prompt (0 for a pipeline without T5).
        negative_prompt: for guidance above 1 in families that guide by a second branch.
    """

    path: str
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    height: int | None = None
    width: int | None = None
    max_sequence_length: int = 128
    negative_prompt: str = ""

    @classmethod
    def of(cls, path: str) -> ModelConfig:
        """The defaults for a model; a shipped one brings its own."""
        return cls(path, **WORLDS.get(path, {}))

    @property
    def location(self) -> str:
        """`path`, or the folder of the shipped model of that name."""
        if self.path not in WORLDS:
            return self.path
        return str(importlib.import_module(f"flowrl.miniature.{self.path}").WEIGHTS)


def is_model(name: str) -> bool:
    """Whether this names a model: a folder, a shipped one, or what looks like a hub id."""
    return name in WORLDS or Path(name).is_dir() or name.count("/") == 1


@dataclass
class AdapterConfig:
    """A LoRA adapter; None of its `target_modules` takes the model family's published ones.

    Args:
        rank, alpha: the update is alpha / rank times B A.
        init: A's first weights, "gaussian" or "kaiming" (peft's default). B starts at 0 in both.
        target_modules: names of linear layers.
    """

    rank: int = 32
    alpha: int = 64
    init: Literal["gaussian", "kaiming"] = "gaussian"
    target_modules: list[str] | None = None


@dataclass(frozen=True)
class Stock(Schedule):
    """The grid of the model's own scheduler, `SchedulerConfig(pipe.scheduler.config)` once the model is loaded.

    Args:
        linspace: see `SchedulerConfig`.
    """

    linspace: bool | None = None

    def __call__(self, steps: int, image_tokens: int | None = None) -> Any:
        raise RuntimeError("this schedule is known only with the model: `build_trainer` replaces it")


@dataclass
class Recipe:
    """Everything that defines a run.

    Args:
        description: one line for people.
        model, objective, sampler, training: the parts; `sampler` may hold a `Stock` schedule.
        rewards: name, `module:function` or `KIND@URL[,URL]` (`remote@...`, see docs/rewards.md) -> weight.
        prompts: a named set, file or `module:function`; see `PromptSet`.
        eval_prompts, eval_rewards, eval_sampler: see `Trainer`.
        lora: None trains all weights.
    """

    description: str
    model: ModelConfig
    objective: Objective
    sampler: FlowSampler
    rewards: dict[str, float]
    prompts: str
    eval_prompts: str | None = None
    eval_rewards: dict[str, float] | None = None
    eval_sampler: FlowSampler | None = None
    lora: AdapterConfig | None = None
    training: TrainingArguments = field(default_factory=TrainingArguments)


def _concrete(base: type, module: Any) -> dict[str, type]:
    return {
        name: cls
        for name, cls in vars(module).items()
        if inspect.isclass(cls) and issubclass(cls, base) and not inspect.isabstract(cls)
    }


# A part is written as its class's name and fields, or as the name alone.
_PARTS: dict[str, dict[str, type]] = {
    "objective": _concrete(Objective, objectives),
    "sampler": _concrete(FlowSampler, samplers),
    "schedule": _concrete(Schedule, samplers) | {"Stock": Stock},
    "plan": _concrete(Plan, samplers),
}
_PARTS["schedule"].pop("SchedulerConfig")  # its config is the model's: that is Stock
_PARTS["eval_sampler"] = _PARTS["sampler"]
_ALIASES = {"stock": "Stock", "all": "AllSteps"}
_PLAIN = {"model": ModelConfig, "lora": AdapterConfig, "training": TrainingArguments}
_TABLES = ("rewards", "eval_rewards")  # their keys are the user's


# ---------------------------------------------------------------------------------------------------- reading


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply overrides, in their order.

    Args:
        name_or_path: a shipped recipe's name or a YAML file.
        overrides: "key=value" with a dotted key and a YAML value: `training.iterations=10`, `lora=null`,
            `rewards.jpeg_compressibility=0.5`. Naming another class (`objective=DiffusionNFT`) keeps the fields that
            both classes have with the same default and drops the others.

    Raises:
        RecipeError: no such recipe, broken YAML, an unknown key (with the nearest one), a wrong type,
            a value out of range.
    """
    tree = recipes.read(recipes.find(name_or_path))
    for text in overrides:
        _override(tree, text)
    try:
        return recipe_from(tree)
    except RecipeError as error:
        raise RecipeError(f"recipe {name_or_path}: {error}") from error


def recipe_from(tree: Mapping[str, Any]) -> Recipe:
    """The recipe in nested mappings. Raises RecipeError as `load_recipe` does."""
    tree = _expanded(tree)
    _check_keys(tree, [f.name for f in fields(Recipe)])
    missing = [f.name for f in fields(Recipe) if _required(f) and tree.get(f.name) is None]
    if missing:
        raise RecipeError(f"missing: {', '.join(missing)}")
    parts: dict[str, Any] = {}
    for key, cls in _PLAIN.items():
        if tree.get(key) is not None:
            parts[key] = _build(cls, tree[key], key)
    parts["objective"] = _part(tree["objective"], "objective")
    for key in ("sampler", "eval_sampler"):
        if tree.get(key) is not None:
            parts[key] = _part(tree[key], key)
    simple = {k: v for k, v in tree.items() if k not in (*_PLAIN, *_PARTS)}
    return Recipe(**_typed(Recipe, simple, ""), **parts)


def _required(f: Any) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _fields(cls: type) -> dict[str, Any]:
    """Name -> default of a dataclass's parameters."""
    return {f.name: None if _required(f) else f.default for f in fields(cls) if f.init}  # ty: ignore


def _expanded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Parts given by name alone as mappings; the samplers' defaults that differ from their classes'."""
    tree = dict(tree)
    for key in ("objective", "sampler", "eval_sampler"):
        if isinstance(tree.get(key), str):
            tree[key] = {"name": tree[key]}
    for key in ("sampler", "eval_sampler"):
        if isinstance(tree.get(key), Mapping):
            sampler = tree[key] = {"schedule": "stock", "plan": "all", **tree[key]}
            if key == "eval_sampler":
                sampler.setdefault("name", "ODE")
            for part in ("schedule", "plan"):
                if isinstance(sampler[part], str):
                    sampler[part] = {"name": _ALIASES.get(sampler[part], sampler[part])}
            if sampler.get("noise_level", 0) is None:
                del sampler["noise_level"]
    return tree


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise RecipeError(f"{text!r} is not key=value, such as training.iterations=10")
    value = recipes.read_value(value_text)
    path = key.split(".")
    if path[0] in _TABLES and len(path) > 1:  # a reward's name may hold dots
        path = [path[0], key.partition(".")[2]]
    if path[-1] == "name" and path[-2:-1] and path[-2] in _PARTS:
        path.pop()
    node: Any = tree
    for depth, step in enumerate(path[:-1], 1):
        if node.get(step) is None:
            node[step] = {}
        elif isinstance(node[step], str) and step in _PARTS:
            node[step] = {"name": _ALIASES.get(node[step], node[step])}
        if not isinstance(node[step], dict):
            raise RecipeError(f"{key}: {'.'.join(path[:depth])} is {node[step]!r} and has no keys")
        node = node[step]
    if path[-1] in _PARTS and isinstance(value, str):
        value = _switched(path[-1], node.get(path[-1]), value)
    node[path[-1]] = value


def _switched(part: str, old: Any, name: str) -> Any:
    """Another class for a part, with the old one's fields that mean the same in both."""
    name = _ALIASES.get(name, name)
    if not isinstance(old, dict):
        return {"name": name}
    classes = _PARTS[part]
    before, after = classes.get(str(old.get("name"))), classes.get(name)
    if before is None or after is None:
        return {**old, "name": name}  # refused by name later
    was, has = _fields(before), _fields(after)
    kept = {k: v for k, v in old.items() if k not in was or (k in has and was[k] == has[k])}
    return {**kept, "name": name}


def _class_of(values: Any, where: str) -> type:
    classes = _PARTS[where.rpartition(".")[2]]
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where} must be a class's name or a mapping with `name`, got {values!r}")
    name = values.get("name")
    if name is None:
        raise RecipeError(f"{where} has no `name`: one of {', '.join(classes)}")
    if not isinstance(name, str) or name not in classes:
        raise RecipeError(f"unknown {where} {name!r}{recipes.nearest(str(name), classes)}")
    return classes[name]


def _check_keys(given: Iterable[str], known: Sequence[str], where: str = "") -> None:
    """Raise RecipeError for the first key that is not known, with the nearest that is."""
    for key in given:
        if key in known:
            continue
        elsewhere = [f"{part}.{key}" for part, cls in _PLAIN.items() if key in _fields(cls)]
        owners = [name for name, cls in _PARTS.get(where.rpartition(".")[2], {}).items() if key in _fields(cls)]
        if owners:
            hint = f": it belongs to {' or '.join(owners)}"
        elif elsewhere and not where:
            hint = f"; did you mean {elsewhere[0]!r}?"
        else:
            hint = recipes.nearest(f"{where}.{key}".strip("."), [f"{where}.{k}".strip(".") for k in known])
        raise RecipeError(f"unknown key {f'{where}.{key}'.strip('.')!r}{hint}")


def _part(values: Any, where: str) -> Any:
    cls = _class_of(values, where)
    inner = {k: _part(values[k], f"{where}.{k}") for k in ("schedule", "plan") if k in _fields(cls)}
    return _build(cls, {k: v for k, v in values.items() if k not in ("name", *inner)}, where, inner)


def _build(cls: Any, values: Any, where: str, inner: Mapping[str, Any] | None = None) -> Any:
    """An instance of a dataclass; `inner` are parts that are built already."""
    inner = inner or {}
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where} must be a mapping with keys from {', '.join(_fields(cls))}, got {values!r}")
    _check_keys(values, list(_fields(cls)), where)
    missing = [f.name for f in fields(cls) if f.init and _required(f) and f.name not in {*values, *inner}]
    if missing:
        raise RecipeError(f"missing: {', '.join(f'{where}.{name}' for name in missing)}")
    typed = _typed(cls, values, where)
    try:
        return cls(**typed, **inner)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{where}: {error}") from error


def _typed(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values in the types the class declares. Raises RecipeError naming key, type and value."""
    hints = get_type_hints(cls)
    # Argument by argument: jsonargparse's own reading of a class imports all that its module names for type checkers.
    parser = ArgumentParser(exit_on_error=False)
    for key in values:
        parser.add_argument(f"--{key}", type=hints[key])
    try:
        return dict(vars(parser.parse_object(dict(values))))
    except ArgumentError as error:
        found = re.search(r'Parser key "(\w+)', str(error))
        if found is None:
            raise RecipeError(f"{where or 'top level'}: {error}") from error
        key = found[1]
        message = f"{f'{where}.{key}'.strip('.')} must be {_spelled(hints[key])}, got {values[key]!r}"
        raise RecipeError(message) from error


def _spelled(hint: Any) -> str:
    """A type for people."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is type(None):
        return "null"
    if get_origin(hint) is Union or type(hint).__name__ == "UnionType":
        return " or ".join(map(_spelled, get_args(hint)))
    if get_origin(hint) in (list, tuple):
        return "a list"
    return hint.__name__ if inspect.isclass(hint) and not get_args(hint) else str(hint)


# ---------------------------------------------------------------------------------------------------- writing


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """Nested mappings of plain values with every default spelled out; `recipe_from` reads them back."""

    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            named = {} if isinstance(value, (Recipe, *_PLAIN.values())) else {"name": type(value).__name__}
            return named | {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.init}
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return plain(recipe)


def dump_recipe(recipe: Recipe) -> str:
    """The full recipe as YAML; a file with it is a recipe that gives an equal one."""
    return yaml.safe_dump(recipe_dict(recipe), sort_keys=False, allow_unicode=True, width=110)


# ---------------------------------------------------------------------------------------------------- running


def resolved(sampler: FlowSampler, scheduler_config: Mapping[str, Any]) -> FlowSampler:
    """The sampler with a `Stock` schedule replaced by the grid of this scheduler config."""
    if not isinstance(sampler.schedule, Stock):
        return sampler
    return sampler.with_(schedule=SchedulerConfig(dict(scheduler_config), sampler.schedule.linspace))


def evaluation_sampler(recipe: Recipe) -> FlowSampler:
    """The recipe's own, or the ODE on the training sampler's grid, as in `Trainer`."""
    s = recipe.sampler
    return recipe.eval_sampler or ODE(steps=s.steps, guidance_scale=s.guidance_scale, schedule=s.schedule)


def stock_sampler(pipe: Any) -> FlowSampler:
    """The ODE with the steps and guidance that the pipeline's call defaults to, on its scheduler's grid."""
    call = inspect.signature(pipe.__call__).parameters
    steps, guidance = call["num_inference_steps"].default, call["guidance_scale"].default
    return ODE.from_config(pipe.scheduler.config, steps=steps, guidance_scale=guidance)


def load_policy(
    model: ModelConfig, lora: AdapterConfig | None = None, weights: str | Path | None = None
) -> DiffusersPolicy:
    """The generator a recipe names.

    Args:
        weights: a folder that `save_pretrained` wrote, with a pipeline or an adapter, to take instead of the
            model's own.

    Raises:
        FileNotFoundError: no model there, or `weights` is neither.
    """
    import torch
    from peft import LoraConfig

    from flowrl.pipelines.recording import ADAPTER, DiffusersPolicy, load_pipeline

    folder = None if weights is None else Path(weights)
    adapter = folder is not None and (folder / ADAPTER_FILE).is_file()
    if folder is not None and not adapter and not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no saved model: neither model_index.json (a pipeline) nor {ADAPTER_FILE} (an adapter)"
        )
    source = model.location if folder is None or adapter else folder
    pipe = load_pipeline(source, None if model.dtype is None else getattr(torch, model.dtype))
    if adapter:
        pipe.load_lora_weights(folder, weight_name=ADAPTER_FILE, adapter_name="loaded")
    config = lora and LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
        target_modules=lora.target_modules,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second adapter is what we want
        policy = DiffusersPolicy(
            pipe,
            config,
            height=model.height,
            width=model.width,
            max_sequence_length=model.max_sequence_length,
            negative_prompt=model.negative_prompt,
        )
    if adapter and config is not None:
        # A fresh adapter is 0 and was made the only active one: have both, with the fresh one trained.
        policy.module.set_adapters(["loaded", ADAPTER])
        for name, p in policy.module.named_parameters():
            p.requires_grad_(f".{ADAPTER}." in name)
    return policy


def build_trainer(recipe: Recipe, weights: str | Path | None = None) -> Trainer:
    """The `Trainer` of a recipe, its model loaded.

    Args:
        weights: see `load_policy`; for evaluation, since drift is measured from what was loaded.

    Raises:
        ValueError, TypeError, FileNotFoundError: parts that do not fit, as `Trainer` raises them.
    """
    from accelerate.utils import set_seed

    from flowrl.rewards import names, resolve
    from flowrl.training.prompts import PromptSet
    from flowrl.training.trainer import Trainer

    # What is cheap to refuse is refused before the model is loaded.
    grid = recipe.sampler.schedule
    recipe.objective.check(recipe.sampler.with_(schedule=SingleShift()) if isinstance(grid, Stock) else recipe.sampler)
    for name in [*recipe.rewards, *(recipe.eval_rewards or {})]:
        if name not in names():
            resolve(name)
    prompts = PromptSet(recipe.prompts)
    eval_prompts = None if recipe.eval_prompts is None else PromptSet(recipe.eval_prompts)

    set_seed(recipe.training.seed)  # an adapter's first weights
    policy = load_policy(recipe.model, recipe.lora, weights)
    config = policy.pipe.scheduler.config
    return Trainer(
        policy,
        replace(recipe.objective),  # a fresh one: objectives have state  # ty: ignore
        resolved(recipe.sampler, config),
        recipe.rewards,
        prompts,
        eval_prompts=eval_prompts,
        eval_rewards=recipe.eval_rewards,
        eval_sampler=recipe.eval_sampler and resolved(recipe.eval_sampler, config),
        args=TrainingArguments(**asdict(recipe.training)),
        recipe=recipe_dict(recipe),
    )
