"""One module per method a user names."""

from flowrl.objectives.base import Micro, Objective
from flowrl.objectives.diffusion_nft import DiffusionNFT
from flowrl.objectives.e_grpo import EGRPO
from flowrl.objectives.flow_dppo import FlowDPPO
from flowrl.objectives.flow_grpo import FlowGRPO
from flowrl.objectives.superflow import SuperFlow

__all__ = ["EGRPO", "DiffusionNFT", "FlowDPPO", "FlowGRPO", "Micro", "Objective", "SuperFlow"]
