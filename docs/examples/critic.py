"""grpo_rtg.py with PPO's critic in place of the regression: a network, fitted by gradient steps.
From the scripts' folder:

    python docs/examples/critic.py --env-id CartPole-v1

All else stays: rollouts of whole episodes, GAE, normalization by group, the update. As in ppo.py, V
judges an iteration's steps before it is fitted to them, its targets are Â + V, it takes as many
passes in minibatches of the same size, and sees what the policy sees. Its optimizer is its own.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import grpo_rtg
from grpo_rtg import Args, Episodes, RunningMeanVar, discounted_sums


class Critic(nn.Module):
    """V(s): what ReturnRegression is to grpo_rtg.py's train."""

    args: Args  # of the run: train sets them

    def __init__(self, obs_size: int, decay: float):
        super().__init__()
        self.net = grpo_rtg.mlp(obs_size, self.args.hidden_size, 1, output_gain=1.0)
        self.obs_stats = RunningMeanVar(obs_size)
        self.optimizer = grpo_rtg.Adam(self.net.parameters(), eps=1e-5, fused=True)
        self.step = 0  # of the environment

    def fit(self, episodes: Episodes, gamma: float) -> Tensor:
        """V [K, G, T + 1] as compute_advantages takes it, then a fit to this iteration's steps."""
        args = self.args
        obs = episodes.obs
        if args.norm_obs:
            obs = self.obs_stats.normalize(obs)
        obs = obs.float()
        mask = nn.functional.pad(episodes.mask, (0, 1))  # [K, G, T + 1]
        with torch.no_grad():
            values = torch.zeros(mask.shape).masked_scatter(mask, self.net(obs)).double()
        end = episodes.mask.sum(dim=-1, keepdim=True)  # |o_i|
        last = values.gather(-1, end - 1) * episodes.truncated[..., None]  # after a time limit
        values = values.scatter(-1, end, last)

        deltas = (episodes.rewards + gamma * values[..., 1:] - values[..., :-1]) * episodes.mask
        advantages = discounted_sums(deltas, gamma * args.gae_lambda)
        batch = {"obs": obs, "returns": (advantages + values[..., :-1])[episodes.mask].float()}
        if args.anneal_lr:
            left = 1 - self.step / args.total_timesteps
            self.optimizer.param_groups[0]["lr"] = args.learning_rate * left
        rng = grpo_rtg.np.random.default_rng(self.step)
        for minibatch in grpo_rtg.minibatches(batch, args, rng):
            value = self.net(minibatch["obs"]).squeeze(-1)
            loss = 0.5 * (value - minibatch["returns"]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), args.max_grad_norm)
            self.optimizer.step()
        self.obs_stats.update(episodes.obs)
        self.step += len(obs)
        return values


def train(args: Args) -> dict:
    """grpo_rtg.py's train with the critic; a run with it cannot be resumed."""
    Critic.args = args
    return plain_train(args)


plain_train = grpo_rtg.train
grpo_rtg.train = train
grpo_rtg.ReturnRegression = Critic

if __name__ == "__main__":
    grpo_rtg.main()
