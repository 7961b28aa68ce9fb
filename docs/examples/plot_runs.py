"""Learning curves of runs: a panel for each environment, a line for each script and its options.

    pip install seaborn
    python docs/examples/plot_runs.py runs
    python docs/examples/plot_runs.py runs/CartPole-v1__* --by gamma --out curves.pdf
    python docs/examples/plot_runs.py runs --tag eval/episodic_return    # with --eval-interval

A line is the mean over runs that differ in nothing but the seed, its band the 95% interval of that
mean (a bootstrap over runs). What else runs of one script differ in tells lines apart, unless --by
names the options that do. A line ends where its shortest run ends.
"""

import sys
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

POINTS = 100  # of a line
NO_MATTER = (
    "seed total_timesteps cuda eval_interval eval_episodes greedy render capture_video track"
)
NO_MATTER = {*NO_MATTER.split(), "checkpoint_interval", "resume", "evaluate"}
LABELS = {"charts/episodic_return": "return of training episodes"}
LABELS |= {"eval/episodic_return": "return in evaluations", "charts/success_rate": "success rate"}


def refuse(sentence: str) -> None:
    print(f"plot_runs.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def read(folder: Path, tag: str) -> tuple[dict[str, str], np.ndarray]:
    """A run's options, and the steps and values of its curve [2, P]."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    text = events.Tensors("options/text_summary")[-1].tensor_proto.string_val[0].decode()
    options = dict(line.strip("|").split("|", 1) for line in text.splitlines()[2:])
    options.setdefault("exp_name", folder.name.split("__")[1])  # of older runs
    points = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    return options, np.array([(point.step, point.value) for point in points]).T


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of up to width values around each one."""
    window = np.ones(width)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")


def lines_of(runs: list[tuple[dict, np.ndarray]], by: list[str]) -> dict[str, list[np.ndarray]]:
    """The curves of each line: of runs that are alike in the options by, or else in all."""
    lines = {}
    for options, curve in runs:
        peers = [other for other, _ in runs if other["exp_name"] == options["exp_name"]]
        names = by or [
            name
            for name, value in options.items()
            if name not in NO_MATTER and any(other.get(name) != value for other in peers)
        ]
        told = [f"{name} {options[name]}" for name in names if options.get(name)]
        lines.setdefault(", ".join([options["exp_name"], *told]), []).append(curve)
    return lines


def main(
    folders: tyro.conf.Positional[list[Path]],
    by: list[str] = [],  # noqa: B006
    tag: str = "charts/episodic_return",
    band: Literal["interval", "range"] = "interval",
    smooth: float = 0.05,
    out: Path | None = None,
) -> None:
    """Plot the curves of runs.

    Args:
        folders: of runs, or one that holds such folders
        by: options that tell lines apart, as gamma or num_groups (default: all that differ)
        tag: which curve
        band: 95% interval of the mean, or the range of all runs
        smooth: share of the steps over which a running mean goes
        out: the picture, as curves.png or curves.pdf (default: curves.png beside the first run)
    """
    try:
        import seaborn
    except ModuleNotFoundError:
        refuse("pip install seaborn, which draws the curves.")
    logs = [log for folder in folders for log in folder.glob("**/events.out.tfevents.*")]
    if not logs:
        refuse(f"No runs in {', '.join(map(str, folders))}.")
    panels = {}  # runs of each environment
    for folder in sorted({log.parent for log in logs}):
        options, curve = read(folder, tag)
        if curve.size < 4:
            print(f"{folder} is left out: it has fewer than two points of {tag}.")
        else:
            panels.setdefault(options["env_id"], []).append((options, curve))
    rows = {"environment": [], "line": [], "environment steps": [], LABELS.get(tag, tag): []}
    for env_id, runs in panels.items():
        for line, curves in lines_of(runs, by).items():
            first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
            grid = np.linspace(first, last, POINTS)
            for curve in curves:
                values = running_mean(np.interp(grid, *curve), max(1, round(smooth * POINTS)))
                columns = ([env_id] * POINTS, [f"{line} ({len(curves)})"] * POINTS, grid, values)
                for name, column in zip(rows, columns):
                    rows[name].extend(column)
    if not panels:
        refuse(f"No run has a curve {tag}.")
    environment, line, x, y = rows
    picture = seaborn.relplot(
        rows, kind="line", x=x, y=y, hue=line, col=environment, col_wrap=min(3, len(panels)),
        errorbar=("ci", 95) if band == "interval" else ("pi", 100), seed=0, height=3.2,
        facet_kws={"sharex": False, "sharey": False},
    )  # fmt: skip
    picture.set_titles("{col_name}").legend.set_title("runs in brackets")
    out = out or logs[0].parent.parent / "curves.png"
    picture.savefig(out, dpi=150)
    print(out)


if __name__ == "__main__":
    tyro.cli(main)
