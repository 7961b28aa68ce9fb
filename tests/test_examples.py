"""docs/examples: the environments keep Gymnasium's rules, and what is said about them is so."""

import importlib

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import grpo_outcome
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
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        assert not (obs[:2] == obs[2:]).all()
        assert env.render().count("A") == env.render().count("G") == 1
        total, steps, ended, distance = 0.0, 0, False, abs(obs[:2] - obs[2:]).sum()
        while not ended:
            towards = np.abs(obs[:2] + MOVES - obs[2:]).sum(1).argmin()
            obs, reward, ended, truncated, _ = env.step(towards)
            total, steps = total + reward, steps + 1
        assert steps == distance and not truncated and total == pytest.approx(1 - 0.1 * steps)
        assert "*" in env.render()
    env.reset(seed=0)
    walls = [env.step(0)[0][:2].tolist() for _ in range(6)]
    assert walls[-1][0] == 0  # against the wall it stays


FLAGS = {
    "grpo_outcome": {},
    "grpo_process": {"total_timesteps": 60_000},
    "grpo_rtg": {"total_timesteps": 60_000},
    "ppo": {"total_timesteps": 60_000},
}


@pytest.mark.slow
@pytest.mark.parametrize("script", FLAGS)
def test_all_scripts_solve_the_grid_world(script):
    """Within a step of the shortest path, on average over 100 starts."""
    module = importlib.import_module(script)
    env_id = "docs.examples.grid_world:GridWorld-v0"
    summary = module.train(module.Args(env_id=env_id, **FLAGS[script]))
    env, shortest = gym.make(env_id), []
    for i in range(100):
        obs, _ = env.reset(seed=10**9 + i)
        shortest.append(1 - 0.1 * abs(obs[:2] - obs[2:]).sum())
    assert summary["eval_returns"].mean() >= np.mean(shortest) - 0.1
    assert (summary["eval_returns"] <= np.array(shortest) + 1e-9).all()


def test_only_the_order_of_the_judgements_matters(monkeypatch):
    """Two judges that order episodes alike, one of them on another scale, train the same weights to
    the bit.
    """
    weights = []
    for judge in (
        preferences.prefers_short_ways,
        lambda _, actions, arrived: 1 / len(actions) if arrived else -1.0,
    ):
        monkeypatch.setattr(preferences, "prefers_short_ways", judge)
        options = {
            "num_groups": 8,
            "group_size": 2,
            "num_minibatches": 2,
            "total_timesteps": 4000,
            "eval_episodes": 1,
        }
        env_id = "docs.examples.preferences:PreferredGridWorld-v0"
        summary = grpo_outcome.train(grpo_outcome.Args(env_id=env_id, **options))
        weights.append(grpo_outcome.load(summary["run_dir"] / "model.pt", env_id)[1]["policy"])
    assert summary["steps"] > 2000
    for name, value in weights[0].items():
        assert np.array_equal(value, weights[1][name]), name


def test_arriving_with_the_last_step_allowed_is_arriving():
    env = preferences.EpisodeScore(
        gym.wrappers.TimeLimit(preferences.grid_world.GridWorld(), 1), lambda *x: float(x[2])
    )
    scores = []
    for seed in range(200):
        obs, _ = env.reset(seed=seed)
        obs, score, terminated, truncated, _ = env.step(0)
        assert truncated and score == terminated
        scores.append(score)
    assert 0 < sum(scores) < 50


def test_the_wrapper_pays_once_at_the_end():
    env = gym.make("docs.examples.preferences:PreferredGridWorld-v0")
    env.reset(seed=3)
    rewards, ended = [], False
    while not ended:
        _, reward, terminated, truncated, _ = env.step(0)
        rewards.append(reward)
        ended = terminated or truncated
    assert rewards[:-1] == [0.0] * (len(rewards) - 1)
    assert rewards[-1] == (-float(len(rewards) ** 2) if terminated else -1e6)


@pytest.mark.parametrize(("emitted", "outcome", "process"), [
    ("12.", [0, 0, 1], [1, 1, 1]),
    ("13.", [0, 0, 0], [1, 0, 1]),
    ("1.", [0, 0], [1, 0]),
    ("2.", [0, 0], [0, 0]),
    ("121", [0, 0, 0], [1, 1, 0]),
])  # fmt: skip
def test_the_verifier(emitted, outcome, process):
    for supervision, expected in (("outcome", outcome), ("process", process)):
        env = arithmetic.Arithmetic(supervision)
        env.reset(seed=0)
        env.prompt = (7, 5)
        steps = [env.step(arithmetic.END if token == "." else int(token)) for token in emitted]
        assert [reward for _, reward, *_ in steps] == expected
        assert [terminated for _, _, terminated, *_ in steps] == [False] * (len(emitted) - 1) + [
            True
        ]


def test_held_out_prompts_are_never_drawn():
    env, drawn = arithmetic.Arithmetic(), set()
    for seed in range(3000):
        env.reset(seed=seed)
        drawn.add(tuple(env.prompt))
    held_out = {tuple(prompt) for prompt in arithmetic.SPLITS["held-out"]}
    assert len(drawn) > 250 and not drawn & held_out and not {(b, a) for a, b in drawn} & held_out
    assert len(held_out) > 80 and len(held_out) + len(arithmetic.SPLITS["train"]) == 400


@pytest.mark.slow
def test_grpo_raises_the_accuracy_of_a_pretrained_policy(capsys, monkeypatch):
    """The example itself, with two fifths of its steps: every script gains on prompts that no
    training has seen.
    """
    monkeypatch.setattr(arithmetic, "STEPS", 40_000)
    arithmetic.main()
    table = capsys.readouterr().out.split("share of right answers")[1]
    shares = {
        line.split()[0]: int(line.split("%")[0].split()[-1])
        for line in table.splitlines()[1:]
        if "%" in line
    }
    before = shares.pop("pretrained")
    assert 30 < before < 70 and all(share >= before + 8 for share in shares.values()), table
    assert list(shares) == ["grpo_outcome,", "grpo_process,", "grpo_rtg,"]
