"""Tiny environments whose every number is known.

Used as they are, or by their ids: "tests.envs:Countdown-v0".
"""

from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Countdown(gym.Env):
    """Pays its step number (1, 2, …) and ends after a number of steps drawn from the seed.

    The observation is (that number, steps taken). how_it_ends: "terminated" or "truncated".
    """

    observation_space = spaces.Box(0, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)
    steps_taken_ever = 0

    def __init__(self, how_it_ends="terminated"):
        self.how_it_ends = how_it_ends

    def observe(self):
        return np.array([self.length, self.taken], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(2, 9))
        self.taken = 0
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


class NumpyRandom(Countdown):
    """Draws from np.random when it is made, in steps, and if told so in resets."""

    def __init__(self, in_resets=False):
        super().__init__()
        self.in_resets = in_resets
        self.offset = np.random.random()

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs + np.random.random() if self.in_resets else obs, info

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward * action + np.random.random() + self.offset, *rest


def fail():
    raise RuntimeError("the simulator is gone")


class Hostile(Countdown):
    """From the given episode of an instance on the reset or the third of five steps does what."""

    reset_does = {
        "reset raises": fail,
        "reset returns infinity": lambda: (np.array([0, np.inf]), {}),
    }
    step_does = {
        "step raises": lambda *step: fail(),
        "observation nan": lambda obs, *rest: (obs * np.nan, *rest),
        "reward infinite": lambda obs, reward, *rest: (obs, -np.inf, *rest),
        "reward of two": lambda obs, reward, *rest: (obs, np.zeros(2), *rest),
    }

    def __init__(self, what, episode=1):
        super().__init__()
        self.what = what
        self.good_episodes = episode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = 5
        self.good_episodes -= 1
        if self.good_episodes <= 0 and self.what in self.reset_does:
            return self.reset_does[self.what]()
        return self.observe(), {}

    def step(self, action):
        result = super().step(action)
        bad = self.good_episodes <= 0 and self.taken == 3 and self.what in self.step_does
        return self.step_does[self.what](*result) if bad else result


class Unusual(Countdown):
    """Five steps; observations are lists, rewards of shape (1,), flags are numbers."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = 5
        return self.observe().tolist(), {}

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs.tolist(), np.array([reward]), int(terminated), truncated, info


class Target(gym.Env):
    """One step; an action of shape (2, 1) within [-1, 3] pays minus its squared distance to 2."""

    observation_space = spaces.Dict(
        {"a": spaces.Box(-1, 1, (2, 2)), "b": spaces.Discrete(3, start=5)}
    )
    action_space = spaces.Box(np.float32(-1), np.float32(3), (2, 1), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"a": self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32), "b": 6}, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        obs = {"a": np.zeros((2, 2), np.float32), "b": 5}
        return obs, float(-((action - 2) ** 2).sum()), True, False, {}


class FromFive(gym.Env):
    """Actions are 5, 6, 7; 7 pays. Ten steps to an episode."""

    observation_space = spaces.Discrete(11)
    action_space = spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.taken = 0
        return self.observe(), {}

    def observe(self):
        return self.taken

    def pay(self, action):
        return action == 7

    def step(self, action):
        assert self.action_space.contains(action), action
        self.taken += 1
        reward = float(self.pay(action))
        return self.observe(), reward, False, self.taken >= 10, {}


class Choices(FromFive):
    """Pays the share of an action's choices that are the last one of theirs."""

    kinds = {
        "MultiDiscrete": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[5, 1], [0, -3]]),
        "MultiBinary": spaces.MultiBinary((2, 1, 2)),
    }

    def __init__(self, kind):
        self.action_space = self.kinds[kind]

    def pay(self, action):
        last = getattr(self.action_space, "nvec", 2) - 1 + getattr(self.action_space, "start", 0)
        return (action == last).mean()


class Match(FromFive):
    """One step: see -1, 0 or 1, and answer with action 0, 1 or 2."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Discrete(3)

    def observe(self):
        self.shown = int(self.np_random.integers(3))
        return np.array([self.shown - 1], np.float32)

    def step(self, action):
        return np.zeros(1, np.float32), float(action == self.shown), True, False, {}


class Repeat(FromFive):
    """Four numbers from -2 to 2 are shown; it costs not to repeat them."""

    observation_space = spaces.Box(-2, 2, (4,))
    action_space = spaces.Box(-2, 2, (4,))

    def observe(self):
        self.shown = self.np_random.uniform(-2, 2, 4).astype(np.float32)
        return self.shown

    def pay(self, action):
        return -np.abs(action - self.shown).mean()


class Picture(FromFive):
    """Shows a square of bytes."""

    observation_space = spaces.Box(0, 255, (6, 6, 3), np.uint8)

    def observe(self):
        return self.np_random.integers(256, size=(6, 6, 3), dtype=np.uint8)


class Unknown(spaces.Space):
    """A space that Gymnasium does not know, as MiniGrid's missions are."""


class Odd(FromFive):
    """Has a space that the scripts do not take, or cannot be made."""

    actions = {
        "tuple of actions": spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]),
        "integer actions": spaces.Box(0, 9, (2,), np.int64),
        "empty range": spaces.Box(np.float32([0, 1]), np.float32([1, 1])),
    }

    def __init__(self, what):
        if what.endswith(".xml"):
            Path(what).read_text()
        assert what in (*self.actions, "mission"), f"there is no {what}"
        self.action_space = self.actions.get(what, self.action_space)
        if what == "mission":
            image = spaces.Box(0, 1, (2,))
            self.observation_space = spaces.Dict({"image": image, "mission": Unknown()})


class Drawn(FromFive):
    """Can be shown and filmed."""

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 30}

    def __init__(self, render_mode=None, missing=None):
        self.render_mode = render_mode
        self.missing = missing  # for this mode

    def reset(self, **options):
        if self.missing == self.render_mode == "human":
            raise gym.error.DependencyNotInstalled("pygame is not installed")
        return super().reset(**options)

    def render(self):
        if self.missing == self.render_mode == "rgb_array":
            raise gym.error.DependencyNotInstalled("cairo is not installed")
        return np.zeros((16, 16, 3), np.uint8)


class Text(Drawn):
    """Can be shown as text only."""

    metadata = {"render_modes": ["ansi"], "render_fps": 30}


for env_class in (
    *(Countdown, ChooseLength, IgnoresSeed, NumpyRandom, Hostile, Unusual, Target, FromFive),
    *(Choices, Match, Repeat, Picture, Odd, Drawn, Text),
):
    gym.register(f"{env_class.__name__}-v0", env_class, max_episode_steps=50)
