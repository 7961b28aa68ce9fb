"""grpo_rtg.py --baseline neighbors with another choice of neighbours, for the ablations.

    python docs/benchmark/neighbor_choices.py --time-weight 0 --baseline neighbors --seed 2

--power P (2): the nearest step of another episode counts 1/d^P; 0: all alike
--steps N (0): the plain mean of the N nearest steps, however many are of one episode; 0: not so,
  and --num-neighbors as in grpo_rtg.py
--time-weight W (1): what a standard deviation of time counts beside one of a coordinate
--candidates iteration or group: the other episodes of all groups, or those of the own group

Every other option is one of grpo_rtg.py. Without these it is the same baseline, by a plain search.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from torch import Tensor

import grpo_rtg


def nearest_mean(
    x: Tensor,
    obs: Tensor,
    mask: Tensor,
    k=4,
    power=2.0,
    steps=0,
    time_weight=1.0,
    candidates="iteration",
) -> Tensor:
    """As grpo_rtg.nearest_mean: x and mask [K, G, T], obs [K, G, T, D]."""
    group, member, time = mask.numpy().nonzero()  # [S] each
    episode = group * mask.shape[1] + member
    places = np.column_stack([obs[mask].numpy(), time])
    spread = np.where(np.ptp(places, axis=0) > 0, places.std(0), np.inf)
    places = (places - places.mean(0)) / spread
    places[:, -1] *= time_weight
    first = np.flatnonzero(time == 0)  # where each episode begins
    values, means = x[mask].numpy(), x.numpy().copy()
    for rows in np.array_split(np.arange(len(places)), len(places) // 32 + 1):
        order = (places**2).sum(1) - 2 * places[rows] @ places.T  # that of the distances, [B, S]
        order[episode[rows, None] == episode] = np.inf
        if candidates == "group":
            order[group[rows, None] != group] = np.inf
        if steps:
            chosen = np.argpartition(order, min(steps, len(values)) - 1)[:, :steps]
            weights = np.isfinite(np.take_along_axis(order, chosen, 1)).astype(float)
        else:
            ends = [*first[1:], len(values)]
            nearest = [order[:, i:j].argmin(1) + i for i, j in zip(first, ends)]
            chosen = np.stack(nearest, 1)  # a step of each episode, [B, N]
            squares = ((places[chosen] - places[rows, None]) ** 2).sum(-1)
            squares[np.isinf(np.take_along_axis(order, chosen, 1))] = np.inf
            if 0 < k < len(first):
                squares[squares > (1 + 1e-9) * np.sort(squares)[:, [k - 1]]] = np.inf
            weights = np.where(np.isfinite(squares), (squares + 1e-12) ** (-power / 2), 0)
        any_other, mean = weights.sum(1) > 0, (weights * values[chosen]).sum(1)
        mean = np.where(any_other, mean / np.where(any_other, weights.sum(1), 1), values[rows])
        means[group[rows], member[rows], time[rows]] = mean
    return torch.from_numpy(means)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--power", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--time-weight", type=float, default=1.0)
    parser.add_argument("--candidates", choices=["iteration", "group"], default="iteration")
    choices, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    grpo_rtg.nearest_mean = lambda *args: nearest_mean(*args, **vars(choices))
    grpo_rtg.main()


if __name__ == "__main__":
    main()
