"""Rewards made from other rewards."""

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.core import group_count, rank_in_group, vote
from flowrl.rewards.base import GROUP, Reward, RewardOutput, Spec, _known, _name, quantise
from flowrl.rewards.calling import is_async, when_all
from flowrl.rewards.reward_set import RewardSet, _checked

PAIRS = 64  # compared in one call, so that not all pairs of a group are in memory at once
CALLS = 4  # of an async comparison at once, for the same reason


class _Derived:
    """A reward computed from other sets; it needs the columns they need.

    settings: the function and its arguments, what JSON can hold; none: it is what its one source is.
    waits: it is over at once and returns an awaitable, as its sources wait for servers.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[RewardSet],
        compute: Reward,
        settings: Sequence = (),
        *,
        waits: bool = False,
        differentiable: bool = False,
        groupwise: bool = False,
        range: tuple[float, float] | None = None,
    ):
        self.name, self.sources, self.compute = name, sources, compute
        self.settings, self.waits = list(settings), waits
        self.differentiable, self.range = differentiable, range
        self.groupwise = groupwise or any(source.groupwise for source in sources)

    @property
    def identity(self) -> dict[str, float]:
        """As of a `RewardSet`."""
        if not self.settings:
            return self.sources[0].identity
        return {json.dumps([*self.settings, *(source.identity for source in self.sources)], sort_keys=True): 1.0}

    def check_columns(self, available: Iterable[str]) -> None:
        for source in self.sources:
            source.check_columns(available)

    def check_prompts(self, texts: Sequence[str]) -> None:
        for source in self.sources:
            source.check_prompts(texts)

    def self_test(self, device: torch.device | str = "cpu") -> dict[str, tuple[float, float]]:
        return {name: pair for source in self.sources for name, pair in source.self_test(device).items()}

    def __call__(self, images, prompts: Sequence[str], **columns: Sequence) -> Any:
        return self.compute(images, prompts, columns)


def _inner(rewards: Spec) -> RewardSet:
    return RewardSet(rewards, max_invalid_share=1.0)  # the outermost set judges the share


def _named(kind: str, source: RewardSet) -> str:
    return "_".join([kind, *source.weights])


def _blank(n: int) -> RewardOutput:
    return RewardOutput(torch.full((n,), torch.nan), torch.zeros(n, dtype=torch.bool))


def _take(items, rows: Sequence[int]):
    return items[list(rows)] if isinstance(items, Tensor) else [items[row] for row in rows]


def _rows(rows: Sequence[int], images, prompts, columns) -> tuple[Any, Any, dict[str, Any]]:
    return _take(images, rows), _take(prompts, rows), {key: _take(column, rows) for key, column in columns.items()}


def _ask(source: RewardSet, rows: Sequence[int], *batch) -> list:
    """The set's output for some rows, perhaps an awaitable; nothing for no rows."""
    if not rows:
        return []
    images, prompts, columns = _rows(rows, *batch)
    return [source(images, prompts, **columns)]


def _place(whole: RewardOutput, rows: Sequence[int], part: RewardOutput) -> None:
    """Write the output for some rows into that of all; a detail that others lack is NaN or None there."""
    whole.values[rows], whole.valid[rows] = part.values, part.valid  # ty: ignore
    for key, column in part.details.items():
        missing = (
            torch.full((len(whole.values),), torch.nan) if isinstance(column, Tensor) else [None] * len(whole.values)
        )
        found = whole.details.setdefault(key, missing)
        for row, value in zip(rows, column, strict=True):
            found[row] = value


def scaled(rewards: Spec, scale: float, offset: float = 0.0) -> Reward:
    """The reward scale * r + offset, for published scalings such as (s - 18) / 8; details hold the raw
    parts."""
    source = _inner(rewards)

    def compute(images, prompts, columns):
        def finish(outputs):
            (out,) = outputs
            return RewardOutput(scale * out.values + offset, out.valid, out.details)

        return when_all([source(images, prompts, **columns)], finish)

    low_high = None
    if source.range is not None and scale:
        low, high = sorted(scale * bound + offset for bound in source.range)
        low_high = low, high
    return _Derived(
        _named("scaled", source),
        [source],
        compute,
        ["scaled", float(scale), float(offset)],
        waits=source.waits,
        differentiable=source.differentiable,
        range=low_high,
    )


