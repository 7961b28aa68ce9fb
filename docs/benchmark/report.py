"""The study's tables in README.md and docs/*.md, from the CSVs that run.py wrote.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/report.py
    python docs/benchmark/report.py --check    # whether tables are current; writes nothing

A table replaces what stands between "<!-- table NAME -->" and "<!-- end -->". A ± is half of a 95%
interval over seeds, of Welch's t: with few seeds a bootstrap's is too narrow (Colas et al. 2019,
arXiv:1904.06979).
"""

import re
import sys
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import run
import studies
import tyro
from scipy import stats

DOCS = Path(__file__).parents[1]
REPORTED = studies.STEPS | studies.REPORTED_STEPS
THRESHOLD = {env: gym.spec(env).reward_threshold or -200 for env in REPORTED}  # Pendulum: none
# Of the seconds; on dispatching it is the better rule of thumb.
GOALS = THRESHOLD | {"HalfCheetah-v5": 1000, studies.DISPATCH: -168}
SCRIPTS = ["outcome", "process", "timestep", "PPO"]  # what the four scripts do by default
NAMES = {"regression": "regr.", "PPO": "ppo.py"}
SCRIPT_NAMES = ["`grpo_outcome.py`", "`grpo_process.py`", "`grpo_rtg.py`", "`ppo.py`"]
Table = dict[str, dict[str, list[dict]]]  # {environment: {variant: [row, ...]}}


@cache
def load(study: str, fewest: int = 1) -> Table:
    """Rows of today's commands, for environments where each variant has the fewest or more."""
    rows = run.read(run.RESULTS / f"{study}.csv")
    table = {}
    for job in (run.Job(*job) for job in studies.STUDIES[study]()):
        row = rows.get(job.key)
        if row and row["command"] == job.command:
            table.setdefault(job.env, {}).setdefault(job.variant, []).append(row)
    return {env: found for env, found in table.items() if min(map(len, found.values())) >= fewest}


def values(rows: list[dict], column: str = "greedy") -> np.ndarray:
    return np.array([float(row[column]) for row in rows])


def scores(env: str, rows: list[dict]) -> np.ndarray:
    """Greedy returns on a scale on which a uniformly random policy has 0, the threshold 1."""
    chance = np.genfromtxt(run.RESULTS / "random.csv", delimiter=",", dtype=None, names=True)
    [zero] = chance["mean_return"][chance["env"] == env]
    return (values(rows) - zero) / (THRESHOLD[env] - zero)


def estimate(*samples: np.ndarray, weights: list[float]) -> tuple[float, float]:
    """The weighted sum of the samples' means, and half of its 95% interval (Welch 1947)."""
    point = sum(weight * sample.mean() for weight, sample in zip(weights, samples))
    squares = [(w * stats.sem(sample)) ** 2 for w, sample in zip(weights, samples)]
    if not sum(squares):
        return point, 0.0
    freedom = sum(squares) ** 2 / sum(x**2 / (len(y) - 1) for x, y in zip(squares, samples))
    return point, stats.t.ppf(0.975, freedom) * sum(squares) ** 0.5


def mean(*samples: np.ndarray) -> tuple[float, float]:
    """The mean of a sample; or, of several, the mean of their means."""
    return estimate(*samples, weights=[1 / len(samples)] * len(samples))


