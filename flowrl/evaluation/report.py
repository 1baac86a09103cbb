"""The report of a run: one HTML file with everything inside, made from the files a run leaves."""

from __future__ import annotations

import base64
import html
import io
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Points = tuple[list[float], list[float]]
COLUMNS = 8  # of the trainer's picture grids
WIDEST = 256  # pixels; larger pictures are scaled down so that the file stays small
INK, FAINT = "#1f2933", "#9aa5b1"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")


@dataclass
class Run:
    """What a run folder holds; parts that an unfinished run has not written yet are empty.

    Args:
        folder: the run's `output_dir`.

    Raises:
        FileNotFoundError: the folder holds no run.
    """

    folder: Path

    def __post_init__(self) -> None:
        from flowrl.training.tracking import read_metrics

        metrics = self.folder / "metrics.jsonl"
        if not metrics.is_file():
            raise FileNotFoundError(f"{self.folder} holds no run: there is no metrics.jsonl in it")
        rows = read_metrics(metrics)
        self.rows: list[dict[str, Any]] = [r for r in rows if "reward/mean" in r]
        """One per iteration."""
        self.summary = self._json("summary.json")
        self.before, self.after = self._json("before.json"), self._json("after.json")
        if not self.after:
            self.after = self._json("eval.json")
        recipe = self.folder / "recipe.yaml"
        self.recipe = recipe.read_text(encoding="utf-8") if recipe.is_file() else ""
        self.evaluations = [(r["iteration"] + ("reward/mean" in r or i > 0), r) for i, r in enumerate(rows)]
        self.evaluations = [(x, r) for x, r in self.evaluations if "eval/overall" in r]
        """(iterations done, row) of each evaluation; the one before training is the log's first row."""

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("finished"))

    @property
    def iterations(self) -> int:
        """Iterations in the log."""
        return self.rows[-1]["iteration"] + 1 if self.rows else 0

    def series(self, key: str) -> Points:
        """(iterations, values) of a metric, where it was logged."""
        found = [(r["iteration"] + 1, r[key]) for r in self.rows if r.get(key) is not None]
        return [x for x, _ in found], [y for _, y in found]

    def keys(self, prefix: str) -> list[str]:
        return sorted({k for r in self.rows for k in r if k.startswith(prefix)})

    def pictures(self, name: str) -> list[Image.Image]:
        """The single pictures of the newest grid `samples/NAME-*.png`, in the order of the captions."""
        grids = sorted((self.folder / "samples").glob(f"{name}-*.png"))
        captions = (self.before or self.after).get("captions", [])
        if not grids or not captions:
            return []
        grid = Image.open(grids[-1]).convert("RGB")
        rows = -(-len(captions) // COLUMNS)
        w, h = grid.width // COLUMNS, grid.height // rows
        boxes = [(i % COLUMNS * w, i // COLUMNS * h) for i in range(len(captions))]
        return [grid.crop((x + 2, y + 2, x + w - 2, y + h - 2)) for x, y in boxes]  # without the 2 px frame

    def seconds(self) -> dict[str, float]:
        """Seconds per phase of the whole run."""
        if self.summary:
            return dict(self.summary["phases"])
        total: dict[str, float] = defaultdict(float)
        for row in self.rows:
            for key, value in row.items():
                if key.startswith("time/") and key != "time/iteration":
                    total[key.removeprefix("time/")] += value
        return dict(total)


def task_rows(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Scores per task and overall: dictionaries with task, prompts, images, before, after, change.

    Args:
        before, after: evaluation summaries (`Evaluation.summary()`); a missing one leaves its scores None.
    """
    before, after = before or {}, after or {}
    known = after or before
    rows = []
    for task, entry in known.get("per_task", {}).items():
        scores = [e["per_task"].get(task, {}).get("score") if e else None for e in (before, after)]
        if task != "all":
            rows.append(_row(task, int(entry["prompts"]), int(entry["images"]), *scores))
    if known:
        prompts = sum(int(t["prompts"]) for t in known["per_task"].values())
        rows.append(_row("overall", prompts, known["images"], before.get("overall"), after.get("overall")))
    return rows


def _row(task: str, prompts: int, images: int, before: float | None, after: float | None) -> dict[str, Any]:
    change = None if before is None or after is None else after - before
    return {
        "task": task,
        "prompts": prompts,
        "images": images,
        "before": before,
        "after": after,
        "change": change,
    }


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run's folder, finished or not, and return its path.

    The file is self-contained: no script, no request to anywhere.

    Raises:
        FileNotFoundError: the folder holds no run.
    """
    run = Run(Path(run_dir))
    figures = [figure for draw in _FIGURES if (figure := draw(run))]
    body = "\n".join(
        part
        for part in (
            _header(run),
            _headline(run),
            _section("Scores", _scores(run)),
            _section("Same seeds, before and after", _gallery(run)),
            _section("Health", _health(run)),
            _section("Curves", f'<div class="figures">{"".join(figures)}</div>' if figures else ""),
            _section("Time", _timings(run)),
            _section("Recipe", _recipe(run)),
            _footer(run),
        )
        if part
    )
    title = html.escape(run.folder.resolve().name)
    path = run.folder / "report.html"
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n",
        encoding="utf-8",
    )
    return path


# --------------------------------------------------------------------------------------------------- sections


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>\n{content}</section>" if content else ""


def _header(run: Run) -> str:
    import yaml

    recipe = yaml.safe_load(run.recipe) if run.recipe else {}
    planned = recipe.get("training", {}).get("iterations")
    done = run.summary.get("iterations", run.iterations)
    state = f"finished, {done} iterations" if run.finished else f"unfinished, {done} of {planned or '?'} iterations"
    status = f'<span class="status{"" if run.finished else " open"}">{state}</span>'
    objective = recipe.get("objective", {}).get("name")
    sampler = recipe.get("sampler", {}).get("name")
    parts = [recipe.get("description"), objective and f"{objective} with {sampler}"]
    line = " · ".join(html.escape(p) for p in parts if p)
    return f"<header><h1>{html.escape(run.folder.resolve().name)}</h1>{status}<p>{line}</p></header>"


def _headline(run: Run) -> str:
    tiles = []
    overall = task_rows(run.before, run.after)[-1:]
    if overall and overall[0]["after"] is not None and overall[0]["before"] is not None:
        row = overall[0]
        tiles.append(
            f'<div class="tile wide"><b>{row["before"]:.3f} <i>→</i> {row["after"]:.3f}</b>'
            f"<span>held-out score, {row['change']:+.3f} ({row['images']} images each)</span></div>"
        )
    elif overall:
        score = overall[0]["before"] if overall[0]["after"] is None else overall[0]["after"]
        tiles.append(f'<div class="tile wide"><b>{score:.3f}</b><span>held-out score before training</span></div>')
    elif run.rows:
        first, last = run.rows[0]["reward/mean"], run.rows[-1]["reward/mean"]
        tiles.append(
            f'<div class="tile wide"><b>{first:.3f} <i>→</i> {last:.3f}</b><span>mean training reward</span></div>'
        )
    _, speed = run.series("images_per_second")
    seconds = run.summary.get("seconds") or sum(run.series("time/iteration")[1])
    facts = {
        "training images": f"{run.summary['training_images']:,}" if run.summary else "",
        "wall time": _duration(seconds) if seconds else "",
        "images per second": f"{np.mean(speed):.1f}" if speed else "",
        "processes": str(run.summary.get("processes", "")),
        "seed": str(run.summary.get("seed", "")),
    }
    tiles += [f'<div class="tile"><b>{v}</b><span>{k}</span></div>' for k, v in facts.items() if v]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _scores(run: Run) -> str:
    rows = task_rows(run.before, run.after)
    if not rows:
        return ""
    head = "".join(f"<th>{k}</th>" for k in rows[0])
    body = "".join(
        f"<tr{' class=total' if r['task'] == 'overall' else ''}>"
        + "".join(f"<td>{_cell(k, v)}</td>" for k, v in r.items())
        + "</tr>"
        for r in rows
    )
    note = ""
    if len(rows) > 1:
        note = "<p class=note>Overall is the mean over tasks.</p>"
    if not run.finished and run.after:
        note += f"<p class=note>After {run.after['iteration']} iterations: the newest evaluation so far.</p>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key in ("before", "after", "change"):
        kind = "" if key != "change" or value == 0 else ' class="up"' if value > 0 else ' class="down"'
        return f"<span{kind}>{value:{'+' if key == 'change' else ''}.3f}</span>"
    return html.escape(str(value).replace("_", " ") if key == "task" else str(value))


def _health(run: Run) -> str:
    """Alarms, and per banded metric: its newest value, its band, and the share of rows in each colour."""
    from flowrl.training.bands import BANDS, COLOURS

    body, beyond = "", {"above": "&gt;", "below": "&lt;", "both": "±"}
    for name, band in BANDS.items():
        _, levels = run.series(f"health/{name}")
        if levels:
            colour, (_, values) = COLOURS[int(levels[-1])], run.series(name)
            shares = "".join(f"<td>{levels.count(i) / len(levels):.0%}</td>" for i in range(len(COLOURS)))
            limits = "".join(f"<td>{beyond[band.side]} {x:g}</td>" for x in (band.amber, band.red))
            body += f"<tr><td>{name}</td><td class={colour}>{values[-1]:.3g}</td>{limits}{shares}</tr>"
    if not body:
        return ""
    head = "".join(f"<th>{k}</th>" for k in ("metric", "newest", "amber", "red", *(f"% {c}" for c in COLOURS)))
    alarms = "".join(f"<p class=red>Alarm: {html.escape(a)}</p>" for a in run.summary.get("alarms", []))
    note = "<p class=note>Share of the iterations in each colour. Amber: look at the samples; red: act.</p>"
    return f"{alarms}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _gallery(run: Run) -> str:
    before = run.pictures("before")
    after = run.pictures("after") or run.pictures("eval")
    captions = (run.before or run.after).get("captions", [])
    cards = []
    for i, caption in enumerate(captions):
        shown = [(side, images[i]) for side, images in (("before", before), ("after", after)) if images]
        text = html.escape(caption, quote=True)
        pictures = "".join(
            f'<img src="{_png(image)}" alt="{side}: {text}" title="{side}: {text}">' for side, image in shown
        )
        if pictures:
            cards.append(f"<figure><div>{pictures}</div><figcaption>{text}</figcaption></figure>")
    if not cards:
        return ""
    note = "Left before training, right after. Both start from the same noise." if after else "Before training."
    return f'<p class=note>{note}</p><div class="gallery">{"".join(cards)}</div>'


def _timings(run: Run) -> str:
    seconds = {k: v for k, v in sorted(run.seconds().items(), key=lambda kv: -kv[1]) if v > 0}
    total = sum(seconds.values())
    if not total:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{_duration(v)}</td><td>{v / total:.1%}</td>"
        f'<td class="bar"><span style="width:{100 * v / total:.1f}%"></span></td></tr>'
        for k, v in seconds.items()
    )
    head = "<tr><th>phase</th><th>time</th><th>share</th><th></th></tr>"
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _recipe(run: Run) -> str:
    if not run.recipe:
        return ""
    return f"<details><summary>recipe.yaml</summary><pre>{html.escape(run.recipe)}</pre></details>"


def _footer(run: Run) -> str:
    made_with = run.summary.get("versions") or {
        name: version(name) for name in ("flowrl-align", "torch", "diffusers", "transformers", "peft")
    }
    said = "run with" if run.summary.get("versions") else "report written with"
    return f"<footer>{said} {html.escape(', '.join(f'{k} {v}' for k, v in made_with.items()))}</footer>"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 90 else f"{hours:.1f} h"


def _png(image: Image.Image) -> str:
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


# --------------------------------------------------------------------------------------------------- figures


def _figure(title: str, note: str, draw: Callable[[Any], None]) -> str:
    """One plot with its title and a line on how to read it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 2.7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8, length=3)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("iteration", fontsize=8, color=INK)
    draw(axes)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(fontsize=7, frameon=True, framealpha=0.7, edgecolor="none", ncols=2, labelcolor=INK, loc="best")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=170, facecolor="white")
    data = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<figure><h3>{title}</h3><img src="data:image/png;base64,{data}" alt="{title}">'
        f"<figcaption>{note}</figcaption></figure>"
    )


def _smooth(values: Sequence[float]) -> np.ndarray:
    """Moving average over a fifteenth of the run, shorter at the ends."""
    half = len(values) // 30
    y = np.asarray(values, float)
    return np.array([y[max(0, i - half) : i + half + 1].mean() for i in range(len(y))])


def _line(axes: Any, points: Points, color: Any, label: str | None = None, thin: bool = False) -> None:
    x, y = points
    if not x:
        return
    if len(x) >= 30 and not thin:
        axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
        y = _smooth(y)
    marker = "o" if len(x) == 1 else None
    axes.plot(x, y, color=color, label=label, linewidth=0.9 if thin else 1.8, alpha=0.8 if thin else 1, marker=marker)


def _reward(run: Run) -> str:
    if not run.rows:
        return ""
    tasks = run.keys("reward/task/")

    def draw(axes: Any) -> None:
        for key, color in zip(tasks, (*COLORS[1:], *COLORS[1:]), strict=False):
            x, y = run.series(key)
            points = (x, list(_smooth(y)) if len(y) >= 30 else y)
            _line(axes, points, color, key.removeprefix("reward/task/").replace("_", " "), thin=True)
        _line(axes, run.series("reward/mean"), COLORS[0], "mean")

    note = "Mean of an iteration's samples, and per task; of a long run the moving averages."
    return _figure("Training reward", note, draw)


def _held_out(run: Run) -> str:
    if len(run.evaluations) < 2:
        return ""
    x = [i for i, _ in run.evaluations]
    tasks = sorted({k for _, row in run.evaluations for k in row if k.startswith("eval/task/")})

    def draw(axes: Any) -> None:
        for key, color in zip(tasks, (*COLORS[1:], *COLORS[1:]), strict=False):
            y = [row.get(key, np.nan) for _, row in run.evaluations]
            axes.plot(
                x, y, color=color, linewidth=0.9, alpha=0.8, label=key.removeprefix("eval/task/").replace("_", " ")
            )
        y = [row["eval/overall"] for _, row in run.evaluations]
        axes.plot(x, y, color=COLORS[0], linewidth=1.8, marker="o", markersize=4, label="overall")

    return _figure("Held-out score", "The evaluation prompts; the same noise every time.", draw)


def _drift(run: Run) -> str:
    if run.keys("drift/"):
        return _figure(
            "Distance from the reference",
            "Mean squared difference of the velocity to the model before training.",
            lambda axes: _line(axes, run.series("drift/velocity_mse_reference"), COLORS[0]),
        )
    which = "reference" if run.keys("kl/reference") else "old"
    steps = run.keys(f"kl/{which}/step_")
    if not run.keys(f"kl/{which}"):
        return ""

    def draw(axes: Any) -> None:
        from matplotlib import colormaps

        for i, key in enumerate(steps):
            shade = colormaps["viridis"](0.9 * i / max(len(steps) - 1, 1))
            ends = i in (0, len(steps) - 1)
            name = f"step {int(key.rpartition('_')[2])}" if ends else None
            _line(axes, run.series(key), shade, name, thin=True)
        _line(axes, run.series(f"kl/{which}"), INK, "mean")
        if any(value > 0 for value in run.series(f"kl/{which}")[1]):
            axes.set_yscale("log")

    note = "Per step of the sampler, averaged over latent elements, nats; logarithmic."
    return _figure(f"KL to the {'model before training' if which == 'reference' else 'behaviour policy'}", note, draw)


def _ratio(run: Run) -> str:
    if not run.keys("train/ratio_mean"):
        return ""

    def draw(axes: Any) -> None:
        x, high = run.series("train/ratio_max")
        _, low = run.series("train/ratio_min")
        axes.fill_between(x, low, high, color=COLORS[0], alpha=0.2, linewidth=0, label="lowest to highest")
        _line(axes, run.series("train/ratio_mean"), COLORS[0], "mean")

    return _figure("Importance ratio", "Policy over behaviour policy, mean of the iteration's updates.", draw)


def _clipped(run: Run) -> str:
    if not run.keys("train/clip_frac_"):
        return ""

    def draw(axes: Any) -> None:
        _line(axes, run.series("train/clip_frac_high"), COLORS[1], "above the range")
        _line(axes, run.series("train/clip_frac_low"), COLORS[0], "below the range")
        axes.set_ylim(bottom=0)

    return _figure("Clipped share", "Share of transitions whose ratio left the clip range.", draw)


def _simple(title: str, note: str, **series: str) -> Callable[[Run], str]:
    """A figure of one or two metrics from 0 up: label -> key."""

    def make(run: Run) -> str:
        present = {label: key for label, key in series.items() if run.series(key)[0]}

        def draw(axes: Any) -> None:
            for (label, key), color in zip(present.items(), COLORS, strict=False):
                _line(axes, run.series(key), color, label)
            axes.set_ylim(bottom=0)

        return _figure(title, note, draw) if present else ""

    return make


_FIGURES: tuple[Callable[[Run], str], ...] = (
    _reward,
    _held_out,
    _drift,
    _ratio,
    _clipped,
    _simple(
        "Effective sample size",
        "(sum r)^2 / (n sum r^2) of the importance ratios, mean of the iteration's updates.",
        size="train/effective_sample_size",
    ),
    _simple(
        "Diversity within groups",
        "RMS pixel distance of two images of one prompt.",
        diversity="images/diversity",
    ),
    _simple("Gradient norm", "Before clipping, mean of the iteration's updates.", norm="train/grad_norm"),
    _simple(
        "Groups that teach nothing",
        "Share of groups whose samples all have one reward, and of samples no reward could score.",
        **{"no spread": "reward/zero_spread_share", "invalid": "reward/invalid_share"},
    ),
    _simple("Speed", "Training images per second, everything included.", speed="images_per_second"),
)

_STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: #1f2933; background: #fff;
       max-width: 1120px; margin: 0 auto; padding: 32px 24px; }
h1 { font-size: 28px; margin: 0; display: inline-block; }
h2 { font-size: 19px; margin: 40px 0 12px; padding-bottom: 6px; border-bottom: 1px solid #e4e7eb; }
h3 { font-size: 14px; margin: 0 0 4px; }
header p { color: #52606d; margin: 4px 0 0; }
.status { margin-left: 12px; padding: 2px 10px; border-radius: 10px; font-size: 13px; background: #e3f6ec;
          color: #0b6b3a; vertical-align: 5px; }
.status.open { background: #fff3d6; color: #8a5a00; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 24px; }
.tile { background: #f5f7fa; border-radius: 8px; padding: 12px 18px; min-width: 100px; }
.tile.wide { background: #e6f1fa; }
.tile b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile.wide b { font-size: 30px; line-height: 1.1; } .tile i { color: #9aa5b1; font-style: normal; }
.tile span, .note, figcaption, footer { color: #52606d; font-size: 13px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { font-weight: 600; font-size: 13px; color: #52606d; }
th, td { text-align: right; padding: 5px 16px; border-bottom: 1px solid #e4e7eb; }
th:first-child, td:first-child { text-align: left; padding-left: 4px; }
tr.total td { font-weight: 600; border-top: 2px solid #cbd2d9; }
.up { color: #0b6b3a; } .down { color: #b42318; }
.green { background: #e3f6ec; } .amber { background: #fff3d6; } .red { background: #fde2df; }
.bar { width: 320px; } .bar span { display: block; height: 10px; background: #0072b2; border-radius: 3px; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 28px; }
.figures img { width: 100%; } figure { margin: 0; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: 18px 16px; }
.gallery div { display: flex; gap: 4px; } .gallery img { width: calc(50% - 2px); border: 1px solid #e4e7eb; }
.gallery figcaption { line-height: 1.35; margin-top: 3px; }
pre { background: #f5f7fa; padding: 14px; border-radius: 8px; overflow: auto; font-size: 13px; }
summary { cursor: pointer; color: #0072b2; } footer { margin-top: 40px; }
"""
