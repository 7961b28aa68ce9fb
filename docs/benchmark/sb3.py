"""Stable-Baselines3's PPO, for run.py and speed.py.

    python docs/benchmark/sb3.py --env-id CartPole-v1 --settings '{"n_envs": 8}'

Settings are PPO's, n_envs, and normalize: VecNormalize, and bounded actions from -1 to 1, as in the
scripts. A number that is a text falls linearly to 0. With policy_kwargs, networks have ReLU.
Evaluations have the scripts' starts.
"""

import json
import sys
import time
from functools import partial
from operator import mul
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.wrappers import DtypeObservation, FlattenObservation, TransformAction
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

sys.path.insert(0, str(Path(__file__).parents[2]))


def wrapped(env: gym.Env, normalize: bool) -> gym.Env:
    """With flat observations of floats; to normalize, bounded actions from -1 to 1."""
    env = DtypeObservation(FlattenObservation(env), np.float32)
    space = env.action_space
    if not normalize or not isinstance(space, gym.spaces.Box):
        return env

    def stretch(action: np.ndarray) -> np.ndarray:
        action = space.low + (action + 1) / 2 * (space.high - space.low)
        whole = np.issubdtype(space.dtype, np.integer)
        return (np.rint(action) if whole else action).astype(space.dtype)

    return TransformAction(env, stretch, gym.spaces.Box(-1, 1, space.shape))


def main(
    env_id: str,
    total_timesteps: int = 200_000,
    seed: int = 1,
    eval_episodes: int = 100,
    settings: str = "{}",
) -> None:
    torch.set_num_threads(1)
    options = json.loads(settings)
    options = {k: partial(mul, float(v)) if isinstance(v, str) else v for k, v in options.items()}
    if "policy_kwargs" in options:
        options["policy_kwargs"]["activation_fn"] = torch.nn.ReLU
    normalize = options.pop("normalize", False)
    make = partial(make_vec_env, partial(gym.make, env_id), wrapper_class=wrapped)
    make = partial(make, wrapper_kwargs={"normalize": normalize})
    env = make(options.pop("n_envs", 1), seed)
    if normalize:
        env = VecNormalize(env, gamma=options["gamma"])
    model = PPO("MlpPolicy", env, seed=seed, device="cpu", tensorboard_log="runs", **options)
    start = time.time()
    model.learn(total_timesteps)
    print(f"Trained {model.num_timesteps:,} steps in {time.time() - start:.1f} s")
    last = [episode["r"] for episode in model.ep_info_buffer]
    print(f"Training return, last {len(last)} episodes: {np.mean(last):.2f}")

    alone = make()
    if normalize:
        alone = VecNormalize(alone, training=False, norm_reward=False)
        alone.obs_rms = env.obs_rms
    returns = []
    for start in range(10**9, 10**9 + eval_episodes):
        alone.seed(start)
        returns.append(evaluate_policy(model, alone, 1)[0])
    print(f"Greedy evaluation, {eval_episodes} episodes: return {np.mean(returns):.2f}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
