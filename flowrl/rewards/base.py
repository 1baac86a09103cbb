"""What a reward is, how rewards are named, combined and checked."""

import asyncio
import difflib
import functools
import importlib
import inspect
import json
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Reward: TypeAlias = Callable[..., Any]
"""`reward(images, prompts, **columns) -> list[float] | Tensor | RewardOutput`, or an awaitable of one.

`images`: float [N, 3, H, W] in [0, 1] (a plain list of N items for generators of text); `prompts`: N strings;
`columns`: the prompt metadata, each a list of N, passed by name to the parameters the signature declares
(all of them to `**kwargs`). The two first arguments are passed by position.
An attribute `differentiable = True` promises a gradient from the values to the pixels.
A method `known_pair() -> (images, prompts, columns)` gives a good sample and a bad one for `RewardSet.self_test`.
"""
Spec: TypeAlias = "str | Reward | Mapping[str | Reward, float] | list[Spec] | tuple[Spec, ...]"
R = TypeVar("R", bound=Callable[..., Any])


@dataclass
class RewardOutput:
    """The values of one reward, and which of them count.

    values: [N] float, in the reward's own unit; NaN and inf are allowed only where `valid` is False.
    valid: [N] bool, False where a sample could not be scored (time-out, bad reply); None means all valid.
    details: named columns to log, each a tensor [N] or a list of N; `details["reason"]` is quoted in errors.
    """

    values: Tensor
    valid: Tensor | None = None
    details: dict[str, Tensor | list] = field(default_factory=dict)


@dataclass
class Scores:
    """What a `RewardSet` found for N samples, on the CPU.

    total: [N] float32, sum_i w_i r_i; NaN where invalid.
    parts: name -> [N] float32, the unweighted r_i; NaN where that reward is invalid.
    valid: [N] bool, True where every part is valid.
    details: name -> that reward's details.
    """

    total: Tensor
    parts: dict[str, Tensor]
    valid: Tensor
    details: dict[str, dict[str, Tensor | list]]


