"""LunarLander whose reset(seed) fixes the start alone, for the ablation that tells a shared start
from shared luck.

In Gymnasium's, the seed fixes the ground, the first push and what the engines scatter at every
step. Here the engines' luck is each environment's own: of a group's members, too, which start
alike.
"""

import itertools

import gymnasium as gym
import numpy as np
from gymnasium.envs.box2d.lunar_lander import LunarLander

numbers = itertools.count()  # of the environments made so far: the seeds of their luck


class OwnLuck(LunarLander):
    def __init__(self, **options):
        super().__init__(**options)
        self.luck = np.random.default_rng(next(numbers))

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        start = super().reset(seed=seed, options=options)
        self.np_random = self.luck
        return start


gym.register("LunarLanderOwnLuck-v3", OwnLuck, max_episode_steps=1000, reward_threshold=200)
