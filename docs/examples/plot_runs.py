"""Learning curves of runs: a panel for each environment, a line for each script and its options.

    pip install seaborn
    python docs/examples/plot_runs.py runs
    python docs/examples/plot_runs.py runs/CartPole-v1__grpo_rtg__* --by gamma --out curves.pdf
    python docs/examples/plot_runs.py runs --tag eval/episodic_return    # with --eval-interval

A line is the mean over runs that differ in nothing but the seed, its band the 95% interval of that
mean (a bootstrap over runs). What else runs of one script differ in tells lines apart, unless --by
names the options that do. A line ends where its shortest run ends.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

POINTS = 100  # of a line
SMOOTH = 5  # points over which a running mean goes
NO_MATTER = {"seed", "cuda", "eval_interval", "eval_episodes", "greedy", "render", "capture_video"}
NO_MATTER |= {"track", "checkpoint_interval", "resume", "evaluate"}
LABELS = {"charts/episodic_return": "return in training", "eval/episodic_return": "return"}


def refuse(sentence: str) -> None:
    print(f"plot_runs.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def read(folder: Path, tag: str) -> tuple[dict[str, str], np.ndarray]:
    """A run's options, and the steps and values of its curve [2, P]."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    text = events.Tensors("options/text_summary")[-1].tensor_proto.string_val[0].decode()
    options = dict(line.strip("|").split("|", 1) for line in text.splitlines()[2:])
    points = events.Scalars(tag) if tag in events.Tags()["scalars"] else []
    return options, np.array([(point.step, point.value) for point in points]).T


def lines_of(runs: list[tuple[dict, np.ndarray]], by: list[str]) -> dict[str, list[tuple]]:
    """The runs of each line: those that are alike in the options by, or else in all."""
    lines = {}
    for options, curve in runs:
        peers = [other for other, _ in runs if other["exp_name"] == options["exp_name"]]
        differing = {name for name in options if len({x.get(name) for x in peers}) > 1}
        names = by or [name for name in options if name in differing - NO_MATTER]
        told = [f"{name} {options[name]}" for name in names if options.get(name)]
        lines.setdefault(", ".join([options["exp_name"], *told]), []).append((options, curve))
    return dict(sorted(lines.items()))


def panels_of(folders: list[Path], tag: str, by: list[str]) -> dict[str, dict[str, list[tuple]]]:
    """The lines of each environment's panel."""
    logs = {log.parent for folder in folders for log in folder.glob("**/events.out.tfevents.*")}
    runs = [(folder, *read(folder, tag)) for folder in sorted(logs)]
    if not runs:
        refuse(f"No runs in {', '.join(map(str, folders))}: name a folder of a run, or of many.")
    if unknown := {*by} - {name for _, options, _ in runs for name in options}:
        refuse(f"No run has an option {', '.join(unknown)}.")
    panels = {}
    for folder, options, curve in runs:
        if curve.size >= 4:
            panels.setdefault(options["env_id"], []).append((options, curve))
        else:
            print(f"{folder} is left out: fewer than two points of {tag}.")
    if not panels:
        refuse(f"No run has a curve {tag} (eval/... needs --eval-interval).")
    return {env_id: lines_of(some, by) for env_id, some in panels.items()}


def main(
    folders: tyro.conf.Positional[list[Path]],
    by: list[str] = [],  # noqa: B006
    tag: str = "charts/episodic_return",
    band: Literal["interval", "range"] = "interval",
    out: Path = Path("runs", "curves.png"),
) -> None:
    """Plot the curves of runs.

    Args:
        folders: of runs, or one that holds such folders
        by: options that tell lines apart, as gamma or num-groups (default: all that differ)
        tag: which curve
        band: 95% interval of the mean, or the range of all runs (better for three or fewer)
        out: the picture, as curves.png or curves.pdf
    """
    try:
        import pandas
        import seaborn
        from matplotlib.ticker import EngFormatter
    except ModuleNotFoundError:
        refuse("pip install seaborn, which draws the curves.")
    panels = panels_of(folders, tag, [name.replace("-", "_") for name in by])
    x, y, curves = "environment steps", LABELS.get(tag, tag), []
    for env_id, lines in panels.items():
        for name, runs in lines.items():
            last = min(curve[0, -1] for _, curve in runs)
            seeds = Counter(options["seed"] for options, _ in runs)
            told = (f"{seed} ({n} times)" if n > 1 else seed for seed, n in seeds.items())
            print(f"{env_id}, {name}: seeds {', '.join(told)}; drawn to step {last:,.0f}")
            grid = np.linspace(max(curve[0, 0] for _, curve in runs), last, POINTS)
            for _, curve in runs:
                values = pandas.Series(np.interp(grid, *curve))
                mean = values.rolling(SMOOTH, center=True, min_periods=1).mean()
                frame = {"environment": env_id, "runs": name, x: grid, y: mean}
                curves.append(pandas.DataFrame(frame))
    print(f"Lines are means over runs, and running means over {SMOOTH / POINTS:.0%} of the steps.")
    seaborn.set_theme(style="ticks", palette="colorblind", rc={"pdf.fonttype": 42})
    picture = seaborn.relplot(
        pandas.concat(curves), kind="line", x=x, y=y, hue="runs", style="runs", col="environment",
        col_wrap=min(3, len(panels)), errorbar=("ci", 95) if band == "interval" else ("pi", 100),
        seed=0, height=2.6, aspect=1.25, facet_kws={"sharex": False, "sharey": False},
    )  # fmt: skip
    picture.set_titles("{col_name}")
    for panel in picture.axes.flat:
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    place = {"bbox_to_anchor": (0.5, 0), "ncols": 2, "title": None, "frameon": False}
    seaborn.move_legend(picture, "upper center", **place)
    try:
        picture.savefig(out, dpi=300)
    except (OSError, ValueError) as error:
        refuse(str(error))
    print(out)


if __name__ == "__main__":
    tyro.cli(main)
