"""Run scripts in processes forked from one that has torch loaded (0.1 s); read what they leave."""

import importlib
import json
import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
SCRIPTS = ["grpo_outcome", "grpo_process", "grpo_rtg", "ppo"]
both_kinds = pytest.mark.parametrize("script", ["grpo_rtg", "ppo"])  # which differ in more than Â
# A run of a few iterations, a fifth of a second long.
TINY = ["--total-timesteps", 400, "--max-episode-steps", 20, "--hidden-size", 8]
TINY += ["--update-epochs", 2, "--minibatch-size", 64, "--eval-episodes", 2]
GROUPS = ["--num-groups", 1, "--group-size", 4]
TINY = {script: [*TINY, *GROUPS] for script in SCRIPTS[:3]} | {
    "ppo": [*TINY, "--num-envs", 4, "--num-steps", 16]
}


def env(name: str, **kwargs) -> list:
    """Options of a run in an environment of tests/envs.py."""
    return ["--env-id", f"tests.envs:{name}-v0", "--env-kwargs", json.dumps(kwargs)]


def _main(script: str, argv: list[str], folder: str, file_limit: int | None, environ: dict) -> None:
    os.chdir(folder)
    os.environ |= environ
    rank = environ.get("RANK", "")
    for descriptor, name in ((1, f"out{rank}.txt"), (2, f"err{rank}.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    sys.argv = [f"{script}.py", *argv]
    importlib.reload(importlib.import_module(script)).main()  # it reads RANK and WORLD_SIZE


def context():
    """Of multiprocessing: its processes have the scripts loaded."""
    os.environ["PYTHONPATH"] = str(ROOT)  # for the server, which else cannot preload from here
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.child", *SCRIPTS])
    return context


def start(script: str, *argv, folder, file_limit: int | None = None, environ=None):
    """A running process; what it prints goes to out.txt and err.txt (out0.txt, …) in folder.

    No file it writes exceeds file_limit.
    """
    args = (script, [str(x) for x in argv], str(folder), file_limit, environ or {})
    process = context().Process(target=_main, args=args)
    process.start()
    return process


def run(script: str, *argv, folder, **kwargs) -> int:
    """Exit status of a whole run."""
    process = start(script, *argv, folder=folder, **kwargs)
    process.join()
    return process.exitcode


def only_run(folder=".") -> Path:
    """The folder of the only run that was started in a folder."""
    [run_dir] = Path(folder, "runs").iterdir()
    return run_dir


def read(path) -> dict:
    return torch.load(path, weights_only=True)


def iteration_in(folder) -> int:
    """Of the checkpoint of the run in this folder; -1 before there is one."""
    checkpoints = list(Path(folder).glob("runs/*/checkpoint.pt"))
    return read(checkpoints[0])["progress"]["iteration"] if checkpoints else -1


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def wait_for_iteration(iteration: int, process, folder) -> None:
    """Until the run in this folder has saved it, or its process has ended."""
    wait_for(lambda: iteration_in(folder) >= iteration or not process.is_alive())


def curves(run_dir: Path) -> dict:
    """The points {step: value} of each curve."""
    # TensorBoard reads files by name, which has the second, the process and a count of its
    # files: 10 before 9
    for path in run_dir.glob("events.*"):
        start, process, count = path.name.rsplit(".", 2)
        path.rename(path.with_name(f"{start}.{process:0>9}.{count:0>9}"))
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    values = {tag: {point.step: point.value for point in some} for tag, some in points.items()}
    twice = {tag for tag, some in points.items() if len(some) > len(values[tag])}
    assert twice <= {"eval/episodic_return"}  # of a run killed when the last one had just been made
    return values


def contents(run_dir: Path) -> dict:
    """Every state in the run's files and every point of its curves, less times and options."""
    files = {name: read(run_dir / f"{name}.pt") for name in ("model", "best", "checkpoint")}
    for states in files.values():
        del states["args"]
    del files["checkpoint"]["progress"]["seconds"]
    points = curves(run_dir)
    del points["charts/SPS"]
    return files | {"curves": points}


def equal(one, other) -> bool:
    """Whether nested containers are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other
