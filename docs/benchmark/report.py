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
from itertools import pairwise, product
from pathlib import Path

import gymnasium as gym
import numpy as np
import studies
import tyro
from scipy import stats

DOCS = Path(__file__).parents[1]
REPORTED = studies.STEPS | studies.REPORTED_STEPS
THRESHOLD = {env: gym.spec(env).reward_threshold or -200 for env in REPORTED}  # Pendulum: none
# Of the seconds; on dispatching it is the better rule of thumb.
GOALS = THRESHOLD | {"HalfCheetah-v5": 1000, studies.DISPATCH: -168}
VARIANTS = dict(zip(studies.VARIANTS, studies.VARIANTS))  # and their headings
VARIANTS |= {"regression": "regr.", "PPO": "ppo.py"}
THREE = {variant: VARIANTS[variant] for variant in studies.THREE}
SCRIPTS = {"outcome": "`grpo_outcome.py`", "process": "`grpo_process.py`"}
SCRIPTS |= {"timestep": "`grpo_rtg.py`", "PPO": "`ppo.py`"}
DOSE = {variant: f"`{script}`" for variant, script in studies.DOSE.items()}
LUCK = {"outcome": SCRIPTS["outcome"], "timestep": SCRIPTS["timestep"]}
LUCK |= {"not seeded": DOSE["not seeded"], "regression": "`regression.py`", "PPO": "`ppo.py`"}
LUCK |= {studies.SCALED: "`ppo.py`, rewards / 100", "SB3": "SB3's PPO"}
MEMBERS = {shape: shape for shape in ("2x16", "4x8", "8x4", "16x2")}
Table = dict[str, dict[str, list[dict]]]  # {environment: {variant: [row, ...]}}


@cache
def load(study: str, fewest: int = 1) -> Table:
    """Rows of today's commands, for environments where each variant has the fewest or more."""
    rows = studies.read(study)
    table = {}
    for key, command in studies.jobs(study).items():
        if key in rows and rows[key]["command"] == command:
            env, variant, _ = key
            table.setdefault(env, {}).setdefault(variant, []).append(rows[key])
    return {env: found for env, found in table.items() if min(map(len, found.values())) >= fewest}


def values(rows: list[dict], column: str = "greedy") -> np.ndarray:
    return np.array([float(row[column]) for row in rows])


def scores(env: str, rows: list[dict]) -> np.ndarray:
    """Greedy returns on a scale on which a uniformly random policy has 0, the threshold 1."""
    chance = np.genfromtxt(studies.RESULTS / "random.csv", delimiter=",", dtype=None, names=True)
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
    numbers = {len(rows) for entries in table.values() for rows in entries.values()}
    return "–".join(str(number) for number in sorted({min(numbers), max(numbers)})) + " seeds"


def returns(study: str, columns: dict[str, str]):
    """Mean greedy returns: a row for each environment, a column for each variant."""
    found = load(study, 3)
    found = {env: {x: found[env][x] for x in columns if x in found[env]} for env in found}
    yield [seeds(found), *columns.values()]
    for env, entries in found.items():
        samples = {name: values(rows) for name, rows in entries.items()}
        best, second = sorted(samples, key=lambda name: -samples[name].mean())[:2]
        clear = is_clear(*difference(samples[best], samples[second]))
        steps = re.search(r"--total-timesteps (\d+)", entries[best][0]["command"])[1]
        cells = dict.fromkeys(columns, "–")
        for name, sample in samples.items():
            cells[name] = shown(*mean(sample), form(env), clear and name == best)
        yield [heading(env, int(steps)), *cells.values()]


def ladder():
    """All variants; under the environments the mean of their scores, of all and of all but one."""
    yield from returns("ladder", VARIANTS)
    found = load("ladder", 5)
    rest = [env for env in found if not env.startswith("MountainCar")]
    for name, envs in (("mean score", found), ("without Mountain Car", rest)):
        cells = [name]
        for variant in VARIANTS:
            samples = [scores(env, found[env].get(variant, [])) for env in envs]
            cells.append(shown(*mean(*samples), ".2f") if all(map(len, samples)) else "–")
        yield cells


