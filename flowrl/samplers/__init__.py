"""How a generation becomes a decision process: kernels, sigma grids and step plans."""

from flowrl.samplers.flow import CPS, CPWS, ODE, DanceSDE, FlowSampler, FlowSDE
from flowrl.samplers.plans import AllSteps, Merged, Plan, RandomSteps, SlidingWindow, StepPlan, Window
from flowrl.samplers.schedules import Explicit, Schedule, SchedulerConfig, SingleShift

__all__ = [
    "CPS",
    "CPWS",
    "ODE",
    "AllSteps",
    "DanceSDE",
    "Explicit",
    "FlowSDE",
    "FlowSampler",
    "Merged",
    "Plan",
    "RandomSteps",
    "Schedule",
    "SchedulerConfig",
    "SingleShift",
    "SlidingWindow",
    "StepPlan",
    "Window",
]
