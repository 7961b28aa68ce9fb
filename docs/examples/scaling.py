"""grpo_rtg.py with two other scales of R - b: leave-one-out, and a std for each time step.

    python docs/examples/scaling.py --env-id CartPole-v1 --scale leave-one-out
    python docs/examples/scaling.py --env-id CartPole-v1 --scale step

With the n members still alive at t, b is their mean of R. R minus the mean of the others alone
(RLOO, arXiv:2402.14740) is n / (n - 1) times R - b, which matters where members end at different
times; the group's std divides it. With --scale step the n members' own std divides R - b. The last
one alive gets 0. All else is grpo_rtg.py's.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from regression import discounted_sums, divide_by_std

import grpo_rtg
from grpo_rtg import Episodes


@dataclass
class Args(grpo_rtg.Args):
    """GRPO with another scale of R - b."""

    exp_name: str = Path(__file__).stem
    baseline: tyro.conf.Suppress[str] = "timestep"  # no choice here
    norm_std: tyro.conf.Suppress[bool] = True
    scale: Literal["leave-one-out", "step"] = "leave-one-out"


def advantages_of(episodes: Episodes, args: Args) -> Tensor:
    """Advantages [K, G, T]."""
    mask = episodes.mask
    returns = discounted_sums(episodes.rewards, args.gamma)
    alive = mask.sum(dim=1, keepdim=True)  # n, [K, 1, T]
    b = returns.sum(dim=1, keepdim=True) / alive.clamp(min=1)
    differences = (returns - b).where(mask, 0)
    others = (alive - 1).clamp(min=1)
    if args.scale == "leave-one-out":
        return divide_by_std(differences * alive / others, episodes)
    std = (differences.square().sum(dim=1, keepdim=True) / others).sqrt()
    tied = std <= 1e-7 * returns.abs().amax(dim=(1, 2), keepdim=True)
    return (differences / std).where(~tied, 0)


if __name__ == "__main__":
    grpo_rtg.main(Args, advantages_of=advantages_of)
