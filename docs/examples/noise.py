"""Environments with luck that the seed fixes and no action changes: noise, wind, pushes, demand.

    python grpo_rtg.py --env-id docs.examples.noise:Pendulum10-v0
    python grpo_rtg.py --env-id docs.examples.noise:Pendulum10-v0 --no-seed-groups
    python -m docs.examples.noise    # what two rules for the reservoir earn

Pendulum and Acrobot with normal noise added to each reward; its standard deviation σ stands in the
id. The noise of a step depends on the seed and the step's number alone, so that all members of a
seeded group get the same. The first thousand seeds from 10^9 on, the starts of the scripts'
evaluations, have none: policies are judged without it.

Wind: LunarLander with its wind. Pushes: MuJoCo's InvertedPendulum with pushes. Environments of
others, rewards near 1 (pip install mo-gymnasium or-gymnasium or-gym-inventory): Reservoir, a dam
with random inflow, both its costs in hundreds; Portfolio, assets with random prices, wealth in
thousands; Backlog and LostSales, a supply chain with random demand, profits in hundreds.
ScaledDispatch: dispatch.py with a hundredth of its rewards in training, but not in evaluations.
"""

import gymnasium as gym
import numpy as np

from docs.examples import dispatch

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


class Scaled(gym.Wrapper):
    """A hundredth of the rewards, but in evaluations."""

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.scale = 1.0 if seed in EVALUATION_SEEDS else 0.01
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        obs, reward, *rest = self.env.step(action)
        return obs, self.scale * reward, *rest


class Pushes(gym.Wrapper):
    """A force on the cart, drawn anew every ten steps."""

    def reset(self, **options):
        self.count = 0
        return self.env.reset(**options)

    def step(self, action):
        if self.count % 10 == 0:
            self.unwrapped.data.xfrc_applied[1, 0] = 60 * self.unwrapped.np_random.normal()
        self.count += 1
        return self.env.step(action)


def noise(env_id: str, sigma: float, **options) -> gym.Env:
    return Noise(gym.make(env_id, **options), sigma)


def scaled_dispatch(**options) -> gym.Env:
    return Scaled(dispatch.Dispatch(**options))


def pushes(**options) -> gym.Env:
    return Pushes(gym.make("InvertedPendulum-v5", **options))


class Final(gym.Wrapper):
    """The end of time is an end: nothing that follows is worth a thing."""

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated or truncated, False, info


def rescaled(env_id: str, scale: float, final: bool = True, **options) -> gym.Env:
    """With the sum of a step's rewards, divided; final says whether the end of time is an end."""
    env = gym.make(env_id, disable_env_checker=True, **options)  # it knows no vectors of rewards
    env = Final(env) if final else env
    return gym.wrappers.TransformReward(env, lambda rewards: np.sum(rewards) / scale)


for name, env_id, steps in (("Pendulum", "Pendulum-v1", 200), ("Acrobot", "Acrobot-v1", 500)):
    for sigma in (0, 0.3, 1, 3, 10, 30):
        own = {"env_id": env_id, "sigma": sigma}
        gym.register(f"{name}{sigma}-v0", noise, max_episode_steps=steps, kwargs=own)
WIND = {"enable_wind": True, "wind_power": 20.0, "turbulence_power": 2.0}
gym.register("Wind-v0", "gymnasium.envs.box2d:LunarLander", max_episode_steps=1000, kwargs=WIND)
gym.register("ScaledDispatch-v0", scaled_dispatch, max_episode_steps=dispatch.NUM_JOBS)
gym.register("Pushes-v0", pushes, max_episode_steps=1000)
RESERVOIR = {"normalized_action": True, "final": False}  # water goes on
INVENTORY = "or_gym_inventory:or_gym_inventory/InvManagement"
for name, env_id, scale, steps, own in (
    ("Reservoir", "mo_gymnasium:water-reservoir-v0", 100, 100, RESERVOIR),
    ("Portfolio", "or_gymnasium:PortfolioOpt-v0", 1000, 10, {}),
    ("Backlog", f"{INVENTORY}Backlog-v0", 100, 30, {}),
    ("LostSales", f"{INVENTORY}LostSales-v0", 100, 30, {}),
):
    own = {"env_id": env_id, "scale": scale, **own}
    gym.register(f"{name}-v0", rescaled, max_episode_steps=steps, kwargs=own)

if __name__ == "__main__":
    env = gym.make("Reservoir-v0")
    for kept in (0.0, 12.5):  # water, once the demand of 50 is met
        returns = []
        for seed in EVALUATION_SEEDS[:100]:
            [level], _ = env.reset(seed=seed)
            rewards, over = [], False
            while not over:
                least = max(level - 100, 0)
                release = min(level, max(50, level - kept))
                action = np.array([(release - least) / (level - least)], np.float32)
                [level], reward, _, over, _ = env.step(action)
                rewards.append(reward)
            returns.append(sum(rewards))
        print(f"keep {kept}: {np.mean(returns):.2f}")