class RewardError(RuntimeError):
    """A reward failed; carries the samples so that the caller can `save` them.

    reward: its name; "(input)" when the images themselves are broken. rows: those at fault (all when the
    whole call failed). images, prompts, columns: the batch.
    """

    def __init__(self, message: str, reward: str, images, prompts: Sequence[str], columns=None, rows=None):
        super().__init__(f"reward {reward!r}: {message}")
        self.reward = reward
        self.images, self.prompts, self.columns = images, list(prompts), dict(columns or {})
        self.rows = list(range(len(self.prompts))) if rows is None else list(rows)

    def save(self, directory: str | Path) -> Path:
        """Write the rows at fault as `row_00000.png` plus `error.json`; returns the path of the JSON.

        Non-finite pixels are painted black, since they have no 8-bit value.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        samples: list[dict[str, Any]] = []
        for row in self.rows:
            sample: dict[str, Any] = {"row": row, "prompt": self.prompts[row]}
            if isinstance(self.images, Tensor):
                sample["image"] = f"row_{row:05d}.png"
                pixels = torch.nan_to_num(self.images[row : row + 1].detach().float(), 0.0, 0.0, 0.0)
                Image.fromarray(_bytes(pixels)[0].cpu().numpy()).save(directory / sample["image"])
            else:
                sample["media"] = self.images[row]
            sample["columns"] = {key: column[row] for key, column in self.columns.items()}
            samples.append(sample)
        path = directory / "error.json"
        report = {"reward": self.reward, "error": str(self), "samples": samples}
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False, default=repr), encoding="utf-8")
        return path


# ---------------------------------------------------------------------------------------- pixels


def _bytes(images: Tensor) -> Tensor:
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _check_images(images: Tensor) -> None:
    if images.ndim != 4 or images.shape[1] != 3 or not images.numel() or not images.is_floating_point():
        raise ValueError(
            f"images must be a float tensor [N, 3, H, W] in [0, 1], got {images.dtype} {list(images.shape)}"
        )
    low, high = images.detach().aminmax()  # NaN if any pixel is
    if not (low >= -0.5 and high <= 1.5):  # decoders overshoot a little; another range is a mistake
        raise ValueError(f"images must lie in [0, 1], got [{low:.3g}, {high:.3g}]; rescale them first")


def quantise(images: Tensor) -> Tensor:
    """Images as a PNG would hold them: round(255 clamp(x, 0, 1)).

    images: float [N, 3, H, W] in [0, 1]. Returns uint8 [N, H, W, 3] on the same device. Every reward that
    leaves the tensor world goes through here, so all see the same pixels. Raises ValueError on another
    shape, dtype or range and on non-finite pixels.
    """
    _check_images(images)
    return _bytes(images.detach().float())


def to_pil(images: Tensor) -> list[Image.Image]:
    """`quantise`d images as N RGB PIL images; raises as `quantise` does."""
    return [Image.fromarray(pixels) for pixels in quantise(images).cpu().numpy()]


# ---------------------------------------------------------------------------------------- names

_REGISTRY: dict[str, Callable[..., Any]] = {}
# Rewards that register themselves when their module is first asked for, so that naming one loads no other.
_HOMES = {
    "shapes": "flowrl.miniature.shapes.reward",
    "shapes_official": "flowrl.miniature.shapes.reward",
}


def register(name: str) -> Callable[[R], R]:
    """Decorator: make a reward function, or a class whose instances are rewards, known as `name`.

    Raises ValueError when another reward has the name.
    """

    def add(reward: R) -> R:
        if _REGISTRY.setdefault(name, reward) is not reward:
            raise ValueError(f"reward name {name!r} is taken by {_REGISTRY[name]!r}")
        return reward

    return add


def names() -> list[str]:
    """The registered reward names, sorted."""
    return sorted({*_REGISTRY, *_HOMES})


def resolve(reward: str | Reward) -> Reward:
    """The callable behind a registered name, `remote@URL[,URL...]`, a `module:attribute` path or a callable.

    A class is instantiated without arguments. Raises ValueError on an unknown name (with the nearest known
    ones) or path, TypeError on something not callable.
    """
    found: Any = reward
    if isinstance(reward, str) and reward not in _REGISTRY and reward in _HOMES:
        importlib.import_module(_HOMES[reward])
    if isinstance(reward, str) and reward in _REGISTRY:
        found = _REGISTRY[reward]
    elif isinstance(reward, str) and reward.startswith("remote@"):
        from flowrl.rewards.remote import RemoteReward

        found = RemoteReward(reward.removeprefix("remote@"))
    elif isinstance(reward, str) and ":" in reward:
        module, _, attribute = reward.partition(":")
        try:
            found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise ValueError(f"cannot load reward {reward!r}: {error}") from error
    elif isinstance(reward, str):
        close = difflib.get_close_matches(reward, names(), n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(names())}."
        raise ValueError(f"unknown reward {reward!r}; {hint} Your own function is given as 'module:function'.")
    if inspect.isclass(found):
        found = found()
    if not callable(found):
        raise TypeError(f"a reward is a name or a callable (images, prompts, **columns), got {reward!r}")
    return found


def _name(reward: str | Reward) -> str:
    if isinstance(reward, str):
        return reward
    while isinstance(reward, functools.partial):
        reward = reward.func
    own = getattr(reward, "name", None)
    if isinstance(own, str):
        return own
    name = getattr(reward, "__name__", None) or type(reward).__name__
    if name == "<lambda>":
        code = reward.__code__  # ty: ignore[missing-attribute]
        return f"lambda_{Path(code.co_filename).stem.strip('<>')}_{code.co_firstlineno}"
    return name


# ---------------------------------------------------------------------------------------- calling


@functools.cache
def _event_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """One loop for all asynchronous rewards: it works beside a loop of the caller's, and HTTP clients that
    belong to a loop survive from step to step."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        with torch.no_grad():  # grad mode is per thread
            loop.run_forever()

    thread = threading.Thread(target=serve, name="flowrl-rewards", daemon=True)
    thread.start()
    return loop, thread


def _submit(awaitable: Awaitable) -> Future:
    async def run():
        return await awaitable

    loop, thread = _event_loop()
    if threading.current_thread() is thread:  # waiting for ourselves would never end
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        raise RuntimeError("an async reward cannot call a RewardSet with async rewards; await the inner reward")
    return asyncio.run_coroutine_threadsafe(run(), loop)


def _is_async(reward: Reward) -> bool:
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


