"""Score a folder of images with any rewards, without a model to train.

What the images were made for is read from

    FOLDER/metadata.jsonl            a line per image: {"file_name": "0001.png", "prompt": "a red cat", ...columns}
    FOLDER/*/metadata.jsonl          the same in each subfolder, or GenEval's layout: the prompt's object, whose images
                                     are in samples/ beside it
    a file of such lines elsewhere, or one prompt for all images.
"""

from __future__ import annotations

import contextlib
import csv
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from PIL import Image, ImageOps
from torch import Tensor
from tqdm.auto import tqdm

from flowrl.rewards import RewardSet
from flowrl.rewards.base import GROUP, Spec
from flowrl.rollout import Prompt
from flowrl.training.prompts import PromptSet, columns_of

log = logging.getLogger(__name__)
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
WAITING = 8  # batches' worth of images that wait for others of their size
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # with 8 bits a channel


@dataclass(frozen=True)
class FolderImage:
    """An image below a folder (`file`, with slashes), and what it was made for."""

    file: str
    path: Path
    prompt: Prompt


def read_folder(folder: str | Path, prompts: str | Path | None = None, prompt: str | None = None) -> list[FolderImage]:
    """The images of a folder with their prompts; nothing is decoded yet.

    prompts: a `.jsonl` file with a line per image, whose `file_name` is below the folder. prompt: one for all images,
    also those in subfolders. Default: the folder's own metadata. Images without a line are left out, with a warning.
    Raises ValueError or FileNotFoundError when there are no images, no prompts, or a line names an image that is not
    there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    every = _images(folder.rglob("*"))
    if prompt is not None:
        found = [(path, Prompt(0, prompt)) for path in every]
    else:
        own = [folder / "metadata.jsonl"] if (folder / "metadata.jsonl").is_file() else folder.glob("*/metadata.jsonl")
        sources = sorted(own) if prompts is None else [Path(prompts)]
        if not sources:
            raise ValueError(
                f'{folder} has no metadata.jsonl with a line {{"file_name": ..., "prompt": ...}} per image: name such '
                "a file with --prompts, or give one --prompt for all"
            )
        found = [pair for source in sources for pair in _described(source, folder if prompts else source.parent)]
        if left := set(every) - {path for path, _ in found}:
            log.warning("%d images in %s have no prompt and are left out, such as %s", len(left), folder, min(left))
    if missing := [path for path, _ in found if not path.is_file()]:
        raise FileNotFoundError(f"{len(missing)} of {len(found)} images are not there, such as {missing[0]}")
    if not found:
        raise ValueError(f"no images in {folder}: {', '.join(SUFFIXES)} are read")
    named = [(path.relative_to(folder) if path.is_relative_to(folder) else path, path, p) for path, p in found]
    return [FolderImage(name.as_posix(), path, prompt) for name, path, prompt in named]


def _images(paths: Any) -> list[Path]:
    return sorted(path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file())


def _described(source: Path, base: Path) -> Iterator[tuple[Path, Prompt]]:
    """The images that the lines of a metadata file speak of."""
    for prompt in PromptSet(source):
        name = prompt.metadata.get("file_name")
        if name is None:
            images = _images((base / "samples").glob("*"))
            if not images:
                raise ValueError(
                    f"{source}: {prompt.text!r} has no file_name, and there are no images in {base / 'samples'}"
                )
            yield from ((path, prompt) for path in images)
        else:
            yield base / str(name), prompt


def rewards_for(rewards: Spec, images: Sequence[FolderImage]) -> RewardSet:
    """The rewards, checked against what the images' metadata gives them. Raises ValueError or TypeError."""
    found = RewardSet(rewards, max_invalid_share=1.0)  # what cannot be scored is counted
    found.check_columns(_columns(images))
    found.check_prompts([image.prompt.text for image in images])
    return found


def _columns(images: Sequence[FolderImage]) -> list[str]:
    # Images are scored in batches of one size, which part groups: so there is no group_id.
    return sorted({key for image in images for key in image.prompt.metadata} - {"file_name", GROUP})


def read_image(path: str | Path) -> np.ndarray:
    """An image file as uint8 RGB [H, W, 3], turned as its EXIF says.

    Grey, palette and CMYK images are converted; an alpha channel is dropped where it is opaque. Raises ValueError with
    the reason: transparent pixels (what lies behind them is not known), more than 8 bits a channel, a broken file.
    """
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode not in MODES:
                raise ValueError(f"mode {image.mode} has no 8-bit RGB; convert it first")
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                if upright.getchannel("A").getextrema() != (255, 255):
                    raise ValueError("has transparent pixels; paste it on a background first")
            return np.asarray(upright.convert("RGB"))
    except (
        OSError,
        SyntaxError,
        EOFError,
        Image.DecompressionBombError,
    ) as error:  # what Pillow raises on broken files
        raise ValueError(f"cannot be read: {error}") from error


