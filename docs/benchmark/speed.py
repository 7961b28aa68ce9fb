"""How fast the scripts are: where the time goes, and what a GPU is for. boxes.py compares them with
Stable-Baselines3 and CleanRL.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/speed.py parts
    python docs/benchmark/speed.py gpu

Every run is a process of its own with one thread. Figures are medians over seeds, in brackets the
range.

parts: where the time of grpo_rtg.py goes, in microseconds per environment step; timers stand around
the functions that are named. The environment alone: gym.make, random actions, one core.

gpu: grpo_rtg.py with one pass over minibatches of 64 steps an iteration, and a learning rate of
next to nothing, so that all runs have the same short episodes (about 22 steps); with and without
--cuda, side by side.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
SCRIPTS = ["grpo_outcome", "grpo_process", "grpo_rtg", "ppo"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
DEVICES = ("--no-cuda", "--cuda")
PARTS = {  # of an iteration of grpo_rtg.py
    "steps": "rollout: the environments' steps and resets, lists, the flat batch",
    "sampling": "rollout: `act`, observations to actions",
    "baseline": "`ReturnRegression`, the baseline",
    "log_probs": "`log_probs`, π_old of all steps",
    "loss": "update: forward passes and `grpo_loss`",
    "backward": "update: backward passes",
    "adam": "update: shuffles, the clipped gradient, Adam",
    "rest": "advantages, logs, checkpoints, progress",
}


class Meter:
    """What a run tells as it goes: the steps and episodes so far, and the time spent in rollouts
    and in updates.
    """

    def __init__(self, spawned: float):
        self.spawned, self.first, self.start_up = spawned, None, None
        self.steps = 0
        self.seconds = {"rollout": 0.0, "update": 0.0}

    def start(self) -> None:
        """Call it before every step or rollout: the first call ends the start-up."""
        if self.first is None:
            self.start_up, self.first = time.time() - self.spawned, time.perf_counter()

    def add(self, returns: list[float], steps: int) -> None:
        """Episodes that ended, and all environment steps so far."""
        self.steps = steps

    def result(self) -> dict:
        seconds = time.perf_counter() - self.first
        shares = {phase: spent / seconds for phase, spent in self.seconds.items()}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rates = {"steps": self.steps, "rate": self.steps / seconds}
        return rates | shares | {"start_up": self.start_up, "peak": peak}


def run_script(name: str, flags: list[str], spawned: float) -> dict:
    """One of this project's scripts; rollouts and updates are timed from outside, once an
    iteration.
    """
    module, meter = importlib.import_module(name), Meter(spawned)
    rollout = "collect_steps" if name == "ppo" else "collect_groups"
    play, update, finish = getattr(module, rollout), module.update, module.Run.finish
    played, result = [], {}

    def timed(phase, function, *args):
        start = time.perf_counter()
        value = function(*args)
        meter.seconds[phase] += time.perf_counter() - start
        return value

    def watched_rollout(*args):
        meter.start()
        value = timed("rollout", play, *args)
        if name == "ppo":
            played[:] = value.episode_returns, value.rewards.numel()
        else:
            played[:] = value.rewards.sum(-1).flatten().tolist(), len(value.obs)
        return value

    def watched_update(*args):
        returns, steps = played
        meter.add(returns, meter.steps + steps)
        return timed("update", update, *args)

    def watched_finish(*args):  # without the evaluation that follows
        result.update(meter.result(), gpu_peak=module.torch.cuda.max_memory_allocated() / 2**20)
        return finish(*args)

    setattr(module, rollout, watched_rollout)
    module.update, module.Run.finish = watched_update, watched_finish
    import tyro

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        module.train(tyro.cli(module.Args, args=[*flags, "--eval-episodes", "1"]))
    return result


def run_parts(name: str, flags: list[str], spawned: float) -> dict:
    """grpo_rtg.py, with the microseconds per environment step that an iteration's parts take."""
    module, seconds = importlib.import_module(name), dict.fromkeys(PARTS, 0.0)

    def timed(function, part):
        def call(*args):
            start = time.perf_counter()
            value = function(*args)
            seconds[part] += time.perf_counter() - start
            return value

        return call

    def finish(*args):
        spent.update(seconds)  # without the evaluation that follows
        return finish_run(*args)

    spent, finish_run, module.Run.finish = {}, module.Run.finish, finish
    regression, tensor = module.ReturnRegression, module.torch.Tensor
    regression.fit = timed(regression.fit, "baseline")
    module.Policy.act = timed(module.Policy.act, "sampling")
    module.Policy.log_probs = timed(module.Policy.log_probs, "log_probs")
    module.grpo_loss = timed(module.grpo_loss, "loss")
    tensor.backward = timed(tensor.backward, "backward")
    result = run_script(name, flags, spawned)
    total = 1e6 / result["rate"]
    spent = {part: 1e6 * value / result["steps"] for part, value in spent.items()}
    spent["steps"] = total * result["rollout"] - spent["sampling"]
    spent["adam"] = total * result["update"] - spent["loss"] - spent["backward"]
    spent["rest"] = total * (1 - result["rollout"] - result["update"])
    spent["rest"] -= spent["log_probs"] + spent["baseline"]
    return result | spent | {"total": total}