class _Named:
    """A reward with its name, weight and the columns its signature takes."""

    def __init__(self, name: str, call: Reward, weight: float):
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
            raise ValueError(f"reward {name!r}: the weight must be a finite number, got {weight!r}")
        self.name, self.call, self.weight = name, call, float(weight)
        try:
            signed = call.forward if isinstance(call, torch.nn.Module) else call
            parameters = list(inspect.signature(signed).parameters.values())
        except ValueError as error:
            raise TypeError(f"reward {name!r}: its signature cannot be read; wrap it in a lambda") from error
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(by_position) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise TypeError(f"reward {name!r} must accept (images, prompts, **columns), it has {parameters}")
        columns = by_position[2:] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.accepted = {p.name for p in columns}
        self.required = {p.name for p in columns if p.default is p.empty}

    def select(self, columns: Mapping[str, Sequence]) -> dict[str, Sequence]:
        return {k: v for k, v in columns.items() if self.takes_all or k in self.accepted}


def _values(raw: Any, n: int) -> Tensor:
    """What a reward returned as [n] numbers; raises ValueError saying what came back instead."""
    if isinstance(raw, np.ndarray) and raw.dtype.kind in "biuf":
        raw = torch.from_numpy(raw.copy())
    if isinstance(raw, list | tuple):
        for value in raw:
            if not isinstance(value, numbers.Real | np.bool_) and not (
                isinstance(value, Tensor) and value.numel() == 1
            ):
                raise ValueError(
                    f"returned {value!r} among its values; return numbers, and RewardOutput with valid=False "
                    "for a sample that could not be scored"
                )
        scalars = [torch.as_tensor(value, dtype=torch.float32, device="cpu").reshape(()) for value in raw]
        raw = torch.stack(scalars) if scalars else torch.empty(0)  # stack keeps a gradient
    if not isinstance(raw, Tensor) or raw.is_complex():
        raise ValueError(
            f"returned {type(raw).__name__}; return one number per image: list[float], Tensor or RewardOutput"
        )
    if raw.shape != (n,):
        raise ValueError(f"returned shape {list(raw.shape)} for {n} images; return one number per image, [{n}]")
    return raw.to("cpu", torch.float32)


def _checked(raw: Any, n: int) -> tuple[Tensor, Tensor, dict[str, Tensor | list]]:
    """What a reward returned as values [n] (NaN where invalid), valid [n], details; raises ValueError."""
    out = raw if isinstance(raw, RewardOutput) else RewardOutput(raw)
    values, valid = _values(out.values, n), torch.ones(n, dtype=torch.bool)
    if out.valid is not None:
        valid = torch.as_tensor(out.valid).cpu()
        if valid.dtype != torch.bool or valid.shape != (n,):
            raise ValueError(f"returned valid of {valid.dtype} {list(valid.shape)}; it must be bool [{n}]")
    for key, column in out.details.items():
        if len(column) != n:
            raise ValueError(f"details[{key!r}] has {len(column)} entries for {n} images; give one per image")
    return values.masked_fill(~valid, torch.nan), valid, dict(out.details)


