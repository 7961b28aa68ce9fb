"""What a newcomer gets out of the box: with an environment's name and no other setting, here, from
Stable-Baselines3's PPO and from CleanRL's. The runs of run.py's studies "boxes" and "seconds":

    pip install -r docs/benchmark/requirements.txt
    export CLEANRL=/checkout/of/cleanrl CLEANRL_PYTHON=/python/that/can/run/it
    python docs/benchmark/run.py boxes
    python docs/benchmark/run.py seconds

A run is a process of its own with one thread and no GPU. The entries: grpo_rtg.py and ppo.py with
their defaults, SB3's PPO with its defaults and with the settings that RL-Zoo found for the
environment, CleanRL's ppo.py or ppo_continuous_action.py; on MountainCarContinuous and FrozenLake
grpo_rtg.py and ppo.py alone. An environment's runs of "seconds" are of one day and machine, so that
they can be compared.

A training return is the mean of the last 100 training episodes' returns, undiscounted and not
normalized (at the end of a run with fewer, of these). reach_steps and reach_seconds say when it
first was the threshold, counted from the first environment step; start_up is the time before that.
This project's episodes count when their rollout is complete. seconds is the whole training, peak
the MiB of memory until its end. greedy is the mean of 100 episodes after it, with the likeliest
actions; on FrozenLake, where an episode returns 0 or 1, of 1,000.

CleanRL is watched through what it prints: its clock starts with its first finished episode, and its
steps are those at its last one. Its interpreter needs Gymnasium 0.29 (with later ones it prints no
returns), where LunarLander-v3 has not come yet: it gets v2.
It has no greedy return: ppo.py stores no model, and the one of ppo_continuous_action.py lacks the
statistics of the observations it was trained on.
"""

import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COLUMNS = ["env", "variant", "seed", "steps", "reach_steps", "reach_seconds", "training", "greedy"]
COLUMNS += ["seconds", "start_up", "peak", "command", "commit", "versions"]
WINDOW = 100  # episodes of a mean
SCRIPTS = ["grpo_rtg.py", "ppo.py"]
SB3, RL_ZOO = "SB3 PPO, defaults", "SB3 PPO, RL-Zoo's settings"


class Environment(NamedTuple):
    """Its budget, the return to be reached, what CleanRL runs for it, episodes of evaluation."""

    steps: int
    threshold: float
    cleanrl: str = ""
    episodes: int = 100


