"""From which numbers the bands of `flowrl.training.bands` are taken: quantiles over the iterations of finished runs.

    python benchmarks/bands.py RUN [RUN ...]

RUN is a run's folder, or a folder of runs. Prints, per metric with a band: iterations, median, the 99 % quantile
towards the band's side, the share of iterations beyond amber and red now, and the proposal: amber twice and red four
times as far as that quantile from the value of a model that has not moved. Give it runs whose samples look right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from flowrl.training.bands import BANDS
from flowrl.training.tracking import read_metrics

UNMOVED = {"train/effective_sample_size": 1.0}  # 0 for all others


def rows_of(folders: list[Path]) -> list[dict]:
    files = [p for f in folders for pattern in ("metrics.jsonl", "*/metrics.jsonl") for p in sorted(f.glob(pattern))]
    print(f"{len(files)} runs: {', '.join(str(p.parent) for p in files)}\n")
    return [row for p in files for row in read_metrics(p)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    rows = rows_of(parser.parse_args().runs)
    print("| metric | n | median | 99 % | beyond amber | beyond red | proposal |\n" + "| --- " * 7 + "|")
    for name, band in BANDS.items():
        values = np.array([row[name] for row in rows if name in row])
        if not len(values):
            print(f"| {name} | 0 | | | | | |")
            continue
        rest = UNMOVED.get(name, 0.0)
        edge = np.quantile(np.abs(values) if band.side == "both" else values, 0.01 if band.side == "below" else 0.99)
        shares = [np.mean([band._replace(amber=limit).colour(v) != "green" for v in values]) for limit in band[:2]]
        amber, red = (rest + factor * (edge - rest) for factor in (2, 4))
        moved = (edge - rest) * (-1 if band.side == "below" else 1) > 1e-6
        proposal = f"Band({amber:.2g}, {red:.2g}, {band.side!r})" if moved else "none: it did not move"
        print(
            f"| {name} | {len(values)} | {np.median(values):.3g} | {edge:.3g} | {shares[0]:.1%} | {shares[1]:.1%} | "
            f"{proposal} |"
        )


if __name__ == "__main__":
    main()
