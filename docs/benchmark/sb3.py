"""Stable-Baselines3's PPO with VecNormalize, for run.py.

    python docs/benchmark/sb3.py --env-id docs.examples.dispatch:Dispatch-v0

Its defaults are ppo.py's settings; evaluations have the scripts' starts.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

sys.path.insert(0, str(Path(__file__).parents[2]))


@dataclass
class Args:
    env_id: str
    seed: int = 1
    total_timesteps: int = 200_000
    num_envs: int = 16
    num_steps: int = 256
    minibatch_size: int = 128
    learning_rate: float = 1e-3  # falls to 0
    gamma: float = 0.99
    gae_lambda: float = 0.98


def main(args: Args) -> None:
    torch.set_num_threads(1)
    env = VecNormalize(make_vec_env(args.env_id, args.num_envs, args.seed), gamma=args.gamma)
    sizes = {"n_steps": args.num_steps, "batch_size": args.minibatch_size, "device": "cpu"}
    sizes |= {"gamma": args.gamma, "gae_lambda": args.gae_lambda, "seed": args.seed}
    rate = args.learning_rate
    model = PPO("MlpPolicy", env, lambda left: rate * left, tensorboard_log="runs", **sizes)
    start = time.time()
    model.learn(args.total_timesteps)
    print(f"Trained {model.num_timesteps:,} steps in {time.time() - start:.1f} s")
    last = [episode["r"] for episode in model.ep_info_buffer]
    print(f"Training return, last {len(last)} episodes: {np.mean(last):.2f}")

    alone = VecNormalize(make_vec_env(args.env_id), training=False, norm_reward=False)
    alone.obs_rms = env.obs_rms
    returns = []
    for seed in range(10**9, 10**9 + 100):
        alone.seed(seed)
        returns.append(evaluate_policy(model, alone, 1)[0])
    print(f"Greedy evaluation, 100 episodes: return {np.mean(returns):.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
