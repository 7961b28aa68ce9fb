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
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.examples import regression
from grpo_rtg import Episodes, train

ITERATIONS = 3
BASELINES = ["`group`", "`timestep`", "regression"]


def shares(episodes: Episodes) -> list[float]:
    """Of each of the BASELINES."""
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


class Measured(regression.Regression):
    """The regression, which notes the shares of its first iterations and then stops training."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __call__(self, episodes: Episodes, args: regression.Args) -> Tensor:
        self.noted.append(shares(episodes))
        if len(self.noted) == ITERATIONS:
            args.total_timesteps = 1
        return super().__call__(episodes, args)


def measure(env_id: str, seed: int, shape: dict) -> list[list[float]]:
    """The shares [iteration, baseline] in a run."""
    measured = Measured()
    train(regression.Args(env_id=env_id, seed=seed, eval_episodes=1, **shape), measured)
    return measured.noted


def main() -> None:
    small = {"minibatch_size": 256, "group_size": 4}
    columns = {
        "CartPole": ("CartPole-v1", {}),
        "Pendulum": ("Pendulum-v1", {}),
        "LunarLander": ("LunarLander-v3", {}),
        "CartPole, 4 groups of 4": ("CartPole-v1", small),
        "Pendulum, 1 group of 4": ("Pendulum-v1", small | {"num_groups": 1}),
    }
    nowhere = io.StringIO()
    results = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for env_id, shape in columns.values():
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                runs = [measure(env_id, seed, shape) for seed in range(1, 6)]
            results.append(torch.tensor(runs).mean(0))
    print(f"| share | {' | '.join(columns)} |\n{'|-' * (len(columns) + 1)}|")
    for number, name in enumerate(BASELINES):
        cells = [", ".join(f"{x:.0%}" for x in result[:, number]) for result in results]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
