"""metered:Env-v0 is an environment that notes when training reaches a return, for speed.py seconds.

What it is to watch stands in the variable METER, as JSON: env_id, threshold (the mean return of 100
episodes in a row, which ends the process), steps and longest (steps and seconds of training, after
which the process ends, too), spawned (when the process was started, by time.time) and path (of what
it noted). All environments of a process count together. Needs nothing but Gymnasium, from 0.29 on.
"""

import atexit
import json
import os
import resource
import time
from collections import deque
from pathlib import Path

import gymnasium as gym

METER = json.loads(os.environ["METER"])
noted = {"reached": 0, "steps": 0, "seconds": 0, "start_up": 0}
recent = deque(maxlen=100)


def write_down() -> None:
    noted["seconds"] = time.time() - METER["spawned"] - noted["start_up"]
    noted["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB
    Path(METER["path"]).write_text(json.dumps(noted))


class Metered(gym.Wrapper):
    def reset(self, **options):
        self.episode_return = 0.0
        return self.env.reset(**options)

    def step(self, action):
        if noted["steps"] == 0:
            noted["start_up"] = time.time() - METER["spawned"]
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.episode_return += float(reward)
        noted["steps"] += 1
        if terminated or truncated:
            recent.append(self.episode_return)
        if len(recent) == 100 and sum(recent) / 100 >= METER["threshold"]:
            noted["reached"] = 1
        seconds = time.time() - METER["spawned"] - noted["start_up"]
        if noted["reached"] or noted["steps"] == METER["steps"] or seconds > METER["longest"]:
            write_down()
            os._exit(0)
        return obs, reward, terminated, truncated, info


def make(**options) -> gym.Env:
    return Metered(gym.make(METER["env_id"], **options))


atexit.register(write_down)  # CleanRL takes a few steps less than it is given
gym.register("Env-v0", make)
