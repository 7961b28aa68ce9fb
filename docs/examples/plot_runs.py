"""Learning curves of several runs: a colour for each script, its mean and range over seeds.

pip install matplotlib
python docs/examples/plot_runs.py runs/CartPole-v1__*
python docs/examples/plot_runs.py runs/CartPole-v1__* --tag eval/episodic_return --out eval.png

The last one is for runs with --eval-interval.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read(run: Path, tag: str) -> tuple[list[int], list[float]]:
    """Environment steps and values of a curve; empty if the run has no such curve."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    points = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    return [point.step for point in points], [point.value for point in points]


def main(
    runs: tyro.conf.Positional[list[Path]],
    tag: str = "charts/episodic_return",
    smooth: int = 5,
    out: Path = Path("curves.png"),
) -> None:
    """Plot the curves of runs, which are folders named env__script__seed__time.

    Args:
        runs: folders of runs, of one environment
        tag: which curve
        smooth: iterations in a running mean
        out: the picture
    """
    curves = {}  # of each script
    for run in runs:
        steps, values = read(run, tag)
        if len(steps) < smooth:
            sys.exit(f"plot_runs.py: {run} has fewer than {smooth} points of {tag}: see --smooth.")
        means = np.convolve(values, np.ones(smooth) / smooth, mode="valid")
        script = run.resolve().name.split("__")[1]
        curves.setdefault(script, []).append((steps[smooth - 1 :], means))
    for script, found in curves.items():
        shortest = min(steps[-1] for steps, _ in found)
        grid = np.linspace(0, shortest, 200)
        band = [np.interp(grid, steps, means, left=np.nan) for steps, means in found]
        [line] = plt.plot(grid, np.mean(band, axis=0), label=f"{script}, {len(found)} seeds")
        plt.fill_between(grid, np.min(band, axis=0), np.max(band, axis=0), alpha=0.2)
        line.set_linewidth(2)
    plt.xlabel("environment steps")
    plt.ylabel(tag)
    plt.legend()
    plt.savefig(out, dpi=150)
    print(out)


if __name__ == "__main__":
    tyro.cli(main)
