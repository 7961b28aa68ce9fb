"""grpo_rtg.py --baseline neighbors with another choice of neighbours, for the ablations.

    python docs/benchmark/neighbor_choices.py --time-weight 0 --baseline neighbors --seed 2

--time-weight W (1): what a standard deviation of time counts beside one of a coordinate
--candidates iteration, group or N: all groups' steps, the own group's, or N random ones of all

Every other option is one of grpo_rtg.py. Without these two it is the same baseline, computed by a
plain search.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

import grpo_rtg


def nearest_mean(
    x: Tensor, obs: Tensor, mask: Tensor, k: int, time_weight=1.0, candidates="iteration"
) -> Tensor:
    """As grpo_rtg.nearest_mean: x and mask [K, G, T], obs [K, G, T, D]."""
    group, member, t = mask.nonzero().T  # [S] each
    episode = group * mask.shape[1] + member
    steps = torch.cat([obs[mask].double(), t[:, None]], -1)
    steps -= steps[0].clone()
    spread = steps.std(0, correction=0)
    steps = (steps - steps.mean(0)) / spread.where(spread > 0, torch.inf)
    steps[:, -1] *= time_weight
    chosen = torch.arange(len(steps))
    if candidates.isdigit():
        chosen = torch.randperm(len(steps), generator=torch.Generator().manual_seed(0))
        chosen = chosen[: int(candidates)]
    values, means = x[mask][chosen], []
    others, places = steps[chosen], steps
    for rows in torch.arange(len(steps)).split(64):
        distance = torch.cdist(places[rows], others)
        distance[episode[rows, None] == episode[chosen]] = torch.inf
        if candidates == "group":
            distance[group[rows, None] != group[chosen]] = torch.inf
        distance, nearest = distance.topk(min(k or len(chosen), len(chosen)), largest=False)
        means.append(values[nearest].where(distance.isfinite(), torch.nan).nanmean(1))
    mean = x.clone()
    mean[mask] = torch.cat(means)
    return mean.where(mean.isfinite(), x)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--time-weight", type=float, default=1.0)
    parser.add_argument("--candidates", default="iteration")
    choices, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    grpo_rtg.nearest_mean = lambda *args: nearest_mean(*args, **vars(choices))
    grpo_rtg.main()


if __name__ == "__main__":
    main()
