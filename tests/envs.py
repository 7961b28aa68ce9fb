"""Tiny environments whose every number is known, registered with Gymnasium under tests.envs: or used as they are."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Countdown(gym.Env):
    """Starts at a length drawn from the seed, pays its step number (1, 2, …) and ends when the length is used up.

    The observation is (length, steps taken). how_it_ends: "terminated" or "truncated".
    """

    observation_space = spaces.Box(0, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, how_it_ends="terminated", render_mode=None):
        self.how_it_ends, self.steps_taken_ever = how_it_ends, 0

    def observe(self):
        return np.array([self.length, self.taken], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length, self.taken = int(self.np_random.integers(2, 9)), 0
        return self.observe(), {}

    def step(self, action):
        self.taken += 1
        self.steps_taken_ever += 1
        over = self.taken >= self.length
        return self.observe(), float(self.taken), over and self.how_it_ends == "terminated", over, {}


class ChooseLength(Countdown):
    """As Countdown, but action 1 ends the episode, so that members of a group differ in length."""

    def step(self, action):
        if action == 1:
            self.length = self.taken + 1
        return super().step(action)


class IgnoresSeed(Countdown):
    starts = 0

    def reset(self, *, seed=None, options=None):
        IgnoresSeed.starts += 1
        return super().reset(seed=IgnoresSeed.starts)


class TurnsNaN(Countdown):
    """Observation or reward becomes NaN at the third step."""

    def __init__(self, what="reward", render_mode=None):
        super().__init__()
        self.what = what

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = 5
        return self.observe(), {}

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if self.taken == 3:
            obs, reward = (obs * np.nan, reward) if self.what == "observation" else (obs, float("nan"))
        return obs, reward, terminated, truncated, info


class Target(gym.Env):
    """One step; a Box action of shape (2, 1) within [-1, 3] pays minus its squared distance to 2; it is recorded."""

    observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (2, 2)), "b": spaces.Discrete(3, start=5)})
    action_space = spaces.Box(np.float32(-1), np.float32(3), (2, 1), np.float32)

    def __init__(self):  # no render_mode: Gymnasium asks for none, so neither may the scripts
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"a": self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32), "b": 6}, {}

    def step(self, action):
        self.actions.append(action)
        assert self.action_space.contains(action), action
        return {"a": np.zeros((2, 2), np.float32), "b": 5}, -float(((action - 2) ** 2).sum()), True, False, {}


class FromFive(gym.Env):
    """Actions are 5, 6, 7; 7 pays 1. Ten steps to an episode."""

    observation_space = spaces.Discrete(11)
    action_space = spaces.Discrete(3, start=5)

    def __init__(self, render_mode=None):
        pass

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.taken = 0
        return self.taken, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.taken += 1
        return self.taken, float(action == 7), False, self.taken >= 10, {}


class Unsupported(FromFive):
    def __init__(self, what="action", render_mode=None):
        if what == "action":
            self.action_space = spaces.MultiDiscrete([2, 2])
        else:
            self.observation_space = spaces.Graph(spaces.Box(0, 1, (2,)), None)


for name, kwargs in {
    "Countdown": {},
    "ChooseLength": {},
    "IgnoresSeed": {},
    "Target": {},
    "FromFive": {},
    "TurnsNaN": {},
}.items():
    gym.register(f"{name}-v0", f"tests.envs:{name}", max_episode_steps=50, kwargs=kwargs)
gym.register("TurnsNaNObs-v0", "tests.envs:TurnsNaN", max_episode_steps=50, kwargs={"what": "observation"})
gym.register("UnsupportedActions-v0", "tests.envs:Unsupported", max_episode_steps=50)
gym.register("UnsupportedObs-v0", "tests.envs:Unsupported", max_episode_steps=50, kwargs={"what": "observation"})
gym.register("NoLimit-v0", "tests.envs:Countdown")
