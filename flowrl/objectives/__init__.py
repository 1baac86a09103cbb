"""One module per method a user names."""

from flowrl.objectives.base import Micro, Objective
from flowrl.objectives.diffusion_nft import DiffusionNFT
from flowrl.objectives.flow_grpo import FlowGRPO

__all__ = ["DiffusionNFT", "FlowGRPO", "Micro", "Objective"]
