r"""Learning from judgements of whole episodes: no rewards, only a score at the end, of which only
the order counts.

    python grpo_outcome.py --env-id docs.examples.preferences:PreferredGridWorld-v0 \
        --num-groups 32 --group-size 2 --learning-rate 2e-3 --minibatch-size 256 --ent-coef 0.03

EpisodeScore hides an environment's rewards and pays one score when the episode ends, as a person or
a reward model would. With two members in a group, outcome supervision gives the better one

    (R_1 - (R_1 + R_2)/2) / std = (d/2) / (|d|/√2) = 1/√2,    d = R_1 - R_2 > 0

and the other -1/√2, whatever the margin d (above rounding): any judge that puts the two in the same
order trains the same policy. The judge below has a scale that no sum of rewards would have.
"""

from collections.abc import Callable
from copy import deepcopy

import gymnasium as gym

import docs.examples.grid_world as grid_world


class EpisodeScore(gym.Wrapper):
    """Replace all rewards of an episode by one score, paid with its last step.

    judge takes the episode's observations (one more than actions), its actions and whether it
    reached an end of its own (terminated), and gives a number. Wrap the environment after its time
    limit: cut further out, by a limit that this wrapper does not see, an episode is never scored.
    """

    def __init__(self, env: gym.Env, judge: Callable[[list, list, bool], float]):
        super().__init__(env)
        self.judge = judge

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        obs, info = self.env.reset(seed=seed, options=options)
        self.observations, self.actions = [deepcopy(obs)], []
        return obs, info

    def step(self, action):
        obs, _, terminated, truncated, info = self.env.step(action)
        self.observations.append(deepcopy(obs))
        self.actions.append(action)
        ended = terminated or truncated
        score = float(self.judge(self.observations, self.actions, terminated)) if ended else 0.0
        return obs, score, terminated, truncated, info


def prefers_short_ways(observations: list, actions: list, arrived: bool) -> float:
    """The judge of the grid world: arriving beats not arriving, and of two arrivals the sooner."""
    return -float(len(actions) ** 2) if arrived else -1e6


def make(render_mode: str | None = None) -> gym.Env:
    limited = gym.wrappers.TimeLimit(grid_world.GridWorld(render_mode), 50)
    return EpisodeScore(limited, prefers_short_ways)


gym.register("PreferredGridWorld-v0", make, max_episode_steps=50)
