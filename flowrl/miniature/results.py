"""What the benchmark's results say: tables, plots, the comparison page and the algorithm pages."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flowrl.miniature.bench import SAMPLERS, VARIANTS
from flowrl.objectives.cards import CARDS, Card

Axis = Literal["forwards", "seconds"]
RESULTS = Path(__file__).parents[2] / "benchmarks/results/miniature.json"
"""The results in the repository, not part of the package; `samplers.json` beside it has a budget of its own."""
MARKERS = ("<!-- results: written by `flowrl bench miniature --docs` -->", "<!-- end of results -->")
GOALS = (0.8, 0.9)


def load(file: Path = RESULTS) -> dict[str, Any] | None:
    """A `results.json`; None where there is none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def at(points: Sequence[dict[str, Any]], axis: Axis, budget: float) -> dict[str, Any]:
    """The last evaluation within a budget."""
    return [p for p in points if p[axis] <= budget][-1]


def reached(points: Sequence[dict[str, Any]], axis: Axis, score: float) -> float | None:
    """What it took to a held-out score; None if the curve never gets there."""
    return next((p[axis] for p in points if p["overall"] >= score), None)


def rows(results: Mapping[str, Any], axis: Axis) -> list[dict[str, Any]]:
    """The table under an equal budget: a row per method, means over the seeds that have a curve.

    "to 0.8" is the mean of what the seeds took that got there, with their number when not all did. "failed" counts runs
    that ended early; they enter with what they had reached.
    """
    table = []
    for name in VARIANTS:
        runs = [r for r in results["runs"] if r["variant"] == name]
        if not runs:
            continue
        curves = [r["points"] for r in runs if r["points"]]
        row: dict[str, Any] = {"method": name, "score": None, "seeds": None}
        ends = [at(points, axis, results["budget"][axis]) for points in curves]
        row["score"] = _mean([p["overall"] for p in ends])
        row["seeds"] = f"{_low(ends)} - {_high(ends)}" if ends else None
        for task in _tasks(results):
            row[task.replace("_object", "")] = _mean([p["per_task"][task] for p in ends])
        row |= {f"to {goal}": _taken([reached(points, axis, goal) for points in curves]) for goal in GOALS}
        row["KL"] = _mean([p["kl"] for p in ends])
        row["diversity"] = _mean([p["diversity"] for p in ends])
        row["zero spread"] = _mean([p["zero_spread_share"] for p in ends if p["zero_spread_share"] is not None])
        row["failed"] = f"{sum(r['failure'] is not None for r in runs)} of {len(runs)}"
        row["setting"] = setting(runs[0]["setting"])
        table.append(row)
    return table


def setting(chosen: Mapping[str, float]) -> str:
    """Tuned keys in a few words."""
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in chosen.items()) or "not tuned"


def _tasks(results: Mapping[str, Any]) -> list[str]:
    return next((list(r["points"][0]["per_task"]) for r in results["runs"] if r["points"]), [])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _low(points: Sequence[dict[str, Any]]) -> str:
    return f"{min(p['overall'] for p in points):.3f}"


def _high(points: Sequence[dict[str, Any]]) -> str:
    return f"{max(p['overall'] for p in points):.3f}"


def _taken(values: Sequence[float | None]) -> str | None:
    got = [v for v in values if v is not None]
    if not got:
        return None
    some = "" if len(got) == len(values) else f" ({len(got)} of {len(values)})"
    return f"{sum(got) / len(got):,.0f}{some}"


def markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """A table's rows in Markdown."""

    def shown(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [list(table[0]), ["---"] * len(table[0]), *([shown(v) for v in row.values()] for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---------------------------------------------------------------------------------------------------------- plots


def plot(results: Mapping[str, Any], folder: Path, prefix: str = "") -> list[Path]:
    """Held-out score over forwards and over seconds, mean over seeds: objectives, then samplers."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from flowrl.evaluation.report import COLORS

    objectives = [name for name in VARIANTS if name == SAMPLERS[0] or name not in SAMPLERS]
    there = {r["variant"] for r in results["runs"]}
    # Flow-GRPO, which is in both, does not make a panel of its own.
    panels = [names for names in (objectives, SAMPLERS) if len(there.intersection(names)) > 1] or [objectives]
    files = []
    axes_of: tuple[Axis, ...] = ("forwards", "seconds")
    for axis in axes_of:
        figure = Figure(figsize=(1 + 4.5 * len(panels), 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, names in zip(row, panels, strict=True):
            for name, color in zip(names, COLORS, strict=False):
                curves = [r["points"] for r in results["runs"] if r["variant"] == name and r["points"]]
                if not curves:
                    continue
                grid = np.linspace(0, min(c[-1][axis] for c in curves), 50)
                scores = [np.interp(grid, [p[axis] for p in c], [p["overall"] for p in c]) for c in curves]
                axes.plot(grid, np.mean(scores, 0), color=color, label=name)
            axes.axvline(results["budget"][axis], color="#9aa5b1", linewidth=0.8, linestyle=":")
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlabel({"forwards": "transformer forwards", "seconds": "seconds of training"}[axis])
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=8, frameon=False)
        row[0].set_ylabel("held-out score")
        files.append(folder / f"{prefix}{axis}.png")
        figure.savefig(files[-1], dpi=130)
    return files


# ---------------------------------------------------------------------------------------------------------- pages


def comparison(results: Mapping[str, Any] | None) -> str:
    """The part of the comparison page that the results decide."""
    if results is None:
        return "No results are in the repository yet."
    budget = results["budget"]
    tried = "chosen by the search below" if results["tuning"] else "the recipes'; nothing was tuned"
    seeds = sorted({r["seed"] for r in results["runs"]})
    machines = ", ".join(sorted({r["machine"] for r in results["runs"]}))
    parts = [
        f"Seeds {', '.join(map(str, seeds))}; learning rates and coefficients {tried}. {machines}.",
        f"### {budget['forwards']:,} transformer forwards",
        markdown(rows(results, "forwards")),
        "![Held-out score over transformer forwards](comparison-forwards.png)",
        f"### {budget['seconds']:g} seconds",
        markdown(rows(results, "seconds")),
        "![Held-out score over seconds](comparison-seconds.png)",
    ]
    failures = [f"- {r['variant']}, seed {r['seed']}: {r['failure']}" for r in results["runs"] if r["failure"]]
    if failures:
        parts += ["### Runs that failed", "\n".join(failures)]
    if results["tuning"]:
        parts += ["### The search", markdown(search_rows(results["tuning"]))]
    return "\n\n".join(parts)


def search_rows(tuning: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per setting that `bench.tune` tried; the score is on prompts of the training set."""
    return [
        {
            "method": name,
            "setting": setting(t["setting"]),
            "base": t["base"],
            "score": t["score"],
            "KL": t["kl"],
            "": "chosen" if t["setting"] == found["chosen"] else (t["failure"] or ""),
        }
        for name, found in tuning.items()
        for t in found["tried"]
    ]


def write_comparison(page: Path, results: Mapping[str, Any] | None) -> None:
    """Put the results between the page's markers and the plots beside it.

    Raises:
        ValueError: the page lacks the markers.
    """
    text = page.read_text(encoding="utf-8")
    start, end = (text.find(m) for m in MARKERS)
    if start < 0 or end < start:
        raise ValueError(f"{page} lacks the lines {MARKERS[0]} and {MARKERS[1]}")
    if results is not None:
        plot(results, page.parent, "comparison-")
    page.write_text(f"{text[:start]}{MARKERS[0]}\n\n{comparison(results)}\n\n{text[end:]}", encoding="utf-8")


def card_facts(card: Card, cost: Mapping[str, Any] | None, results: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything on a card: its data, what the code says and what was measured, as plain values.

    Args:
        cost: `bench.cost`, or None to leave it out.
    """
    paper, status = card.source
    variant = VARIANTS[card.name]
    safe, bad = _seen(((results or {}).get("tuning") or {}).get(card.name, {"tried": []}))
    return {
        "name": card.name,
        "objective": card.objective,
        "title": card.title,
        "paper": paper,
        "kind": card.kind,
        "formula_status": status,
        "requires": card.requires,
        "cost_per_image": None if cost is None else dict(cost),
        "defaults": card.defaults,
        "defaults_source": card.defaults_source,
        "recipes": card.recipes,
        "benchmark": shlex.join(["flowrl", "train", variant.recipe, *variant.overrides]),
        "safe_ranges": [*card.safe_ranges, *safe],
        "failure_signs": [*card.failure_signs, *bad],
        "curve": _curve(card.name, results),
        "tests": list(card.tests),
    }


def _seen(tuning: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Settings of the search that ended above the base, and those that did not."""
    safe, bad = [], []
    for t in tuning["tried"]:
        what = f"{setting(t['setting'])}: "
        if t["score"] is None:
            bad.append(what + (t["failure"] or "no evaluation"))
        else:
            above = t["score"] > t["base"]
            (safe if above else bad).append(f"{what}{t['base']:.3f} to {t['score']:.3f} on the search's prompts")
    return safe, bad


def _curve(name: str, results: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Score at tenths of the budget of forwards."""
    curves = [r["points"] for r in (results or {"runs": []})["runs"] if r["variant"] == name and r["points"]]
    if results is None or not curves:
        return []
    table = []
    for tenth in range(11):
        forwards = results["budget"]["forwards"] * tenth // 10
        ends = [at(points, "forwards", forwards) for points in curves]
        table.append(
            {
                "forwards": forwards,
                "score": _mean([p["overall"] for p in ends]),
                "seeds": f"{_low(ends)} - {_high(ends)}",
            }
        )
    return table


STATUS = {
    "verified": "verified against the authors' code or the paper's text",
    "secondary": "secondary: from accounts of others",
    "derived": "DERIVED, not verified",
}
COST = "Cost"


def card_page(facts: Mapping[str, Any]) -> str:
    """A card in Markdown."""
    requires = ", ".join(facts["requires"]["always"]) or "nothing"
    if facts["requires"]["with kl > 0"]:
        requires += f"; with kl > 0 also {', '.join(facts['requires']['with kl > 0'])}"
    about = {
        "paper": f"{facts['title']}, [arXiv {facts['paper']}](https://arxiv.org/abs/{facts['paper']})",
        "class": f"`flowrl.objectives.{facts['objective']}`",
        "kind": facts["kind"],
        "requires": requires,
        "formulas": STATUS[facts["formula_status"]],
        "recipes": ", ".join(f"`{name}`" for name in facts["recipes"]) or "none ships",
        "in the benchmark": f"`{facts['benchmark']}`",
        "tests": ", ".join(f"`{path}`" for path in facts["tests"]),
    }
    parts = [f"# {facts['objective']}", markdown([{"": k, facts["name"]: v} for k, v in about.items()])]
    cost = facts["cost_per_image"]
    if cost is not None:
        counted = (
            ("sampling the rollout", cost["rollout"]),
            ("update, without gradient", cost["update"]),
            ("update, with gradient", cost["gradient"]),
            ("sum", cost["forwards"]),
            ("sum, with gradient counted three times", cost["work"]),
        )
        parts += [
            f"## {COST}",
            f"Transformer forwards per training image, counted by running one iteration at {cost['steps']} steps with "
            f"{cost['group_size']} images a prompt:",
            markdown([{"": k, "forwards": f"{v:g}"} for k, v in counted]),
        ]
    defaults = [{"argument": f"`{k}`", "default": f"`{v!r}`"} for k, v in facts["defaults"].items()]
    parts += ["## Defaults", markdown(defaults), f"Source: {facts['defaults_source']}."]
    parts += ["## In the miniature"]
    parts += [_list("Safe", facts["safe_ranges"]), _list("Signs of failure", facts["failure_signs"])]
    if facts["curve"]:
        parts += ["Held-out score over transformer forwards:", markdown(facts["curve"])]
    else:
        parts += ["No measured curve is in the repository yet."]
    return "\n\n".join(parts) + "\n"


def _list(title: str, entries: Sequence[str]) -> str:
    if not entries:
        return f"{title}: nothing has been recorded yet."
    return "\n".join([f"{title}:", "", *(f"- {entry}" for entry in entries)])


def overview() -> list[dict[str, Any]]:
    """A row per card."""
    return [
        {
            "name": card.name,
            "objective": card.objective,
            "kind": card.kind,
            "paper": card.source[0],
            "formulas": card.source[1],
        }
        for card in CARDS.values()
    ]


def overview_page() -> str:
    table = [{**row, "name": f"[{row['name']}]({row['name']}.md)"} for row in overview()]
    return (
        "# Algorithms\n\nOne card per method, made by `flowrl algorithms --write-docs docs/algorithms` from the code "
        f"and the benchmark's results.\n\n{markdown(table)}\n"
    )


def write_pages(
    folder: Path, cost: Callable[[str], Mapping[str, Any]], results: Mapping[str, Any] | None
) -> list[Path]:
    """Write the overview and every card into a folder of the docs."""
    pages = {"index": overview_page()}
    pages |= {card.name: card_page(card_facts(card, cost(card.name), results)) for card in CARDS.values()}
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.md" for name in pages]
    for file, text in zip(files, pages.values(), strict=True):
        file.write_text(text, encoding="utf-8")
    return files