def discounts():
    """The chosen discounts: a row for each environment, a column for each variant."""
    yield ["γ, λ", *VARIANTS.values()]
    for env, found in load("ladder", 5).items():
        cells = dict.fromkeys(VARIANTS, "–")
        for variant, rows in found.items():
            options = dict(pairwise(rows[0]["command"].split()))
            chosen = [options[name] for name in ("--gamma", "--gae-lambda") if name in options]
            cells[variant] = ", ".join(chosen)
        yield [heading(env, studies.STEPS[env]), *cells.values()]


def ablations():
    """What an option changes: a row for each, a column for each environment."""
    found = load("ablations", 5)
    yield [seeds(found), *(heading(env, studies.STEPS[env]) for env in found)]
    options = [*studies.OPTIONS, "groups of two", "one group", "outcome, --no-seed-groups"]
    for option in [*options, *studies.SCALES]:
        cells = []
        for env, entries in found.items():
            if option not in entries:  # the environment's own weight of the bonus
                cells.append("–")
                continue
            base = entries["outcome" if option.startswith("outcome") else "timestep"]
            change = difference(values(entries[option]), values(base))
            cells.append(shown(*change, form(env), is_clear(*change)))
        yield [re.sub("--.*", r"`\g<0>`", option), *cells]


def defaults():
    """Medians, and how many runs end at the threshold or above: greedily, and in training."""
    yield ["", SCRIPTS["timestep"], "in training", SCRIPTS["PPO"], "in training"]
    for env, entries in load("defaults", 5).items():
        cells = [f"{heading(env, studies.REPORTED_STEPS[env])}, {GOALS[env]:g}"]
        for script, column in product(("grpo_rtg.py", "ppo.py"), ("greedy", "train_return")):
            found = values(entries[script], column)
            above = (found >= THRESHOLD[env]).sum()
            cells.append(f"{format(np.median(found), form(env))}, {above} of {len(found)}")
        yield cells


def tuning():
    """A row for each script and iteration: mean returns greedily and in training."""
    found, named = load("tuning"), set()
    steps = studies.DEFAULT_STEPS
    yield ["script", "iteration", *(heading(env, steps[env]) for env in found)]
    for variant in dict.fromkeys(variant for _, variant, _ in studies.jobs("tuning")):
        cells = []
        for entries in found.values():
            rows = entries.get(variant, [])
            means = [values(rows, x).mean() for x in ("greedy", "train_return") if rows]
            seeds = f" ({len(rows)})" if len(rows) not in (0, 5) else ""
            cells.append(" / ".join(f"{mean:.0f}" for mean in means) + seeds or "–")
        if set(cells) != {"–"}:
            script, iteration = variant.replace(" passes of ", "x").split(" ", 1)
            yield ["" if script in named else f"`{script}`", iteration, *cells]
            named.add(script)


def settings():
    """The commands of what was tuned, and the mean greedy return of each."""
    yield ["", "greedy", "`python` …"]
    for study, columns in (("ladder", THREE), ("luck", LUCK)):
        for env, found in load(study, 5).items():
            for column in (x for x in columns if x in found and x != "SB3"):
                command = re.sub(" --seed .*", "", found[column][0]["command"])
                command = re.sub(r" (--ga\S+) \S+(?=.* \1 )", "", command)  # the last one holds
                point = format(values(found[column]).mean(), form(env))
                steps = int(re.search(r"--total-timesteps (\d+)", command)[1])
                yield [heading(env, steps), point, f"`{command}`"]