class RewardSet:
    """Named rewards with weights, scored together: total = sum_i w_i r_i.

    rewards: a name, a callable, a mapping of either to its weight, or a (nested) list of these, where the
        weight is 1. Weight 0 logs a reward without training on it.
    max_invalid_share: in [0, 1]; a larger share of invalid rows in a batch raises instead of being left out.

    A set is itself a reward. Raises ValueError or TypeError when a reward or weight is unusable.
    """

    name = "reward_set"

    def __init__(self, rewards: Spec, max_invalid_share: float = 0.5):
        self.max_invalid_share = max_invalid_share
        self.rewards: list[_Named] = []
        self._add(rewards)
        if not self.rewards:
            raise ValueError("no reward given")

    def _add(self, rewards: Spec, weight: float = 1.0) -> None:
        if isinstance(rewards, Mapping):
            for reward, weight in rewards.items():
                self._add(reward, weight)
        elif isinstance(rewards, list | tuple):
            for reward in rewards:
                self._add(reward, weight)
        else:
            call = resolve(rewards)
            base = name = _name(rewards if isinstance(rewards, str) else call)
            count = 1
            while name in self.weights:
                count += 1
                name = f"{base}_{count}"
            self.rewards.append(_Named(name, call, weight))

    @property
    def weights(self) -> dict[str, float]:
        """Name -> weight, in the order given."""
        return {reward.name: reward.weight for reward in self.rewards}

    @property
    def differentiable(self) -> bool:
        """Whether every reward with a weight promises a gradient to the pixels."""
        return all(getattr(r.call, "differentiable", False) for r in self.rewards if r.weight)

    def check_columns(self, available: Iterable[str]) -> None:
        """Check, before any image is made, that the prompts carry what the rewards need.

        Raises ValueError naming the reward and the missing column, or a column that hides `images` or
        `prompts`.
        """
        available = set(available)
        if clash := available & {"images", "prompts"}:
            raise ValueError(f"prompt columns {sorted(clash)} hide the reward arguments of that name; rename them")
        for reward in self.rewards:
            if missing := reward.required - available:
                raise ValueError(
                    f"reward {reward.name!r} needs the prompt columns {sorted(missing)}, the prompts have "
                    f"{sorted(available)}; add them to the metadata or give the parameter a default"
                )
            if inner := getattr(reward.call, "check_columns", None):
                inner(available)

    def self_test(self, device: torch.device | str = "cpu") -> dict[str, tuple[float, float]]:
        """Score each reward's known pair; rewards without one are left out, derived ones test their sources.

        Returns name -> (good, bad). Raises RewardError when the good sample is not the higher one.
        """
        report: dict[str, tuple[float, float]] = {}
        for reward in self.rewards:
            if inner := getattr(reward.call, "self_test", None):
                report |= inner(device)
            elif pair := getattr(reward.call, "known_pair", None):
                images, prompts, columns = pair()
                images = images.to(device) if isinstance(images, Tensor) else images
                good, bad = _inner([reward.call]).score(images, prompts, columns).total.detach().tolist()
                if not good > bad:
                    message = f"self-test failed: {good:.4g} for a good sample, {bad:.4g} for a bad one"
                    remedy = "its weights, architecture or preprocessing are not the ones it was made for"
                    raise RewardError(f"{message}; {remedy}.", reward.name, images, prompts, columns)
                report[reward.name] = good, bad
        return report

    def __call__(self, images, prompts: Sequence[str], **columns: Sequence) -> RewardOutput:
        scores = self.score(images, prompts, columns)
        return RewardOutput(scores.total, scores.valid, {**scores.parts})

    def score(self, images, prompts: Sequence[str], columns: Mapping[str, Sequence] | None = None) -> Scores:
        """Score N samples with every reward; asynchronous ones run while synchronous ones compute.

        images, prompts, columns: as in `Reward`. Works inside a running event loop too. The total keeps the
        graph of differentiable rewards where grad mode is on.
        Raises ValueError on inconsistent input and RewardError when a reward raises, returns something else
        than N numbers, returns NaN or inf as valid, or leaves more than `max_invalid_share` of the rows
        invalid.
        """
        columns, n = dict(columns or {}), len(prompts)
        self._check_input(images, prompts, columns)
        fail = functools.partial(RewardError, images=images, prompts=prompts, columns=columns)
        parts: dict[str, Tensor] = {}
        details: dict[str, dict[str, Tensor | list]] = {}
        valid = torch.ones(n, dtype=torch.bool)
        total = torch.zeros(n)
        for reward, raw in self._call(images, prompts, columns, fail):
            name = reward.name
            try:
                parts[name], scored, details[name] = _checked(raw, n)
            except (ValueError, TypeError) as error:
                raise fail(f"{error}.", name) from error
            if bad := torch.nonzero(scored & ~torch.isfinite(parts[name])).flatten().tolist():
                shown = [parts[name][row].item() for row in bad[:8]]
                raise fail(
                    f"returned {shown} for rows {bad[:8]}, {len(bad)} of {n}; mend it, or return "
                    "RewardOutput with valid=False for samples that cannot be scored.",
                    name,
                    rows=bad,
                )
            valid &= scored
            if reward.weight:
                total = total + reward.weight * parts[name]
        if (lost := int((~valid).sum())) > self.max_invalid_share * n:
            worst = max(parts, key=lambda name: int(parts[name].isnan().sum()))
            rows = torch.nonzero(parts[worst].isnan()).flatten().tolist()
            reasons = details[worst].get("reason", ["none given"] * n)
            said = "; ".join(dict.fromkeys(str(reasons[row]) for row in rows[:3]))
            raise fail(
                f"{len(rows)} of {n} samples could not be scored ({lost} by all rewards together), more than "
                f"max_invalid_share={self.max_invalid_share}. Reasons: {said}. Check its server or model.",
                worst,
                rows=rows,
            )
        return Scores(total.masked_fill(~valid, torch.nan), parts, valid, details)

    def _check_input(self, images, prompts, columns) -> None:
        n = len(prompts)
        if n == 0 or len(images) != n:
            raise ValueError(f"got {len(images)} images for {n} prompts")
        for key, column in columns.items():
            if isinstance(column, str) or len(column) != n:
                raise ValueError(f"column {key!r} must be a list of {n} entries, one per prompt")
        self.check_columns(columns)
        if isinstance(images, Tensor):
            finite = torch.isfinite(images).reshape(n, -1).all(1)
            if images.ndim == 4 and not finite.all():
                rows = torch.nonzero(~finite).flatten().tolist()
                message = f"images {rows[:8]} hold NaN or inf; the generator diverged or overflowed"
                raise RewardError(message, "(input)", images, prompts, columns, rows)
            _check_images(images)

    def _call(self, images, prompts, columns, fail) -> list[tuple[_Named, Any]]:
        """Every reward's raw answer, in the order of the rewards."""
        answers: dict[str, Any] = {}
        running: dict[str, Future] = {}
        try:
            # Known coroutine functions first: their servers work while we compute.
            for reward in sorted(self.rewards, key=lambda reward: not _is_async(reward.call)):
                name = reward.name
                answer = reward.call(images, prompts, **reward.select(columns))
                if inspect.isawaitable(answer):
                    running[name] = _submit(answer)
                else:
                    answers[name] = answer
            for name, future in running.items():
                answers[name] = future.result()
        except RewardError:  # of an inner set, which has said it all
            raise
        except Exception as error:
            raise fail(
                f"raised {type(error).__name__}: {error}. Save the samples and call it on them.", name
            ) from error
        finally:
            for future in running.values():
                future.cancel()  # no effect on those that are done
        return [(reward, answers[reward.name]) for reward in self.rewards]


