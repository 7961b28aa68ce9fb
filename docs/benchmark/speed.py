"""Seconds: beside other libraries, and on a GPU.

    pip install -r docs/benchmark/requirements.txt
    export CLEANRL=/checkout/of/cleanrl CLEANRL_PYTHON=/python/that/can/run/it
    python docs/benchmark/speed.py seconds
    python docs/benchmark/speed.py gpu

seconds: until the mean return of 100 training episodes in a row is the threshold, counted from the
first environment step; start-up before it, and peak memory until then. With nothing but the
environment's name and the steps: grpo_rtg.py and ppo.py, SB3's PPO with its defaults and with
RL-Zoo's settings, and CleanRL, whose interpreter needs Gymnasium 0.29 (so LunarLander-v2 and
HalfCheetah-v4). On HalfCheetah ours have the ladder's settings; on dispatching ours have
--norm-obs, and SB3 VecNormalize with ppo.py's settings. Two runs at a time, one thread each. A row
of results/seconds.csv names its day.

gpu: one pass over minibatches of 64 steps an iteration, and a learning rate of next to nothing, so
that all runs have the same short episodes (about 22 steps); with and without --cuda, side by side.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import run
import studies
import torch
import tyro
from report import GOALS
from studies import DISPATCH, SECONDS_STEPS

# hyperparams/ppo.yml of github.com/DLR-RM/rl-baselines3-zoo at 22e3ff2 (April 2026)
ZOO = {
    "CartPole-v1": {"n_envs": 8, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98}
    | {"n_epochs": 20, "ent_coef": 0.0, "learning_rate": "0.001", "clip_range": "0.2"},
    "Acrobot-v1": {"normalize": True, "n_envs": 16, "n_steps": 256, "gae_lambda": 0.94}
    | {"gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0},
    "Pendulum-v1": {"n_envs": 4, "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10}
    | {"ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2}
    | {"use_sde": True, "sde_sample_freq": 4},
    "LunarLander-v3": {"n_envs": 16, "n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98}
    | {"gamma": 0.999, "n_epochs": 4, "ent_coef": 0.01},
    "HalfCheetah-v5": {"normalize": True, "n_envs": 1, "n_steps": 512, "batch_size": 64}
    | {"gamma": 0.98, "gae_lambda": 0.92, "n_epochs": 20, "learning_rate": 2.0633e-05}
    | {"ent_coef": 0.000401762, "clip_range": 0.1, "max_grad_norm": 0.8, "vf_coef": 0.58096}
    | {"policy_kwargs": {"log_std_init": -2, "ortho_init": False, "net_arch": [256, 256]}},
    DISPATCH: studies.SB3,
}
# CleanRL and SB3's defaults were not chosen for an environment.
LONGEST = {"CleanRL": 600, "SB3, defaults": 600}  # seconds; 1200 elsewhere


def commands(env_id: str, seed: str) -> dict[str, list[str]]:
    """Who trains, and what runs it."""
    steps = str(SECONDS_STEPS[env_id])
    flags = ["--env-id", "metered:Env-v0", "--total-timesteps", steps, "--seed", seed]
    found = {}
    for variant in ("timestep", "PPO"):
        line = studies.VARIANTS[variant] + " --norm-obs" * (env_id == DISPATCH)
        if env_id == "HalfCheetah-v5":
            line = studies.tuned(env_id, variant)
        script, *own = line.split()
        found[script] = [sys.executable, f"{run.ROOT}/{script}", *own, *flags]
    for name, settings in (("SB3, RL-Zoo's settings", ZOO[env_id]), ("SB3, defaults", {})):
        sb3_flags = [*flags, "--settings", json.dumps(settings)]
        found[name] = [sys.executable, f"{run.ROOT}/docs/benchmark/sb3.py", *sb3_flags]
    if "CLEANRL" in os.environ:
        continuous = env_id in ("Pendulum-v1", "HalfCheetah-v5")
        script = "ppo_continuous_action.py" if continuous else "ppo.py"
        script = f"{os.environ['CLEANRL']}/cleanrl/{script}"
        found["CleanRL"] = [os.environ["CLEANRL_PYTHON"], script, *flags]
    if env_id == DISPATCH:  # without VecNormalize there is nothing to compare
        found = {name: found[name] for name in found if name not in LONGEST}
    return found


def measure(env_id: str, entry: str, seed: str, command: list[str]) -> dict:
    """The row of a run in a process and a folder of its own, as metered.py notes it."""
    meter = {"env_id": env_id, "steps": SECONDS_STEPS[env_id], "threshold": GOALS[env_id]}
    meter["longest"] = LONGEST.get(entry, 1200)
    if entry == "CleanRL":
        older = {"LunarLander-v3": "LunarLander-v2", "HalfCheetah-v5": "HalfCheetah-v4"}
        meter["env_id"] = older.get(env_id, env_id)
    modules = f"{Path(__file__).parent}{os.pathsep}{run.ROOT}"
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": modules}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "noted.json")
        variables["METER"] = json.dumps(meter | {"path": str(path), "spawned": time.time()})
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{entry} on {env_id}: {done.stderr[-2000:]}")
        noted = json.loads(path.read_text())
    noted = {name: round(value, 1) for name, value in noted.items()}
    return {"env": env_id, "variant": entry, "seed": seed} | noted | {"day": date.today()}


def seconds() -> None:
    """How long each library takes to reach the threshold."""
    done = studies.read("seconds")
    jobs = []
    for env_id, seed in product(SECONDS_STEPS, ("1", "2")):
        jobs += [(env_id, entry, seed, line) for entry, line in commands(env_id, seed).items()]
    jobs = [job for job in jobs if job[:3] not in done]
    jobs.sort(key=lambda job: job[1] in LONGEST)  # the slow ones last
    with ThreadPoolExecutor(2) as pool:
        for end in as_completed([pool.submit(measure, *job) for job in jobs]):
            run.add("seconds", end.result())


def rate(width: int, groups: int, seed: int, device: str) -> float:
    """Steps per second of a run of grpo_rtg.py that learns nothing, of some iterations at least."""
    steps = max(20_000 if width == 64 else 4_000, groups * 16 * 120)
    flags = f"--hidden-size {width} --num-groups {groups} --group-size 16 --seed {seed} {device}"
    flags += f" --total-timesteps {steps} --minibatch-size 64 --update-epochs 1"
    flags += " --learning-rate 1e-9 --no-anneal-lr --eval-episodes 1"
    command = [sys.executable, f"{run.ROOT}/grpo_rtg.py", *flags.split()]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return float(re.search(r"\((\S+) steps/s\)", done.stdout)[1].replace(",", ""))


def gpu() -> None:
    """Steps per second with and without a GPU."""
    if not torch.cuda.is_available():
        sys.exit("speed.py: torch finds no GPU.")
    print(f"{torch.cuda.get_device_name()}, one thread of the CPU\n")
    print("| width | groups of 16 | --no-cuda, steps/s | --cuda, steps/s | ratio |")
    print("|-|-|-|-|-|")
    for width, groups in product((64, 256, 1024), (1, 8, 64)):
        pairs = []
        for seed in (1, 2, 3):  # side by side, each with a core of its own
            with ThreadPoolExecutor(2) as pool:
                run_on = partial(rate, width, groups, seed)
                pairs.append([*pool.map(run_on, ("--no-cuda", "--cuda"))])
        on_cpu, on_gpu = (median(rates) for rates in zip(*pairs))
        ratio = median(gpu / cpu for cpu, gpu in pairs)
        print(f"| {width} | {groups} | {on_cpu:,.0f} | {on_gpu:,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"seconds": seconds, "gpu": gpu}, description=__doc__)
