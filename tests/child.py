"""Small runs, in this process or in one forked from a server that has torch loaded."""

import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parent.parent
SCRIPTS = ["grpo_outcome", "grpo_process", "grpo_rtg", "ppo"]
both_kinds = pytest.mark.parametrize("script", ["grpo_rtg", "ppo"])  # which differ in more than Â
# A run of a few iterations, a fifth of a second long.
TINY = {"total_timesteps": 400, "env_kwargs": '{"max_episode_steps": 20}', "hidden_size": 8}
TINY |= {"update_epochs": 2, "minibatch_size": 64, "eval_episodes": 2}
TINY = dict.fromkeys(SCRIPTS, TINY | {"num_groups": 1, "group_size": 4}) | {
    "ppo": TINY | {"num_envs": 4, "num_steps": 16}
}


def env(name: str, **kwargs) -> dict:
    """Options of a run in an environment of tests/envs.py."""
    return {"env_id": f"tests.envs:{name}-v0", "env_kwargs": json.dumps(kwargs)}


def train(script: str, **options):
    """A whole run in this process; returns the Run."""
    module = importlib.import_module(script)
    return module.train(module.Args(**TINY[script] | options))


def main(module, *words, **options) -> None:
    """What the command line does with these options."""
    sys.argv = [f"{module.__name__}.py", *words]
    for name, value in options.items():
        flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        sys.argv += [flag] if isinstance(value, bool) else [flag, str(value)]
    module.main()


def start(target, script: str, environ: dict, **options):
    """A process that calls target with the script, loaded where this is the environment."""
    os.environ["PYTHONPATH"] = str(ROOT)  # for the server, which else cannot preload from here
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.child", *SCRIPTS])
    process = context.Process(target=_call, args=(target, script, os.getcwd(), environ, options))
    process.start()
    return process


def _call(target, script: str, folder: str, environ: dict, options: dict) -> None:
    os.chdir(folder)
    os.environ |= environ
    target(importlib.reload(importlib.import_module(script)), **options)


def only_run() -> Path:
    [run_dir] = Path("runs").iterdir()
    return run_dir


def weights(run) -> dict:
    return run.saved["policy"].cpu().state_dict()


def curves(run_dir: Path) -> dict:
    """The points {step: value} of each curve."""
    # TensorBoard reads them by name, which tells only the second in which they were made
    for number, path in enumerate(sorted(run_dir.glob("events.*"), key=os.path.getmtime)):
        path.rename(run_dir / f"events.tfevents.{number}")
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    values = {tag: {point.step: point.value for point in some} for tag, some in points.items()}
    twice = {tag for tag, some in points.items() if len(some) > len(values[tag])}
    assert twice <= {"eval/episodic_return"}  # of an iteration that is evaluated and the last one
    return values


def equal(one, other) -> bool:
    """Whether nested containers are equal, tensors to the bit."""
    one, other = tree_leaves(one), tree_leaves(other)
    return len(one) == len(other) and all(map(np.array_equal, one, other))
