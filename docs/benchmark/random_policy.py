"""Returns of a uniformly random policy on the study's environments: report.py counts its scores
from their means.

    pip install -r docs/benchmark/requirements.txt
    python docs/benchmark/random_policy.py

Episode i starts from reset(seed=i). Prints results/random.csv as it writes it: environment, mean
return of 300 episodes, its standard error.
"""

import csv

import gymnasium as gym
import numpy as np
import run
import studies

EPISODES = 300
PATH = run.RESULTS / "random.csv"


def random_returns(env_id: str, episodes: int) -> np.ndarray:
    """Returns [episodes] of actions drawn uniformly from the action space."""
    env = gym.make(env_id)
    env.action_space.seed(0)
    returns = np.zeros(episodes)
    for i in range(episodes):
        env.reset(seed=i)
        ended = False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            returns[i] += reward
            ended = terminated or truncated
    return returns


def main() -> None:
    rows = [("env", "mean_return", "standard_error", "episodes")]
    for env_id in studies.STEPS:
        returns = random_returns(env_id, EPISODES)
        error = returns.std(ddof=1) / EPISODES**0.5
        rows.append((env_id, f"{returns.mean():.4g}", f"{error:.2g}", EPISODES))
        print(*rows[-1], sep=",", flush=True)
    with open(PATH, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
