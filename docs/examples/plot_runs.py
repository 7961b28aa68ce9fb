"""Learning curves of runs: a panel for each environment, a line for each script and its options.

    python docs/examples/plot_runs.py runs
    python docs/examples/plot_runs.py runs/CartPole-v1__grpo_rtg__* --by gamma --out curves.pdf
    python docs/examples/plot_runs.py runs --tag eval/episodic_return    # with --eval-interval

A line is the mean over runs that differ in nothing but the seed, smoothed over 5% of the steps; its
band is two standard errors of that mean to either side. What else runs of one script differ in
tells lines apart, unless --by names options. A line ends with its shortest run.
"""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

POINTS = 100  # of a line
SMOOTH = 5  # points over which a running mean goes
NO_MATTER = {"seed", "cuda", "eval_interval", "eval_episodes", "greedy", "render", "capture_video"}
NO_MATTER |= {"track", "checkpoint_interval", "resume", "evaluate"}
BANDS = {"errors": ("se", 2), "range": ("pi", 100)}
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


def differing(runs: list[dict[str, str]]) -> list[str]:
    """The options in which runs differ and which matter."""
    names = dict.fromkeys(name for options in runs for name in options if name not in NO_MATTER)
    return [name for name in names if len({options.get(name) for options in runs}) > 1]


def lines_of(runs: list[tuple[dict, np.ndarray]], by: list[str]) -> dict[str, list[tuple]]:
    """The runs of each line: those that are alike in the options by, or else in all."""
    lines = {}
    for options, curve in runs:
        peers = [other for other, _ in runs if other["exp_name"] == options["exp_name"]]
        told = [f"{name} {options[name]}" for name in by or differing(peers) if options.get(name)]
        lines.setdefault(", ".join([options["exp_name"], *told]), []).append((options, curve))
    return dict(sorted(lines.items()))


def panels_of(folders: list[Path], tag: str, by: list[str]) -> dict[str, dict[str, list[tuple]]]:
    """The lines of each environment's panel."""
    logs = {log.parent for folder in folders for log in folder.glob("**/events.out.tfevents.*")}
    runs = [(folder, *read(folder, tag)) for folder in sorted(logs)]
    if not runs:
        refuse(f"No runs in {[*map(str, folders)]}: name folders of runs first, then --by.")
    if unknown := {*by} - {name for _, options, _ in runs for name in options}:
        refuse(f"No run has an option {', '.join(unknown)}; spaces stand between several.")
    panels = {}
    for folder, options, curve in runs:
        if curve.size >= 4:
            env_id = options["env_id"].split(":")[-1]  # without its module
            panels.setdefault(env_id, []).append((options, curve))
        else:
            print(f"{folder} is left out: fewer than two points of {tag}.")
    if not panels:
        refuse(f"No run has a curve {tag} (eval/... needs --eval-interval).")
    return {env_id: lines_of(some, by) for env_id, some in panels.items()}


@dataclass
class Options:
    folders: tyro.conf.Positional[list[Path]]  # of runs, or one that holds such folders
    by: tuple[str, ...] = ()  # options that tell lines apart, as gamma (none: all that differ)
    tag: str = "charts/episodic_return"  # which curve
    band: Literal[tuple(BANDS)] = "errors"  # two standard errors; or all runs, for three or fewer
    out: Path = Path("runs", "curves.png")  # the picture, as curves.png or curves.pdf


def main(args: Options) -> None:
    """Draw the curves."""
    try:
        import pandas
        import seaborn
        from matplotlib.ticker import EngFormatter
    except ModuleNotFoundError:
        refuse("pip install seaborn, which draws the curves.")
    panels = panels_of(args.folders, args.tag, [name.replace("-", "_") for name in args.by])
    x, y, curves = "environment steps", LABELS.get(args.tag, args.tag), []
    for env_id, lines in panels.items():
        for name, runs in lines.items():
            first = max(curve[0, 0] for _, curve in runs)
            last = min(curve[0, -1] for _, curve in runs)
            seeds = sorted((options["seed"] for options, _ in runs), key=int)
            print(f"{env_id}, {name}: seeds {', '.join(seeds)}; drawn to step {last:,.0f}")
            if mixed := differing([options for options, _ in runs]):
                print(f"  this line mixes runs that differ in {', '.join(mixed)}")
            if last <= first:
                refuse(f"{env_id}, {name}: one run ends before another begins.")
            grid = np.linspace(first, last, POINTS)
            for _, curve in runs:
                values = pandas.Series(np.interp(grid, *curve))
                mean = values.rolling(SMOOTH, center=True, min_periods=1).mean()
                frame = {"panel": env_id, "runs": textwrap.fill(name), x: grid, y: mean}
                curves.append(pandas.DataFrame(frame))
    seaborn.set_theme(style="ticks", palette="colorblind", rc={"pdf.fonttype": 42})
    picture = seaborn.relplot(
        pandas.concat(curves), kind="line", x=x, y=y, hue="runs", style="runs", col="panel",
        col_wrap=min(3, len(panels)), errorbar=BANDS[args.band], height=2.6, aspect=1.25,
        facet_kws={"sharex": False, "sharey": False, "legend_out": False},
    )  # fmt: skip
    picture.set_titles("{col_name}")
    for panel in picture.axes.flat:
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    place = {"bbox_to_anchor": (0.5, 0), "ncols": 2, "title": None, "frameon": False}
    seaborn.move_legend(picture, "upper center", **place)
    try:
        picture.savefig(args.out, dpi=300)
    except (OSError, ValueError) as error:
        refuse(str(error))
    print(args.out)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
