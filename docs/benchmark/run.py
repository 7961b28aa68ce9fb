"""Run a study of studies.py: every setting with every seed, and one CSV of what came out.

    python docs/benchmark/run.py main                            # all, a run on each core
    python docs/benchmark/run.py main --only "Acrobot.* outcome" # whose name this matches
    python docs/benchmark/run.py main --list                     # what has been run and what not
    python docs/benchmark/run.py main --replay 20                # do 20 runs end as they did?

Each run is a process of its own with one thread, started as a user starts it. It can be stopped at
any time and started again: a run that is in the CSV with the same command is not repeated, one
whose flags have changed since is.

The CSV, docs/benchmark/results/STUDY.csv, has for each run (environment, variant, seed) the
learning curve, a row for each 25th of the budget: step, train_return (mean over the iterations
since the row before of the mean return of the episodes that ended in each) and eval_return (mean of
10 greedy episodes). The run's last row has at the step where it ended: train_return (mean of the
last 100 training episodes), greedy and sampled (mean of 100 episodes each after training, from the
same starts), seconds of training, the command, the commit of this repository and the versions of
what computed it, with the kernel of NumPy's OpenBLAS.
"""

import argparse
import contextlib
import csv
import importlib
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

# for this process and all it starts
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
# NumPy's OpenBLAS rounds as the processor's kernel does: one that all with AVX2 have
os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
COLUMNS = ["env", "variant", "seed", "step", "train_return", "eval_return"]
COLUMNS += ["greedy", "sampled", "seconds", "command", "commit", "versions"]
POINTS = 25  # of a learning curve


@dataclass(frozen=True)
class Job:
    """One run: a script and its flags on an environment, with a seed; curve asks for evaluations
    during training.
    """

    env: str
    variant: str
    seed: int
    steps: int
    script: str
    flags: str
    curve: bool = True

    @property
    def command(self) -> str:
        command = f"{self.script} --env-id {self.env} --total-timesteps {self.steps}"
        command += f" {self.flags} --seed {self.seed}"
        return " ".join(command.split())

    @property
    def env_id(self) -> str:
        ids = re.findall(r"--env-id (\S+)", self.command)
        return ids[-1]  # that of the flags overrides the job's

    @property
    def trained(self) -> str:
        """The script that trains: first_std.py has it among its flags."""
        return re.findall(r"\S+\.py", self.command)[-1]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.env, self.variant, str(self.seed)


