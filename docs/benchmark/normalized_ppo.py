"""ppo.py with rewards divided by the spread of the discounted return, as RL-Zoo has them.

It is what Stable-Baselines3's VecNormalize does. CleanRL has Gymnasium's NormalizeReward, which
differs at the end of an episode, and with which training returns would be logged divided.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from gymnasium.wrappers.utils import RunningMeanStd

sys.path.insert(0, str(Path(__file__).parents[2]))
import ppo

plain = ppo.collect_steps


def collect_steps(running: ppo.Running, policy, num_steps: int, rng) -> ppo.Steps:
    """ppo.collect_steps, whose rewards are divided, and whose episodes' returns are not."""
    steps = plain(running, policy, num_steps, rng)
    if not hasattr(running, "spread"):
        running.spread = RunningMeanStd(shape=())
        running.discounted = np.zeros(len(running.envs))
    rewards = []
    for reward, done in zip(steps.rewards.numpy(), steps.done.numpy()):  # [N] of each time step
        running.discounted = 0.99 * running.discounted + reward
        running.spread.update(running.discounted)
        rewards.append(reward / np.sqrt(running.spread.var + 1e-8))
        running.discounted[done] = 0
    return steps._replace(rewards=torch.from_numpy(np.float32(rewards)))


ppo.collect_steps = collect_steps
