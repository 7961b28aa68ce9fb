"""The study's tables and figures in docs/, from the CSVs that run.py wrote.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/report.py
    python docs/benchmark/report.py --check    # whether tables are current; writes nothing

Tables replace what stands in README.md and docs/*.md between "<!-- table NAME -->" and
"<!-- end -->"; figures go to docs/figures. Following Agarwal et al. 2021 (arXiv:2108.13264): the
interquartile mean (IQM), with 95% percentile bootstrap intervals that resample seeds within each
environment, and the probability of improvement.
"""

import csv
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import boxes
import gymnasium as gym
import matplotlib.pyplot as plt
import numpy as np
import random_policy
import run
import studies
import tyro
from scipy.stats import bootstrap, trim_mean

DOCS = Path(__file__).parents[1]
TEXT = "#808080"  # as far from white as from black
# Okabe and Ito's colours, told apart by colour-blind people too, in the shades that show on white
# and on black: one for each variant, in all figures.
HUES = "#E69F00 #56B4E9 #0072B2 #b58900 #CC79A7 #D55E00 #009E73 #7f7f7f"
COLOURS = dict(zip(studies.RUNGS, HUES.split(), strict=True))
NAMES = {  # of the rungs, and of what stands beside them, in tables and figures
    "outcome": "outcome",
    "group": "`group`",
    "timestep": "`timestep`",
    "state": "+ state",
    "λ": "+ λ < 1",
    "memory": "+ memory: `regression`",
    "critic network": "critic network",
    "PPO": "`ppo.py`",
    "process": "beside: process",
    "GPG": "beside: GPG's bins",
}
RESAMPLES = 2000
TIE = 0.01  # scores that differ by less are as good as equal: all who stand still do it alike
ENOUGH = 5  # seeds that a result needs to be shown
# Scores count from a uniformly random policy's return (0) to Gymnasium's reward threshold (1).
# Pendulum has none: -200.
with open(random_policy.PATH, newline="") as file:
    RANDOM = {row["env"]: float(row["mean_return"]) for row in csv.DictReader(file)}
THRESHOLD = {env: gym.spec(env).reward_threshold or -200 for env in studies.STEPS}

iqm = partial(trim_mean, proportiontocut=0.25)


def interval(samples: list, statistic) -> tuple[float, float, float]:
    """A statistic of some samples (one for each environment) and its 95% interval.

    Each sample is resampled by itself.
    """
    value = float(statistic(*samples))
    if all(np.ptp(sample) == 0 for sample in samples):
        return value, value, value
    options = {"n_resamples": RESAMPLES, "method": "percentile", "rng": np.random.default_rng(0)}
    low, high = bootstrap(samples, statistic, **options).confidence_interval
    return value, float(low), float(high)


