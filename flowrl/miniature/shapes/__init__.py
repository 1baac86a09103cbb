"""The world "shapes": see `world` (prompts, renderer), `detector` and `reward` (judge), `pretrain` (base model)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).parent / "weights"
"""The shipped `StableDiffusion3Pipeline`, 32 x 32 px, made by `python -m flowrl.miniature.shapes.pretrain`."""


def load_policy(peft_config: Any = None, **kwargs: Any) -> Any:
    """The shipped pipeline as a `DiffusersPolicy`; the world's prompts need no T5 padding."""
    from flowrl.pipelines.recording import DiffusersPolicy, load_pipeline

    return DiffusersPolicy(load_pipeline(WEIGHTS), peft_config, max_sequence_length=0, **kwargs)
