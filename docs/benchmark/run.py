"""Run a study of studies.py: every setting with every seed, and one CSV of what came out.

    python docs/benchmark/run.py main                            # all, a run on each core
    python docs/benchmark/run.py main --only "Acrobot.* outcome" # whose name this matches
    python docs/benchmark/run.py main --list                     # what has been run and what not
    python docs/benchmark/run.py main --replay 20                # do 20 runs end as they did?

Each run is a process of its own with one thread, started as a user starts it. It can be stopped at
any time and started again: a run that is in the CSV with the same command is not repeated, one
whose flags have changed since is. To make a study anew, delete its CSV.

The CSV, docs/benchmark/results/STUDY.csv, has for each run (environment, variant, seed) the
learning curve, a row for each 25th of the budget: step, train_return (mean over the iterations
since the row before of the mean return of the episodes that ended in each) and eval_return (mean of
10 greedy episodes). The run's last row has at the step where it ended: train_return (mean of the
last 100 training episodes), greedy and sampled (mean of 100 episodes each after training, from the
same starts), seconds of training, the command, the commit of this repository and the versions of
what computed it. A + after the commit: a Python file differed from it.

--replay checks out the commit that a row names, into a temporary folder, and runs the row there.
Where its versions name a kernel of NumPy's OpenBLAS, each of which rounds in its own way, it asks
for that one; SkylakeX needs a processor with AVX-512.
"""

import argparse
import contextlib
import csv
import importlib
import io
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

# for this process and all it starts
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

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
            greedy, sampled = evaluate(job.script, str(run_dir / "model.pt"))
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


def evaluate(script: str, model: str) -> list[str]:
    """Mean return of 100 episodes of a saved policy, greedy and sampled."""
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    module = importlib.import_module(Path(script).stem)
    module.torch.set_num_threads(1)
    policy, args = load_policy(module, model)
    means = []
    nowhere = io.StringIO()  # for what evaluate prints, and its bar
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for greedy in (True, False):
            options = replace(args, eval_episodes=100, greedy=greedy)
            means.append(module.evaluate(policy, options, module.Run.EVAL_SEED).mean())
    return [f"{mean:.6g}" for mean in means]


def load_policy(module, model: str):
    """The policy in a script's model.pt, and the options that it was trained with."""
    args = module.load(model)["args"]
    env = module.make_env(args)
    network = getattr(module, "ActorCritic", module.Policy)
    policy = network(env.observation_space, env.action_space, args)
    module.load(model, {"policy": policy})
    return policy, args


def git(*words) -> str:
    """What a git command in this repository prints; RuntimeError if it fails."""
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout.strip()


def commit() -> str:
    """The commit that is checked out, with a + if a Python file differs from it."""
    changed = git("diff", "--name-only", "HEAD", "--", "*.py")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)


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


def replay(runs: dict[tuple, list[dict]], args: argparse.Namespace) -> bool:
    """Run randomly chosen runs of a CSV again, each with its own commit; whether all agree.

    A run agrees if it ends with the same steps and the same training return, to the last digit.
    What else is in its rows (learning curve, evaluations) is compared, too, and said. Nothing is
    demanded of a run whose commit has a +, or whose kernel this processor lacks.
    """
    short = [rows for rows in runs.values() if float(rows[-1]["seconds"]) <= args.seconds]
    chosen = random.Random(args.seed).sample(short, min(args.replay, len(short)))
    commits = {rows[-1]["commit"].rstrip("+") for rows in chosen}
    ends = Counter()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(args.jobs) as pool:
        trees = {name: stack.enter_context(checkout(name)) for name in commits}
        futures = {}
        for rows in chosen:
            tree = trees[rows[-1]["commit"].rstrip("+")]
            futures[pool.submit(execute_there, tree, rows)] = rows
        for future in as_completed(futures):
            rows = futures[future]
            end = compare(rows, future)
            print(f"{' '.join(key_of(rows))} ({rows[-1]['commit']}): {end}", flush=True)
            ends[end.partition(":")[0]] += 1
    print(f"Of {len(chosen)} runs:", ", ".join(f"{n} {end}" for end, n in ends.items()))
    return "otherwise" not in ends


