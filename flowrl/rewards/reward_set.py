"""Rewards scored together: called, checked, weighted and summed."""

import functools
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.rewards.base import (
    GROUP,
    Reward,
    RewardError,
    RewardOutput,
    Scores,
    Spec,
    _check_images,
    _known,
    _name,
    resolve,
)
from flowrl.rewards.calling import after, in_thread, is_async, submit


def _range(name: str, declared: Any) -> tuple[float, float] | None:
    if declared is None:
        return None
    try:
        low, high = (float(bound) for bound in declared)
    except (TypeError, ValueError):
        low = high = math.nan
    if not low < high:
        raise ValueError(f"reward {name!r}: range must be (low, high) with low < high, got {declared!r}")
    return low, high


class _Named:
    """A reward with its name, weight, the columns its signature takes, and what it says of itself."""

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
        self.groupwise = GROUP in self.accepted or bool(getattr(call, "groupwise", False))
        if self.groupwise and not (self.takes_all or GROUP in self.accepted):
            raise TypeError(
                f"reward {name!r} says it is groupwise: it must have a parameter {GROUP!r} to know the groups"
            )
        self.required |= {GROUP} if self.groupwise else set()
        self.range = _range(name, getattr(call, "range", None))
        remote = bool(getattr(call, "remote", False))
        if remote and getattr(call, "differentiable", False):
            raise TypeError(f"reward {name!r} says it is remote and differentiable: no gradient comes from a server")
        self.waits = remote or is_async(call) or bool(getattr(call, "waits", False))
        self.ask = in_thread(call) if remote and not is_async(call) else call

    def select(self, columns: Mapping[str, Sequence]) -> dict[str, Sequence]:
        wanted = self.accepted | (set(columns) - {GROUP} if self.takes_all else set())
        wanted |= {GROUP} if self.groupwise else set()
        return {k: v for k, v in columns.items() if k in wanted}

    def check(self, values: Tensor, valid: Tensor, fail: Callable[..., RewardError]) -> None:
        """Raises on valid values that are no numbers or outside the declared range, give or take rounding."""
        low, high = self.range or (-math.inf, math.inf)
        slack_low, slack_high = (1e-5 * max(abs(bound), 1.0) for bound in (low, high))
        broken, outside = valid & ~values.isfinite(), (values < low - slack_low) | (values > high + slack_high)
        remedy = "mend it, or return RewardOutput with valid=False for samples that cannot be scored"
        for bad, what in (
            (broken, f"{int(broken.sum())} of {len(values)}; {remedy}"),
            (outside, f"outside its declared range {self.range}"),
        ):
            if rows := torch.nonzero(bad).flatten().tolist():
                shown = [values[row].item() for row in rows[:8]]
                raise fail(f"returned {shown} for rows {rows[:8]}, {what}.", self.name, rows=rows)


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


def _checked(raw: Any, n: int) -> RewardOutput:
    """What a reward returned, with values NaN where invalid, and `valid` given; raises ValueError."""
    out = raw if isinstance(raw, RewardOutput) else RewardOutput(raw)
    values, valid = _values(out.values, n), torch.ones(n, dtype=torch.bool)
    if out.valid is not None:
        valid = torch.as_tensor(out.valid).cpu()
        if valid.dtype != torch.bool or valid.shape != (n,):
            raise ValueError(f"returned valid of {valid.dtype} {list(valid.shape)}; it must be bool [{n}]")
    for key, column in out.details.items():
        if len(column) != n:
            raise ValueError(f"details[{key!r}] has {len(column)} entries for {n} images; give one per image")
    return RewardOutput(values.masked_fill(~valid, torch.nan), valid, dict(out.details))


