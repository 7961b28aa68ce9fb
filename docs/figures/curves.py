"""curves.svg: training returns of every variant on every environment of the study.

    pip install -r docs/benchmark/requirements.txt
    python docs/figures/curves.py

A line is the mean over seeds in each 25th of the budget; its band is its 95% interval.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from draw import save, use_style

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))
import report
import studies

COLOURS = {
    "outcome": "#E69F00",
    "process": "#999999",
    "group": "#56B4E9",
    "timestep": "#0072B2",
    "regression": "#009E73",
    "critic": "#CC79A7",
    "bins": "#8FCB3B",
    "PPO": "#D55E00",
}


def main() -> None:
    use_style()
    ladder = report.load("ladder", 5)
    rows = (len(ladder) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(9, 0.6 + 2.6 * rows), layout="constrained")
    for panel, (env, found) in zip(axes.flat, ladder.items()):
        steps = np.linspace(0, studies.STEPS[env], 26)[1:] / 1000
        for variant in filter(found.get, COLOURS):
            colour = COLOURS[variant]
            curves = np.array([row["curve"].split() for row in found[variant]], dtype=float)
            point, half = np.transpose([report.mean(curve) for curve in curves.T])
            panel.plot(steps, point, color=colour, linewidth=1.6, label=variant)
            bounds = point - half, point + half
            panel.fill_between(steps, *bounds, color=colour, alpha=0.15, linewidth=0)
        panel.axhline(report.THRESHOLD[env], color="#808080", linewidth=0.8, linestyle=":")
        panel.set_title(env, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes.flat[len(ladder) :]:
        panel.set_axis_off()
    for panel in axes[-1]:
        panel.set_xlabel("environment steps, thousands")
    figure.supylabel("return of training episodes", fontsize=10)
    labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=4, frameon=False)
    save(figure, "curves")


if __name__ == "__main__":
    main()
