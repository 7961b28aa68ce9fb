"""Run a study of studies.py: every setting with every seed, a CSV row for each run.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/run.py ladder                         # all, a run on each core
    python docs/benchmark/run.py ladder --only "Acrobot.* PPO"  # whose name this matches
    python docs/benchmark/run.py ladder --replay 20             # do 20 rows repeat themselves?

A run is a process with one thread. What is in the CSV with the same command is not run again, so a
study can be stopped and started at any time.

A row of docs/benchmark/results/STUDY.csv: environment, variant and seed; steps of training; greedy,
the mean return of 100 episodes after training, from the same starts in every run; train_return, the
mean of the last 100 training episodes; seconds of training; curve, the mean return of training
episodes in each 25th of the budget; command, commit and versions. The scripts must be as committed.
"""

import csv
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import studies
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
POINTS = 25  # of a learning curve


def execute(key: tuple[str, str, str], command: str, root: Path = ROOT) -> dict:
    """Train and evaluate; the row of the CSV."""
    script, *flags = command.split()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, root / script, *flags]
        variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
        [run_dir] = Path(folder, "runs").iterdir()
        curve = training_curve(run_dir, int(flags[flags.index("--total-timesteps") + 1]))
    steps, seconds = re.search(r"Trained ([\d,]+) steps in (\S+) s", done.stdout).groups()
    return {
        **dict(zip(("env", "variant", "seed"), key)),
        "steps": steps.replace(",", ""),
        "greedy": re.search(r"Greedy evaluation.* return (\S+)", done.stdout)[1],
        "train_return": re.search(r"Training return.*: (\S+)", done.stdout)[1],
        "seconds": seconds,
        "command": command,
        "commit": git("rev-parse", "--short", "HEAD"),
        "versions": versions(),
        "curve": curve,
    }


def training_curve(run_dir: Path, steps: int) -> str:
    """Mean training return in each 25th of the budget; where no episode ended, the one before."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = {"charts/episodic_return", "rollout/ep_rew_mean"}  # ours, SB3's
    [tag] = tags.intersection(events.Tags()["scalars"])
    at, values = np.array([(point.step, point.value) for point in events.Scalars(tag)]).T
    means = []
    for end in np.linspace(0, steps, POINTS + 1)[1:]:
        here = values[(at > end - steps / POINTS) & (at <= end)]
        means.append(here.mean() if len(here) else means[-1] if means else np.nan)
    return " ".join(f"{value:.5g}" for value in means)


def git(*words) -> str:
    """What a git command in this repository prints."""
    return subprocess.check_output(["git", "-C", ROOT, *words], text=True).strip()


def versions() -> str:
    """What computed a row; at the end instructions and processor, for each kind rounds anew."""
    names = [f"{name} {version(name)}" for name in ("torch", "gymnasium", "numpy")]
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.findall(r"^(?:vendor_id|cpu family|model)\s*: (\S+)", cpuinfo, re.MULTILINE)[:3]
    names += [torch.backends.cpu.get_cpu_capability(), " ".join(cpu) or platform.machine()]
    return ", ".join([f"Python {platform.python_version()}", *names])


def add(study: str, row: dict) -> None:
    """Add a row to a CSV, or replace it, in the order of its keys; whole or not at all."""
    rows = studies.read(study)  # anew, for another part may be running beside this one
    rows[row["env"], row["variant"], row["seed"]] = row
    part = studies.RESULTS / f"{study}.part"
    with open(part, "w", newline="") as file:
        table = csv.DictWriter(file, list(row), lineterminator="\n")
        table.writeheader()
        for key in sorted(rows, key=lambda key: (key[0], key[1], int(key[2]))):
            table.writerow(rows[key])
    part.replace(part.with_suffix(".csv"))


def run_all(jobs: dict[tuple, str], study: str, processes: int) -> int:
    """Run what is to be run and add it to the CSV; how many runs failed."""
    failed = 0
    with ThreadPoolExecutor(processes) as pool:
        ends = [pool.submit(execute, *job) for job in jobs.items()]
        for end in tqdm(as_completed(ends), total=len(jobs), unit=" runs"):
            if error := end.exception():  # the other runs go on
                failed += 1
                tqdm.write(str(error))
                continue
            row = end.result()
            tqdm.write("{env} {variant} {seed}: greedy {greedy}, {seconds} s".format(**row))
            add(study, row)
    return failed


def replay(rows: list[dict], processes: int) -> bool:
    """Run rows again, each with the scripts of its own commit; whether all end as they did."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        for name in {row["commit"] for row in rows}:
            git("worktree", "add", "--detach", f"{folder}/{name}", name)

        def again(row: dict) -> str:
            if not versions().startswith(row["versions"]):  # older rows name no processor
                return f"not comparable: made with {row['versions']}"
            key = row["env"], row["variant"], row["seed"]
            try:
                new = execute(key, row["command"], Path(folder, row["commit"]))
            except RuntimeError as error:
                return f"otherwise: {error}"
            names = ("steps", "greedy", "train_return", "curve")
            changed = [f"{x} {new[x]}, was {row[x]}" for x in names if new[x] != row[x]]
            if not changed:
                return "as in the CSV"
            verdict = "otherwise" if row["versions"] == versions() else "another processor?"
            return f"{verdict}: {'; '.join(changed)}"

        ends = [*pool.map(again, rows)]
    git("worktree", "prune")
    for row, end in zip(rows, ends):
        print(f"{row['env']} {row['variant']} {row['seed']} ({row['commit']}): {end}")
    print(f"{ends.count('as in the CSV')} of {len(ends)} rows end as in the CSV.")
    return not any(end.startswith("otherwise") for end in ends)


@dataclass
class Options:
    study: tyro.conf.Positional[Literal[tuple(studies.STUDIES)]]
    jobs: int = os.cpu_count()  # runs side by side
    only: str = ""  # regular expression that 'environment variant seed' must match
    replay: int = 0  # run so many of the rows again


def main() -> None:
    args = tyro.cli(Options, description=__doc__)
    rows = studies.read(args.study)
    if args.replay:
        named = [row for key, row in rows.items() if re.search(args.only, " ".join(key))]
        chosen = random.sample(named, min(args.replay, len(named)))
        minutes = sum(float(row["seconds"]) for row in chosen) / args.jobs / 60
        print(f"{len(chosen)} runs, which took {minutes:.0f} minutes when the CSV was made")
        sys.exit(not replay(chosen, args.jobs))
    scripts = ("grpo_*.py", "ppo.py", "docs/examples", "docs/benchmark/sb3.py")
    if git("status", "--porcelain", "--", *scripts):
        sys.exit("Commit the scripts: a row names the commit that it is of.")
    jobs = studies.jobs(args.study)
    missing = {key: jobs[key] for key in jobs if rows.get(key, {}).get("command") != jobs[key]}
    print(f"{args.study}: {len(jobs) - len(missing)} of {len(jobs)} runs are in its CSV")
    todo = {key: missing[key] for key in missing if re.search(args.only, " ".join(key))}
    if failed := run_all(todo, args.study, args.jobs):
        sys.exit(f"{failed} of {len(todo)} runs failed.")


if __name__ == "__main__":
    main()
