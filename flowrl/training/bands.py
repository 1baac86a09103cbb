"""What the monitored numbers mean: green, amber and red bands, and the alarm for reward hacking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Colour = Literal["green", "amber", "red"]
COLOURS: tuple[Colour, ...] = ("green", "amber", "red")
"""A logged `health/NAME` is an index of this."""
SMOOTHING = 0.2  # weight of the newest iteration in the averages that the alarm reads
TINY = 1e-6


class Band(NamedTuple):
    """Thresholds of one metric: red beyond `red`, else amber beyond `amber`, on one side or on both (|value|)."""

    amber: float
    red: float
    side: Literal["above", "below", "both"] = "above"

    def colour(self, value: float) -> Colour:
        """NaN is red."""
        x = abs(value) if self.side == "both" else value
        sign = -1 if self.side == "below" else 1
        within = [sign * x <= sign * limit for limit in (self.amber, self.red)]
        return "green" if within[0] else "amber" if within[1] else "red"


# Rounded by hand, for models like the miniature's. Amber lies beyond the 99 % quantile of whole runs of shapes-nft (2
# seeds), shapes-flow-dppo, shapes-e-grpo and shapes-superflow; where these never moved it is a guess (effective sample
# size, invalid share).
# `python benchmarks/bands.py RUN ...` proposes what finished runs say.
BANDS: dict[str, Band] = {
    "kl/old": Band(1e-3, 5e-3),
    "kl/reference": Band(0.05, 0.2),
    "log_prob_gap": Band(2e-3, 5e-3, "both"),
    "drift/velocity_mse_reference": Band(0.6, 1.2),
    "train/effective_sample_size": Band(0.9, 0.5, "below"),
    "reward/zero_spread_share": Band(0.7, 0.9),
    "reward/invalid_share": Band(0.05, 0.25),
    # Powers of two: 1 is twice, -1 half of the first iteration.
    "images/change/high_frequency": Band(0.75, 1.5, "both"),
    "images/change/saturation": Band(0.75, 1.5, "both"),
    "images/change/sharpness": Band(2.0, 4.0, "both"),
    "images/change/diversity": Band(-0.3, -0.75, "below"),
    "held_out/fall": Band(1.0, 2.0),  # standard errors
    "held_out/gap": Band(0.5, 1.0),  # standard deviations of the reward in the first iteration
}


def judge(metrics: Mapping[str, float]) -> dict[str, Colour]:
    """The colour of every metric that has a band."""
    return {name: band.colour(metrics[name]) for name, band in BANDS.items() if name in metrics}


def headline(colours: Mapping[str, Colour]) -> str:
    """The worst colour and what has it, for the progress bar."""
    worst = max(colours.values(), key=COLOURS.index, default="green")
    if worst == "green":
        return worst
    return f"{worst} ({', '.join(name for name, colour in colours.items() if colour == worst)})"


@dataclass
class Watch:
    """What the alarm remembers of a run; every field is part of a checkpoint."""

    first: dict[str, float] = field(default_factory=dict)
    """Rewards and image statistics of the first iteration."""
    smooth: dict[str, float] = field(default_factory=dict)
    """Their exponential averages."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    raised: dict[str, str] = field(default_factory=dict)
    """Cause -> message of the alarms so far; a cause alarms once a run."""

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take in an iteration; returns `images/change/NAME` = log2(average now / first iteration)."""
        for key, value in metrics.items():
            if key.startswith(("reward/", "images/")) and math.isfinite(value):
                self.first.setdefault(key, value)
                before = self.smooth.setdefault(key, value)
                self.smooth[key] = before + SMOOTHING * (value - before)
        return {
            key.replace("images/", "images/change/"): math.log2((now + TINY) / (self.first[key] + TINY))
            for key, now in self.smooth.items()
            if key.startswith("images/")
        }

    def evaluated(
        self, score: float, error: float, rewards: Mapping[str, float], keep: bool = True
    ) -> dict[str, float]:
        """Take in a held-out evaluation; returns how it stands beside the training reward, from the second one on.

            held_out/fall     (best score before - score) / standard error of that difference
            held_out/suspect  evaluations in a row with the fall beyond its red band and a training reward above that of
                              the best evaluation
            held_out/gap      the largest over rewards of [training gain - held-out gain] / std of the reward in the
                              first iteration; for rewards that are both trained and evaluated

        Args:
            score, error: the held-out score and its standard error.
            rewards: held-out means by name.
            keep: False looks without remembering.
        """
        trained = self.smooth.get("reward/mean")
        entry = {"score": score, "error": error, "rewards": dict(rewards), "trained": trained, "suspect": 0}
        found: dict[str, float] = {}
        if self.evaluations and trained is not None:
            start, last, best = self.evaluations[0], self.evaluations[-1], self._best()
            found["held_out/fall"] = (best["score"] - score) / max(math.hypot(error, best["error"]), TINY)
            # The evaluation before training has the policy of the first rollout.
            at_best = self.first["reward/mean"] if best["trained"] is None else best["trained"]
            suspect = BANDS["held_out/fall"].colour(found["held_out/fall"]) == "red" and trained > at_best
            found["held_out/suspect"] = entry["suspect"] = last["suspect"] + 1 if suspect else 0
            gaps = [
                (self.smooth[mean] - self.first[mean] - (value - start["rewards"][name])) / self.first[std]
                for name, value in rewards.items()
                if (mean := f"reward/{name}/mean") in self.first
                and self.first[std := f"reward/{name}/std"] > 0
                and name in start["rewards"]
            ]
            if gaps:
                found["held_out/gap"] = max(gaps)
        if keep:
            self.evaluations.append(entry)
        return found

    def alarms(self, metrics: Mapping[str, float]) -> list[str]:
        """New suspicions of reward hacking in one iteration's metrics, as sentences with their numbers."""
        found = {}
        if metrics.get("held_out/suspect", 0) >= 2:
            found["held_out"] = (
                f"the training reward rose (average {self.smooth['reward/mean']:.4g}) while the held-out score fell: "
                f"{metrics['eval/overall']:.4g} now, {metrics['held_out/fall']:.1f} standard errors below its best "
                f"({self._best()['score']:.4g}), and the evaluation before that had fallen as well"
            )
        for name, colour in judge(metrics).items():
            if name.startswith("images/change/") and colour == "red":
                key = name.replace("change/", "")
                found[name] = (
                    f"the images' {key.removeprefix('images/').replace('_', ' ')} went from {self.first[key]:.4g} to "
                    f"{self.smooth[key]:.4g} (average), which may not be what the reward is for"
                )
        new = {cause: text for cause, text in found.items() if cause not in self.raised}
        self.raised |= new
        return list(new.values())

    def _best(self) -> dict[str, Any]:
        return max(self.evaluations, key=lambda e: e["score"])