# ---------------------------------------------------------------------------------------- combinators


class _Derived:
    """A reward computed from other sets; it needs the columns they need."""

    def __init__(self, name: str, sources: Sequence[RewardSet], compute: Reward, differentiable: bool = False):
        self.name, self.sources, self.compute = name, sources, compute
        self.differentiable = differentiable

    def check_columns(self, available: Iterable[str]) -> None:
        for source in self.sources:
            source.check_columns(available)

    def self_test(self, device: torch.device | str = "cpu") -> dict[str, tuple[float, float]]:
        return {name: pair for source in self.sources for name, pair in source.self_test(device).items()}

    def __call__(self, images, prompts: Sequence[str], **columns: Sequence) -> RewardOutput:
        return self.compute(images, prompts, columns)


def _inner(rewards: Spec) -> RewardSet:
    return RewardSet(rewards, max_invalid_share=1.0)  # the outermost set judges the share


def scaled(rewards: Spec, scale: float, offset: float = 0.0) -> Reward:
    """The reward scale * r + offset, for published scalings such as (s - 18) / 8; details hold the raw
    parts."""
    source = _inner(rewards)

    def compute(images, prompts, columns):
        out = source(images, prompts, **columns)
        return RewardOutput(scale * out.values + offset, out.valid, out.details)

    return _Derived("_".join(["scaled", *source.weights]), [source], compute, source.differentiable)


def gate(condition: Spec, rewards: Spec, otherwise: float = 0.0) -> Reward:
    """The reward r where condition > 0, else `otherwise`: a format gate, or a veto over a whole weighted sum.

    The condition is scored first and `rewards` only sees the samples that pass, so an expensive reward is not
    spent on the others. A row whose condition is invalid is invalid. details["passed"]: [N] bool.
    """
    when, source = _inner(condition), _inner(rewards)

    def take(items, rows):
        return items[rows] if isinstance(items, Tensor) else [items[row] for row in rows]

    def compute(images, prompts, columns):
        gates = when.score(images, prompts, columns)
        valid, passed = gates.valid.clone(), gates.total > 0  # NaN does not pass
        values = torch.full_like(gates.total, otherwise).masked_fill(~valid, torch.nan)
        details: dict[str, Tensor | list] = {"passed": passed}
        if rows := torch.nonzero(passed).flatten().tolist():
            kept = {key: take(column, rows) for key, column in columns.items()}
            scores = source.score(take(images, rows), take(prompts, rows), kept)
            values[rows], valid[rows] = scores.total, scores.valid
            for name, part in scores.parts.items():
                details[name] = torch.full_like(values, torch.nan).index_copy(0, torch.tensor(rows), part)
        return RewardOutput(values, valid, details)

    return _Derived("_".join(["gated", *source.weights]), [when, source], compute)
