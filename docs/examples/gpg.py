"""grpo_rtg.py with Group Policy Gradient's baseline (GPG, arXiv:2510.03679): the mean return of the
steps in the same bin of states.

    python docs/examples/gpg.py --env-id CartPole-v1 --bin-width 1

Its Algorithm 2 sorts an iteration's steps into bins f(s, t).
Each episode gives a bin the return-to-go of its first visit, and a step's advantage is R minus the
mean of its bin. With f = t and one group that is --baseline timestep; here f is the state, rounded.
The numbers of a state have different units, so they are rounded in standard deviations, which is
not in the paper. PPO's clipped objective is GPG's, too; all else is grpo_rtg.py's.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from regression import discounted_sums, divide_by_std

import grpo_rtg
from grpo_rtg import Episodes, UserError


@dataclass
class Args(grpo_rtg.Args):
    """GRPO with the mean of a bin of states."""

    exp_name: str = Path(__file__).stem
    baseline: tyro.conf.Suppress[str] = "bins"  # no choice here
    bin_width: float = 1.0  # ε of f(s) = ε Round(s/ε), in standard deviations of the observations


def advantages_of(episodes: Episodes, args: Args) -> Tensor:
    """Advantages [K, G, T]."""
    if args.bin_width == 0:
        raise UserError("--bin-width must be above 0.")
    mask = episodes.mask
    obs = episodes.obs.double()
    standardized = (obs - obs.mean(dim=0)) / (obs.std(dim=0) + 1e-8)
    rounded = (standardized / args.bin_width).round()
    bins = rounded.unique(dim=0, return_inverse=True)[1]  # number of each step's, [S]
    episode = mask.flatten(0, 1).nonzero()[:, 0]  # number of each step's, [S]
    returns = discounted_sums(episodes.rewards, args.gamma)
    differences = returns[mask] - bin_means(returns[mask], bins, episode)
    advantages = torch.zeros_like(returns).masked_scatter(mask, differences)
    return divide_by_std(advantages, episodes) if args.norm_std else advantages


def bin_means(returns: Tensor, bins: Tensor, episode: Tensor) -> Tensor:
    """The mean return of each step's bin [S]: of each episode's first visit to it.

    returns, bins and episode are [S], an episode's steps in the order of time.
    """
    visits, number = torch.stack([episode, bins]).unique(dim=1, return_inverse=True)
    steps = torch.arange(len(returns))
    first = torch.full_like(visits[0], len(returns)).scatter_reduce(0, number, steps, "amin")
    sums = torch.zeros(len(returns)).double().index_add(0, bins[first], returns[first])
    return (sums / bins[first].bincount(minlength=len(returns)))[bins]


if __name__ == "__main__":
    grpo_rtg.main(Args, advantages_of=advantages_of)
