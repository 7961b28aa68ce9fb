"""Wrappers for what people bring. Copy the one that fits into the module that registers your own.

    gymnasium.register("Mine-v0", lambda **options: Seeded(MyEnv(**options)), max_episode_steps=500)

Seeded: an environment whose reset ignores its seed. OldGym: one with the interface of gym before
0.26. OwnProcess: one with a single simulator for a whole process.
"""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode


class Seeded(gym.Wrapper):
    """Starts that the seed fixes, for what draws from NumPy's global generator or has seed().

    Afterwards the generator is put back, for the scripts and other environments draw from it, too.
    What steps draw from it is not shared: hand them the environment's np_random for that.
    """

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if seed is None:
            return self.env.reset(options=options)
        if hasattr(self.unwrapped, "seed"):
            self.unwrapped.seed(seed)
        before = np.random.get_state()
        np.random.seed(seed % 2**32)
        try:
            return self.env.reset(seed=seed, options=options)
        finally:
            np.random.set_state(before)


class OldGym(gym.Env):
    """reset() -> observation and step(action) -> observation, reward, done, info, made new."""

    def __init__(self, env, observation_space: gym.Space, action_space: gym.Space):
        self.env = env
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        if seed is not None:
            self.env.seed(seed)
        return self.env.reset(), {}

    def step(self, action):
        obs, reward, done, info = self.env.step(action)
        cut = info.get("TimeLimit.truncated", False)
        return obs, reward, done and not cut, cut, info


class OwnProcess(gym.Env):
    """An environment in a process of its own: OwnProcess(MyEnv).

    This process makes one, too, for its spaces, and closes it. Infos stay behind.
    """

    def __init__(self, make_env):
        self.envs = AsyncVectorEnv([make_env], autoreset_mode=AutoresetMode.DISABLED)
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        return self.envs.reset(seed=seed, options=options)[0][0].copy(), {}

    def step(self, action):
        results = self.envs.step(np.array([action]))
        obs, reward, terminated, truncated = (result[0] for result in results[:4])
        return obs.copy(), float(reward), bool(terminated), bool(truncated), {}

    def close(self):
        self.envs.close()
