"""grpo_rtg.py with a baseline that knows the state: a linear critic, fitted in closed form.

    python docs/examples/regression.py --env-id CartPole-v1

b(s, t) is a ridge regression of an iteration's returns-to-go on random cosines of state and time
(Duan et al. 2016; Rahimi and Recht 2007), and GAE (arXiv:1506.02438) takes the place of R - b:

    Â_{i,t} = Σ_{j≥t} (γλ)^(j-t) (r_{i,j} + γ b_{i,j+1} - b_{i,j}) / std

After its end an episode has b = 0; where a time limit cut it, it has its last b. The fit sees the
steps it judges; under torchrun each process has its own. b is a value estimate: strictly, this is
no longer GRPO. All else is grpo_rtg.py's.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torch.nn.functional import pad

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_rtg
from grpo_rtg import Episodes

NUM_FEATURES = 128
BANDWIDTH = 2.0  # of the kernel, in inputs' standard deviations times √(their number)
RIDGE = 1e-3  # penalty on the weights, per step


@dataclass
class Args(grpo_rtg.Args):
    """GRPO with a linear critic."""

    exp_name: str = Path(__file__).stem
    baseline: tyro.conf.Suppress[str] = "regression"  # no choice here
    gae_lambda: float = 0.98  # λ of GAE


class Regression:
    """advantages_of for grpo_rtg.train.

    It keeps the last fit, for what a time limit cuts off, though its inputs are scaled anew.
    """

    def __init__(self):
        self.weights = torch.zeros(1 + NUM_FEATURES).double()

    def state_dict(self) -> dict:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict) -> None:
        self.weights = state["weights"]

    def __call__(self, episodes: Episodes, args: Args) -> Tensor:
        """Advantages [K, G, T]."""
        features = cosines(episodes)  # [S, 1 + NUM_FEATURES]
        mask = pad(episodes.mask, (0, 1))  # [K, G, T + 1]
        cut_off = values_of(features @ self.weights, episodes).where(~mask, 0)
        returns = discounted_sums(pad(episodes.rewards, (0, 1)) + cut_off, args.gamma)[mask]  # [S]

        gram = features.T @ features / len(features)
        gram.diagonal()[1:] += RIDGE  # the constant is free
        self.weights = torch.linalg.solve(gram, features.T @ returns / len(features))
        values = values_of(features @ self.weights, episodes)
        advantages = gae(episodes, values, args.gamma, args.gae_lambda)
        return divide_by_std(advantages, episodes) if args.norm_std else advantages


def cosines(episodes: Episodes) -> Tensor:
    """Features [S, 1 + NUM_FEATURES] of state and time, the first of them constant."""
    t = episodes.mask.nonzero()[:, 2:]  # of each step, [S, 1]
    inputs = torch.cat([episodes.obs.double(), t], dim=-1)  # [S, D + 1]
    inputs = (inputs - inputs.mean(dim=0)) / (inputs.std(dim=0) + 1e-8)
    num_inputs = inputs.shape[1]
    generator = torch.Generator().manual_seed(0)
    frequencies = torch.randn(num_inputs, NUM_FEATURES, generator=generator).double()
    phases = 2 * torch.pi * torch.rand(NUM_FEATURES, generator=generator).double()
    waves = torch.cos(inputs @ frequencies / (BANDWIDTH * num_inputs**0.5) + phases)
    return pad(waves, (1, 0), value=1.0)


def values_of(values: Tensor, episodes: Episodes) -> Tensor:
    """b [K, G, T + 1] from each step's [S]: after its end an episode has 0 or, cut, its last b."""
    mask = pad(episodes.mask, (0, 1))
    padded = torch.zeros(mask.shape).double().masked_scatter(mask, values.double())
    end = episodes.mask.sum(dim=-1, keepdim=True)  # |o_i|
    last = padded.gather(-1, end - 1) * episodes.truncated[..., None]
    return padded.scatter(-1, end, last)


def gae(episodes: Episodes, values: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """GAE's advantages [K, G, T] from values [K, G, T + 1]."""
    deltas = episodes.rewards + gamma * values[..., 1:] - values[..., :-1]
    return discounted_sums(deltas.where(episodes.mask, 0), gamma * gae_lambda)


def discounted_sums(x: Tensor, gamma: float) -> Tensor:
    """Σ_{j≥t} γ^(j-t) x_j along the last dimension."""
    sums = x.clone()
    for t in reversed(range(x.shape[-1] - 1)):
        sums[..., t] += gamma * sums[..., t + 1]
    return sums


def divide_by_std(advantages: Tensor, episodes: Episodes) -> Tensor:
    """Advantages [K, G, T] over their root mean square in the group; 0 where that is rounding."""
    num_steps = episodes.mask.sum(dim=(1, 2), keepdim=True)
    variance = advantages.square().sum(dim=(1, 2), keepdim=True) / (num_steps - 1).clamp(min=1)
    std = variance.sqrt()
    largest = discounted_sums(episodes.rewards, 1.0).abs().amax(dim=(1, 2), keepdim=True)
    return (advantages / std).where(std > 1e-7 * largest, 0)


if __name__ == "__main__":
    grpo_rtg.main(Args, advantages_of=Regression())
