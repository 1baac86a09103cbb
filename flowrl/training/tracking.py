"""Where metrics and images go: metrics.jsonl and PNG files always, accelerate's trackers by name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from flowrl.rewards import quantise

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def check_trackers(names: tuple[str, ...]) -> None:
    """Refuse unknown or missing trackers before anything is computed.

    Raises:
        ValueError: unknown name.
        ImportError: the package is not installed; the message gives the extra.
    """
    for name in names:
        if name not in _PACKAGES:
            raise ValueError(f"unknown tracker {name!r} in log_with: choose from {', '.join(_PACKAGES)}")
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ImportError(
                f"log_with names {name!r}, which is not installed: pip install 'flowrl-align[{name}]', or drop it"
            )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def image_grid(images: Tensor, columns: int = 8, scale_to: int = 96) -> np.ndarray:
    """A uint8 `[H, W, 3]` picture of `[N, 3, h, w]` images in [0, 1]; small ones are magnified without smoothing."""
    x = quantise(images.cpu()).permute(0, 3, 1, 2)
    factor = max(1, scale_to // x.shape[-1])
    x = x.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    x = torch.nn.functional.pad(x, (2, 2, 2, 2), value=128)
    rows = -(-len(x) // columns)
    blank = x.new_full((rows * columns - len(x), *x.shape[1:]), 255)
    x = torch.cat([x, blank]).reshape(rows, columns, *x.shape[1:])
    return x.permute(0, 3, 1, 4, 2).reshape(rows * x.shape[3], columns * x.shape[4], 3).numpy()


class Tracking:
    """Logs on the main process only."""

    def __init__(
        self, accelerator: Accelerator, directory: Path, run_config: Mapping[str, Any], resume_at: int
    ) -> None:
        self.accelerator, self.directory = accelerator, directory
        if not accelerator.is_main_process:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "metrics.jsonl"
        if self.path.exists():  # a resumed run goes on where its checkpoint stands
            rows = read_metrics(self.path)
            self.path.write_text("".join(json.dumps(r) + "\n" for r in rows if r["iteration"] < resume_at))
        accelerator.init_trackers(
            "flowrl", config={k: v for k, v in run_config.items() if isinstance(v, int | float | str | bool)}
        )

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """One row of numbers."""
        if not self.accelerator.is_main_process:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
        self.accelerator.log(dict(metrics), step=iteration)

    def image(self, name: str, grid: np.ndarray, iteration: int) -> Path | None:
        """One picture: `samples/NAME-ITERATION.png`, and to trackers that take images. uint8 [H, W, 3]."""
        if not self.accelerator.is_main_process:
            return None
        from PIL import Image

        path = self.directory / "samples" / f"{name}-{iteration:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grid).save(path)
        for tracker in self.accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.log_images({name: grid[None]}, step=iteration, dataformats="NHWC")
            elif tracker.name == "wandb":
                tracker.log_images({name: [grid]}, step=iteration)
        return path

    def close(self) -> None:
        # Not accelerator.end_training(): it ends the process group too, which saving or evaluating afterwards needs.
        for tracker in self.accelerator.trackers:
            tracker.finish()
