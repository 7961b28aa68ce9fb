"""By how much does a baseline follow an episode's own returns?

    python docs/benchmark/bias.py

If all returns-to-go of one episode were higher by 1, b would be higher by this share at its steps
(their mean), and what its actions earn would seem lower by as much. Means over all episodes of an
iteration with default options, and over five seeds.
"""

import contextlib
import io
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.examples import regression
from grpo_rtg import Episodes, train


def shares(episodes: Episodes) -> list[float]:
    """Of the baselines group, timestep and regression."""
    mask = episodes.mask.double()
    lengths = mask.sum(-1)  # [K, G]
    of_group = lengths / lengths.sum(-1, keepdim=True)
    alive = mask.sum(1, keepdim=True).clamp(min=1)
    of_timestep = (mask / alive).sum(-1) / lengths

    features = regression.cosines(episodes)  # [S, F]
    gram = features.T @ features / len(features)
    gram.diagonal()[1:] += regression.RIDGE
    parts = features.split(lengths.flatten().long().tolist())
    sums = torch.stack([part.sum(0) for part in parts])  # [K G, F]
    followed = (sums @ torch.linalg.inv(gram) * sums).sum(-1) / len(features)
    return [of_group.mean(), of_timestep.mean(), (followed / lengths.flatten()).mean()]


def measure(env_id: str, seed: int, shape: dict) -> list[list[float]]:
    """The shares [iteration, baseline] in a run."""
    noted = []
    fit = regression.Regression()

    def advantages_of(episodes: Episodes, args: regression.Args) -> Tensor:
        noted.append(shares(episodes))
        return fit(episodes, args)

    args = regression.Args(env_id=env_id, seed=seed, total_timesteps=20_000, eval_episodes=1)
    train(replace(args, **shape), advantages_of)
    return noted[:3]


def main() -> None:
    small = {"minibatch_size": 256, "num_groups": 4, "group_size": 4}
    columns = {
        "CartPole": ("CartPole-v1", {}),
        "Pendulum": ("Pendulum-v1", {}),
        "LunarLander": ("LunarLander-v3", {}),
        "CartPole, 4 groups of 4": ("CartPole-v1", small),
        "Pendulum, 1 group of 4": ("Pendulum-v1", small | {"num_groups": 1}),
    }
    results = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for env_id, shape in columns.values():
            with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
                runs = [measure(env_id, seed, shape) for seed in range(1, 6)]
            results.append(torch.tensor(runs).mean(0))
    print(f"| share | {' | '.join(columns)} |\n{'|-' * (len(columns) + 1)}|")
    for number, name in enumerate(("`group`", "`timestep`", "regression")):
        cells = [", ".join(f"{x:.0%}" for x in result[:, number]) for result in results]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
