"""A 5×5 grid world, as an example of an environment that Gymnasium does not ship. From the scripts'
folder:

    python grpo_outcome.py --env-id docs.examples.grid_world:GridWorld-v0

Agent and goal start in different cells, drawn at random. Each of the four moves costs 0.1, reaching
the goal pays 1 on top of that and ends the episode; a move against a wall leaves the agent where it
is.
"""

import gymnasium as gym
import numpy as np

SIZE = 5
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # up, down, left, right: (row, column)


class GridWorld(gym.Env):
    """Observations are (row, column) of the agent and of the goal, which Gymnasium flattens to four
    one-hot vectors.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(self, render_mode: str | None = None):
        self.observation_space = gym.spaces.MultiDiscrete([SIZE] * 4)
        self.action_space = gym.spaces.Discrete(len(MOVES))
        if render_mode not in (None, "ansi"):
            raise gym.error.UnsupportedMode("The grid world is shown as text only.")
        self.render_mode = render_mode

    def reset(
        self, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)  # seeds self.np_random: every random number must come from there
        cells = self.np_random.choice(SIZE**2, size=2, replace=False)
        self.agent, self.goal = (np.array(divmod(cell, SIZE)) for cell in cells)
        return self.observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.agent = (self.agent + MOVES[action]).clip(0, SIZE - 1)
        arrived = bool((self.agent == self.goal).all())
        return self.observation(), 1.0 * arrived - 0.1, arrived, False, {}

    def observation(self) -> np.ndarray:
        return np.concatenate([self.agent, self.goal])

    def render(self) -> str | None:
        """The grid as text, with mode "ansi": A the agent, G the goal, * both."""
        if self.render_mode is None:
            return None
        grid = np.full((SIZE, SIZE), ".")
        grid[tuple(self.goal)] = "G"
        grid[tuple(self.agent)] = "*" if (self.agent == self.goal).all() else "A"
        return "\n".join(" ".join(row) for row in grid) + "\n"


gym.register("GridWorld-v0", GridWorld, max_episode_steps=50)
