"""grpo_rtg.py with ppo.py's critic: a network, fitted by gradient steps, in place of the group.

    python docs/examples/critic.py --env-id CartPole-v1

Rollouts of whole episodes and the update are grpo_rtg.py's. The advantage is regression.py's, with
V in place of the regression. As in ppo.py, V judges an iteration's steps before it is fitted to
them, its targets are Â + V, and it takes --update-epochs passes in minibatches. It has an optimizer
of its own; under torchrun each process has its own V, and after a resume the first one's.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from gymnasium import spaces
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from regression import divide_by_std, gae, values_of

import grpo_rtg
import ppo
from grpo_rtg import Episodes, all_gather


@dataclass
class Args(grpo_rtg.Args):
    """GRPO with PPO's critic."""

    exp_name: str = Path(__file__).stem
    baseline: tyro.conf.Suppress[str] = "critic"  # no choice here
    gae_lambda: float = 0.98  # λ of GAE


class Critic:
    """advantages_of for grpo_rtg.train. The network is built when the first episodes come."""

    def __init__(self):
        self.network = None
        self.saved = None  # what a checkpoint had
        self.step = 0  # environment steps

    def state_dict(self) -> dict:
        if self.network is None:  # nothing came since the checkpoint
            return self.saved
        parts = {"network": self.network, "optimizer": self.optimizer}
        return {"step": self.step} | {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict) -> None:
        self.saved = state

    def build(self, num_inputs: int, args: Args) -> None:
        """The network, its actor unused, and its optimizer."""
        obs_space = spaces.Box(-torch.inf, torch.inf, (num_inputs,))
        with torch.random.fork_rng():  # so that a resumed run's other draws are as before
            torch.manual_seed(args.seed)
            self.network = ppo.Policy(obs_space, spaces.Discrete(1), args)
        parameters = self.network.critic.parameters()
        self.optimizer = torch.optim.Adam(parameters, args.learning_rate, eps=1e-5, fused=True)
        if self.saved:
            self.step = self.saved["step"]
            self.network.load_state_dict(self.saved["network"])
            self.optimizer.load_state_dict(self.saved["optimizer"])

    def __call__(self, episodes: Episodes, args: Args) -> Tensor:
        """Advantages [K, G, T]."""
        if self.network is None:
            self.build(episodes.obs.shape[1], args)
        with torch.no_grad():
            values = values_of(self.network.value(episodes.obs), episodes)  # [K, G, T + 1]
        advantages = gae(episodes, values, args.gamma, args.gae_lambda)
        targets = (advantages + values[..., :-1])[episodes.mask].float()  # [S]
        self.fit(episodes.obs, targets, args)
        return divide_by_std(advantages, episodes) if args.norm_std else advantages

    def fit(self, obs: Tensor, targets: Tensor, args: Args) -> None:
        """Passes over the steps obs [S, D] and targets [S]."""
        remaining = max(0, 1 - self.step / args.total_timesteps) if args.anneal_lr else 1
        self.optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        num_minibatches = max(1, round(len(obs) / args.minibatch_size))
        for _ in range(args.update_epochs):
            for indices in torch.randperm(len(obs)).tensor_split(num_minibatches):
                errors = self.network.value(obs[indices]) - targets[indices]
                self.optimizer.zero_grad()
                (0.5 * errors.square().mean()).backward()
                max_norm = args.max_grad_norm or torch.inf
                nn.utils.clip_grad_norm_(self.network.critic.parameters(), max_norm)
                self.optimizer.step()
        if args.norm_obs:
            self.network.update_obs_stats(obs)
        self.step += sum(all_gather(len(obs)))


if __name__ == "__main__":
    grpo_rtg.main(Args, advantages_of=Critic())