def pooled_iqm(*samples) -> float:
    """IQM of all samples together; each environment counts alike, however many its seeds."""
    size = np.lcm.reduce([len(sample) for sample in samples])
    repeated = [np.repeat(sample, size // len(sample)) for sample in samples]
    return float(iqm(np.concatenate(repeated)))


def mean(*samples) -> float:
    """Mean over environments of the means of their samples."""
    return float(np.mean([np.mean(sample) for sample in samples]))


def improvement(*samples) -> float:
    """Probability that a run of the first half's environments beats one of the second half's.

    A tie counts half.
    """
    half = len(samples) // 2
    chances = []
    for ours, theirs in zip(samples[:half], samples[half:]):
        ahead = ours[:, None] - theirs
        chances.append((ahead > TIE).mean() + 0.5 * (np.abs(ahead) <= TIE).mean())
    return float(np.mean(chances))


def gain(*samples) -> float:
    """By how much the IQM of the first half's environments exceeds that of the second half's."""
    half = len(samples) // 2
    return pooled_iqm(*samples[:half]) - pooled_iqm(*samples[half:])


def load(study: str) -> dict[str, dict[str, list[dict]]]:
    """Rows of a study: {environment: {variant: [row, ...]}}, of today's commands alone."""
    rows = run.read(run.RESULTS / f"{study}.csv")
    table = {}
    for job in (run.Job(*job) for job in studies.STUDIES[study]()):
        row = rows.get(job.key)
        if row and row["command"] == job.command:
            table.setdefault(job.env, {}).setdefault(job.variant, []).append(row)
    return table


def load_ladder() -> dict[str, dict[str, list[dict]]]:
    """The ladder where all variants have seeds enough, and of each as many as of the others."""
    table = {}
    for env, variants in load("ladder").items():
        fewest = min(len(variants.get(name, [])) for name in NAMES)
        if fewest >= ENOUGH:
            table[env] = {name: variants[name][:fewest] for name in NAMES}
    return table


def without_mountain_car(envs) -> list[str]:
    """What one rung alone solves decides a mean over eight."""
    return [env for env in envs if env != "MountainCarContinuous-v0"]


def values(rows: list[dict], column: str) -> np.ndarray:
    """What a column says for each run; of "curve" the mean over the run's training returns."""
    if column == "curve":
        return np.nanmean([[float(x) for x in row["curve"].split()] for row in rows], axis=1)
    return np.array([float(row[column]) for row in rows])


def scores(env: str, rows: list[dict], column: str = "greedy") -> np.ndarray:
    return (values(rows, column) - RANDOM[env]) / (THRESHOLD[env] - RANDOM[env])


def short(env: str) -> str:
    return re.sub(r"-v\d+$", "", env).replace("MountainCarContinuous", "MountainCarC.")


def markdown(head: list[str], rows: list[list[str]]) -> str:
    top, *lines = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([top, "|-" * len(head) + "|", *lines])


def with_interval(point: tuple[float, float, float], digits: int = 2) -> str:
    return "{:z.{n}f} [{:z.{n}f}, {:z.{n}f}]".format(*point, n=digits)


def typical(env: str, rows: list[dict], column: str) -> str:
    """The interquartile mean of returns, with its interval."""
    digits = 2 if env == "FrozenLake-v1" else 0 if env in studies.MUJOCO else 1
    return with_interval(interval([values(rows, column)], iqm), digits)


def ladder_table() -> str:
    """A row for each environment: the score at each rung."""
    lines = []
    for env, rungs in load_ladder().items():
        each = (f"{iqm(scores(env, rungs[rung])):.2f}" for rung in studies.RUNGS)
        lines.append([short(env), *each])
    return markdown(["", *(NAMES[rung] for rung in studies.RUNGS)], lines)


def overall_table() -> str:
    """A row for each rung: its score over all environments. Some with shapes of their own, too."""
    table = load_ladder()
    most = without_mountain_car(table)
    rows = {name: {env: table[env][rung] for env in table} for rung, name in NAMES.items()}
    for rung in studies.OWN_SHAPE:
        own = {env: rungs[rung] for env, rungs in load("own").items() if rung in rungs}
        rows[f"{NAMES[rung]}, own shapes"] = rows[NAMES[rung]] | own
    cells = [(table, "greedy", pooled_iqm), (table, "greedy", mean), (most, "greedy", mean)]
    lines = []
    for name, runs in rows.items():
        line = [name]
        for envs, column, statistic in (*cells, (table, "curve", pooled_iqm)):
            samples = [scores(env, runs[env], column) for env in envs]
            line.append(with_interval(interval(samples, statistic)))
        lines.append(line)
    head = ["rung", "IQM, greedy", "mean, greedy", "mean without MountainCarC."]
    return markdown([*head, "IQM, while learning"], lines)


def gains_table() -> str:
    """A row for each rung and one for several together: what the IQM gains, with intervals."""
    table = load_ladder()
    most = without_mountain_car(table)
    rungs = list(studies.RUNGS)[:-1]
    pairs = [(NAMES[rung], rung, above) for above, rung in zip(rungs, rungs[1:])]
    pairs.insert(-1, ("state, λ and memory together", "memory", "timestep"))
    lines = []
    for name, rung, above in pairs:
        line = [name]
        for column in ("greedy", "curve"):
            for envs in (table, most):
                new = [scores(env, table[env][rung], column) for env in envs]
                old = [scores(env, table[env][above], column) for env in envs]
                line.append(with_interval(interval(new + old, gain)))
        lines.append(line)
    head = ["rung", "greedy", "without MountainCarC.", "while learning", "without MountainCarC."]
    return markdown(head, lines)


def beats_table() -> str:
    """A row for each rung: how often it beats PPO."""
    table = load_ladder()
    lines = []
    for rung in (*list(studies.RUNGS)[:-1], "GPG"):
        line = [NAMES[rung]]
        for column in ("greedy", "sampled", "train_return"):
            samples = [scores(env, table[env][x], column) for x in (rung, "PPO") for env in table]
            line.append(with_interval(interval(samples, improvement)))
        lines.append(line)
    return markdown(["rung", "greedy", "sampled", "in training"], lines)


def returns_table() -> str:
    """A row for each environment and rung: greedy, sampled and training returns."""
    lines = []
    for env, rungs in load_ladder().items():
        for rung, rows in rungs.items():
            first = f"{short(env)}, {len(rows)} seeds" if rung == "outcome" else ""
            columns = ("greedy", "sampled", "train_return")
            greedy, sampled, training = (typical(env, rows, column) for column in columns)
            lines.append([first, NAMES[rung], greedy, sampled.split()[0], training])
    head = ["environment", "rung", "greedy", "sampled", "training, last 100"]
    return markdown(head, lines)


def defaults_table() -> str:
    """A row for each environment: how many seeds reach the threshold, and the median return."""
    lines = []
    for env, entries in load("boxes").items():
        steps, threshold, *_ = boxes.ENVIRONMENTS[env]
        line = [f"{short(env)}, {steps:,}", f"{threshold:g}"]
        for script in boxes.SCRIPTS:
            returns = values(entries[script], "greedy")
            digits = 2 if env == "FrozenLake-v1" else 0
            reached = f"{(returns >= threshold).sum()} of {len(returns)}"
            line += [reached, f"{np.median(returns):z.{digits}f}"]
        lines.append(line)
    head = ["environment, steps", "threshold"]
    for script in boxes.SCRIPTS:
        head += [f"`{script}`: reached", "median"]
    return markdown(head, lines)


def compared(study: str) -> dict[str, dict[str, list[dict]]]:
    """The environments of boxes.py on which all are compared: {environment: {entry: rows}}."""
    return {
        env: {re.sub("(CleanRL) .*", r"\1", entry): rows for entry, rows in entries.items()}
        for env, entries in load(study).items()
        if boxes.ENVIRONMENTS[env].cleanrl
    }


def by_entry(found: dict, cell) -> list[list[str]]:
    """A line for each entry: its name, and what cell says of it on each environment."""
    lines = []
    for entry in dict.fromkeys(entry for entries in found.values() for entry in entries):
        name = f"`{entry}`" if entry.endswith(".py") else entry
        each = [cell(env, of[entry]) if entry in of else "–" for env, of in found.items()]
        lines.append([name, *each])
    return lines


def until(rows: list[dict], unit: str) -> str:
    """Median steps or seconds until the training return is at the threshold; > all, if never."""
    median = np.median([float(row[f"reach_{unit}"] or "inf") for row in rows])
    over = "> " if np.isinf(median) else ""
    median = min(median, np.median(values(rows, unit)))
    return over + (f"{median / 1000:.0f}k" if unit == "steps" else f"{median:.0f}")


def boxes_table() -> str:
    """A row for each entry: median greedy return (of CleanRL training), seeds above, steps."""

    def cell(env: str, rows: list[dict]) -> str:
        returns = values(rows, "greedy" if rows[0]["greedy"] else "training")
        above = (returns >= boxes.ENVIRONMENTS[env].threshold).sum()
        return f"{np.median(returns):.0f}, {above} of {len(rows)}, {until(rows, 'steps')}"

    found = compared("boxes")
    return markdown(["", *(heading(env) for env in found)], by_entry(found, cell))


def heading(env: str) -> str:
    steps, threshold, *_ = boxes.ENVIRONMENTS[env]
    steps = f"{steps // 1000}k" if steps < 10**6 else f"{steps // 10**6}M"
    return f"{short(env)} {steps}, {threshold:g}"


def seconds_table() -> str:
    """A row for each entry: seconds until the threshold, seconds before training and memory."""
    found = compared("seconds")
    lines = by_entry(found, lambda env, rows: until(rows, "seconds"))
    for line in lines:
        rows = [row for entries in found.values() for row in entries.get(line[0].strip("`"), [])]
        line.append(f"{np.median(values(rows, 'start_up')):.1f}")
        line.append(f"{np.median(values(rows, 'peak')):.0f}")
    environments = [heading(env) for env in found]
    return markdown(["seconds", *environments, "start-up", "memory, MiB"], lines)


def steps_table() -> str:
    """A row for each environment: steps until the threshold of us and of others, and seconds."""
    timed = compared("seconds")
    lines = []
    for env, found in compared("boxes").items():
        line = [f"{short(env)}, {boxes.ENVIRONMENTS[env].threshold:g}"]
        for entry in (*boxes.SCRIPTS, boxes.SB3, boxes.RL_ZOO, "CleanRL"):
            cell = until(found[entry], "steps") if entry in found else "–"
            if entry in timed.get(env, {}):
                cell += f", {until(timed[env][entry], 'seconds')} s"
            line.append(cell)
        lines.append(line)
    return markdown(["", "`grpo_rtg.py`", "`ppo.py`", "SB3 PPO", "SB3, RL-Zoo", "CleanRL"], lines)


def each_seed_table(study: str) -> str:
    """A row for each environment and variant: every seed's greedy return, sorted."""
    lines = []
    for env, variants in load(study).items():
        for variant, rows in variants.items():
            each = ", ".join(f"{value:z.0f}" for value in np.sort(values(rows, "greedy")))
            training = f"{np.median(values(rows, 'train_return')):z.0f}"
            lines.append([short(env), NAMES.get(variant, variant), each, training])
    return markdown(["environment", "variant", "greedy, each seed", "training, median"], lines)


def features_table() -> str:
    """What features.py wrote: R² of the next iteration's returns, a row for each choice."""
    with open(run.RESULTS / "features.csv", newline="") as file:
        head, *lines = csv.reader(file)
    return markdown([head[0], *(short(env) for env in head[1:])], lines)


def choices_table() -> str:
    """A row for each choice: greedy returns on the environments where it was tried."""
    found = load("choices")
    lines = by_entry(found, lambda env, rows: typical(env, rows, "greedy"))
    return markdown(["choice", *(short(env) for env in found)], lines)


def ablations_table() -> str:
    """A row for each changed option, between what the ladder has: training returns."""
    found = {}
    ladder = load_ladder()
    for env, settings in load("ablations").items():
        unchanged = {rung: ladder[env][rung] for rung in ("timestep", "outcome")}
        found[env] = {"timestep": unchanged["timestep"]} | settings | unchanged
    lines = []
    for name in next(iter(found.values())):
        line = [re.sub("(timestep|--.*)", r"`\1`", name)]
        line += [typical(env, found[env][name], "train_return") for env in found]
        lines.append(line)
    return markdown(["changed", *(short(env) for env in found)], lines)


def mujoco_table() -> str:
    """A row for each environment and rung on MuJoCo: greedy returns; bold: what the ladder has."""
    columns = ["--log-std-init 0", "--log-std-init -2", "--no-norm-obs", "normalized rewards"]
    ladder = load_ladder()
    lines = []
    for env, settings in load("mujoco").items():
        for rung in ("timestep", "memory", "PPO"):
            line = [short(env), NAMES[rung]]
            for options in columns:
                rows = settings.get(f"{rung} {options}", [])
                if options == studies.LOG_STD[env]:
                    line.append(f"**{typical(env, ladder[env][rung], 'greedy')}**")
                else:
                    line.append(typical(env, rows, "greedy") if rows else "–")
            lines.append(line)
    head = ["environment", "rung", *(f"`{options}`" for options in columns[:3]), columns[3]]
    return markdown(head, lines)


def both(rows: list[dict]) -> str:
    """The mean of greedy and sampled returns."""
    means = [values(rows, "greedy"), values(rows, "sampled")]
    return f"{np.mean(means):.4g}" if rows else "–"


def tuning_table() -> str:
    """The mean of greedy and sampled of timestep / regression with each shape; bold: the one taken.

    Two tables, for MuJoCo has shapes of its own.
    """
    found = load("tuning")
    tables = []
    for shapes in (studies.SHAPES, studies.LONG_SHAPES):
        lines = []
        for env in found:
            if (env in studies.MUJOCO) != (shapes is studies.LONG_SHAPES):
                continue
            line = [short(env)]
            for shape in shapes:
                rungs = ("timestep", "memory")
                cell = " / ".join(both(found[env].get(f"{rung}: {shape}", [])) for rung in rungs)
                line.append(f"**{cell}**" if shape == studies.LADDER_SHAPE[env] else cell)
            lines.append(line)
        tables.append(markdown(["`timestep` / `regression`", *shapes], lines))
    return "\n\n".join(tables)


def outcome_table() -> str:
    """The same of outcome supervision with the ladder's shape, and the best of the other shapes."""
    settings = ("γ = 1", "γ = 1, Eq. 3's mean", "γ < 1", "γ < 1, Eq. 3's mean")
    lines = []
    for env, found in load("outcome").items():
        shape = studies.LADDER_SHAPE[env]
        others = [both(found[f"γ < 1: {name}"]) for name in studies.SHAPES if name != shape]
        cells = [both(found[f"{setting}: {shape}"]) for setting in settings]
        lines.append([short(env), *cells, max(others, key=float)])
    return markdown(["outcome", *settings, "γ < 1, best other shape"], lines)


def commands_table() -> str:
    """The ladder's commands of regression and of PPO, without options that are the default."""
    lines = []
    for env in load_ladder():
        for rung in ("memory", "PPO"):
            script = studies.RUNGS[rung]
            defaults = vars(run.load_script(script).Args())
            flags = studies.rung_flags(env, rung, studies.LADDER_SHAPE[env])
            line = f"python {script} --env-id {env} --total-timesteps {studies.STEPS[env]}"
            for option, value in re.findall(r"--([a-z-]+)(?: (?!--)(\S+))?", flags):
                default = defaults[option.replace("-", "_")]
                if not value or type(default)(value) != default:
                    line += f" --{option} {value}".rstrip()
            lines.append(line)
    return "\n".join(["```sh", *lines, "```"])


def plain(rung: str) -> str:
    return NAMES[rung].replace("`", "")


def style(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, color=TEXT, linewidth=0.5)
    axes.set_axisbelow(True)


def draw_ladder() -> None:
    """A panel for each environment and one for all: the score at each rung, from top to bottom."""
    table = load_ladder()
    figure, grid = plt.subplots(2, 5, figsize=(10, 5), sharey=True)
    grid[1, 4].remove()
    for axes, env in zip(grid.flat, [*table, "all"]):
        envs = list(table) if env == "all" else [env]
        middles = []
        for y, rung in enumerate(studies.RUNGS):
            samples = [scores(each, table[each][rung]) for each in envs]
            point = interval(samples, pooled_iqm)
            colour = COLOURS[rung]
            axes.plot(point[1:], [y, y], color=colour, linewidth=3, solid_capstyle="round")
            axes.plot(point[0], y, "o", color=colour, markersize=6)
            middles.append(point[0])
        axes.plot(middles[:6], range(6), color=TEXT, linewidth=0.8, zorder=0)
        axes.axvline(1, color=TEXT, linewidth=0.8, linestyle=":")
        axes.set_xlim(max(min(0, *middles) - 0.1, -1.5), max(1, *middles) + 0.15)
        axes.set_title("all" if env == "all" else short(env), loc="left", fontsize=10)
        style(axes)
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(middles)), [plain(rung) for rung in studies.RUNGS])
        axes.set_ylim(len(middles) - 0.5, -0.5)
    figure.supxlabel("score of greedy evaluation: 0 = random policy, 1 = solved", fontsize=10)
    figure.tight_layout()
    save(figure, "ladder")


