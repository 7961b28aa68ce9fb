"""Tiny environments whose every number is known, by ids such as "tests.envs:Countdown-v0"."""

import os
import random

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Countdown(gym.Env):
    """Shows (length, steps taken), in one array for all, and pays length + steps taken / 10.

    The length is 2 to 8, by the seed; with choose, action 1 ends it, too; ends: the flags then.
    """

    observation_space = spaces.Box(0, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)
    shown = np.zeros(2, np.float32)
    info = {}

    def __init__(self, ends=("terminated",), choose=False):
        self.ends = ends
        self.choose = choose

    def observe(self):
        self.shown[:] = self.length, self.taken
        return self.shown

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(2, 9))
        self.taken = 0
        return self.observe(), {}

    def step(self, action):
        self.taken += 1
        over = self.taken >= self.length or bool(self.choose and action == 1)
        flags = [over and flag in self.ends for flag in ("terminated", "truncated")]
        self.info["is_success"] = self.taken > 4
        return self.observe(), self.length + self.taken / 10, *flags, self.info


class Dice(Countdown):
    """Draws from generators that all share; kills an evaluation where there is a file "die"."""

    def reset(self, *, seed=None, options=None):
        if seed == 10**9 and os.path.exists("die"):
            os.remove("die")
            os.kill(os.getpid(), 9)
        return super().reset(seed=seed)

    def step(self, action):
        obs, _, over, *rest = super().step(action)
        reward = random.random() + np.random.random()
        return obs, reward * action, over or reward > 1.8, *rest


class Faulty(Countdown):
    """Does what is wrong."""

    resets = 0

    def __init__(self, what):
        super().__init__()
        self.what = what

    def observe(self):
        bad = self.taken == {"reset": 0, "observation": 2, "last": self.length}.get(self.what)
        return super().observe() + (np.nan if bad else 0)

    def reset(self, *, seed=None, options=None):
        Faulty.resets += 1
        return super().reset(seed=Faulty.resets if self.what == "ignores the seed" else seed)

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, {"reward nan": np.nan, "reward None": None}.get(self.what, reward), *rest


class Odd(Countdown):
    """Five steps, in forms that are not Gymnasium's but can be understood."""

    metadata = {"render_modes": None}

    def observe(self):
        self.length = 5
        return super().observe()[None]  # (1, D)

    def step(self, action):
        obs, reward, over, *rest = super().step(action)
        return obs, np.array([reward]) if self.taken % 2 else 1, np.array([over]), *rest


class Answer(Countdown):
    """Ten steps, each of which pays the share of an action's numbers that are the best ones."""

    nested = spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[5, 1], [0, -3]])
    kinds = {
        "Discrete": (spaces.Discrete(3, start=5, dtype=np.int16), 7),
        "MultiDiscrete": (nested, [[6, 3], [3, -2]]),
        "MultiBinary": (spaces.MultiBinary((2, 1, 2)), 1),
        "Box": (spaces.Box(np.float32(-1), np.float32(3), (2, 1)), 2),
        "Tuple": (spaces.Tuple([spaces.Discrete(2)]), 0),
        "integers": (spaces.Box(0, 9, (2,), np.int64), 7),
        "bools": (spaces.Box(0, 1, (2,), bool), 0),
        "strange": (spaces.Discrete(2), 0),
    }
    observation_space = spaces.Dict(a=spaces.Box(-1, 1, (2, 2)), b=spaces.MultiDiscrete([2, 3]))

    def __init__(self, kind):
        super().__init__(ends=["truncated"])
        self.action_space, self.best = self.kinds[kind]
        if kind == "strange":
            self.observation_space = spaces.Dict(a=spaces.Space())  # as MiniGrid's text

    def observe(self):
        self.length = 10
        return {"a": np.full((2, 2), 0.5, np.float32), "b": np.array([1, 2])}

    def step(self, action):
        assert self.action_space.contains(action), action
        obs, _, *rest = super().step(action)
        return obs, np.mean(1 - np.minimum(np.abs(action - np.array(self.best)), 1)), *rest


class Stamp(Countdown):
    """One step: shows a time of 1.7e9, or one second later, and asks which."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def observe(self):
        return np.array([1.7e9 + self.length % 2])

    def step(self, action):
        return self.observe(), float(action == self.length % 2), True, False, {}


for env_class in (Countdown, Dice, Faulty, Odd, Answer, Stamp):
    gym.register(f"{env_class.__name__}-v0", env_class, max_episode_steps=50)