def score_images(
    images: Sequence[FolderImage],
    rewards: RewardSet,
    output: str | Path | None = None,
    *,
    batch_size: int = 16,
    device: torch.device | str | None = None,
) -> list[dict[str, Any]]:
    """One row per image, in their order: file_name, prompt, a number (None if invalid) per reward, and the reason.

    rewards: see `rewards_for`; their self-tests come first. output: a `.jsonl` or `.csv` file, which gets each row as
    soon as it is there. Images of one size are scored together, `batch_size` at a time, on `device` (default: the
    accelerator). An image that cannot be read is invalid for every reward. Raises ValueError on another suffix,
    RewardError as `RewardSet.score` does.
    """
    check_output(output)
    device = str(PartialState().device) if device is None else device
    rewards.self_test(device)  # before an earlier output is written over
    keys, columns = ["file_name", "prompt", *rewards.weights, "reason"], _columns(images)
    rows: dict[int, dict[str, Any]] = {}
    with _rows_to(output, keys) as write, tqdm(total=len(images), desc="score", dynamic_ncols=True) as bar:

        def add(index: int, values: dict[str, Any]) -> None:
            image = images[index]
            given = {"file_name": image.file, "prompt": image.prompt.text, **values}
            rows[index] = {key: given.get(key) for key in keys}
            write(rows[index])
            bar.update()

        for batch in _batches(images, batch_size, lambda index, reason: add(index, {"reason": reason})):
            pixels = torch.from_numpy(np.stack([pixels for _, pixels in batch])).to(device)
            prompts = [images[index].prompt for index, _ in batch]
            for (index, _), values in zip(batch, _values(rewards, pixels, prompts, columns), strict=True):
                add(index, values)
    return [rows[index] for index in range(len(images))]


def _batches(
    images: Sequence[FolderImage], size: int, unreadable: Callable[[int, str], None]
) -> Iterator[list[tuple[int, np.ndarray]]]:
    """(index, pixels) of images that have one size; fewer than `size` where too many sizes wait."""
    waiting: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
    for index, image in enumerate(images):
        try:
            pixels = read_image(image.path)
        except ValueError as error:
            unreadable(index, str(error))
            continue
        batch = waiting.setdefault(pixels.shape, [])
        batch.append((index, pixels))
        if len(batch) == size:
            yield waiting.pop(pixels.shape)
        elif sum(map(len, waiting.values())) >= WAITING * size:
            yield waiting.pop(max(waiting, key=lambda shape: len(waiting[shape])))
    yield from waiting.values()


def _values(
    rewards: RewardSet, pixels: Tensor, prompts: Sequence[Prompt], columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """What goes into the row of each image."""
    images = pixels.permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        scores = rewards.score(images, [p.text for p in prompts], columns_of(prompts, columns))
    for row in range(len(prompts)):
        values = {name: part[row].item() for name, part in scores.parts.items()}
        lost = [name for name, value in values.items() if value != value]
        said = {name: scores.details[name].get("reason", ["not scored"] * len(prompts))[row] for name in lost}
        reasons = [f"{name}: {reason}" for name, reason in said.items()]
        yield {k: None if k in lost else v for k, v in values.items()} | {"reason": "; ".join(reasons) or None}


def check_output(output: str | Path | None) -> None:
    """Raises ValueError for a file that is neither `.jsonl` nor `.csv`."""
    if output is not None and Path(output).suffix not in (".jsonl", ".csv"):
        raise ValueError(f"the output must be a .jsonl or .csv file, not {output}")


@contextlib.contextmanager
def _rows_to(output: str | Path | None, keys: Sequence[str]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What writes a row to the file, or nowhere."""
    if output is None:
        yield lambda row: None
        return
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            table = csv.DictWriter(file, keys)
            table.writeheader()
            write = table.writerow
        else:
            write = lambda row: file.write(json.dumps(row, ensure_ascii=False) + "\n")  # noqa: E731

        def at_once(row: dict[str, Any]) -> None:
            write(row)
            file.flush()

        yield at_once


def summary(rows: Sequence[dict[str, Any]], rewards: RewardSet) -> list[dict[str, Any]]:
    """One row per reward: images scored, invalid ones, mean, std (population), min and max of the scored."""
    found = []
    for name in rewards.weights:
        values = np.array([row[name] for row in rows if row[name] is not None])
        known = [float(f(values)) for f in (np.mean, np.std, np.min, np.max)] if len(values) else [None] * 4
        counts = {"reward": name, "images": len(values), "invalid": len(rows) - len(values)}
        found.append(counts | dict(zip(("mean", "std", "min", "max"), known, strict=True)))
    return found