def execute(job: Job) -> list[dict]:
    """Train in a process of its own, then evaluate what it saved: the rows of the CSV. RuntimeError
    if it fails.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    width = job.steps // POINTS
    command = [sys.executable, ROOT / job.script, *job.command.split()[1:], "--eval-episodes", "10"]
    command += ["--eval-interval", str(width)] if job.curve else []
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{job.command} ended with status {done.returncode}: {done.stderr[-1000:]}"
            )
        [run_dir] = Path(folder, "runs").iterdir()
        try:
            greedy, sampled = evaluate(job.trained, job.env_id, str(run_dir / "model.pt"))
        except Exception as error:  # a script's own error cannot be unpickled
            raise RuntimeError(
                f"{job.command} trained, but could not be evaluated: {error}"
            ) from error
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
        logged = set(events.Tags()["scalars"])
        train, evaluations = (
            [(point.step, point.value) for point in events.Scalars(tag)] if tag in logged else []
            for tag in ("charts/episodic_return", "eval/episodic_return")
        )
    base = {"env": job.env, "variant": job.variant, "seed": job.seed}
    rows = []
    for step in range(width, job.steps + 1, width) if job.curve else ():
        seen = {}
        for name, curve in (("train_return", train), ("eval_return", evaluations)):
            past = [(at, value) for at, value in curve if at <= step]
            values = [value for at, value in past if at > step - width] or [
                value for _, value in past[-1:]
            ]
            seen |= {name: f"{mean(values):.6g}"} if values else {}
        rows.append(base | {"step": step} | seen)
    steps, seconds = re.search(r"Trained ([\d,]+) steps in (\S+) s", done.stdout).groups()
    last = re.search(r"Training return, last 100 episodes: (\S+)", done.stdout)[1]
    versions = [f"{name} {version(name)}" for name in ("torch", "gymnasium", "numpy")]
    versions.append(f"OpenBLAS {os.environ['OPENBLAS_CORETYPE']}")
    rows.append(
        base
        | {
            "step": int(steps.replace(",", "")),
            "train_return": last,
            "greedy": greedy,
            "sampled": sampled,
        }
        | {"seconds": seconds, "command": job.command, "commit": commit()}
        | {"versions": ", ".join([f"Python {platform.python_version()}", *versions])}
    )
    return rows


def evaluate(script: str, env_id: str, model: str) -> list[str]:
    """Mean return of 100 episodes of a saved policy, greedy and sampled."""
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    module = importlib.import_module(Path(script).stem)
    module = vars(module).get("grpo_rtg", module)  # which neighbor_choices.py runs
    module.torch.set_num_threads(1)
    policy, args = load_policy(module, model, env_id)
    returns = []
    for greedy in (True, False):
        with contextlib.redirect_stdout(None):  # what evaluate prints
            options = replace(args, eval_episodes=100, greedy=greedy)
            returns.append(f"{module.evaluate(policy, options).mean():.6g}")
    return returns


def load_policy(module, model: str, env_id: str):
    """The policy in a script's model.pt, and the options that it was trained with."""
    args, states = module.load(model, env_id)
    env = module.make_env(args.env_id)
    network = module.ActorCritic if hasattr(module, "ActorCritic") else module.Policy
    policy = network(env.observation_space, env.action_space, args.hidden_size, args.norm_obs)
    policy.load_state_dict(states["policy"])
    return policy, args


def commit() -> str:
    """The commit that is checked out, with a + if a script differs from it."""
    git = ["git", "-C", str(ROOT)]
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"]).returncode
    head = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return head + "+" * bool(changed)


def read(path: Path) -> dict[tuple, list[dict]]:
    """The rows of each whole run in a CSV; a run whose last row is missing was being written when
    the power failed.
    """
    runs = {}
    if path.exists():
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                runs.setdefault((row["env"], row["variant"], row["seed"]), []).append(row)
    return {key: rows for key, rows in runs.items() if rows[-1]["versions"]}