ENVIRONMENTS = {
    "CartPole-v1": Environment(200_000, 475, "ppo.py --env-id CartPole-v1"),
    "Acrobot-v1": Environment(500_000, -100, "ppo.py --env-id Acrobot-v1"),
    "Pendulum-v1": Environment(500_000, -200, "ppo_continuous_action.py --env-id Pendulum-v1"),
    "LunarLander-v3": Environment(1_000_000, 200, "ppo.py --env-id LunarLander-v2"),
    "MountainCarContinuous-v0": Environment(300_000, 90),
    "FrozenLake-v1": Environment(100_000, 0.7, episodes=1000),
}
# hyperparams/ppo.yml of github.com/DLR-RM/rl-baselines3-zoo at 22e3ff2 (April 2026). lin_x falls
# linearly to 0.
ZOO = {
    "CartPole-v1": {"n_envs": 8, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98}
    | {"n_epochs": 20, "ent_coef": 0.0, "learning_rate": "lin_0.001", "clip_range": "lin_0.2"},
    "Acrobot-v1": {"normalize": True, "n_envs": 16, "n_steps": 256, "gae_lambda": 0.94}
    | {"gamma": 0.99, "n_epochs": 4, "ent_coef": 0.0},
    "Pendulum-v1": {"n_envs": 4, "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10}
    | {"ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2}
    | {"use_sde": True, "sde_sample_freq": 4},
    "LunarLander-v3": {"n_envs": 16, "n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98}
    | {"gamma": 0.999, "n_epochs": 4, "ent_coef": 0.01},
}


def jobs(seeds: int, seeds_of_others: int):
    """The fields of run.py's Job for each run; the entries take turns."""
    for seed in range(1, seeds + 1):
        for env, (_, _, cleanrl, _) in ENVIRONMENTS.items():
            entries = list(SCRIPTS)
            if cleanrl and seed <= seeds_of_others:
                script, _, env_id = cleanrl.split()
                entries += [SB3, RL_ZOO, f"CleanRL {script}" + f" on {env_id}" * (env_id != env)]
            for entry in entries:
                yield env, entry, seed, command(env, entry, seed)


def command(env: str, entry: str, seed: int) -> str:
    """What a run does, in a line."""
    steps, _, cleanrl, episodes = ENVIRONMENTS[env]
    rest = f"--total-timesteps {steps} --seed {seed}"
    if entry.startswith("CleanRL"):
        return f"{cleanrl} {rest}"
    if entry.startswith("SB3"):
        settings = ZOO[env] if entry == RL_ZOO else {}
        return f"SB3 PPO --env-id {env} {rest} {json.dumps(settings)}"
    if episodes != 100:
        rest += f" --eval-episodes {episodes}"
    return f"{entry} --env-id {env} {rest}"


class Meter:
    """Steps, episodes and seconds of a run as it goes, and when its return reached a threshold."""

    def __init__(self, job: dict):
        self.spawned = job["spawned"]
        self.threshold = job["threshold"]
        self.first = None  # when the first environment step was
        self.steps = 0
        self.recent = deque(maxlen=WINDOW)
        self.reached = (None, None)

    def start(self) -> None:
        """Call it before every step or rollout: the first call ends the start-up."""
        if self.first is None:
            self.start_up = time.time() - self.spawned
            self.first = time.perf_counter()

    def add(self, returns: list[float], steps: int) -> None:
        """Episodes that ended together, and all environment steps so far."""
        self.steps = steps
        self.recent.extend(returns)
        full = bool(returns) and len(self.recent) == WINDOW
        if self.reached[0] is None and full and mean(self.recent) >= self.threshold:
            self.reached = steps, time.perf_counter() - self.first

    def result(self) -> dict:
        """A row's figures; call it when training ends."""
        return {
            "steps": self.steps,
            "reach_steps": self.reached[0],
            "reach_seconds": self.reached[1],
            "training": mean(self.recent) if self.recent else None,
            "seconds": time.perf_counter() - self.first,
            "start_up": self.start_up,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def run_script(job: dict) -> dict:
    """One of this project's scripts, watched once an iteration."""
    meter = Meter(job)
    script, *flags = job["command"].split()
    sys.path.insert(0, str(ROOT))
    module = import_module(Path(script).stem)
    name = "collect_steps" if script == "ppo.py" else "collect_groups"
    collect, update, finish = getattr(module, name), module.update, module.Run.finish
    rollouts, result = [], {}

    def watched_collect(*args):
        meter.start()
        rollouts.append(collect(*args))
        return rollouts[-1]

    def watched_update(*args):  # comes only if the rollout counts
        rollout = rollouts.pop()
        if script == "ppo.py":
            meter.add(rollout.episode_returns, meter.steps + rollout.rewards.numel())
        else:
            returns = rollout.rewards.sum(dim=-1).flatten().tolist()
            meter.add(returns, meter.steps + len(rollout.obs))
        return update(*args)

    def watched_finish(*args):
        result.update(meter.result())  # without the evaluation that follows
        summary = finish(*args)
        result["greedy"] = mean(summary["eval_returns"])
        return summary

    setattr(module, name, watched_collect)
    module.update, module.Run.finish = watched_update, watched_finish
    import tyro

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        module.train(tyro.cli(module.Args, args=flags))
    return result


def run_sb3(job: dict) -> dict:
    """Stable-Baselines3's PPO, with its defaults or RL-Zoo's settings."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    meter = Meter(job)

    class Watch(BaseCallback):
        def _on_rollout_start(self):
            meter.start()

        def _on_step(self):
            ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            meter.add(ended, self.num_timesteps)
            return True

    settings = dict(ZOO[job["env"]]) if job["variant"] == RL_ZOO else {}
    normalize, num_envs = settings.pop("normalize", False), settings.pop("n_envs", 1)
    for name, value in settings.items():
        if isinstance(value, str):
            settings[name] = partial(float.__mul__, float(value.removeprefix("lin_")))
    env = make_vec_env(job["env"], num_envs, seed=job["seed"])
    played = make_vec_env(job["env"], 10, seed=10**9)  # evaluated side by side, to be quicker
    if normalize:
        env = VecNormalize(env, gamma=settings["gamma"])
        played = VecNormalize(played, training=False, norm_reward=False)
        played.obs_rms = env.obs_rms
    model = PPO("MlpPolicy", env, seed=job["seed"], device="cpu", **settings)
    model.learn(job["steps"], callback=Watch())
    result = meter.result()
    greedy, _ = evaluate_policy(model, played, deterministic=True, n_eval_episodes=100)
    return result | {"greedy": float(greedy)}


def run_cleanrl(job: dict) -> dict:
    """One of CleanRL's scripts with its default flags, from what it prints."""
    script, *flags = job["command"].split()
    script = str(Path(os.environ["CLEANRL"], "cleanrl", script))
    command = [os.environ["CLEANRL_PYTHON"], script, *flags, "--no-cuda"]
    meter, env = Meter(job), os.environ | {"PYTHONUNBUFFERED": "1"}
    # its standard error is that of this process
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if found := re.search(r"step=(\d+), episodic_return=\[?\s*([-+.e\d]+)", line):
                meter.start()
                meter.add([float(found[2])], int(found[1]))
    if process.returncode or not meter.steps:
        sys.exit(f"CleanRL ended with status {process.returncode}, or printed no return.")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return meter.result() | {"peak": peak, "greedy": None}


def execute(job) -> dict:
    """A run in a process and a folder of its own: its row of the CSV, or that with an error."""
    from run import commit  # here, for it loads torch, which start_up counts where it is needed

    steps, threshold, *_ = ENVIRONMENTS[job.env]
    todo = asdict(job) | {"steps": steps, "threshold": threshold, "spawned": time.time()}
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(todo)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        return asdict(job) | {"error": f"{job.command}: {done.stderr[-2000:]}"}
    result = asdict(job) | json.loads(done.stdout.splitlines()[-1])
    result |= {"commit": commit("grpo_rtg.py"), "versions": versions(job)}
    return {name: round(x, 3) if isinstance(x, float) else x for name, x in result.items()}


def versions(job) -> str:
    """Of what computed a run."""
    packages = ["torch", "gymnasium", "numpy"] + ["stable-baselines3"] * ("SB3" in job.variant)
    asked = f"from importlib.metadata import version as v; print(*map(v, {packages}))"
    ours = not job.variant.startswith("CleanRL")
    python = sys.executable if ours else os.environ["CLEANRL_PYTHON"]
    told = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    return ", ".join(f"{name} {number}" for name, number in zip(packages, told.stdout.split()))


def main() -> None:
    """What a process started by execute does: a run, whose figures it prints."""
    job = json.loads(sys.argv[1])
    library = job["variant"].split()[0]
    runner = {"SB3": run_sb3, "CleanRL": run_cleanrl}.get(library, run_script)
    print(json.dumps(runner(job)))


if __name__ == "__main__":
    main()
