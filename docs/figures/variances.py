"""variances.svg: what luck.py measures, beside what was best.

    pip install -r docs/benchmark/requirements.txt
    python docs/figures/variances.py

A line goes from one seed to the other: below, of a new policy, above, of one trained for 50,000
steps.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from draw import TEXT, save, use_style

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))
import report
import studies

COLOURS = {"grpo_rtg.py": "#0072B2", "ppo.py": "#D55E00", "neither": TEXT}  # which was better


def main() -> None:
    use_style()
    figure, panel = plt.subplots(figsize=(9, 5.4), layout="constrained")
    envs = sorted(studies.ENVS, key=lambda env: np.median(report.measured(env, "50k", "critic")))
    for y, env in enumerate(envs):
        point, half = report.beside_ppo(env)
        better = "grpo_rtg.py" if point > half else "ppo.py" if point < -half else "neither"
        for stage, filled in (("new", False), ("50k", True)):
            found = report.measured(env, stage, "critic")
            style = {"color": COLOURS[better], "alpha": 1 if filled else 0.5}
            height = y + (0.12 if filled else -0.12)
            panel.plot(found[[0, -1]], [height] * 2, linewidth=1.5, **style)
            face = COLOURS[better] if filled else "none"
            panel.plot(np.median(found), height, "o", markerfacecolor=face, **style)
    panel.set_xscale("log")
    panel.axvline(100, color=TEXT, linewidth=1, linestyle=":")
    panel.annotate("a critic is better ", (100, -1), ha="right", va="center", fontsize=9)
    panel.annotate(" a shared seed is better", (100, -1), ha="left", va="center", fontsize=9)
    panel.set_ylim(-1.6, len(envs) - 0.4)
    panel.set_yticks(range(len(envs)), [report.heading(env, 0)[:-3] for env in envs])
    panel.set_xticks([30, 100, 1000, 10_000], ["30", "100", "1,000", "10,000"])
    panel.set_xlabel("episodes with a critic for as good a gradient as 100 with a shared seed")
    panel.spines[["top", "right"]].set_visible(False)
    for better, colour in COLOURS.items():
        panel.plot([], [], "o", color=colour, label=f"{better} is clearly ahead")
    panel.plot([], [], "o", color=TEXT, markerfacecolor="none", alpha=0.5, label="a new policy")
    panel.plot([], [], "o", color=TEXT, label="trained for 50,000 steps")
    panel.legend(frameon=False, loc="lower right")
    save(figure, "variances")


if __name__ == "__main__":
    main()