@contextlib.contextmanager
def checkout(name: str) -> Iterator[Path]:
    """The files of a commit, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, name)
        git("worktree", "add", "--detach", tree, name)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", tree)


EXECUTE = """import json, sys
sys.path.insert(0, "docs/benchmark")
import run
print(json.dumps(run.execute(run.Job(**json.loads(sys.argv[1])))))"""


MULTIPLY = "import numpy; numpy.ones((64, 64)) @ numpy.ones((64, 64))"


class NoKernelError(Exception):
    """The processor cannot run the kernel of OpenBLAS that a row names."""


def execute_there(tree: Path, rows: list[dict]) -> list[dict]:
    """What a commit's own run.py makes of a run, with the kernel of OpenBLAS that it names."""
    env = os.environ.copy()
    if kernel := re.search(r"OpenBLAS (\w+)", rows[-1]["versions"]):
        env["OPENBLAS_CORETYPE"] = kernel[1]
        if subprocess.run([sys.executable, "-c", MULTIPLY], env=env).returncode:
            raise NoKernelError(kernel[0])
    command = [sys.executable, "-c", EXECUTE, json.dumps(asdict(job_of(rows)))]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        raise RuntimeError((errors or [f"status {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def job_of(rows: list[dict]) -> Job:
    """The job that made a run, from its command."""
    command = r"(\S+) --env-id \S+ --total-timesteps (\d+) ?(.*) --seed \d+"
    script, steps, flags = re.fullmatch(command, rows[-1]["command"]).groups()
    env, variant, seed = key_of(rows)
    return Job(env, variant, int(seed), int(steps), script, flags, curve=len(rows) > 1)


def key_of(rows: list[dict]) -> tuple[str, str, str]:
    return rows[-1]["env"], rows[-1]["variant"], rows[-1]["seed"]


def compare(rows: list[dict], future) -> str:
    """How a run ended when it was replayed, in words."""
    try:
        new = future.result()
    except NoKernelError as error:
        return f"not comparable: this processor has no {error}"
    except RuntimeError as error:
        end = f"otherwise: it fails: {error}"
    else:
        end = "as in the CSV"
        if end_of(new) != end_of(rows):
            end = f"otherwise: {end_of(new)} instead of {end_of(rows)}"
        elif [*map(compared, new)] != [*map(compared, rows)]:
            end += ", but not its curve or evaluations"
    if rows[-1]["commit"].endswith("+") and end.startswith("otherwise"):
        return end.replace("otherwise", "not comparable: a file differed from the commit")
    return end


def compared(row: dict) -> dict[str, str]:
    """A row of a CSV, less what differs from run to run."""
    names = [name for name in COLUMNS if name not in ("seconds", "commit", "versions")]
    return {name: str(row.get(name, "")) for name in names}


def end_of(rows: list[dict]) -> tuple[str, str]:
    """Steps and training return of a run."""
    return str(rows[-1]["step"]), rows[-1]["train_return"]


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
    args = parser.parse_args()
    path = RESULTS / f"{args.study}.csv"
    runs = read(path)
    if args.replay:
        named = {key: rows for key, rows in runs.items() if re.search(args.only, " ".join(key))}
        sys.exit(not replay(named, args))
    jobs = [Job(*job) for job in studies.STUDIES[args.study]()]
    missing = [
        job for job in jobs if job.key not in runs or runs[job.key][-1]["command"] != job.command
    ]
    missing = [job for job in missing if not studies.is_over(job.command)]
    todo = [job for job in missing if re.search(args.only, " ".join(job.key))]
    print(
        f"{args.study}: {len(jobs) - len(missing)} of {len(jobs)} runs are in "
        + str(path.relative_to(ROOT))
    )
    if args.list:
        print("\n".join(f"missing: {' '.join(job.key)}" for job in todo))
        return
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
            # read again: another part of the study may be running beside this one
            runs = read(path) | {job.key: rows}
            write(path, runs)
    if failed:
        sys.exit(f"{len(failed)} of {len(todo)} runs failed.")


if __name__ == "__main__":
    main()
