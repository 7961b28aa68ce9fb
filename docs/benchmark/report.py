"""The study's tables and figures in docs/, from the CSVs that run.py, boxes.py and
random_policy.py wrote.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/report.py
    python docs/benchmark/report.py --check    # whether tables are current; writes nothing

Tables replace what stands in docs/*.md between "<!-- table NAME -->" and "<!-- end -->"; figures go
to docs/figures. Following Agarwal et al. 2021 (arXiv:2108.13264): the interquartile mean (IQM),
with 95% percentile bootstrap intervals that resample seeds within each environment, and the
probability of improvement.
"""

import argparse
import re
import sys
from functools import partial
from pathlib import Path

import boxes
import defaults
import gymnasium as gym
import matplotlib.pyplot as plt
import numpy as np
import random_policy
import run
import studies
from scipy.stats import bootstrap, trim_mean

DOCS = Path(__file__).parents[1]
# Okabe and Ito's colours, told apart by colour-blind people too, in the shades that show on white
# and on black.
COLOURS = {
    "outcome": "#E69F00",
    "process": "#CC79A7",
    "return-to-go": "#56B4E9",
    "return-to-go, timestep": "#0072B2",
    "return-to-go, neighbors": "#009E73",
    "PPO": "#7f7f7f",
}
MARKERS = dict(zip(COLOURS, "sD^oPv"))
TEXT = "#808080"  # as far from white as from black
RESAMPLES = 2000
ENOUGH = 5  # seeds that a result needs to be shown
# Scores count from a uniformly random policy's return (0) to Gymnasium's reward threshold (1).
# Pendulum has none: -200.
RANDOM = random_policy.read()
THRESHOLD = {env: gym.spec(env).reward_threshold or -200 for env in studies.STEPS}

iqm = partial(trim_mean, proportiontocut=0.25)


def short(text: str) -> str:
    """The variants of grpo_rtg.py by their baselines, as its option names them."""
    return text.replace("return-to-go, ", "").replace("return-to-go", "group")


def interval(samples: list, statistic) -> tuple[float, float, float]:
    """A statistic of some samples (one for each environment) and its 95% interval, each sample
    resampled by itself.
    """
    value = float(statistic(*samples))
    if all(np.ptp(sample) == 0 for sample in samples):
        return value, value, value
    options = {"n_resamples": RESAMPLES, "method": "percentile", "rng": np.random.default_rng(0)}
    low, high = bootstrap(samples, statistic, **options).confidence_interval
    return value, float(low), float(high)