def gate(condition: Spec, rewards: Spec, otherwise: float = 0.0) -> Reward:
    """The reward r where condition > 0, else `otherwise`: a format gate, or a veto over a whole weighted sum.

    The condition is scored first and `rewards` only sees the samples that pass, so an expensive reward is not
    spent on the others; a condition that waits for a server holds up what comes after it. A row whose condition is
    invalid is invalid. details["passed"]: [N] bool.
    """
    when, source = _inner(condition), _inner(rewards)

    def compute(images, prompts, columns):
        gates = when.score(images, prompts, columns)
        passed = gates.total > 0  # NaN does not pass
        values = torch.full_like(gates.total, otherwise).masked_fill(~gates.valid, torch.nan)
        out = RewardOutput(values, gates.valid.clone())
        if "reason" in (why := gates.output().details):
            out.details["reason"] = list(why["reason"])
        rows = torch.nonzero(passed).flatten().tolist()

        def finish(outputs):
            for part in outputs:
                _place(out, rows, part)
            out.details["passed"] = passed
            return out

        return when_all(_ask(source, rows, images, prompts, columns), finish)

    low_high = source.range and (min(source.range[0], otherwise), max(source.range[1], otherwise))
    waits, settings = source.waits and not when.waits, ["gate", float(otherwise)]
    return _Derived(_named("gated", source), [when, source], compute, settings, waits=waits, range=low_high)


def cached(rewards: Spec, size: int = 100_000) -> Reward:
    """The reward r, remembered by content: a sample whose 8-bit pixels, prompt and columns were scored before is not
    scored again. For judges that are slow or cost money.

    size: samples remembered; those not asked for the longest are forgotten. Invalid samples are not remembered. The
    memory is that of one process and is not saved: with a judge that answers differently from call to call a resumed
    run is not the same to the last bit. Raises ValueError on rewards that compare samples.
    """
    source = _inner(rewards)
    if source.groupwise:
        raise ValueError(f"{list(source.weights)} compare samples: what one is worth depends on the others, cache none")
    memory: dict[bytes, RewardOutput] = {}  # one sample each, in the order of use
    lock = threading.Lock()  # answers come in another thread than questions

    def compute(images, prompts, columns):
        columns = {key: value for reward in source.rewards for key, value in reward.select(columns).items()}
        keys = _content(images, prompts, columns)
        with lock:
            known = {key: memory[key] for key in keys if key in memory}
        new: dict[bytes, int] = {}
        for row, key in enumerate(keys):
            if key not in known:
                new.setdefault(key, row)

        def finish(outputs):
            for scored in outputs:
                known.update((key, _one(scored, place)) for place, key in enumerate(new))
            out = _blank(len(keys))
            with lock:
                for row, key in enumerate(keys):
                    _place(out, [row], known[key])
                    if known[key].valid.all():  # ty: ignore
                        memory.pop(key, None)
                        memory[key] = known[key]
                while len(memory) > size:
                    del memory[next(iter(memory))]
            return out

        return when_all(_ask(source, list(new.values()), images, prompts, columns), finish)

    return _Derived("_".join(source.weights), [source], compute, waits=source.waits, range=source.range)


def _one(out: RewardOutput, row: int) -> RewardOutput:
    """One sample of an output, holding on to nothing else."""

    def of(column):
        return column[row : row + 1].detach().clone() if isinstance(column, Tensor) else [column[row]]

    return RewardOutput(of(out.values), of(out.valid), {key: of(column) for key, column in out.details.items()})


def _content(images, prompts: Sequence[str], columns: dict[str, Sequence]) -> list[bytes]:
    """A digest of each sample."""
    media = quantise(images).cpu().numpy() if isinstance(images, Tensor) else images
    keys = []
    for row, prompt in enumerate(prompts):
        pixels = media[row].tobytes() if isinstance(images, Tensor) else json.dumps(media[row], default=repr).encode()
        shape = list(images.shape[1:]) if isinstance(images, Tensor) else None
        rest = [shape, prompt, {key: columns[key][row] for key in sorted(columns)}]
        keys.append(hashlib.blake2b(json.dumps(rest, default=repr).encode() + b"\0" + pixels, digest_size=16).digest())
    return keys


# ---------------------------------------------------------------------------------------- inside a group


def per_group(rewards: Spec) -> Reward:
    """The reward r, called once for each group with that group's samples alone: for a scorer that ranks or compares the
    candidates of one prompt, or measures their diversity."""
    source = _inner(rewards)

    def compute(images, prompts, columns):
        out = _blank(len(prompts))
        for rows in _groups(columns[GROUP]):
            _place(out, rows, source.score(*_rows(rows, images, prompts, columns)).output())
        return out

    return _Derived(_named("per_group", source), [source], compute, ["per_group"], groupwise=True, range=source.range)


def ranked(rewards: Spec) -> Reward:
    """The rank of r in its group, from 0 (lowest) to 1: (rank - 1) / (n - 1) for the n valid samples of a group.

    Equal rewards share the mean of their ranks; a sample alone, and all where all are equal, get 0.5. Details hold the
    raw parts. What is left of a reward is its order, whatever its unit or outliers.
    """
    source = _inner(rewards)

    def compute(images, prompts, columns):
        def finish(outputs):
            (out,) = outputs
            gid = torch.as_tensor(columns[GROUP])
            n = group_count(gid, out.valid)
            ranks = (rank_in_group(out.values, gid, valid=out.valid) - 1) / (n - 1)
            return RewardOutput(torch.where(n > 1, ranks, 0.5), out.valid, out.details)

        return when_all([source(images, prompts, **columns)], finish)

    name, waits = _named("ranked", source), source.waits
    return _Derived(name, [source], compute, ["ranked"], waits=waits, groupwise=True, range=(0.0, 1.0))


