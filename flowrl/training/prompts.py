"""Prompts: reading, checking and drawing them."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from flowrl import noise
from flowrl.rollout import Prompt

PromptSource: TypeAlias = "str | Path | Sequence[str | Mapping[str, Any]]"
# The worlds of `flowrl.miniature`, and what their models need of `flowrl.training.recipe.ModelConfig`.
WORLDS: dict[str, dict[str, Any]] = {
    "shapes": {"max_sequence_length": 0},
    "glyphs": {"max_sequence_length": 0, "height": 24, "width": 48},
}
# Named prompt sets: a function that returns the entries, as "module:function". Any such path works as a source too.
NAMED = {
    "geneval": "flowrl.rewards.geneval:benchmark_prompts",
    "geneval/test": "flowrl.rewards.geneval:benchmark_prompts",
    "geneval/train": "flowrl.rewards.geneval_prompts:train_prompts",
    "geneval/train-seen": "flowrl.rewards.geneval_prompts:seen_prompts",
    "geneval/test-unseen": "flowrl.rewards.geneval_prompts:unseen_prompts",
    **{f"{world}/train": f"flowrl.miniature.{world}.world:train_prompts" for world in WORLDS},
    **{f"{world}/test": f"flowrl.miniature.{world}.world:held_out_prompts" for world in WORLDS},
}
_DRAW = int.from_bytes(b"prompts", "little")


class PromptSet(Sequence[Prompt]):
    """A list of prompts with their metadata columns, drawn as a function of (seed, iteration).

    Args:
        source: a list of texts or of mappings with the key "prompt"; a file, `.jsonl` (one such mapping a line) or
            `.txt` (one prompt a line); a name in `NAMED`; or "module:function" returning a list. A mapping's other
            keys are the columns rewards receive; `weight` sets how often the prompt is drawn.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken entry; the message names the file and line.
    """

    def __init__(self, source: PromptSource) -> None:
        if isinstance(source, str) and (source in NAMED or re.fullmatch(r"[\w.]+:\w+", source)):
            source = _call(NAMED.get(source, source))
        if isinstance(source, str | Path):
            entries: Iterable[tuple[str, Any]] = _read(Path(source))
        else:
            entries = ((f"prompt {i}", entry) for i, entry in enumerate(source))
        self._prompts = [_parse(where, entry, i) for i, (where, entry) in enumerate(entries)]
        if not self._prompts:
            raise ValueError(f"no prompts in {source!r}")
        columns = [set(p.metadata) for p in self._prompts]
        self.columns: tuple[str, ...] = tuple(sorted(set().union(*columns)))
        """Names of all metadata columns; a prompt that lacks one gives None there."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index):
        return self._prompts[index]

    def draw(self, seed: int, iteration: int, count: int) -> list[Prompt]:
        """`count` distinct prompts, with chance proportional to their weights; the same on every process.

        Raises:
            ValueError: fewer than `count` prompts.
        """
        if count > len(self):
            raise ValueError(
                f"{count} distinct prompts an iteration were asked of {len(self)}: lower prompts_per_iteration"
            )
        # Gumbel top-k is weighted drawing without replacement.
        uniform = torch.rand(len(self), generator=noise.generator(seed, iteration, _DRAW), dtype=torch.float64)
        gumbel = -(-uniform.clamp(min=1e-300).log()).log()
        keys = gumbel + torch.tensor([math.log(p.weight) for p in self], dtype=torch.float64)
        return [self[i] for i in keys.topk(count).indices.tolist()]


def columns_of(prompts: Sequence[Prompt], names: Iterable[str]) -> dict[str, list[Any]]:
    """The metadata columns of some samples, as rewards receive them."""
    return {name: [p.metadata.get(name) for p in prompts] for name in names}


def _call(path: str) -> Any:
    module, _, function = path.partition(":")
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load prompts from {path!r}: {error}") from error


def _read(path: Path) -> Iterable[tuple[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(
            f"no prompt file {path}. Pass a .jsonl or .txt file, 'module:function', or one of {', '.join(NAMED)}."
        )
    try:
        # Only a newline ends a line: JSON strings may hold U+2028 and its like. "-sig" drops a byte-order mark.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if path.suffix == ".jsonl":
            try:
                yield where, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
        else:
            yield where, line.strip()


def _parse(where: str, entry: Any, index: int) -> Prompt:
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("prompt"), str):
        raise ValueError(f'{where}: a prompt is a text or an object with the key "prompt" (a text), got {entry!r}')
    if not entry["prompt"].strip():
        raise ValueError(f"{where}: the prompt is empty")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ValueError(f"{where}: weight must be a positive number, got {weight!r}")
    metadata = {k: v for k, v in entry.items() if k not in ("prompt", "weight")}
    return Prompt(index, entry["prompt"], metadata, float(weight))
