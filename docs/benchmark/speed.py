"""How fast grpo_rtg.py is: where a step's time goes, and what a GPU is for.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/speed.py parts
    python docs/benchmark/speed.py gpu

Runs have one thread. Figures are medians over seeds.

parts: microseconds per environment step that functions take, with timers around them.

gpu: one pass over minibatches of 64 steps an iteration, and a learning rate of next to nothing, so
that all runs have the same short episodes (about 22 steps); with and without --cuda, side by side.
"""

import contextlib
import io
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Literal
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch
import tyro
from gymnasium.wrappers import TimeLimit

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_rtg

PARTS = {  # a function of an iteration: where it is
    "rollout: `collect_groups`": (grpo_rtg, "collect_groups"),
    "in it: the environments' `step`": (TimeLimit, "step"),
    "in it: `act`": (grpo_rtg.Policy, "act"),
    "π_old of all steps: `make_batch`": (grpo_rtg, "make_batch"),
    "update: `update`": (grpo_rtg, "update"),
    "in it: `grpo_loss`": (grpo_rtg, "grpo_loss"),
    "in it: `backward`": (torch.Tensor, "backward"),
    "in it: Adam's `step`": (torch.optim.Adam, "step"),
}


def train(flags: list[str]) -> dict[str, float]:
    """A run's environment steps and those a second, and the MiB it had on a GPU."""
    if "--cuda" not in flags:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch's optimizers would start it
    args = tyro.cli(grpo_rtg.Args, args=flags)
    nowhere = io.StringIO()  # for what is printed, and the bars
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        patch.object(grpo_rtg.Run, "evaluate"),  # whose episodes are no rollout
    ):
        run = grpo_rtg.train(args)
    return {
        "steps": run.step,
        "rate": run.step / run.seconds,
        "peak": torch.cuda.max_memory_allocated() / 2**20,
    }


def train_timed(flags: list[str]) -> dict[str, float]:
    """The microseconds per environment step that the parts of a run take, and all of it."""
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(function, part: str):
        def call(*args, **options):
            start = time.perf_counter()
            value = function(*args, **options)
            seconds[part] += time.perf_counter() - start
            return value

        return call

    with contextlib.ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            function = getattr(owner, name)
            setattr(owner, name, timed(function, part))
            stack.callback(setattr, owner, name, function)
        result = train(flags)
    spent = {part: 1e6 * value / result["steps"] for part, value in seconds.items()}
    return spent | {"the whole run": 1e6 / result["rate"]}


def parts(seeds: range) -> None:
    columns = {}
    for env_id in ("CartPole-v1", "LunarLander-v3", "Hopper-v5"):
        flags = ["--env-id", env_id, *["--norm-obs"] * (env_id == "Hopper-v5"), "--seed"]
        columns[env_id] = [train_timed([*flags, str(seed)]) for seed in seeds]
    print(f"| µs per environment step | {' | '.join(columns)} |")
    print("|-" * (len(columns) + 1) + "|")
    for part in [*PARTS, "the whole run"]:
        cells = [f"{median(run[part] for run in runs):.0f}" for runs in columns.values()]
        print(f"| {part} | {' | '.join(cells)} |")


def short_episodes(width: int, groups: int, size: int) -> list[str]:
    """Flags of a run that learns nothing, of some iterations at least."""
    steps = max(20_000 if width == 64 else 4_000, groups * size * 120)
    flags = {"--hidden-size": width, "--num-groups": groups, "--group-size": size}
    flags |= {"--total-timesteps": steps, "--update-epochs": 1, "--minibatch-size": 64}
    flags |= {"--learning-rate": 1e-9}
    return [*(str(x) for flag in flags.items() for x in flag), "--no-anneal-lr"]


def gpu(seeds: range) -> None:
    if not torch.cuda.is_available():
        print("speed.py: torch finds no GPU.", file=sys.stderr)
        sys.exit(2)
    print(f"{torch.cuda.get_device_name()}, one thread of the CPU\n")
    print("| width | groups of 16 | --no-cuda, steps/s | --cuda, steps/s | ratio | peak MiB |")
    print("|-|-|-|-|-|-|")
    for width in (64, 256, 1024):
        for groups in (1, 8, 64):
            pairs = []
            for seed in seeds:  # side by side, in new processes, each with a core of its own
                flags = [*short_episodes(width, groups, 16), "--seed", str(seed)]
                with ProcessPoolExecutor(2, get_context("spawn")) as pool:
                    pairs.append([*pool.map(train, (flags, [*flags, "--cuda"]))])
            on_cpu = median(cpu["rate"] for cpu, _ in pairs)
            on_gpu = median(gpu["rate"] for _, gpu in pairs)
            ratio = median(gpu["rate"] / cpu["rate"] for cpu, gpu in pairs)
            peak = median(gpu["peak"] for _, gpu in pairs)
            cells = f"{on_cpu:,.0f} | {on_gpu:,.0f} | {ratio:.2f} | {peak:.1f}"
            print(f"| {width} | {groups} | {cells} |", flush=True)


@dataclass
class Options:
    table: tyro.conf.Positional[Literal["parts", "gpu"]]
    seeds: str = "1-5"  # first-last


def main() -> None:
    args = tyro.cli(Options, description=__doc__)
    first, last = map(int, args.seeds.split("-"))
    table = {"parts": parts, "gpu": gpu}[args.table]
    table(range(first, last + 1))


if __name__ == "__main__":
    main()
