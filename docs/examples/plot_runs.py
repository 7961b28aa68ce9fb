"""Learning curves of several runs: a colour for each script, its mean and range over runs.

pip install matplotlib
python docs/examples/plot_runs.py runs/CartPole-v1__*
python docs/examples/plot_runs.py runs/CartPole-v1__* --tag eval/episodic_return --out eval.png

The last one is for runs with --eval-interval. A curve ends where its script's shortest run ends.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

POINTS = 200  # of a curve in the picture


def refuse(sentence: str) -> None:
    print(f"plot_runs.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def read(run: Path, tag: str) -> tuple[list[int], list[float]]:
    """Environment steps and values of a curve; exits if it has fewer than two points."""
    points = []
    if run.is_dir():
        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        points = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    if len(points) < 2:
        refuse(f"{run} has fewer than two points of {tag}.")
    return [point.step for point in points], [point.value for point in points]


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of up to width values around each one."""
    window = np.ones(width)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def main(
    runs: tyro.conf.Positional[list[Path]],
    tag: str = "charts/episodic_return",
    smooth: float = 0.05,
    out: Path = Path("curves.png"),
) -> None:
    """Plot the curves of runs, which are folders named env__script__seed__time.

    Args:
        runs: folders of runs, of one environment
        tag: which curve
        smooth: share of the steps over which a running mean goes
        out: the picture
    """
    names = [run.resolve().name.split("__") for run in runs]
    if len({env for env, *_ in names}) != 1 or min(map(len, names)) < 2:
        refuse("Name folders of one environment, called env__script__seed__time.")
    curves = {}  # of each script
    for run, (_, script, *_) in zip(runs, names):
        curves.setdefault(script, []).append(read(run, tag))
    for script, found in curves.items():
        first = max(steps[0] for steps, _ in found)
        last = min(steps[-1] for steps, _ in found)
        grid = np.linspace(first, last, POINTS)
        width = np.clip(round(smooth * POINTS), 1, POINTS)
        band = [running_mean(np.interp(grid, *curve), width) for curve in found]
        plt.plot(grid, np.mean(band, axis=0), linewidth=2, label=f"{script}, {len(found)} runs")
        plt.fill_between(grid, np.min(band, axis=0), np.max(band, axis=0), alpha=0.2)
    plt.title(names[0][0])
    plt.xlabel("environment steps")
    plt.ylabel(tag)
    plt.legend()
    plt.savefig(out, dpi=150)
    print(out)


if __name__ == "__main__":
    tyro.cli(main)
