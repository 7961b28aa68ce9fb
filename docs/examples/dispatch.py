"""Dispatching: jobs of very unequal size arrive at random, and each must be sent to a server.

    python grpo_rtg.py --env-id docs.examples.dispatch:Dispatch-v0 --norm-obs
    python docs/examples/dispatch.py    # what two rules of thumb earn

The load balancing of Mao et al. 2019 (arXiv:1807.02264), smaller. Sizes and times between arrivals
are luck that no action changes. reset(seed=s) fixes all of it, so that a group's members serve the
same jobs. A reward is minus the time, in thousands, that jobs spend in the system until the next
arrival; after the last one they are all served.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SPEEDS = np.linspace(0.15, 1.05, 5)  # of the servers, in work per unit of time
NUM_JOBS = 200  # of an episode
MEAN_GAP = 110.0  # between arrivals; the servers together can do 330 work in it
SHAPE = 1.5  # of the Pareto distribution of sizes, whose mean is about 280


class Dispatch(gym.Env):
    """Observation: log(1 + time that each server needs for its queue), log(1 + the job's size)."""

    observation_space = spaces.Box(0, np.inf, (len(SPEEDS) + 1,), np.float32)
    action_space = spaces.Discrete(len(SPEEDS))
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sizes = np.minimum(100 * (1 + self.np_random.pareto(SHAPE, NUM_JOBS + 1)), 10_000)
        self.gaps = self.np_random.exponential(MEAN_GAP, NUM_JOBS)
        self.gaps[-1] = np.inf  # time to serve them all
        self.queues = [[] for _ in SPEEDS]  # the work left of each job, first come, first served
        self.job = 0
        return self.observe(), {}

    def observe(self):
        waits = [sum(queue) / speed for queue, speed in zip(self.queues, SPEEDS)]
        return np.log1p([*waits, self.sizes[self.job]]).astype(np.float32)

    def step(self, action):
        self.queues[action].append(self.sizes[self.job])
        times = [serve(q, speed, self.gaps[self.job]) for q, speed in zip(self.queues, SPEEDS)]
        self.job += 1
        return self.observe(), -sum(times) / 1000, self.job == NUM_JOBS, False, {}

    def render(self):
        """A pile of jobs for each server, the first one at the bottom; a pixel is 50 of time."""
        image = np.full((180, 40 * len(SPEEDS), 3), 255, np.uint8)
        for server, (queue, speed) in enumerate(zip(self.queues, SPEEDS)):
            bottom = 180
            for work in queue:
                top = max(0, bottom - 2 - int(work / speed / 50))
                image[top : max(0, bottom - 1), 40 * server + 4 : 40 * server + 36] = 0, 114, 178
                bottom = top
        return image


def serve(queue: list[float], speed: float, time: float) -> float:
    """Work on a queue for a while; returns the time that its jobs spent in the system."""
    spent = 0.0
    while queue and time > 0:
        worked = min(time, queue[0] / speed)
        spent += len(queue) * worked
        time -= worked
        queue[0] -= worked * speed
        if queue[0] < 1e-9:
            queue.pop(0)
    return spent


def shortest_wait(obs: np.ndarray) -> int:
    """The server that is free first, of several the fastest."""
    return np.lexsort((-SPEEDS, obs[:-1]))[0]


def soonest_done(obs: np.ndarray) -> int:
    """The server that would have done this job first."""
    waits, size = np.expm1(obs[:-1]), np.expm1(obs[-1])
    return (waits + size / SPEEDS).argmin()


if __name__ != "__main__":
    gym.register("Dispatch-v0", Dispatch, max_episode_steps=NUM_JOBS)
else:
    env = Dispatch()
    for rule in (shortest_wait, soonest_done):
        returns = []
        for seed in range(10**9, 10**9 + 100):  # the starts of the scripts' evaluations
            obs, _ = env.reset(seed=seed)
            rewards, over = [], False
            while not over:
                obs, reward, over, _, _ = env.step(rule(obs))
                rewards.append(reward)
            returns.append(sum(rewards))
        print(f"{rule.__name__}: {np.mean(returns):.1f}")
