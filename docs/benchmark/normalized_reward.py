"""Hopper and HalfCheetah with rewards divided by the spread of the return, for training alone.

CleanRL and RL-Zoo train PPO on MuJoCo so. run.py evaluates on the environment itself.
"""

import gymnasium as gym

for name in ("Hopper-v5", "HalfCheetah-v5"):

    def make(name=name, **options) -> gym.Env:
        return gym.wrappers.NormalizeReward(gym.make(name, **options), gamma=0.99)

    gym.register(f"NormalizedReward/{name}", make)