def curve_interval(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """IQM [points] of curves [seeds, points] and its 95% interval, seeds resampled."""
    index = np.random.default_rng(0).integers(len(curves), size=(RESAMPLES, len(curves)))
    resampled = iqm(curves[index], axis=1)  # [resamples, points]
    return iqm(curves, axis=0), *np.quantile(resampled, (0.025, 0.975), axis=0)


def pooled_iqm(*samples) -> float:
    """IQM of all samples together; one with fewer seeds is repeated, so that each environment
    counts alike.
    """
    size = np.lcm.reduce([len(sample) for sample in samples])
    return float(
        iqm(np.concatenate([np.repeat(sample, size // len(sample)) for sample in samples]))
    )


def mean_of_means(*samples) -> float:
    """Mean over environments of the mean over runs: no run is left out."""
    return float(np.mean([np.mean(sample) for sample in samples]))


def improvement(*samples) -> float:
    """Probability that a run of the first half's environments is better than one of the second
    half's, ties half.
    """
    ours, theirs = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    chances = [((x[:, None] > y) + 0.5 * (x[:, None] == y)).mean() for x, y in zip(ours, theirs)]
    return float(np.mean(chances))


def load(study: str) -> dict[str, dict[str, list]]:
    """Rows of each run: {environment: {variant: [rows, ...]}}, in the order of studies.py, of what
    has been run.
    """
    runs, table = run.read(run.RESULTS / f"{study}.csv"), {}
    for job in (run.Job(*job) for job in studies.STUDIES[study]()):
        if job.key in runs and runs[job.key][-1]["command"] == job.command:
            table.setdefault(job.env, {}).setdefault(job.variant, []).append(runs[job.key])
    if study == "main":  # shown once all variants have seeds enough for an interval
        counts = {
            env: [len(variants.get(name, [])) for name in studies.VARIANTS]
            for env, variants in table.items()
        }
        table = {env: variants for env, variants in table.items() if min(counts[env]) >= ENOUGH}
    return table


def final(runs: list, column: str) -> np.ndarray:
    """What a column of the last row says, for each run."""
    return np.array([float(rows[-1][column]) for rows in runs])


def score(env: str, values: np.ndarray) -> np.ndarray:
    return (values - RANDOM[env]) / (THRESHOLD[env] - RANDOM[env])


def cell(env: str, values: np.ndarray) -> str:
    digits = 2 if env == "FrozenLake-v1" else 1 if abs(THRESHOLD[env]) < 1000 else 0
    return "{:z.{n}f} [{:z.{n}f}, {:z.{n}f}]".format(*interval([values], iqm), n=digits)


def setting_of(env: str, variant: str, setting: str, command: str) -> str:
    """A setting's name; for "another discount" its shape, and what is other about it."""
    if setting != "another discount":
        return setting
    flag, symbol = ("--gae-lambda", "λ") if variant == "PPO" else ("--gamma", "γ")
    shape = studies.BEST[env][list(studies.VARIANTS).index(variant)]
    value = re.findall(flag + r" (\S+)", command)[-1]
    return f"{shape}, {symbol} {value}"


def ranked(table) -> dict[tuple[str, str], list]:
    """The settings tried for each environment and variant, best first: (runs, mean return, whether
    it was taken, setting).
    """
    tried = {}
    for env, variants in table.items():
        for name, runs in variants.items():
            variant, setting = name.split(": ", 1)
            value, command = (
                float(np.mean([final(runs, "greedy"), final(runs, "sampled")])),
                runs[0][-1]["command"],
            )
            taken = f" {studies.tuned(env, variant)} --seed" in command
            found = len(runs), value, taken, setting_of(env, variant, setting, command)
            tried.setdefault((env, variant), []).append(found)
    # what got more seeds won a round before; of equals the one that was taken
    return {
        key: sorted(settings, key=lambda each: each[:3], reverse=True)
        for key, settings in tried.items()
    }


def tuning_table(table) -> str:
    lines = [
        "| environment | variant | best setting | its mean | the others, best first |",
        "|-|-|-|-|-|",
    ]
    for (env, variant), [(most, best, _, chosen), *others] in ranked(table).items():
        fewest = min([most, *(runs for runs, *_ in others)])
        rest = ", ".join(
            f"{value:.4g}{'*' * (runs > fewest)} ({setting})" for runs, value, _, setting in others
        )
        lines.append(f"| {env} | {variant} | {chosen} | {best:.4g} | {rest} |")
    return "\n".join(lines)


def main_table(table) -> str:
    head = "| environment, steps | variant | greedy | sampled | training, last 100 | seeds |"
    lines = [head, "|-|-|-|-|-|-|"]
    for env, variants in table.items():
        for variant, runs in variants.items():
            cells = [
                cell(env, final(runs, column)) for column in ("greedy", "sampled", "train_return")
            ]
            steps = f"{studies.STEPS[env]:,}"
            lines.append(f"| {env}, {steps} | {variant} | {' | '.join(cells)} | {len(runs)} |")
    return "\n".join(lines)


def summary_rows(table) -> dict[str, dict[str, tuple]]:
    """For each variant: IQM and mean of the scores of all environments, and the probability of
    improvement over PPO.
    """
    rows = {}
    for variant in studies.VARIANTS if table else ():
        scores = {
            name: [score(env, final(table[env][name], "greedy")) for env in table]
            for name in {variant, "PPO"}
        }
        rows[variant] = {"score": interval(scores[variant], pooled_iqm)}
        rows[variant]["mean"] = interval(scores[variant], mean_of_means)
        if variant != "PPO":
            rows[variant]["improvement"] = interval(scores[variant] + scores["PPO"], improvement)
    return rows


def summary_table(table) -> str:
    heads = "IQM of scores, greedy", "mean of scores", "probability of improvement over PPO"
    lines = [f"| variant | {' | '.join(heads)} |", "|-|-|-|-|"]
    for variant, row in summary_rows(table).items():
        cells = [
            "{:.2f} [{:.2f}, {:.2f}]".format(*row[key]) if key in row else "–"
            for key in ("score", "mean", "improvement")
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def improvement_table(table) -> str:
    """Probability of improvement over PPO on each environment by itself, by greedy and by training
    return.
    """
    others = [name for name in studies.VARIANTS if name != "PPO"]
    heads = [f"{short(name)}, {how}" for name in others for how in ("greedy", "training")]
    lines = [f"| environment | {' | '.join(heads)} |"]
    lines.append("|-|" + "-|-|" * len(others))
    for env, runs in table.items():
        pairs = [
            [final(runs[name], by) for name in (each, "PPO")]
            for each in others
            for by in ("greedy", "train_return")
        ]
        lines.append(f"| {env} | {' | '.join(f'{improvement(*pair):.2f}' for pair in pairs)} |")
    return "\n".join(lines)


def overview_table(table) -> str:
    """Greedy returns alone, a column for each variant: for README."""
    names = list(studies.VARIANTS)
    lines = [f"| environment, steps | {' | '.join(names)} |", "|-|" + "-|" * len(names)]
    for env, runs in table.items():
        cells = [cell(env, final(runs[name], "greedy")).partition(" [")[0] for name in names]
        lines.append(f"| {env}, {studies.STEPS[env]:,} | {' | '.join(cells)} |")
    overall = [f"{row['score'][0]:.2f}" for row in summary_rows(table).values()]
    return "\n".join([*lines, f"| score over all | {' | '.join(overall)} |"])


def command_table(_) -> str:
    lines = ["| environment | variant | command |", "|-|-|-|"]
    jobs = {
        (job.env, job.variant): job for job in (run.Job(*job) for job in studies.STUDIES["main"]())
    }
    for (env, variant), job in jobs.items():
        if studies.is_over(job.command):
            continue
        command = job.command.removesuffix(f" --seed {job.seed}")
        lines.append(f"| {env} | {variant} | `python {command}` |")
    return "\n".join(lines)


def ablation_runs(table) -> dict[str, dict[str, dict[str, list]]]:
    """Runs of the ablations that have seeds enough: {environment: {setting: {variant: runs}}}."""
    runs = {}
    for env, names in table.items():
        for setting, change in studies.changes(env).items():
            for variant in studies.VARIANTS:
                same = studies.changes_nothing(env, variant, change)
                found = names.get(f"{variant}: {'tuned' if same else setting}", [])
                if len(found) >= ENOUGH:
                    runs.setdefault(env, {}).setdefault(setting, {})[variant] = found
    return runs


def ablation_table(table) -> str:
    """A row for each setting: greedy and training returns of each variant."""
    names = ["outcome", "return-to-go", "return-to-go, timestep"]
    heads = [f"{short(name)}, {how}" for name in names for how in ("greedy", "training")]
    lines = [
        f"| environment, steps, seeds | setting | {' | '.join(heads)} |",
        "|-|-|" + "-|-|" * len(names),
    ]
    for env, settings in ablation_runs(table).items():
        for setting, runs in settings.items():
            cells = [
                cell(env, final(runs[name], column)) if name in runs else "–"
                for name in names
                for column in ("greedy", "train_return")
            ]
            fewest, most = min(map(len, runs.values())), max(map(len, runs.values()))
            seeds = fewest if fewest == most else f"{fewest} to {most}"
            lines.append(
                f"| {env}, {studies.ABLATION_STEPS[env]:,}, {seeds} | {setting} | "
                + f"{' | '.join(cells)} |"
            )
    return "\n".join(lines)


def neighbor_table(table) -> str:
    """A row for each choice of neighbours: greedy and training returns."""
    lines = ["| environment | setting | greedy | training | seeds | seconds |", "|-|-|-|-|-|-|"]
    for env, settings in table.items():
        for setting, runs in settings.items():
            cells = [cell(env, final(runs, column)) for column in ("greedy", "train_return")]
            seconds = f"{np.median(final(runs, 'seconds')):.0f}"
            lines.append(f"| {env} | {setting} | {' | '.join(cells)} | {len(runs)} | {seconds} |")
    return "\n".join(lines)


def norm_obs_table(table) -> str:
    """timestep with --norm-obs and without: the one is of this study, the other of main's."""
    heads = [f"{how}, {name}" for how in ("greedy", "training") for name in ("without", "with")]
    lines = [f"| environment | {' | '.join(heads)} | seeds |", "|-|-|-|-|-|-|"]
    others = load("main")
    for env, half in table.items():
        [(name, runs)] = half.items()
        pair = [runs, others[env]["return-to-go, timestep"][: len(runs)]]
        lines.append(f"| {env} | {paired(env, pair if name == 'without' else pair[::-1])}")
    return "\n".join(lines)


def first_std_table(table) -> str:
    """With a first standard deviation of 1, as in main, and with this study's."""
    heads = [f"{how}, from {std}" for how in ("greedy", "training") for std in ("1", "e⁻²")]
    lines = [f"| environment | variant | {' | '.join(heads)} | seeds |", "|-|-|-|-|-|-|-|"]
    others = load("main")
    for env, variants in table.items():
        for variant, runs in variants.items():
            pair = [others[env][variant][: len(runs)], runs]
            lines.append(f"| {env} | {variant} | {paired(env, pair)}")
    return "\n".join(lines)


def paired(env: str, pair) -> str:
    """The cells of two lots of runs with the same seeds: greedy returns of both, then training."""
    cells = [cell(env, final(x, by)) for by in ("greedy", "train_return") for x in pair]
    return f"{' | '.join(cells)} | {len(pair[0])} |"


def style(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, color=TEXT, linewidth=0.5)
    axes.set_axisbelow(True)


def spread(positions: np.ndarray, distance: float, top: float) -> np.ndarray:
    """Positions moved so that neighbours are a distance apart and none is above the top: labels
    that do not overlap.
    """
    order, moved = np.argsort(positions), np.sort(positions).astype(float)
    for _ in range(200):
        for i in range(len(moved) - 1):
            overlap = distance - (moved[i + 1] - moved[i])
            if overlap > 1e-9:
                moved[i : i + 2] += (-overlap / 2, overlap / 2)
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], top - distance * (len(moved) - 1 - i))
    result = np.empty_like(moved)
    result[order] = moved
    return result


def draw_curves(table, column: str, name: str, title: str) -> None:
    """A panel for each environment: IQM over seeds against steps, the interval as a band, labels at
    the lines' ends.
    """
    figure, panels = plt.subplots(
        -(-len(table) // 2), 2, figsize=(11, 2.9 * -(-len(table) // 2)), squeeze=False
    )
    for axes in panels.flat[len(table) :]:
        axes.remove()
    for axes, (env, variants) in zip(panels.flat, table.items()):
        ends = {}
        for variant, runs in variants.items():
            seen = np.array([[float(row[column] or "nan") for row in rows[:-1]] for rows in runs])
            steps = np.array([float(row["step"]) for row in runs[0][:-1]])
            shown = ~np.isnan(seen).any(0)
            middle, low, high = curve_interval(seen[:, shown])
            axes.plot(steps[shown], middle, color=COLOURS[variant], linewidth=1.8)
            axes.fill_between(
                steps[shown], low, high, color=COLOURS[variant], alpha=0.2, linewidth=0
            )
            ends[variant] = middle[-1]
        if env in THRESHOLD:
            axes.axhline(THRESHOLD[env], color=TEXT, linewidth=0.8, linestyle=":")
        bottom, top = axes.get_ylim()
        if env in THRESHOLD:  # what is far below a random policy would press the rest together
            bottom = max(bottom, RANDOM[env] - 0.5 * (THRESHOLD[env] - RANDOM[env]))
            axes.set_ylim(bottom, top)
        places = spread(np.array(list(ends.values())), (top - bottom) * 0.11, top)
        for (variant, end), place in zip(ends.items(), places):
            axes.annotate(
                short(variant),
                (studies.STEPS[env], end),
                (1.03, (place - bottom) / (top - bottom)),
                textcoords="axes fraction",
                color=COLOURS[variant],
                va="center",
                fontsize=9,
                arrowprops={
                    "arrowstyle": "-",
                    "color": COLOURS[variant],
                    "linewidth": 0.6,
                    "shrinkB": 0,
                    "relpos": (0, 0.5),
                },
            )
        counts = sorted({len(runs) for runs in variants.values()})
        seeds = " to ".join(map(str, (counts[0], counts[-1])[: len(counts)]))
        axes.set_title(f"{env}, {seeds} seeds", loc="left", fontsize=10)
        axes.xaxis.set_major_formatter(
            lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k"
        )
        style(axes)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel(title, fontsize=10)
    figure.tight_layout(w_pad=1.5)
    save(figure, name)


def draw_summary(table) -> None:
    """Scores of each variant on each environment and on all; beside them the probability of
    improvement over PPO.
    """
    rows, summary = list(table), summary_rows(table)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 0.75 * len(rows) + 2), width_ratios=(3, 1.4)
    )
    offsets = dict(zip(COLOURS, np.linspace(-0.3, 0.3, len(COLOURS))))
    for y, env in enumerate([*rows, "all"]):
        for variant, offset in offsets.items():
            if env == "all":
                point = summary[variant]["score"]
            else:
                point = interval([score(env, final(table[env][variant], "greedy"))], iqm)
            left.plot(
                point[1:],
                [y + offset] * 2,
                color=COLOURS[variant],
                linewidth=2,
                solid_capstyle="round",
            )
            left.plot(point[0], y + offset, MARKERS[variant], color=COLOURS[variant], markersize=6)
    left.set_yticks(range(len(rows) + 1), [*rows, "all (IQM)"])
    left.axhline(len(rows) - 0.5, color=TEXT, linewidth=0.8)
    left.axvline(1, color=TEXT, linewidth=0.8, linestyle=":")
    left.axvline(0, color=TEXT, linewidth=0.8, linestyle=":")
    left.invert_yaxis()
    left.set_xlabel("score of greedy evaluation: 0 = random policy, 1 = solved")
    for y, variant in enumerate(offsets):
        point = summary.get(variant, {}).get("improvement")
        if point:
            right.plot(
                point[1:], [y, y], color=COLOURS[variant], linewidth=2, solid_capstyle="round"
            )
            right.plot(point[0], y, MARKERS[variant], color=COLOURS[variant], markersize=7)
            right.annotate(short(variant), (0.02, y - 0.28), color=COLOURS[variant], fontsize=10)
    right.axvline(0.5, color=TEXT, linewidth=0.8, linestyle=":")
    right.set(
        xlim=(0, 1),
        ylim=(len(offsets) - 1.5, -0.6),
        yticks=[],
        xlabel="probability of being better than PPO",
    )
    for axes in (left, right):
        style(axes)
    handles = [left.plot([], [], MARKERS[v], color=COLOURS[v], label=short(v))[0] for v in offsets]
    left.legend(
        handles=handles,
        ncols=3,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1),
        frameon=False,
        labelcolor=TEXT,
        columnspacing=1.2,
        handletextpad=0.2,
    )
    figure.tight_layout()
    save(figure, "summary")


def draw_ablations(table) -> None:
    """Training return with each single change to the tuned flags, a panel for each environment with
    all the changes.
    """
    settings = list(studies.SEEDED | studies.OWN_LUCK | studies.ABLATIONS)
    table = {env: runs for env, runs in ablation_runs(table).items() if settings[-1] in runs}
    if not table:
        return
    figure, panels = plt.subplots(
        1, len(table), figsize=(11, 0.34 * len(settings) + 1), sharey=True, squeeze=False
    )
    variants = [
        variant for variant in COLOURS if any(variant in runs["tuned"] for runs in table.values())
    ]
    offsets = dict(zip(variants, np.linspace(-0.22, 0.22, len(variants))))
    for axes, (env, by_setting) in zip(panels.flat, table.items()):
        points = {
            (setting, variant): interval([final(runs, "train_return")], iqm)
            for setting, by_variant in by_setting.items()
            for variant, runs in by_variant.items()
        }
        lower, upper = np.quantile([value for value, *_ in points.values()], (0.25, 0.75))
        # what is below would press the rest together: a number at the edge
        lost = lower - 4 * (upper - lower)
        for (setting, variant), (value, low, high) in points.items():
            place, colour = settings.index(setting) + offsets[variant], COLOURS[variant]
            if setting == "tuned":
                axes.axvline(value, color=colour, linewidth=0.8, linestyle=":")
            if value < lost:
                at = axes.get_yaxis_transform()
                axes.text(
                    0.01,
                    place,
                    f"◄ {value:.0f}",
                    color=colour,
                    transform=at,
                    va="center",
                    fontsize=9,
                )
                continue
            axes.plot(
                [low, high], [place, place], color=colour, linewidth=2, solid_capstyle="round"
            )
            axes.plot(value, place, MARKERS[variant], color=colour, markersize=5)
        for y in range(1, len(settings), 2):
            axes.axhspan(y - 0.5, y + 0.5, color=TEXT, alpha=0.08, linewidth=0)
        axes.set_title(f"{env}, {studies.ABLATION_STEPS[env]:,} steps", loc="left", fontsize=10)
        style(axes)
        axes.grid(visible=False, axis="y")
    panels.flat[0].set(yticks=range(len(settings)), ylim=(len(settings) - 0.5, -0.5))
    panels.flat[0].set_yticklabels(settings)
    figure.supxlabel("mean return of the last 100 training episodes", fontsize=10)
    handles = [
        plt.Line2D([], [], color=COLOURS[v], marker=MARKERS[v], linestyle="", label=short(v))
        for v in variants
    ]
    figure.legend(
        handles=handles, ncols=len(handles), loc="upper right", frameon=False, labelcolor=TEXT
    )
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    save(figure, "ablations")


def save(figure, name: str) -> None:
    (DOCS / "figures").mkdir(exist_ok=True)
    path = DOCS / "figures" / f"{name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    print(path.relative_to(DOCS.parent))


def use_style() -> None:
    """Text and axes in a grey that shows on white and on black, and files that are the same each
    time.
    """
    coloured = "text.color axes.labelcolor axes.edgecolor axes.titlecolor xtick.color ytick.color"
    plt.rcParams |= dict.fromkeys(coloured.split(), TEXT) | {
        "svg.hashsalt": "grpo",
        "font.size": 10,
    }


TABLES = {  # name: how it is made, and of which study
    "tuning": (tuning_table, "tuning"),
    "main": (main_table, "main"),
    "summary": (summary_table, "main"),
    "improvement": (improvement_table, "main"),
    "commands": (command_table, "main"),
    "overview": (overview_table, "main"),
    "ablations": (ablation_table, "ablations"),
    "boxes": (lambda _: boxes.table(boxes.read()), "main"),
    "box": (lambda _: boxes.overview(boxes.read()), "main"),
    "defaults": (lambda _: defaults.table(boxes.read(defaults.CSV)), "main"),
    "choices": (neighbor_table, "choices"),
    "neighbors": (neighbor_table, "neighbors"),
    "norm_obs": (norm_obs_table, "norm_obs"),
    "first_std": (first_std_table, "first_std"),
}


def with_tables(page: str) -> str:
    """A page whose tables are those of the CSVs."""

    def fill(found: re.Match) -> str:
        make, study = TABLES[found["name"]]
        return f"{found['start']}\n{short(make(load(study)))}\n<!-- end -->"

    table = r"(?P<start><!-- table (?P<name>\w+) -->)\n.*?<!-- end -->"
    return re.sub(table, fill, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    paths = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    pages = {path: with_tables(path.read_text()) for path in paths}
    old = [str(path) for path, page in pages.items() if page != path.read_text()]
    if check:
        sys.exit(f"Not current: {', '.join(old)}" if old else None)
    for path, page in pages.items():
        path.write_text(page)
    use_style()
    if table := load("main"):
        draw_curves(table, "train_return", "training", "mean return of training episodes")
        draw_curves(table, "eval_return", "greedy", "mean return of greedy evaluations")
        draw_summary(table)
    if table := load("ablations"):
        draw_ablations(table)


if __name__ == "__main__":
    main()