def seconds():
    """Seconds until the threshold, > where it is not reached; medians of start-up and memory."""
    steps = studies.SECONDS_STEPS
    heads = [f"{heading(env, steps[env])}, {GOALS[env]:g}" for env in steps]
    yield ["", *heads, "start-up, s", "memory, MiB"]
    rows = studies.read("seconds").values()
    for entry in dict.fromkeys(row["variant"] for row in rows):
        mine = [row for row in rows if row["variant"] == entry]
        cells = []
        for env in steps:
            runs = [row for row in mine if row["env"] == env]
            runs.sort(key=lambda row: (row["reached"] == "0", float(row["seconds"])))
            found = (">" * (row["reached"] == "0") + f"{float(row['seconds']):.0f}" for row in runs)
            cells.append(", ".join(found) or "–")
        cells += [f"{np.median(values(mine, name)):.0f}" for name in ("start_up", "peak")]
        yield [re.sub(r".*\.py", r"`\g<0>`", entry), *cells]


def beside_ppo(env: str) -> tuple[float, float]:
    """By how much grpo_rtg.py ends above ppo.py, and half of the interval."""
    found = (load("ladder") | load("luck") | load("dose"))[env]
    own = found.get("seeded") or found["timestep"]
    return difference(values(own), values(found.get(studies.SCALED) or found["PPO"]))


def twice():
    """grpo_rtg.py, also with twice the steps, and ppo.py; seconds are medians."""
    names = [SCRIPTS["timestep"], "with twice the steps", SCRIPTS["PPO"]]
    yield ["", *names, "seconds", "of `ppo.py`"]
    for env, found in load("twice").items():
        usual = (load("ladder") | load("luck"))[env]
        samples = [values(x) for x in (usual["timestep"], found["timestep"], usual["PPO"])]
        cells = [shown(*mean(x), form(env)) for x in samples]
        cells += [f"{np.median(values(found[x], 'seconds')):.0f}" for x in ("timestep", "PPO")]
        yield [heading(env, (studies.STEPS | studies.LUCK)[env]), *cells]


def measured(env: str, stage: str, name: str) -> np.ndarray:
    """What luck.py measured with each of the two seeds, in order."""
    rows = studies.read("variances").items()
    found = [row[name].split()[0] for key, row in rows if key[:2] == (env, stage)]
    return np.sort(np.array(found, dtype=float))


def variances():
    """Means of two seeds, and both of them; new policies, and trained ones."""
    names = [f"{name}, {stage}" for stage in ("new", "50k") for name in ("many seeds", "critic")]
    yield ["", "the seed's", "predicted", *names, "less `ppo.py`"]
    for env in studies.ENVS:
        cells = [heading(env, 0).removesuffix(" 0k")]
        for name in ("seed_share", "predicted"):
            means = (measured(env, stage, name).mean() for stage in ("new", "50k"))
            cells.append(", ".join(f"{x:.2f}" for x in means))
        for stage, name in product(("new", "50k"), ("single", "critic")):
            found = measured(env, stage, name)
            cells.append(f"{found.mean():.0f}<br><sub>{found[0]:.0f}…{found[-1]:.0f}</sub>")
        ahead = beside_ppo(env)
        yield [*cells, shown(*ahead, form(env), is_clear(*ahead))]


MAKERS = [ladder, ablations, defaults, tuning, seconds, settings, discounts, twice, variances]
TABLES = {table.__name__: table for table in MAKERS} | {
    "scripts": partial(returns, "ladder", SCRIPTS),
    "million": partial(returns, "million", THREE),
    "unseen": partial(returns, "unseen", THREE),
    "dose": partial(returns, "dose", DOSE),
    "luck": partial(returns, "luck", LUCK),
    "members": partial(returns, "members", MEMBERS),
}


def table(found: re.Match) -> str:
    """A table of the CSVs, in place of the one that a page has."""
    head, *rows = TABLES[found[1]]()
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|-" * len(head) + "|")
    return "\n".join([f"<!-- table {found[1]} -->", *lines, "<!-- end -->"])


def main(check: bool = False) -> None:
    paths = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    for path in paths:
        old = path.read_text()
        new = re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", table, old, flags=re.DOTALL)
        if check and new != old:
            sys.exit(f"Not current: {path}")
        path.write_text(new)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