def win_rate(compare: Callable[..., Any], both_orders: bool = True) -> Reward:
    """How often a sample beats the others of its group: r_i = mean_j P(i better than j), in [0, 1].

    compare: `compare(images_a, images_b, prompts) -> P(a better)`, for M pairs M numbers in [0, 1] (0.5 a tie), or a
    `RewardOutput` with `valid`, or an awaitable of one.
    both_orders: ask for (a, b) and for (b, a) and take the mean of what they say, P = (P_ab + 1 - P_ba) / 2, so that a
    judge that prefers the first place counts as undecided: G (G - 1) comparisons for a group of G. False asks for one
    order, half as many.

    A sample alone in its group gets 0.5; one whose comparisons all failed is invalid. With both orders
    details["disagreement"] is the mean of |P_ab - (1 - P_ba)|.
    """

    def compute(images, prompts, columns):
        # With one order the places decide who comes first, or a judge that likes the first would favour early samples.
        pairs = [
            (a, b)
            for rows in _groups(columns[GROUP])
            for i, a in enumerate(rows)
            for j, b in enumerate(rows)
            if i != j and (both_orders or (i < j) == (i + j) % 2)
        ]
        slots = asyncio.Semaphore(CALLS)

        def taken(part: Sequence[tuple[int, int]]) -> tuple:
            first, second = zip(*part, strict=True)
            return _take(images, first), _take(images, second), _take(prompts, first)

        async def in_turn(part: Sequence[tuple[int, int]]):
            async with slots:
                return await compare(*await asyncio.to_thread(taken, part))

        parts = [pairs[i : i + PAIRS] for i in range(0, len(pairs), PAIRS)]
        answers = [in_turn(part) if waits else compare(*taken(part)) for part in parts]
        return when_all(answers, lambda answers: _win_rates(pairs, answers, len(prompts), both_orders))

    waits = is_async(compare)
    settings = ["win_rate", _known(compare, _name(compare)), both_orders]
    name = f"win_rate_{_name(compare)}"
    return _Derived(name, [], compute, settings, waits=waits, groupwise=True, range=(0.0, 1.0))


def _win_rates(pairs: list[tuple[int, int]], answers: list, n: int, both_orders: bool) -> RewardOutput:
    """Values [n] from what `compare` said of the pairs, `PAIRS` an answer."""
    says = torch.full((n, n), torch.nan)  # P(row better than column)
    asked = torch.zeros(n, dtype=torch.bool)
    for i, answer in enumerate(answers):
        part = pairs[i * PAIRS : (i + 1) * PAIRS]
        out = _checked(answer, len(part))
        fine = (out.values >= 0) & (out.values <= 1)
        if bad := out.values[torch.as_tensor(out.valid) & ~fine].tolist():
            raise ValueError(f"the comparison returned {bad[:8]}; it must return probabilities in [0, 1]")
        first, second = torch.tensor(part).T
        says[first, second], asked[first], asked[second] = out.values, True, True
    reverse = 1 - says.T
    better = (says + reverse) / 2 if both_orders else torch.where(says.isnan(), reverse, says)
    values = torch.where(asked, better.nanmean(1), 0.5)
    details: dict[str, Tensor | list] = {"disagreement": (says - reverse).abs().nanmean(1)} if both_orders else {}
    valid = ~values.isnan()
    if not valid.all():
        details["reason"] = ["" if ok else "all its comparisons failed" for ok in valid.tolist()]
    return RewardOutput(values, valid, details)


def majority(answer: Callable[[Any], Hashable | None]) -> Reward:
    """1 where a sample's answer is the most frequent one of its group, else 0: self-consistency without a reference.

    answer: `answer(sample)`, what to vote by, None where there is none (it does not vote and gets 0). The answer that
    came first wins a tie. Source: test-time RL, as accounts of SPINE describe it.
    """

    def compute(images, prompts, columns):
        answers = [answer(sample) for sample in images]
        winners = vote(answers, torch.as_tensor(columns[GROUP]))
        return [float(own is not None and own == winner) for own, winner in zip(answers, winners, strict=True)]

    settings = ["majority", _known(answer, _name(answer))]
    return _Derived("majority", [], compute, settings, groupwise=True, range=(0.0, 1.0))


def _groups(group_id: Sequence[int]) -> list[list[int]]:
    """The rows of each group."""
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_id):
        rows.setdefault(int(group), []).append(row)
    return list(rows.values())
