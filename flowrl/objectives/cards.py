"""One card per method: data only. What the code knows is read from it, and what was measured from the benchmark."""

from __future__ import annotations

import importlib
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from flowrl import recipes

if TYPE_CHECKING:
    from flowrl.core import Preset
    from flowrl.objectives.base import Objective

Status = Literal["verified", "secondary", "derived"]


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a user should know of a method beyond its docstring.

    Args:
        name: the preset of the core with dashes, and the method's name in the benchmark.
        objective: its class in `flowrl.objectives`.
        title: of the paper.
        paper, formula_status: given only where the core has no preset of the method (see `Preset`).
        defaults_source: where the defaults come from.
        safe_ranges, failure_signs: as seen in the miniature; empty where nothing has been seen yet.
        tests: files that check it.
    """

    name: str
    objective: str
    title: str
    paper: str | None = None
    formula_status: Status | None = None
    defaults_source: str
    safe_ranges: tuple[str, ...] = ()
    failure_signs: tuple[str, ...] = ()
    tests: tuple[str, ...]

    @property
    def cls(self) -> type[Objective]:
        return getattr(importlib.import_module("flowrl.objectives"), self.objective)

    @property
    def preset(self) -> Preset | None:
        """The method's own preset of the core."""
        from flowrl.core import PRESETS

        return PRESETS.get(self.name.replace("-", "_"))

    @property
    def source(self) -> tuple[str, Status]:
        """(arXiv id, formula status)."""
        paper, status = self.paper, self.formula_status
        if self.preset is not None:
            paper, status = self.preset.paper, self.preset.formula_status
        assert paper is not None and status is not None
        return paper, status

    @property
    def kind(self) -> Literal["trajectory", "forward-process"]:
        """Whether it scores recorded actions again or needs only clean samples and fresh noise."""
        return "trajectory" if "log_prob" in self.cls().requires else "forward-process"

    @property
    def requires(self) -> dict[str, list[str]]:
        """What the objective needs: "always", and what a weight of the KL above or at 0 adds or takes away."""
        with_kl, without = (set(self.cls(kl=x).requires) for x in (1.0, 0.0))  # ty: ignore
        return {"always": sorted(with_kl & without), "with kl > 0": sorted(with_kl - without)}

    @property
    def defaults(self) -> dict[str, Any]:
        """Arguments of the objective in their order."""
        return {f.name: f.default for f in fields(self.cls) if f.init and f.default is not MISSING}  # ty: ignore

    @property
    def recipes(self) -> list[str]:
        """Names of the shipped recipes that use it."""

        def objective(tree: dict[str, Any]) -> Any:
            part = tree.get("objective")
            return part.get("name") if isinstance(part, dict) else part

        return [name for name, path in recipes.shipped().items() if objective(recipes.read(path)) == self.objective]


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card(
            name="flow-grpo",
            objective="FlowGRPO",
            title="Flow-GRPO: Training Flow Matching Models via Online RL",
            defaults_source="yifan123/flow_grpo, config/base.py; the KL is off here, .04 there for GenEval and OCR",
            safe_ranges=("learning rate 3e-4, clip_range 1e-3, two updates: rose over 30 iterations of one seed",),
            tests=("tests/objectives/test_flow_grpo.py", "tests/core/test_algorithm.py", "tests/core/test_presets.py"),
        ),
        Card(
            name="flow-dppo",
            objective="FlowDPPO",
            title="Flow-DPPO: Divergence Proximal Policy Optimization for Flow Matching Models",
            defaults_source=(
                "the paper's text and the UniRL release differ in delta (1e-7 and 1e-5); the default lies between and "
                "is Flow-Factory's"
            ),
            tests=("tests/objectives/test_flow_dppo.py", "tests/core/test_corrections.py"),
        ),
        Card(
            name="e-grpo",
            objective="EGRPO",
            title="E-GRPO: High Entropy Steps Drive Effective Reinforcement Learning for Flow Models",
            defaults_source="shengjun-zhang/VisualGRPO, the original merge script",
            tests=("tests/objectives/test_e_grpo.py", "tests/samplers/test_plans.py"),
        ),
        Card(
            name="superflow",
            objective="SuperFlow",
            title="SuperFlow: Training Flow Matching Models with RL on the Fly",
            defaults_source="proposed here: the paper's code is not public; clip and bounds are Flow-GRPO's",
            tests=("tests/objectives/test_superflow.py", "tests/core/test_allocation.py"),
        ),
        Card(
            name="diffusion-nft",
            objective="DiffusionNFT",
            title="DiffusionNFT: Online Diffusion Reinforcement with Forward Process",
            paper="2509.16117",
            formula_status="verified",
            defaults_source="NVlabs/DiffusionNFT, the GenEval configuration",
            safe_ranges=(
                "learning rate 3e-4, kl 0.02, cosine schedule: 130 iterations ended above the base on three seeds",
            ),
            failure_signs=(
                "learning rates above 3e-4 only added noise (on an earlier base model)",
                "kl 0 at learning rate 3e-4: after about 60 iterations the policy drifted off and lost what it had "
                "gained (on an earlier base model)",
                "the policy loss says nothing: its value does not depend on the rewards where v = v_old. Watch the "
                "reward and `drift/velocity_mse_reference`",
            ),
            tests=("tests/objectives/test_diffusion_nft.py",),
        ),
    )
}


def find(name: str) -> Card:
    """The card of this name or objective ("flow-grpo", "FlowGRPO").

    Raises:
        ValueError: there is none, with the nearest name.
    """
    for card in CARDS.values():
        if name.lower().replace("_", "-") in (card.name, card.objective.lower()):
            return card
    raise ValueError(f"no algorithm {name!r}{recipes.nearest(name, [*CARDS])}")
