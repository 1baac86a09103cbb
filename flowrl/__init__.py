"""flowrl: align image generators with rewards by reinforcement learning.

Names are imported when first used: `import flowrl` alone loads neither torch nor diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "FlowGRPO": "flowrl.objectives",
    "FlowDPPO": "flowrl.objectives",
    "EGRPO": "flowrl.objectives",
    "SuperFlow": "flowrl.objectives",
    "DiffusionNFT": "flowrl.objectives",
    "Objective": "flowrl.objectives",
    "ODE": "flowrl.samplers",
    "FlowSDE": "flowrl.samplers",
    "DanceSDE": "flowrl.samplers",
    "CPS": "flowrl.samplers",
    "CPWS": "flowrl.samplers",
    "FlowSampler": "flowrl.samplers",
    "AllSteps": "flowrl.samplers",
    "Window": "flowrl.samplers",
    "SlidingWindow": "flowrl.samplers",
    "RandomSteps": "flowrl.samplers",
    "Merged": "flowrl.samplers",
    "DiffusersPolicy": "flowrl.pipelines.recording",
    "load_pipeline": "flowrl.pipelines.recording",
    "RewardOutput": "flowrl.rewards",
    "RewardSet": "flowrl.rewards",
    "PromptSet": "flowrl.training.prompts",
    "Trainer": "flowrl.training.trainer",
    "TrainingArguments": "flowrl.training.arguments",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from flowrl.objectives import EGRPO, DiffusionNFT, FlowDPPO, FlowGRPO, Objective, SuperFlow
    from flowrl.pipelines.recording import DiffusersPolicy, load_pipeline
    from flowrl.rewards import RewardOutput, RewardSet
    from flowrl.samplers import (
        CPS,
        CPWS,
        ODE,
        AllSteps,
        DanceSDE,
        FlowSampler,
        FlowSDE,
        Merged,
        RandomSteps,
        SlidingWindow,
        Window,
    )
    from flowrl.training.arguments import TrainingArguments
    from flowrl.training.prompts import PromptSet
    from flowrl.training.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