def draw_curves() -> None:
    """A panel for each environment: training returns against steps, a line for each rung."""
    table = load_ladder()
    figure, grid = plt.subplots(4, 2, figsize=(10, 10.8))
    for axes, (env, rungs) in zip(grid.flat, table.items()):
        for rung in studies.RUNGS:
            rows = rungs[rung]
            curves = np.array([[float(x) for x in row["curve"].split()] for row in rows])
            steps = np.linspace(0, studies.STEPS[env], curves.shape[1] + 1)[1:]
            axes.plot(steps, iqm(curves, axis=0), color=COLOURS[rung], label=plain(rung))
        axes.axhline(THRESHOLD[env], color=TEXT, linewidth=0.8, linestyle=":")
        gap = THRESHOLD[env] - RANDOM[env]
        axes.set_ylim(max(axes.get_ylim()[0], RANDOM[env] - 0.5 * gap), None)
        axes.set_title(f"{short(env)}, {len(rows)} seeds", loc="left", fontsize=10)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k")
        style(axes)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="upper left", frameon=False, labelcolor=TEXT)
    figure.supxlabel("environment steps", fontsize=10)
    figure.supylabel("mean return of training episodes", fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    save(figure, "training")


def save(figure, name: str) -> None:
    (DOCS / "figures").mkdir(exist_ok=True)
    path = DOCS / "figures" / f"{name}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    print(path.relative_to(DOCS.parent))


def use_style() -> None:
    """Text and axes in a grey that shows on white and on black, and files that repeat."""
    coloured = "text.color axes.labelcolor axes.edgecolor axes.titlecolor xtick.color ytick.color"
    plt.rcParams |= dict.fromkeys(coloured.split(), TEXT)
    plt.rcParams |= {"svg.hashsalt": "grpo", "font.size": 10}


MAKERS = [ladder_table, overall_table, gains_table, beats_table, returns_table, commands_table]
MAKERS += [defaults_table, boxes_table, seconds_table, steps_table]
MAKERS += [features_table, choices_table, ablations_table, mujoco_table, tuning_table]
MAKERS += [outcome_table]
TABLES = {table.__name__.removesuffix("_table"): table for table in MAKERS}
TABLES |= {name: partial(each_seed_table, name) for name in ("unseen", "million", "fair")}


def with_tables(page: str) -> str:
    """A page whose tables are those of the CSVs."""

    def fill(found: re.Match) -> str:
        return f"{found['start']}\n{TABLES[found['name']]()}\n<!-- end -->"

    names = "|".join(TABLES)
    table = rf"(?P<start><!-- table (?P<name>{names}) -->)\n.*?<!-- end -->"
    return re.sub(table, fill, page, flags=re.DOTALL)


@dataclass
class Options:
    check: bool = False  # write nothing


def main() -> None:
    check = tyro.cli(Options, description=__doc__).check
    paths = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    pages = {path: with_tables(path.read_text()) for path in paths}
    old = [str(path) for path, page in pages.items() if page != path.read_text()]
    if check:
        sys.exit(f"Not current: {', '.join(old)}" if old else None)
    for path, page in pages.items():
        path.write_text(page)
    use_style()
    draw_ladder()
    draw_curves()


if __name__ == "__main__":
    main()
