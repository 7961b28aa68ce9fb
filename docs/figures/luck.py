"""luck.svg: returns against doses of luck, and learning curves where luck decides.

    pip install -r docs/benchmark/requirements.txt
    python docs/figures/luck.py

Means over seeds, and their 95% intervals.
"""

import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from draw import save, use_style

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))
import report
import studies

SMALL = "PPO, rewards / 100"
COLOURS = {
    SMALL: "#D55E00",
    "seeded": "#0072B2",
    "timestep": "#0072B2",
    "PPO": "#D55E00",
    "not seeded": "#CC79A7",
}
RULE = -167.6  # what the better of dispatch.py's rules of thumb earns


def band(panel, x, samples: list[np.ndarray], **style) -> None:
    """The mean of each sample, and its interval."""
    point, half = np.transpose([report.mean(sample) for sample in samples])
    panel.plot(x, point, linewidth=1.8, **style)
    panel.fill_between(x, point - half, point + half, color=style["color"], alpha=0.15, linewidth=0)


def main() -> None:
    use_style()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for panel, env_name in ((left, "Pendulum"), (middle, "Acrobot")):
        doses = {env: rows for env, rows in report.load("dose", 3).items() if env_name in env}
        sigmas = [re.search(r"\d+", env)[0] for env in doses]
        for name, script in studies.DOSE.items():
            samples = [report.values(rows[name]) for rows in doses.values()]
            style = {"color": COLOURS[name], "label": script, "marker": "o", "markersize": 4}
            band(panel, sigmas, samples, **style)
        panel.set_title(f"{env_name}, rewards with noise", loc="left", fontsize=10)
        panel.set_xlabel("σ of the noise of a step")
    left.set_ylabel("return without noise")

    found = report.load("luck", 3)[studies.DISPATCH]
    steps = np.linspace(0, 200_000, 26)[1:] / 1000
    for name, scale in (("timestep", 1), ("not seeded", 1), (SMALL, 100)):
        curves = scale * np.array([row["curve"].split() for row in found[name]], dtype=float)
        band(right, steps, [*curves.T], color=COLOURS[name])
    right.axhline(RULE, color="#808080", linewidth=1, linestyle=":")
    right.annotate("better of two rules", (0, RULE), va="bottom", fontsize=9)
    right.set_ylim(-800, -100)
    right.set_title("Dispatching jobs (ppo.py: rewards / 100)", loc="left", fontsize=10)
    right.set_xlabel("environment steps, thousands")
    right.set_ylabel("return of training episodes")
    for panel in (left, middle, right):
        panel.spines[["top", "right"]].set_visible(False)
    labels = left.get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=3, frameon=False)
    save(figure, "luck")


if __name__ == "__main__":
    main()