def write(path: Path, runs: dict[tuple, list[dict]]) -> None:
    """Write a CSV in the order of its keys, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".part"), "w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for _, rows in sorted(runs.items(), key=lambda item: (*item[0][:2], int(item[0][2]))):
            table.writerows(rows)
    path.with_suffix(".part").replace(path)


def replay(jobs: list[Job], runs: dict, args: argparse.Namespace) -> bool:
    """Run randomly chosen runs of a CSV again; whether all agree.

    A run agrees if it ends with the same steps and the same training return, to the last digit.
    What else is in its rows (learning curve, evaluations) is compared, too, and said. Each is run
    with the kernel of OpenBLAS that its row names. One that does not agree with the CSV may still
    agree with that of the checkout in args.against on this machine.
    """
    current = [job for job in jobs if runs.get(job.key, [{}])[-1].get("command") == job.command]
    short = [job for job in current if float(runs[job.key][-1]["seconds"]) <= args.seconds]
    chosen = random.Random(args.seed).sample(short, min(args.replay, len(short)))
    ends = {"as in the CSV": 0}
    kernels = {job: kernel_of(runs[job.key]) for job in chosen}
    for kernel in sorted(set(kernels.values())):
        os.environ["OPENBLAS_CORETYPE"] = kernel  # a pool's processes inherit it
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            these = [job for job in chosen if kernels[job] == kernel]
            futures = {pool.submit(execute, job): job for job in these}
            for future in as_completed(futures):
                job, rows = futures[future], [compared(row) for row in future.result()]
                old = [compared(row) for row in runs[job.key]]
                changed = ", but not its curve or evaluations" if rows != old else ""
                end = f"as in the CSV{changed}"
                if end_of(rows) != end_of(old):
                    end = f"otherwise: {end_of(rows)} instead of {end_of(old)}"
                    again = pool.submit(ended, job, args.against) if args.against else None
                    if again and again.result() == end_of(rows):
                        end = f"as with {args.against}, not as in the CSV"
                print(f"{' '.join(job.key)}: {end}", flush=True)
                ends[end.partition(":")[0]] = ends.get(end.partition(":")[0], 0) + 1
    print(f"Of {len(chosen)} runs end", ", ".join(f"{n} {end}" for end, n in ends.items()))
    return "otherwise" not in ends


def compared(row: dict) -> dict[str, str]:
    """A row of a CSV, less what differs from run to run."""
    names = [name for name in COLUMNS if name not in ("seconds", "commit", "versions")]
    return {name: str(row.get(name, "")) for name in names}


def kernel_of(rows: list[dict]) -> str:
    """The kernel of OpenBLAS with which a run was made."""
    return re.search(r"OpenBLAS (\w+)", rows[-1]["versions"])[1]


def end_of(rows: list[dict]) -> tuple[str, str]:
    """Steps and training return of a run."""
    return rows[-1]["step"], rows[-1]["train_return"]


def ended(job: Job, checkout: Path) -> tuple[str, str]:
    """Steps and training return that the script of another checkout prints."""
    command = [sys.executable, Path(checkout).resolve() / job.script, *job.command.split()[1:]]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--eval-episodes", "1"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    steps = re.search(r"Trained ([\d,]+) steps", done.stdout)[1].replace(",", "")
    return steps, re.search(r"Training return, last 100 episodes: (\S+)", done.stdout)[1]


def main() -> None:
    import studies

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=studies.STUDIES)
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="runs side by side (default: one per core)"
    )
    parser.add_argument(
        "--only", default="", help="regular expression that 'environment variant seed' must match"
    )
    parser.add_argument("--list", action="store_true", help="say what has been run, run nothing")
    parser.add_argument(
        "--replay", type=int, metavar="N", help="run N of the rows again and compare"
    )
    parser.add_argument("--seed", type=int, default=1, help="with --replay: chooses the rows")
    parser.add_argument(
        "--seconds", type=float, default=120, help="with --replay: of short runs only"
    )
    parser.add_argument("--against", help="with --replay: another checkout, for rows that differ")
    args = parser.parse_args()
    path = RESULTS / f"{args.study}.csv"
    runs, jobs = read(path), [Job(*job) for job in studies.STUDIES[args.study]()]
    missing = [
        job for job in jobs if job.key not in runs or runs[job.key][-1]["command"] != job.command
    ]
    todo = [job for job in missing if re.search(args.only, " ".join(job.key))]
    print(
        f"{args.study}: {len(jobs) - len(missing)} of {len(jobs)} runs are in "
        + str(path.relative_to(ROOT))
    )
    if args.list:
        print("\n".join(f"missing: {' '.join(job.key)}" for job in todo))
        return
    if args.replay:
        chosen = [job for job in jobs if re.search(args.only, " ".join(job.key))]
        sys.exit(not replay(chosen, runs, args))
    failed = []
    with (
        ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool,
        tqdm(
            total=sum(job.steps for job in todo), unit=" steps", unit_scale=True, smoothing=0.1
        ) as bar,
    ):
        futures = {pool.submit(execute, job): job for job in todo}
        for future in as_completed(futures):
            job = futures[future]
            bar.update(job.steps)
            try:
                rows = future.result()
            except RuntimeError as error:
                failed.append(str(error))
                bar.write(failed[-1])
                continue
            bar.write(
                "{env} {variant} {seed}: greedy {greedy}, sampled {sampled}, {seconds} s".format(
                    **rows[-1]
                )
            )
            runs = read(path) | {
                job.key: rows
            }  # read again: another part of the study may be running beside this one
            write(path, runs)
    if failed:
        sys.exit(f"{len(failed)} of {len(todo)} runs failed.")


if __name__ == "__main__":
    main()