class RewardSet:
    """Named rewards with weights, scored together: total = sum_i w_i r_i.

    rewards: a name, a callable, a mapping of either to its weight, or a (nested) list of these, where the
        weight is 1. Weight 0 logs a reward without training on it.
    max_invalid_share: in [0, 1]; a larger share of invalid rows in a batch raises instead of being left out.

    A set is itself a reward. Raises ValueError or TypeError when a reward, a weight or the share is unusable.
    """

    name = "reward_set"

    def __init__(self, rewards: Spec, max_invalid_share: float = 0.5):
        if not 0 <= max_invalid_share <= 1:
            raise ValueError(f"max_invalid_share is a share, from 0 to 1, not {max_invalid_share!r}")
        self.max_invalid_share = max_invalid_share
        self.rewards: list[_Named] = []
        self._add(rewards)
        if not self.rewards:
            raise ValueError("no reward given")
        self.range = self._bounds()
        """Bounds of the total, (low, high), or None when a reward with a weight declares none."""

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

    @property
    def groupwise(self) -> bool:
        """Whether some reward compares the samples of a group: all of a group must then be scored in one call."""
        return any(reward.groupwise for reward in self.rewards)

    @property
    def waits(self) -> bool:
        """Whether some reward waits for a server."""
        return any(reward.waits for reward in self.rewards)

    def _bounds(self) -> tuple[float, float] | None:
        bounds = [(r.weight, r.range) for r in self.rewards if r.weight]
        known = [sorted(weight * bound for bound in found) for weight, found in bounds if found is not None]
        if len(known) < len(bounds):
            return None
        return sum(low for low, _ in known), sum(high for _, high in known)

    @property
    def identity(self) -> dict[str, float]:
        """What a resumed run must share: the weights by fingerprint, or by name where a reward has no fingerprint.

        Asks a remote reward's servers, unless they have answered before; raises RuntimeError when none does.
        """
        same: dict[str, float] = {}
        for reward in self.rewards:
            own = getattr(reward.call, "identity", None)  # of what is made of other rewards or runs elsewhere
            for key, share in (own if isinstance(own, dict) else {_known(reward.call, reward.name): 1.0}).items():
                same[key] = same.get(key, 0.0) + reward.weight * share
        return same

    def check_range(self, low: float, high: float, who: str) -> None:
        """Raise ValueError when the total's declared range is not inside [low, high], which `who` needs."""
        if self.range is not None and not (low <= self.range[0] and self.range[1] <= high):
            raise ValueError(
                f"{who} needs rewards in [{low:g}, {high:g}], and these lie in [{self.range[0]:g}, {self.range[1]:g}]: "
                "map them with weights or `scaled`"
            )

    def check_columns(self, available: Iterable[str], supplied: Iterable[str] = ()) -> None:
        """Check, before any image is made, that the prompts carry what the rewards need.

        available: the prompts' columns. supplied: what the caller adds to them, such as `group_id`.
        Raises ValueError naming the reward and the missing column, or a column that hides what rewards receive under
        its name.
        """
        available, supplied = set(available), set(supplied)
        if clash := available & {"images", "prompts", *supplied}:
            raise ValueError(f"prompt columns {sorted(clash)} hide the reward arguments of that name; rename them")
        available |= supplied
        for reward in self.rewards:
            if GROUP in (missing := reward.required - available):
                raise ValueError(
                    f"reward {reward.name!r} compares the samples of a group and needs the column {GROUP!r}, which "
                    "training supplies. Evaluation judges images one by one: give other eval_rewards"
                )
            if missing:
                raise ValueError(
                    f"reward {reward.name!r} needs the prompt columns {sorted(missing)}, the prompts have "
                    f"{sorted(available)}; add them to the metadata or give the parameter a default"
                )
            if inner := getattr(reward.call, "check_columns", None):
                inner(available)

    def check_prompts(self, texts: Sequence[str]) -> None:
        """Let rewards that cannot score every prompt refuse these (ValueError) before any image is made."""
        for reward in self.rewards:
            if check := getattr(reward.call, "check_prompts", None):
                check(texts)

    def self_test(self, device: torch.device | str = "cpu") -> dict[str, tuple[float, float]]:
        """Score each reward's known pair; rewards without one are left out, derived ones test their sources.

        Returns name -> (good, bad). Raises RewardError when the good sample is not the higher one, and RuntimeError
        when no server of a remote reward can be reached.
        """
        report: dict[str, tuple[float, float]] = {}
        for reward in self.rewards:
            if inner := getattr(reward.call, "self_test", None):
                report |= inner(device)
            elif pair := getattr(reward.call, "known_pair", None):
                images, prompts, columns = pair()
                images = images.to(device) if isinstance(images, Tensor) else images
                scores = RewardSet([reward.call], 1.0).score(images, prompts, columns)
                good, bad = scores.total.detach().tolist()
                if not good > bad:
                    message = f"{good:.4g} for a good sample, {bad:.4g} for a bad one; "
                    message += "its weights, architecture or preprocessing are not the ones it was made for"
                    if not scores.valid.all():
                        reasons = scores.output().details.get("reason", [])
                        said = "; ".join(dict.fromkeys(filter(None, reasons))) or "it gives no reason"
                        message = f"it could not score its known samples: {said}"
                    raise RewardError(f"self-test failed: {message}.", reward.name, images, prompts, columns)
                report[reward.name] = good, bad
        return report

    def __call__(self, images, prompts: Sequence[str], **columns: Sequence) -> RewardOutput | Awaitable[RewardOutput]:
        """What `score` finds, as one reward's output; an awaitable of it while rewards wait for their servers."""
        answers = self._answers(images, prompts, columns, None)
        running = next(answers)

        def output() -> RewardOutput:
            return self.judge(next(answers), images, prompts, columns).output()

        return after(running, output) if running else output()

    def score(self, images, prompts: Sequence[str], columns: Mapping[str, Sequence] | None = None) -> Scores:
        """Score N samples with every reward; asynchronous ones run while synchronous ones compute.

        images, prompts, columns: as in `Reward`. Works inside a running event loop too. The total keeps the
        graph of differentiable rewards where grad mode is on.
        Raises ValueError on inconsistent input and RewardError when a reward raises, returns something else
        than N numbers, returns NaN or inf as valid, or leaves more than `max_invalid_share` of the rows
        invalid.
        """
        columns = dict(columns or {})
        return self.judge(next(self.start(images, prompts, columns)), images, prompts, columns)

    def start(
        self, images, prompts: Sequence[str], columns: Mapping[str, Sequence], rows: slice | None = None
    ) -> Generator[dict[str, RewardOutput]]:
        """The first half of `score`, for consecutive rows or all: rewards that wait set off, the others compute.

        `next` of what comes back waits for the answers, name -> that reward's for the rows; until then the caller may
        do something else. `close()` gives them up. Errors count the rows of the whole batch.
        """
        answers = self._answers(images, prompts, columns, rows)
        next(answers)
        return answers

    def judge(
        self, answers: Mapping[str, RewardOutput], images, prompts: Sequence[str], columns: Mapping[str, Sequence]
    ) -> Scores:
        """The second half of `score`: the sum of all rows' answers, and whether they can be trained on."""
        fail = functools.partial(RewardError, images=images, prompts=prompts, columns=columns)
        parts = {name: answer.values for name, answer in answers.items()}
        details = {name: answer.details for name, answer in answers.items()}
        valid = torch.ones(len(prompts), dtype=torch.bool)
        lost = torch.zeros(len(prompts), dtype=torch.bool)
        total = torch.zeros(len(prompts))
        for reward in self.rewards:
            values, scored = parts[reward.name], torch.as_tensor(answers[reward.name].valid)
            reward.check(values, scored, fail)
            lost |= ~scored
            if reward.weight:  # what is only logged takes no sample from the training
                valid &= scored
                total = total + reward.weight * values
        if int(lost.sum()) > self.max_invalid_share * len(lost):
            raise self._too_many_invalid(lost, parts, details, fail)
        return Scores(total.masked_fill(~valid, torch.nan), parts, valid, details)

    def _too_many_invalid(self, lost: Tensor, parts, details, fail: Callable[..., RewardError]) -> RewardError:
        worst = max(parts, key=lambda name: int(parts[name].isnan().sum()))
        rows = torch.nonzero(parts[worst].isnan()).flatten().tolist()
        reasons = details[worst].get("reason", ["none given"] * len(lost))
        said = "; ".join(dict.fromkeys(str(reasons[row]) for row in rows[:3]))
        return fail(
            f"{len(rows)} of {len(lost)} samples could not be scored ({int(lost.sum())} by all rewards together), "
            f"more than max_invalid_share={self.max_invalid_share}. Reasons: {said}. Check its server or model.",
            worst,
            rows=rows,
        )

    def _check_input(self, images, prompts, columns) -> None:
        n = len(prompts)
        if n == 0 or len(images) != n:
            raise ValueError(f"got {len(images)} images for {n} prompts")
        for key, column in columns.items():
            if isinstance(column, str) or len(column) != n:
                raise ValueError(f"column {key!r} must be a list of {n} entries, one per prompt")
        self.check_columns(columns)

    def _answers(self, images, prompts, columns, rows) -> Generator[Any]:
        """What still runs, when all rewards have been called; then every reward's checked answer, in their order."""
        self._check_input(images, prompts, columns)
        numbers = range(len(prompts)) if rows is None else range(len(prompts))[rows]
        fail = functools.partial(RewardError, images=images, prompts=prompts, columns=columns, rows=numbers)
        if rows is not None:
            images, prompts = images[rows], prompts[rows]
            columns = {key: column[rows] for key, column in columns.items()}
        _check_pixels(images, numbers, fail)
        raw: dict[str, Any] = {}
        running: dict[str, Future] = {}
        try:
            # Those known to wait first: their servers work while we compute.
            for reward in sorted(self.rewards, key=lambda reward: not reward.waits):
                name = reward.name
                answer = reward.ask(images, prompts, **reward.select(columns))
                if inspect.isawaitable(answer):
                    running[name] = submit(answer)
                else:
                    raw[name] = answer
            yield list(running.values())
            for name, future in running.items():
                raw[name] = future.result()
        except RewardError:  # of an inner set, which has said it all
            raise
        except Exception as error:
            # What is missing on the machine has a remedy of its own; anything else may be the samples' doing.
            hint = "" if isinstance(error, ImportError | OSError) else " Save the samples and call it on them."
            raise fail(f"raised {type(error).__name__}: {error}.{hint}", name) from error
        finally:
            for future in running.values():
                future.cancel()  # no effect on those that are done
        answers: dict[str, RewardOutput] = {}
        for reward in self.rewards:
            try:
                answers[reward.name] = _checked(raw[reward.name], len(prompts))
            except (ValueError, TypeError) as error:
                raise fail(f"{error}.", reward.name) from error
        yield answers


def _check_pixels(images, numbers: range, fail) -> None:
    """Raises on non-finite pixels or another range; `numbers` are the images' rows in the batch."""
    if not isinstance(images, Tensor):
        return
    finite = torch.isfinite(images).reshape(len(images), -1).all(1)
    if images.ndim == 4 and not finite.all():
        bad = [numbers[row] for row in torch.nonzero(~finite).flatten().tolist()]
        raise fail(f"images {bad[:8]} hold NaN or inf; the generator diverged or overflowed", "(input)", rows=bad)
    _check_images(images)
