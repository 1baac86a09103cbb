"""The world "glyphs": see `world` (prompts, renderer), `reward` (judge), `pretrain` (base model)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.miniature.glyphs.world import HEIGHT, WIDTH

WEIGHTS = Path(__file__).parent / "weights"
"""The shipped `StableDiffusion3Pipeline`, 24 x 48 px, made by `python -m flowrl.miniature.glyphs.pretrain`."""


def load_policy(peft_config: Any = None, **kwargs: Any) -> Any:
    """The shipped pipeline as a `DiffusersPolicy` on the world's canvas; its prompts need no T5 padding."""
    from flowrl.pipelines.recording import DiffusersPolicy, load_pipeline

    pipe = load_pipeline(WEIGHTS)
    return DiffusersPolicy(pipe, peft_config, height=HEIGHT, width=WIDTH, max_sequence_length=0, **kwargs)
