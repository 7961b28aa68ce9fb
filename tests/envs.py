"""Tiny environments whose every number is known.

Used as they are, or by their ids: "tests.envs:Countdown-v0".
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Countdown(gym.Env):
    """Pays its step number (1, 2, …) and ends after a number of steps drawn from the seed.

    The observation is (that number, steps taken). how_it_ends: "terminated" or "truncated".
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
        terminated = over and self.how_it_ends == "terminated"
        return self.observe(), float(self.taken), terminated, over, {}


class ChooseLength(Countdown):
    """As Countdown, but action 1 ends the episode: members of a group differ in length."""

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
        obs, reward, *rest = super().step(action)
        if self.taken == 3 and self.what == "observation":
            obs = obs * np.nan
        elif self.taken == 3:
            reward = float("nan")
        return obs, reward, *rest


def fail():
    raise RuntimeError("the simulator is gone")


class Hostile(Countdown):
    """Five steps an episode; the third step, or the reset, does what says.

    Only from the given episode of an instance on.
    """

    def __init__(self, what, episode=1, render_mode=None):
        super().__init__()
        self.what, self.episode, self.episodes = what, episode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length, self.episodes = 5, self.episodes + 1
        if self.bad and self.what in self.reset_does:
            return self.reset_does[self.what]()
        return self.observe(), {}

    def step(self, action):
        result = super().step(action)
        if self.bad and self.taken == 3 and self.what in self.step_does:
            return self.step_does[self.what](*result)
        return result

    @property
    def bad(self):
        return self.episodes >= self.episode

    reset_does = {
        "reset raises": fail,
        "reset returns a long observation": lambda: (np.zeros(3), {}),
        "reset returns no info": lambda: np.zeros(2),
        "reset returns infinity": lambda: (np.array([0, np.inf]), {}),
    }
    step_does = {
        "step raises": lambda *step: fail(),
        "step returns four": lambda *step: step[:4],
        "step returns none": lambda *step: None,
        "observation nan": lambda obs, *rest: (obs * np.nan, *rest),
        "observation infinite": lambda obs, *rest: (obs + np.inf, *rest),
        "observation long": lambda obs, *rest: (np.zeros(3), *rest),
        "observation a number": lambda obs, *rest: (1.0, *rest),
        "observation of text": lambda obs, *rest: (np.array(["a", "b"]), *rest),
        "reward nan": lambda obs, reward, *rest: (obs, np.float32("nan"), *rest),
        "reward infinite": lambda obs, reward, *rest: (obs, -np.inf, *rest),
        "reward none": lambda obs, reward, *rest: (obs, None, *rest),
        "reward of two": lambda obs, reward, *rest: (obs, np.zeros(2), *rest),
        "terminated of two": lambda obs, reward, over, *rest: (obs, reward, np.ones(2), *rest),
        # what can be used is used
        "harmless float64": lambda obs, *rest: (obs.astype(np.float64), *rest),
        "harmless integers": lambda obs, *rest: (obs.astype(np.int8), *rest),
        "harmless list": lambda obs, *rest: (obs.tolist(), *rest),
        "harmless reward array": lambda obs, reward, *rest: (obs, np.array(reward), *rest),
        "harmless integer flag": lambda obs, reward, over, *rest: (obs, reward, int(over), *rest),
        "harmless numpy bool": lambda obs, reward, over, *rest: (
            obs,
            reward,
            np.bool_(over),
            *rest,
        ),
    }


class Target(gym.Env):
    """One step; a Box action of shape (2, 1) within [-1, 3] pays minus its squared distance to 2.

    Actions are recorded.
    """

    observation_space = spaces.Dict(
        {"a": spaces.Box(-1, 1, (2, 2)), "b": spaces.Discrete(3, start=5)}
    )
    action_space = spaces.Box(np.float32(-1), np.float32(3), (2, 1), np.float32)

    def __init__(self):  # no render_mode: Gymnasium asks for none, so neither may the scripts
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"a": self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32), "b": 6}, {}

    def step(self, action):
        self.actions.append(action)
        assert self.action_space.contains(action), action
        obs, reward = {"a": np.zeros((2, 2), np.float32), "b": 5}, -((action - 2) ** 2).sum()
        return obs, float(reward), True, False, {}


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


class OneStep(FromFive):
    """Every episode is over after one step."""

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, True, False, info


class Endless(FromFive):
    """An episode that the environment never ends."""

    observation_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action == 7), False, False, {}


class Scaled(FromFive):
    """Its rewards times scale."""

    def __init__(self, scale, render_mode=None):
        self.scale = scale

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward * self.scale, *rest


class Unsupported(FromFive):
    def __init__(self, what="action", render_mode=None):
        if what == "action":
            self.action_space = spaces.MultiDiscrete([2, 2])
        else:
            self.observation_space = spaces.Graph(spaces.Box(0, 1, (2,)), None)


def register(env_id: str, env_class: type, max_episode_steps: int | None = 50, **kwargs) -> None:
    gym.register(env_id, env_class, max_episode_steps=max_episode_steps, kwargs=kwargs)


for env_class in (Countdown, ChooseLength, IgnoresSeed, Target, FromFive, TurnsNaN, OneStep):
    register(f"{env_class.__name__}-v0", env_class)
for what in Hostile.reset_does | Hostile.step_does:  # "step raises" is tests.envs:StepRaises-v0
    register(f"{what.title().replace(' ', '')}-v0", Hostile, what=what)
register("Late-v0", Hostile, what="step raises", episode=30)
register("Huge-v0", Scaled, scale=1e12)
register("Tiny-v0", Scaled, scale=1e-12)
register("UnsupportedActions-v0", Unsupported)
register("UnsupportedObs-v0", Unsupported, what="observation")
register("Endless-v0", Endless, max_episode_steps=None)
register("NoLimit-v0", Countdown, max_episode_steps=None)
