"""docs/examples: the environments keep Gymnasium's rules, and what is said about them is so."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import grpo_process
from docs.examples import arithmetic, preferences
from docs.examples.grid_world import MOVES

IDS = ["grid_world:GridWorld-v0", "preferences:PreferredGridWorld-v0"]
IDS += ["arithmetic:Arithmetic-v0", "arithmetic:ArithmeticProcess-v0"]


@pytest.mark.parametrize("name", IDS)
def test_the_environments_keep_the_rules(name):
    env = gym.make(f"docs.examples.{name}")
    check_env(env.unwrapped, skip_render_check=False)
    assert env.spec.max_episode_steps < 100


def test_grid_world_step_by_step():
    env = gym.make("docs.examples.grid_world:GridWorld-v0", render_mode="ansi")
    for seed in range(5):
        obs, _ = env.reset(seed=seed)
        assert env.render().count("A") == env.render().count("G") == 1
        distance = abs(obs[:2] - obs[2:]).sum()
        rewards, ended = [], False
        while not ended:
            towards = np.abs(obs[:2] + MOVES - obs[2:]).sum(1).argmin()
            obs, reward, ended, truncated, _ = env.step(towards)
            rewards.append(reward)
        assert len(rewards) == distance > 0 and not truncated and "*" in env.render()
        assert sum(rewards) == pytest.approx(1 - 0.1 * distance)
    env.reset(seed=0)
    walls = [env.step(0)[0][:2].tolist() for _ in range(6)]
    assert walls[-1][0] == 0  # against the wall it stays


@pytest.mark.slow
def test_process_supervision_solves_the_grid_world():
    """Within a step of the shortest path, on average over 100 starts."""
    env_id = "docs.examples.grid_world:GridWorld-v0"
    summary = grpo_process.train(grpo_process.Args(env_id=env_id, total_timesteps=60_000))
    env, shortest = gym.make(env_id), []
    for i in range(100):
        obs, _ = env.reset(seed=10**9 + i)
        shortest.append(1 - 0.1 * abs(obs[:2] - obs[2:]).sum())
    assert np.mean(summary["eval_returns"]) >= np.mean(shortest) - 0.1
    assert (summary["eval_returns"] <= np.array(shortest) + 1e-9).all()


@pytest.mark.parametrize("limit", [1, 50])
def test_the_wrapper_pays_once_at_the_end(limit):
    """Also where the limit cuts the episode with the step that arrives."""
    limited = gym.wrappers.TimeLimit(preferences.grid_world.GridWorld(), limit)
    env, arrivals = preferences.EpisodeScore(limited, preferences.prefers_short_ways), 0
    for seed in range(40):
        env.reset(seed=seed)
        rewards, ended = [], False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(0)
            rewards.append(reward)
            ended = terminated or truncated
        arrivals += terminated
        assert rewards[:-1] == [0.0] * (len(rewards) - 1)
        assert rewards[-1] == (-float(len(rewards) ** 2) if terminated else -1e6)
    assert 0 < arrivals < 40


@pytest.mark.parametrize(("emitted", "outcome", "process"), [
    ("12.", [0, 0, 1], [1, 1, 1]),
    ("13.", [0, 0, 0], [1, 0, 1]),
    ("1.", [0, 0], [1, 0]),
    ("121", [0, 0, 0], [1, 1, 0]),
])  # fmt: skip
def test_the_verifier(emitted, outcome, process):
    for supervision, expected in (("outcome", outcome), ("process", process)):
        env = arithmetic.Arithmetic(supervision)
        env.reset(seed=0)
        env.prompt = (7, 5)
        steps = [env.step(arithmetic.END if token == "." else int(token)) for token in emitted]
        assert [reward for _, reward, *_ in steps] == expected
        assert [terminated for _, _, terminated, *_ in steps][-2:] == [False, True]


@pytest.mark.slow
def test_grpo_raises_the_accuracy_of_a_pretrained_policy(capsys, monkeypatch):
    """The example itself, with two fifths of its steps: every script gains on unseen prompts."""
    held_out, train = ({tuple(p) for p in x} for x in arithmetic.SPLITS.values())
    assert len(held_out) > 80 and len(held_out | train) == 400 and not held_out & train
    monkeypatch.setattr(arithmetic, "STEPS", 40_000)
    arithmetic.main()
    table = capsys.readouterr().out.split("share of right answers")[1]
    rows = [line.split("%")[0].split() for line in table.splitlines() if "%" in line]
    shares = {row[0]: int(row[-1]) for row in rows}
    before = shares.pop("pretrained")
    assert list(shares) == ["grpo_outcome,", "grpo_process,", "grpo_rtg,"]
    assert 30 < before < 70 and min(shares.values()) >= before + 8, table
