"""Run a study of studies.py: every setting with every seed, a CSV row for each run.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/run.py ladder                         # all, a run on each core
    python docs/benchmark/run.py ladder --only "Acrobot.* PPO"  # whose name this matches
    python docs/benchmark/run.py ladder --list                  # what is missing
    python docs/benchmark/run.py ladder --replay 20             # do 20 rows repeat themselves?

A run is a process with one thread. What is in the CSV with the same command is not run again, so a
study can be stopped and started at any time.

A row of docs/benchmark/results/STUDY.csv: environment, variant and seed; steps of training; greedy,
the mean return of 100 episodes after training, from the same starts in every run; train_return, the
mean of the last 100 training episodes; seconds of training; curve, the mean return of training
episodes in each 25th of the budget; command, commit and versions. A + after the commit: the scripts
differed from it.
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
RESULTS = Path(__file__).parent / "results"
COLUMNS = ["env", "variant", "seed", "steps", "greedy", "train_return", "seconds", "command"]
COLUMNS += ["commit", "versions", "curve"]
POINTS = 25  # of a learning curve


@dataclass(frozen=True)
class Job:
    """One run: what it is called, and the script with its options."""

    env: str
    variant: str
    seed: int
    command: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.env, self.variant, str(self.seed)


def execute(job: Job, root: Path = ROOT) -> dict:
    """Train and evaluate; the row of the CSV, or env, variant, seed and the error."""
    row = {"env": job.env, "variant": job.variant, "seed": job.seed}
    script, *flags = job.command.split()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, root / script, *flags]
        variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
        if done.returncode:  # the other runs go on
            return row | {"error": f"{job.command}: {done.stderr[-2000:]}"}
        [run_dir] = Path(folder, "runs").iterdir()
        curve = training_curve(run_dir, int(flags[flags.index("--total-timesteps") + 1]))
    steps, seconds = re.search(r"Trained ([\d,]+) steps in (\S+) s", done.stdout).groups()
    return row | {
        "steps": int(steps.replace(",", "")),
        "greedy": re.search(r"Greedy evaluation.* return (\S+)", done.stdout)[1],
        "train_return": re.search(r"Training return.*: (\S+)", done.stdout)[1],
        "seconds": seconds,
        "command": job.command,
        "commit": commit(script),
        "versions": versions(),
        "curve": curve,
    }


def training_curve(run_dir: Path, steps: int) -> str:
    """Mean training return in each 25th of the budget; where no episode ended, the one before."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = {"charts/episodic_return", "rollout/ep_rew_mean"}  # ours, SB3's
    [tag] = tags.intersection(events.Tags()["scalars"])
    logged = events.Scalars(tag)
    at = np.array([point.step for point in logged])
    values = np.array([point.value for point in logged])
    means = []
    for end in np.linspace(0, steps, POINTS + 1)[1:]:
        here = values[(at > end - steps / POINTS) & (at <= end)]
        means.append(here.mean() if len(here) else means[-1] if means else np.nan)
    return " ".join(f"{value:.5g}" for value in means)


def git(*words) -> str:
    """What a git command in this repository prints; RuntimeError if it fails."""
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout.strip()


def commit(script: str) -> str:
    """The commit that is checked out, with a + if the script differs from it."""
    changed = git("status", "--porcelain", "--", script, "grpo_rtg.py")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)


def versions() -> str:
    """What computed a row; at the end instructions and processor, for each kind rounds anew."""
    names = [f"{name} {version(name)}" for name in ("torch", "gymnasium", "numpy")]
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.findall(r"^(?:vendor_id|cpu family|model)\s*: (\S+)", cpuinfo, re.MULTILINE)[:3]
    names += [torch.backends.cpu.get_cpu_capability(), " ".join(cpu) or platform.machine()]
    return ", ".join([f"Python {platform.python_version()}", *names])


def read(path: Path) -> dict[tuple, dict]:
    """The rows of a CSV by environment, variant and seed."""
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        return {(row["env"], row["variant"], row["seed"]): row for row in csv.DictReader(file)}


def write(path: Path, rows: dict[tuple, dict], columns: list[str] = COLUMNS) -> None:
    """Write a CSV in the order of its keys, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        for key in sorted(rows, key=lambda key: (key[0], key[1], int(key[2]))):
            table.writerow(rows[key])
    part.replace(path)


def run_all(jobs: list[Job], path: Path, processes: int) -> int:
    """Run what is to be run and add it to the CSV; how many runs failed."""
    failed = 0
    with ThreadPoolExecutor(processes) as pool:
        ends = [pool.submit(execute, job) for job in jobs]
        for end in tqdm(as_completed(ends), total=len(jobs), unit=" runs"):
            row = end.result()
            if "error" in row:
                failed += 1
                tqdm.write(row["error"])
                continue
            tqdm.write("{env} {variant} {seed}: greedy {greedy}, {seconds} s".format(**row))
            rows = read(path)  # anew, for another part may be running beside this one
            write(path, rows | {(row["env"], row["variant"], str(row["seed"])): row})
    return failed


def replay(rows: list[dict], processes: int) -> bool:
    """Run rows again, each with the scripts of its own commit; whether all end as they did."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        for name in {row["commit"].rstrip("+") for row in rows}:
            git("worktree", "add", "--detach", f"{folder}/{name}", name)

        def again(row: dict) -> str:
            if not versions().startswith(row["versions"]):  # older rows name no processor
                return f"not comparable: made with {row['versions']}"
            if row["commit"].endswith("+"):
                return "not comparable: the script differed from the commit"
            job = Job(row["env"], row["variant"], row["seed"], row["command"])
            new = execute(job, Path(folder, row["commit"]))
            names = ("steps", "greedy", "train_return", "curve")
            if all(str(new.get(name)) == row[name] for name in names):
                return "as in the CSV"
            pairs = [f"{name} {new.get(name)}, was {row[name]}" for name in names[:3]]
            end = new.get("error") or "; ".join(pairs)
            if row["versions"] != versions():
                return f"not comparable, perhaps another processor: {end}"
            return f"otherwise: {end}"

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
    list: bool = False  # say what is missing, run nothing
    replay: int = 0  # run so many of the rows again
    seed: int = 1  # with --replay: chooses the rows


def main() -> None:
    args = tyro.cli(Options, description=__doc__)
    path = RESULTS / f"{args.study}.csv"
    rows = read(path)
    if args.replay:
        named = [row for key, row in rows.items() if re.search(args.only, " ".join(key))]
        chosen = random.Random(args.seed).sample(named, min(args.replay, len(named)))
        minutes = sum(float(row["seconds"]) for row in chosen) / args.jobs / 60
        print(f"{len(chosen)} runs, which took {minutes:.0f} minutes when the CSV was made")
        sys.exit(not replay(chosen, args.jobs))
    jobs = [Job(*job) for job in studies.STUDIES[args.study]()]
    missing = [job for job in jobs if rows.get(job.key, {}).get("command") != job.command]
    todo = [job for job in missing if re.search(args.only, " ".join(job.key))]
    print(f"{args.study}: {len(jobs) - len(missing)} of {len(jobs)} runs are in {path.name}")
    if args.list:
        print("\n".join(f"missing: {' '.join(job.key)}" for job in todo))
        return
    if failed := run_all(todo, path, args.jobs):
        sys.exit(f"{failed} of {len(todo)} runs failed.")


if __name__ == "__main__":
    main()