def difference(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    return estimate(a, b, weights=[1, -1])


def is_clear(point: float, half: float) -> bool:
    """Whether an interval does not hold 0."""
    return abs(point) > half


def markdown(head: list[str], rows: list[list[str]]) -> str:
    top, *lines = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([top, "|-" * len(head) + "|", *lines])


def heading(env: str, steps: int) -> str:
    name = re.sub(r"^.*:|-v\d+$", "", env).replace("MountainCarContinuous", "Mountain Car C.")
    return f"{name} " + (f"{steps // 1000}k" if steps < 10**6 else f"{steps // 10**6}M")


def shown(point: float, half: float, form: str, bold: bool = False) -> str:
    mark = "**" if bold else ""
    return f"{mark}{format(point, form)}{mark}<br><sub>± {format(half, form)}</sub>"


def form(env: str) -> str:
    """How to format an environment's returns."""
    if "Blackjack" in env:
        return "z.3f"
    small = "FrozenLake|Reservoir|Portfolio|Backlog|LostSales"
    return "z.2f" if re.search(small, env) else "z.0f"


def seeds(table: Table) -> str:
    """How many runs stand behind a cell."""
    numbers = {len(rows) for entries in table.values() for rows in entries.values() if rows}
    return "–".join(str(number) for number in sorted({min(numbers), max(numbers)})) + " seeds"


def returns_table(study: str, variants: list[str], names: list[str] | None = None) -> str:
    """Mean greedy returns: a row for each environment, a column for each variant."""
    names = names or [NAMES.get(variant, variant) for variant in variants]
    lines = []
    for env, found in load(study, 3).items():
        samples = {name: values(found[name]) for name in variants if name in found}
        best, second = sorted(samples, key=lambda name: -samples[name].mean())[:2]
        clear = is_clear(*difference(samples[best], samples[second]))
        steps = re.search(r"--total-timesteps (\d+)", found[best][0]["command"])[1]
        cells = [heading(env, int(steps))]
        for name in variants:
            cell = "–"
            if name in samples:
                cell = shown(*mean(samples[name]), form(env), clear and name == best)
            cells.append(cell)
        lines.append(cells)
    own = {env: {x: found.get(x, []) for x in variants} for env, found in load(study, 3).items()}
    return markdown([seeds(own), *names], lines)


def ladder_table() -> str:
    """All variants; under the environments the mean of their scores, of all and of all but one."""
    found = load("ladder", 5)
    lines = [returns_table("ladder", studies.VARIANTS)]
    rest = [env for env in found if not env.startswith("MountainCar")]
    for name, envs in (("mean score", found), ("without Mountain Car", rest)):
        cells = [name]
        for variant in studies.VARIANTS:
            samples = [scores(env, found[env].get(variant, [])) for env in envs]
            cells.append(shown(*mean(*samples), ".2f") if all(map(len, samples)) else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def discounts_table() -> str:
    """The chosen discounts: a row for each environment, a column for each variant."""
    lines = []
    for env, found in load("ladder", 5).items():
        cells = [heading(env, studies.STEPS[env])]
        for variant in studies.VARIANTS:
            words = found[variant][0]["command"].split() if variant in found else []
            options = dict(pairwise(words))
            cell = options.get("--gamma", "–")
            if "--gae-lambda" in options:
                cell += f", {options['--gae-lambda']}"
            cells.append(cell)
        lines.append(cells)
    names = (NAMES.get(variant, variant) for variant in studies.VARIANTS)
    return markdown(["γ, λ", *names], lines)


def ablations_table() -> str:
    """What an option changes: a row for each, a column for each environment."""
    found = load("ablations", 5)
    options = [*studies.OPTIONS, "groups of two", "one group", "outcome, --no-seed-groups"]
    lines = []
    for option in [*options, *studies.SCALES]:
        cells = []
        for env, entries in found.items():
            if option not in entries:  # the environment's own weight of the bonus
                cells.append("–")
                continue
            base = entries["outcome" if option.startswith("outcome") else "timestep"]
            change = difference(values(entries[option]), values(base))
            cells.append(shown(*change, form(env), is_clear(*change)))
        lines.append([re.sub("--.*", r"`\g<0>`", option), *cells])
    names = (heading(env, studies.STEPS[env]) for env in found)
    return markdown([seeds(found), *names], lines)


def reached(env: str, rows: list[dict], column: str) -> str:
    """The median return, and how many runs end at the threshold or above."""
    returns = values(rows, column)
    above = (returns >= THRESHOLD[env]).sum()
    return f"{format(np.median(returns), form(env))}, {above} of {len(rows)}"


def with_threshold(env: str, steps: int) -> str:
    return f"{heading(env, steps)}, {GOALS[env]:g}"


def defaults_table() -> str:
    """A row for each environment; greedy returns, and in training, of each script."""
    lines = []
    for env, entries in load("defaults", 5).items():
        cells = [with_threshold(env, studies.REPORTED_STEPS[env])]
        for script in ("grpo_rtg.py", "ppo.py"):
            cells += [reached(env, entries[script], x) for x in ("greedy", "train_return")]
        lines.append(cells)
    return markdown(["", SCRIPT_NAMES[2], "in training", SCRIPT_NAMES[3], "in training"], lines)


def tuning_table() -> str:
    """A row for each script and iteration: mean returns greedily and in training."""
    found, named = load("tuning"), set()
    lines = []
    for variant in dict.fromkeys(variant for _, variant, *_ in studies.tuning()):
        cells = []
        for entries in found.values():
            rows = entries.get(variant, [])
            means = [values(rows, x).mean() for x in ("greedy", "train_return") if rows]
            seeds = f" ({len(rows)})" if len(rows) not in (0, 5) else ""
            cells.append(" / ".join(f"{mean:.0f}" for mean in means) + seeds or "–")
        if set(cells) != {"–"}:
            script, iteration = variant.replace(" passes of ", "x").split(" ", 1)
            lines.append(["" if script in named else f"`{script}`", iteration, *cells])
            named.add(script)
    steps = studies.DEFAULT_STEPS
    return markdown(["script", "iteration", *(heading(env, steps[env]) for env in found)], lines)


def settings_table() -> str:
    """The commands of what was tuned, and the mean greedy return of each."""
    lines = []
    for study, columns in (("ladder", studies.THREE), ("luck", studies.LUCK_COLUMNS)):
        for env, found in load(study, 5).items():
            for column in filter(found.get, columns):
                command = re.sub(" --seed .*", "", found[column][0]["command"])
                command = re.sub(r" (--ga\S+) \S+(?=.* \1 )", "", command)  # the last one holds
                point = format(values(found[column]).mean(), form(env))
                steps = int(re.search(r"--total-timesteps (\d+)", command)[1])
                lines.append([heading(env, steps), point, f"`{command}`"])
    return markdown(["", "greedy", "`python` …"], lines)


def seconds_table() -> str:
    """Seconds until the threshold, > where it is not reached; medians of start-up and memory."""
    rows = run.read(run.RESULTS / "seconds.csv")
    lines = []
    for entry in dict.fromkeys(row["variant"] for row in rows.values()):
        mine = [row for row in rows.values() if row["variant"] == entry]
        cells = []
        for env in studies.SECONDS_STEPS:
            runs = [row for row in mine if row["env"] == env]
            runs.sort(key=lambda row: (row["reached"] == "0", float(row["seconds"])))
            mark = {"1": "", "0": ">"}
            found = (mark[row["reached"]] + f"{float(row['seconds']):.0f}" for row in runs)
            cells.append(", ".join(found) or "–")
        cells += [f"{np.median(values(mine, name)):.0f}" for name in ("start_up", "peak")]
        lines.append([re.sub(r".*\.py", r"`\g<0>`", entry), *cells])
    heads = [with_threshold(env, steps) for env, steps in studies.SECONDS_STEPS.items()]
    return markdown(["", *heads, "start-up, s", "memory, MiB"], lines)


def beside_ppo(env: str) -> tuple[float, float]:
    """By how much grpo_rtg.py ends above ppo.py, and half of the interval."""
    for study, own, ppo in (
        ("dose", "seeded", "PPO"),
        ("luck", "timestep", "PPO, rewards / 100"),
        ("luck", "timestep", "PPO"),
        ("ladder", "timestep", "PPO"),
    ):
        found = load(study).get(env, {})
        if {own, ppo} <= found.keys():
            return difference(values(found[own]), values(found[ppo]))
    raise KeyError(env)


def twice_table() -> str:
    """grpo_rtg.py, also with twice the steps, and ppo.py; seconds are medians."""
    lines = []
    for env, found in load("twice").items():
        usual = (load("ladder") | load("luck"))[env]
        samples = [values(x["timestep"]) for x in (usual, found)] + [values(usual["PPO"])]
        cells = [shown(*mean(x), form(env)) for x in samples]
        cells += [f"{np.median(values(found[x], 'seconds')):.0f}" for x in ("timestep", "PPO")]
        lines.append([heading(env, (studies.STEPS | studies.LUCK)[env]), *cells])
    names = [SCRIPT_NAMES[2], "with twice the steps", SCRIPT_NAMES[3], "seconds", "of `ppo.py`"]
    return markdown(["", *names], lines)


def variances(env: str, stage: str, name: str) -> np.ndarray:
    """What luck.py measured with each of the two seeds, in order."""
    rows = run.read(run.RESULTS / "variances.csv")
    found = [row[name].split()[0] for key, row in rows.items() if key[:2] == (env, stage)]
    return np.sort(np.array(found, dtype=float))


def variances_table() -> str:
    """Means of two seeds, and both of them; new policies, and trained ones."""
    lines = []
    for env in studies.ENVS:
        cells = [heading(env, 0).removesuffix(" 0k")]
        for name in ("seed_share", "predicted"):
            means = (variances(env, stage, name).mean() for stage in ("new", "50k"))
            cells.append(", ".join(f"{x:.2f}" for x in means))
        for stage in ("new", "50k"):
            for name in ("single", "critic"):
                found = variances(env, stage, name)
                cells.append(f"{found.mean():.0f}<br><sub>{found[0]:.0f}…{found[-1]:.0f}</sub>")
        ahead = beside_ppo(env)
        lines.append([*cells, shown(*ahead, form(env), is_clear(*ahead))])
    names = [f"{name}, {stage}" for stage in ("new", "50k") for name in ("many seeds", "critic")]
    return markdown(["", "the seed's", "predicted", *names, "less `ppo.py`"], lines)


LUCK_NAMES = [*SCRIPT_NAMES[::2], "`grpo_rtg.py --no-seed-groups`", "`regression.py`", "`ppo.py`"]
LUCK_NAMES += ["`ppo.py`, rewards / 100", "SB3's PPO"]
LUCK_COLUMNS = [*studies.LUCK_COLUMNS, "SB3"]
DOSE_NAMES = ["`grpo_rtg.py`", "`grpo_rtg.py --no-seed-groups`", "`ppo.py`"]
MAKERS = [ladder_table, ablations_table, defaults_table, tuning_table, seconds_table]
MAKERS += [settings_table, variances_table, discounts_table, twice_table]
TABLES = {table.__name__.removesuffix("_table"): table for table in MAKERS} | {
    "scripts": partial(returns_table, "ladder", SCRIPTS, SCRIPT_NAMES),
    "million": partial(returns_table, "million", studies.THREE),
    "unseen": partial(returns_table, "unseen", studies.THREE),
    "dose": partial(returns_table, "dose", studies.DOSE, DOSE_NAMES),
    "luck": partial(returns_table, "luck", LUCK_COLUMNS, LUCK_NAMES),
    "members": partial(returns_table, "members", ["2x16", "4x8", "8x4", "16x2"]),
}


def with_tables(page: str) -> str:
    """A page whose tables are those of the CSVs."""

    def fill(found: re.Match) -> str:
        return f"{found['start']}\n{TABLES[found['name']]()}\n<!-- end -->"

    names = "|".join(TABLES)
    table = rf"(?P<start><!-- table (?P<name>{names}) -->)\n.*?<!-- end -->"
    return re.sub(table, fill, page, flags=re.DOTALL)


def main(check: bool = False) -> None:
    paths = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    pages = {path: with_tables(path.read_text()) for path in paths}
    old = [str(path) for path, page in pages.items() if page != path.read_text()]
    if check:
        sys.exit(f"Not current: {', '.join(old)}" if old else None)
    for path, page in pages.items():
        path.write_text(page)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
