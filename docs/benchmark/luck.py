"""Environments of others in which luck decides, for the studies: docs.benchmark.luck:Wind-v0.

Backlog and LostSales: a supply chain of four stages with random demand (or-gym-inventory), profits
in hundreds. Wind: LunarLander with its wind. Pushes: MuJoCo's InvertedPendulum, whose cart gets
random pushes. All of this luck is fixed by reset(seed=s).
"""

import gymnasium as gym


class Pushes(gym.Wrapper):
    """A force on the cart along its rail, drawn anew every ten steps."""

    def reset(self, **options):
        self.count = 0
        return self.env.reset(**options)

    def step(self, action):
        if self.count % 10 == 0:
            self.unwrapped.data.xfrc_applied[1, 0] = 30 * self.unwrapped.np_random.normal()
        self.count += 1
        return self.env.step(action)


def inventory(env_id: str, **options) -> gym.Env:
    env = gym.make(f"or_gym_inventory:or_gym_inventory/InvManagement{env_id}", **options)
    return gym.wrappers.TransformReward(env, lambda profit: profit / 100)


def pushes(**options) -> gym.Env:
    return Pushes(gym.make("InvertedPendulum-v5", **options))


for name in ("Backlog", "LostSales"):
    own = {"env_id": f"{name}-v0"}
    gym.register(f"{name}-v0", inventory, max_episode_steps=30, kwargs=own)
wind = {"enable_wind": True, "wind_power": 20.0, "turbulence_power": 2.0}
wind |= {"id": "LunarLander-v3"}
gym.register("Wind-v0", gym.make, max_episode_steps=1000, kwargs=wind)
gym.register("Pushes-v0", pushes, max_episode_steps=1000)
