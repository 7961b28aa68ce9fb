"""The study's tables in README.md and docs/*.md, from the CSVs that run.py wrote.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/report.py
    python docs/benchmark/report.py --check    # whether tables are current; writes nothing

A table replaces what stands between "<!-- table NAME -->" and "<!-- end -->".
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import run
import studies
import tyro

DOCS = Path(__file__).parents[1]
THRESHOLD = {env: gym.spec(env).reward_threshold or -200 for env in studies.STEPS}  # Pendulum: none


def load(study: str) -> dict[str, dict[str, list[dict]]]:
    """Rows of a study: {environment: {variant: [row, ...]}}, of today's commands alone."""
    rows = run.read(run.RESULTS / f"{study}.csv")
    table = {}
    for job in (run.Job(*job) for job in studies.STUDIES[study]()):
        row = rows.get(job.key)
        if row and row["command"] == job.command:
            table.setdefault(job.env, {}).setdefault(job.variant, []).append(row)
    return table


def values(rows: list[dict], column: str) -> np.ndarray:
    return np.array([float(row[column]) for row in rows])


def markdown(head: list[str], rows: list[list[str]]) -> str:
    top, *lines = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([top, "|-" * len(head) + "|", *lines])


def heading(env: str, steps: int) -> str:
    name = re.sub(r"-v\d+$", "", env).replace("MountainCarContinuous", "MountainCarC.")
    steps = f"{steps // 1000}k" if steps < 10**6 else f"{steps // 10**6}M"
    return f"{name} {steps}, {THRESHOLD[env]:g}"


def reached(env: str, rows: list[dict], column: str = "greedy") -> str:
    """The median return, and how many runs end at the threshold or above."""
    returns = values(rows, column)
    digits = 2 if env == "FrozenLake-v1" else 0
    above = (returns >= THRESHOLD[env]).sum()
    return f"{np.median(returns):z.{digits}f}, {above} of {len(rows)}"


def defaults_table() -> str:
    """A row for each script: greedy returns, and in training."""
    found = load("defaults")
    steps = studies.DEFAULT_STEPS | studies.FURTHER_STEPS
    lines = []
    for script in ("grpo_rtg.py", "ppo.py"):
        for column, name in (("greedy", "greedy"), ("train_return", "in training")):
            cells = [reached(env, entries[script], column) for env, entries in found.items()]
            lines.append([f"`{script}`, {name}", *cells])
    return markdown(["", *(heading(env, steps[env]) for env in found)], lines)


def tuning_table() -> str:
    """A row for each script and candidate: mean returns greedily and in training, and seeds."""
    found = load("tuning")
    lines = []
    for script in ("grpo_outcome.py", "grpo_process.py", "grpo_rtg.py"):
        for name in studies.CANDIDATES:
            cells = []
            for entries in found.values():
                rows = entries.get(f"{script} {name}")
                means = [values(rows, x).mean() for x in ("greedy", "train_return")] if rows else []
                seeds = f" ({len(rows)})" if rows else "–"
                cells.append(" / ".join(f"{mean:.0f}" for mean in means) + seeds)
            if set(cells) != {"–"}:
                lines.append([f"`{script}`", name, *cells])
    steps = studies.DEFAULT_STEPS
    return markdown(["script", "iteration", *(heading(env, steps[env]) for env in found)], lines)


MAKERS = [defaults_table, tuning_table]
TABLES = {table.__name__.removesuffix("_table"): table for table in MAKERS}


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


if __name__ == "__main__":
    main()
