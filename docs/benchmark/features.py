"""How well the regression of grpo_rtg.py foretells returns-to-go, by its features and memory.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/features.py

Records the episodes of one training run on each environment, then fits each choice to them in
turn. Prints R²: the share of the variance of an iteration's returns-to-go that the fit before that
iteration explains; the median over the last 60 iterations but for the first eighth of these. Writes
results/features.csv.
"""

import contextlib
import csv
import os
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_rtg

PATH = Path(__file__).parent / "results" / "features.csv"
RUNS = {  # steps, and options, of the runs that are recorded
    "CartPole-v1": {"total_timesteps": 100_000},
    "MountainCarContinuous-v0": {"total_timesteps": 200_000},
    "Pendulum-v1": {"total_timesteps": 150_000, "gamma": 0.95},
    "FrozenLake-v1": {"total_timesteps": 30_000},
    "LunarLander-v3": {"total_timesteps": 300_000},
}
CHOICES = {  # name: what explained is given
    "as it is": {},
    "64 features": {"NUM_FEATURES": 64},
    "256 features": {"NUM_FEATURES": 256},
    "512 features": {"NUM_FEATURES": 512},
    "bandwidth 0.5": {"BANDWIDTH": 0.5},
    "bandwidth 1": {"BANDWIDTH": 1.0},
    "bandwidth 4": {"BANDWIDTH": 4.0},
    "ridge 1e-4": {"RIDGE": 1e-4},
    "ridge 1e-2": {"RIDGE": 1e-2},
    "ridge 1e-1": {"RIDGE": 1e-1},
    "decay 0": {"decay": 0.0},
    "decay 0.9": {"decay": 0.9},
    "frozen statistics": {"frozen": True},
}


def record(env_id: str, options: dict) -> list[grpo_rtg.Episodes]:
    """The episodes of each iteration of a training run with seed 101."""
    iterations = []
    collect = grpo_rtg.collect_groups

    def collect_and_keep(*args) -> grpo_rtg.Episodes:
        iterations.append(collect(*args))
        return iterations[-1]

    args = grpo_rtg.Args(env_id=env_id, seed=101, eval_episodes=1, **options)
    keeping = patch.object(grpo_rtg, "collect_groups", collect_and_keep)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), keeping:
        grpo_rtg.train(args)
    return iterations


def explained(
    iterations, gamma: float, decay=grpo_rtg.Args.decay, frozen=False, **constants
) -> float:
    """Median R² of the fits, each on the iteration after it."""
    changed = type("Changed", (grpo_rtg.ReturnRegression,), constants)
    regression = changed(iterations[0].obs.shape[1], decay)
    shares = []
    for i, episodes in enumerate(iterations):
        before = regression.weights
        b = regression.fit(episodes, gamma)  # [K, G, T + 1], by the fit to these episodes
        if frozen:
            regression.input_stats.update = lambda inputs: None
        inputs = torch.cat([episodes.obs, episodes.mask.nonzero()[:, 2:]], dim=-1)
        normalized = regression.input_stats.normalize(inputs)
        cosines = torch.cos(normalized @ regression.frequencies + regression.phases)
        foretold = before[0] + cosines @ before[1:]
        mask = torch.nn.functional.pad(episodes.mask, (0, 1))
        end = episodes.mask.sum(dim=-1, keepdim=True)
        rest = torch.zeros(mask.shape).double().scatter(-1, end, b.gather(-1, end))
        rewards = torch.nn.functional.pad(episodes.rewards, (0, 1)) + rest
        returns = grpo_rtg.discounted_sums(rewards, gamma)[mask]  # [S]
        if i >= max(1, len(iterations) // 8) and returns.var() > 1e-12:
            shares.append(1 - float((returns - foretold).var() / returns.var()))
    return float(np.median(shares))


def main() -> None:
    torch.set_num_threads(1)
    rows = [["choice", *RUNS]]
    runs = {env: record(env, options) for env, options in RUNS.items()}
    for name, change in CHOICES.items():
        row = [name]
        for env, iterations in runs.items():
            gamma = RUNS[env].get("gamma", 0.99)
            row.append(f"{explained(iterations[-60:], gamma, **change):.2f}")
        rows.append(row)
        print(*row, sep=", ", flush=True)
    with open(PATH, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
