"""grpo_rtg.py --baseline neighbors with another choice of neighbours, for the ablations.

    python docs/benchmark/neighbor_choices.py --time-weight 0 --baseline neighbors --seed 2

--power P (2): the nearest step of another episode counts 1/d^P; 0: all alike
--episodes N (0): only those of the N nearest episodes count; 0: of all
--steps N (0): the plain mean of the N nearest steps, however many are of one episode; 0: not so
--time-weight W (1): what a standard deviation of time counts beside one of a coordinate
--candidates iteration or group: the other episodes of all groups, or those of the own group

Every other option is one of grpo_rtg.py. Without these it is the same baseline, by a plain search.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

import grpo_rtg


def nearest_mean(
    x: Tensor,
    obs: Tensor,
    mask: Tensor,
    power=2.0,
    episodes=0,
    steps=0,
    time_weight=1.0,
    candidates="iteration",
) -> Tensor:
    """As grpo_rtg.nearest_mean: x and mask [K, G, T], obs [K, G, T, D]."""
    group, member, t = mask.nonzero().T  # [S] each
    places = torch.cat([obs[mask].double(), t[:, None]], -1)
    places -= places[0].clone()
    spread = places.std(0, correction=0)
    places = (places - places.mean(0)) / spread.where(spread > 0, torch.inf)
    places[:, -1] *= time_weight
    means, ways = x.clone(), places.new_zeros(*mask.shape, places.shape[1])
    ways[mask] = places
    flat, num_episodes = ways.flatten(0, 2), mask.shape[0] * mask.shape[1]
    of_group = torch.arange(num_episodes) // mask.shape[1]
    for rows in torch.arange(len(places)).split(64):
        distance = torch.cdist(places[rows], flat).where(mask.flatten(), torch.inf)
        distance = distance.view(len(rows), num_episodes, -1)  # [B, N, T]
        own = group[rows] * mask.shape[1] + member[rows]
        distance[torch.arange(len(rows)), own] = torch.inf
        if candidates == "group":
            distance[group[rows, None] != of_group] = torch.inf
        if steps:
            d, found = distance.flatten(1).topk(min(steps, mask.numel()), largest=False)
            values, weights = x.flatten()[found], d.isfinite().double()
        else:
            d, times = distance.min(2)  # [B, N]
            values = x.flatten(0, 1)[torch.arange(num_episodes), times]
            if episodes and episodes < num_episodes:
                d = d.where(d <= d.kthvalue(episodes, keepdim=True).values, torch.inf)
            weights = (d.square() + 1e-12) ** (-power / 2) * d.isfinite()
        mean = (weights * values).sum(1) / weights.sum(1)
        means[group[rows], member[rows], t[rows]] = mean
    return means.where(means.isfinite(), x)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--power", type=float, default=2.0)
    parser.add_argument("--episodes", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--time-weight", type=float, default=1.0)
    parser.add_argument("--candidates", choices=["iteration", "group"], default="iteration")
    choices, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    grpo_rtg.nearest_mean = lambda *args: nearest_mean(*args, **vars(choices))
    grpo_rtg.main()


if __name__ == "__main__":
    main()
