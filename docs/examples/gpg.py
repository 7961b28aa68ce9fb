"""grpo_rtg.py with Group Policy Gradient's baseline (GPG, arXiv:2510.03679) in place of the
regression: the mean return of the steps in the same bin of states. From the scripts' folder:

    python docs/examples/gpg.py --env-id CartPole-v1 --bin-width 1

Its Algorithm 2, here after code that implements it, sorts an iteration's steps into bins f(s, t).
Each trajectory gives a bin the return-to-go of its first visit, and a step's advantage is R minus
the mean of its bin. With f = t and one group it is --baseline timestep; here f is the state,
rounded. The numbers of a state have different units, so they are rounded in standard deviations,
which is not in the paper.

All else stays: PPO's clipped objective, which is GPG's too, the division by the group's standard
deviation, the update. Trajectories are pooled over groups, as the regression pools them.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_rtg
from grpo_rtg import Episodes, RunningMeanVar, discounted_sums


@dataclass
class Args(grpo_rtg.Args):
    bin_width: float = 1.0  # ε of f(s) = ε Round(s/ε), in standard deviations of the observations
    gae_lambda: float = 1.0  # at 1 the advantage is R - b, as in GPG


class BinMeans(nn.Module):
    """b(s): what ReturnRegression is to grpo_rtg.py's train."""

    bin_width: float  # of the run: train sets it

    def __init__(self, obs_size: int, decay: float):
        super().__init__()
        self.obs_stats = RunningMeanVar(obs_size)

    def fit(self, episodes: Episodes, gamma: float) -> Tensor:
        """b [K, G, T + 1] as compute_advantages takes it, 0 after an episode's end."""
        mask = episodes.mask
        self.obs_stats.update(episodes.obs)
        rounded = (self.obs_stats.normalize(episodes.obs) / self.bin_width).round()
        bins = rounded.unique(dim=0, return_inverse=True)[1]  # number of each step's, [S]
        episode = mask.flatten(0, 1).nonzero()[:, 0]  # number of each step's, [S]
        returns = discounted_sums(episodes.rewards, gamma)[mask]  # [S]
        means = bin_means(returns, bins, episode)
        padded = nn.functional.pad(mask, (0, 1))
        return torch.zeros(padded.shape).double().masked_scatter(padded, means)


def bin_means(returns: Tensor, bins: Tensor, episode: Tensor) -> Tensor:
    """The mean return of each step's bin [S]: of each episode's first visit to it.

    returns, bins and episode are [S], an episode's steps in the order of time.
    """
    visits, number = torch.stack([episode, bins]).unique(dim=1, return_inverse=True)
    steps = torch.arange(len(returns))
    first = torch.full_like(visits[0], len(returns)).scatter_reduce(0, number, steps, "amin")
    sums = torch.zeros(len(returns)).double().index_add(0, bins[first], returns[first])
    return (sums / bins[first].bincount(minlength=len(returns)))[bins]


def train(args: Args) -> dict:
    """grpo_rtg.py's train with the bins."""
    if not args.bin_width > 0:
        raise grpo_rtg.UserError(f"--bin-width must be above 0, not {args.bin_width}.")
    BinMeans.bin_width = args.bin_width
    return plain_train(args)


def parse_args(default: Args) -> Args:
    return tyro.cli(Args, default=default)


plain_train = grpo_rtg.train
grpo_rtg.train = train
grpo_rtg.Args = Args
grpo_rtg.parse_args = parse_args
grpo_rtg.ReturnRegression = BinMeans
grpo_rtg.__file__ = __file__  # so that files and commands to go on have this script's name

if __name__ == "__main__":
    grpo_rtg.main()
