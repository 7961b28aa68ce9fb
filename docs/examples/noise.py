"""Rewards with noise that the seed fixes and that no action changes: luck, in doses.

    python grpo_rtg.py --env-id docs.examples.noise:Pendulum10-v0
    python grpo_rtg.py --env-id docs.examples.noise:Pendulum10-v0 --no-seed-groups

Pendulum and Acrobot with normal noise added to each reward; its standard deviation σ stands in the
id. The noise of a step depends on the seed and the step's number alone, so that all members of a
seeded group get the same. The first thousand seeds from 10^9 on, the starts of the scripts'
evaluations, have none: policies are judged without it.
"""

import gymnasium as gym
import numpy as np

EVALUATION_SEEDS = range(10**9, 10**9 + 1000)


class Noise(gym.Wrapper):
    """Adds noise to rewards."""

    def __init__(self, env: gym.Env, sigma: float):
        super().__init__(env)
        self.sigma = sigma

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.size = 0.0 if seed in EVALUATION_SEEDS else self.sigma
        self.generator = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        return obs, float(reward) + self.size * self.generator.normal(), *rest


def make(env_id: str, sigma: float, **options) -> gym.Env:
    return Noise(gym.make(env_id, **options), sigma)


for name, env_id, steps in (("Pendulum", "Pendulum-v1", 200), ("Acrobot", "Acrobot-v1", 500)):
    for sigma in (0, 0.3, 1, 3, 10, 30):
        own = {"env_id": env_id, "sigma": sigma}
        gym.register(f"{name}{sigma}-v0", make, max_episode_steps=steps, kwargs=own)