def own_rate(env_id: str, seconds: float = 1.0) -> float:
    """Steps per second of the environment alone, resets included, with actions drawn before."""
    import gymnasium as gym

    env = gym.make(env_id)
    actions = [env.action_space.sample() for _ in range(1000)]
    env.reset(seed=0)
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        steps += len(actions)
    return steps / (time.perf_counter() - start)


def run(what: str, flags: list[str]) -> dict:
    """One run of grpo_rtg.py in a process of its own, in a folder of its own."""
    job = json.dumps({"what": what, "flags": flags, "spawned": time.time()})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE), "one", job]
        env = os.environ | ONE_THREAD
        if "--cuda" not in flags:
            env["CUDA_VISIBLE_DEVICES"] = ""  # which SB3 and torch's optimizers would start
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} {flags} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def one(job: dict) -> None:
    """What a process started by run does: a job, whose result it prints."""
    runner = {"script": run_script, "parts": run_parts}[job["what"]]
    print(json.dumps(runner("grpo_rtg", job["flags"], job["spawned"])))


def cell(results: list[dict], name: str, digits: int = 0) -> str:
    """Median and range."""
    values = [result[name] for result in results]
    spread = "" if len(values) == 1 else f" [{min(values):,.{digits}f}, {max(values):,.{digits}f}]"
    return f"{median(values):,.{digits}f}{spread}"


def parts(args) -> None:
    first, last = map(int, args.seeds.split("-"))
    columns = []
    for env_id in ("CartPole-v1", "LunarLander-v3", "Hopper-v5"):
        flags = ["--env-id", env_id, *["--norm-obs"] * (env_id == "Hopper-v5"), "--seed"]
        rows = []
        for seed in range(first, last + 1):
            alone = {"alone": 1e6 / own_rate(env_id)}
            rows.append(alone | run("parts", [*flags, str(seed)]))
        columns.append([env_id, *(cell(rows, part, 2) for part in ("alone", *PARTS, "total"))])
    names = ["part, µs per step", "the environment alone", *PARTS.values(), "the whole run"]
    head, *lines = (f"| {' | '.join(line)} |" for line in zip(names, *columns))
    print("\n".join([head, "|-" * (len(columns) + 1) + "|", *lines]))


def short_episodes(width: int, groups: int, size: int) -> list[str]:
    """Flags of a run that learns nothing, of some iterations at least."""
    steps = max(20_000 if width == 64 else 4_000, groups * size * 120)
    flags = {"--hidden-size": width, "--num-groups": groups, "--group-size": size}
    flags |= {"--total-timesteps": steps, "--update-epochs": 1, "--minibatch-size": 64}
    flags |= {"--learning-rate": 1e-9}
    return [*(str(x) for flag in flags.items() for x in flag), "--no-anneal-lr"]


def gpu(args) -> None:
    import torch

    if not torch.cuda.is_available():
        print("speed.py: torch finds no GPU.", file=sys.stderr)
        sys.exit(2)
    first, last = map(int, args.seeds.split("-"))
    print(f"{torch.cuda.get_device_name()}, one thread of the CPU\n")
    print("| width | groups of 16 | --no-cuda, steps/s | --cuda, steps/s | ratio | peak MiB |")
    print("|-|-|-|-|-|-|")
    for width in (64, 256, 1024):
        for groups in (1, 8, 64):
            flags = short_episodes(width, groups, 16)
            on_cpu, on_gpu, ratios = [], [], []
            for seed in range(first, last + 1):
                seeded = [*flags, "--seed", str(seed)]
                with ThreadPoolExecutor(2) as both:  # side by side, each with a core of its own
                    cpu, gpu = both.map(run, ["script"] * 2, ([*seeded, x] for x in DEVICES))
                on_cpu.append(cpu)
                on_gpu.append(gpu)
                ratios.append({"ratio": gpu["rate"] / cpu["rate"]})
            cells = [cell(on_cpu, "rate"), cell(on_gpu, "rate"), cell(ratios, "ratio", 2)]
            cells.append(cell(on_gpu, "gpu_peak", 1))
            print(f"| {width} | {groups} | {' | '.join(cells)} |", flush=True)


TABLES = {table.__name__: table for table in (parts, gpu)}


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        return one(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", default="1-5", help="first-last")
    args = parser.parse_args()
    TABLES[args.table](args)


if __name__ == "__main__":
    main()
