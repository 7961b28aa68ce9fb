"""docs/examples: the environments keep Gymnasium's rules, and what is said about them is so."""

import importlib
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
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


@pytest.fixture
def gpg():
    """The example, with a grpo_rtg.py of its own to change."""
    before = sys.modules.pop("grpo_rtg", None)
    yield importlib.import_module("docs.examples.gpg")
    del sys.modules["docs.examples.gpg"], sys.modules["grpo_rtg"]
    if before is not None:
        sys.modules["grpo_rtg"] = before


def test_bins_by_hand(gpg):
    """Only an episode's first visit to a bin counts there: 3 and 4 in bin 0, 1 and 5 in bin 1."""
    returns = torch.tensor([3.0, 2, 1, 5, 4]).double()
    bins = torch.tensor([0, 0, 1, 1, 0])
    episode = torch.tensor([0, 0, 0, 1, 1])
    assert gpg.bin_means(returns, bins, episode).tolist() == [3.5, 3.5, 3, 3, 3.5]


def test_bins_against_a_loop(gpg):
    """Algorithm 2 of the paper with dictionaries, and R - b as the advantage."""
    torch.manual_seed(0)
    lengths = torch.tensor([[5, 9, 1], [7, 2, 9]])
    mask = torch.arange(9) < lengths[..., None]
    rewards = torch.randn(2, 3, 9).double().where(mask, 0)
    state = torch.randn(int(mask.sum()), 2).round()  # some of ten, many times
    obs = state + 1e-3 * torch.rand(state.shape)
    truncated = torch.ones(2, 3, dtype=torch.bool)  # for which the paper has no value
    episodes = gpg.Episodes(obs, obs, rewards, mask, truncated)
    gpg.BinMeans.bin_width = 0.1
    b = gpg.BinMeans(2, 0.0).fit(episodes, gamma=0.9)

    returns = [r[m] for r, m in zip(rewards.flatten(0, 1), mask.flatten(0, 1))]
    returns = [
        [sum(0.9 ** (j - t) * float(r[j]) for j in range(t, len(r))) for t in range(len(r))]
        for r in returns
    ]
    states = [[tuple(o.tolist()) for o in part] for part in state.split(lengths.flatten().tolist())]
    visits = {}
    for own_states, own_returns in zip(states, returns):
        seen = set()
        for state, value in zip(own_states, own_returns):
            if state not in seen:
                visits.setdefault(state, []).append(value)
            seen.add(state)
    expected = [np.mean(visits[state]) for own in states for state in own]
    assert len(visits) < mask.sum() / 2
    assert b[..., :-1][mask].tolist() == pytest.approx(expected)
    assert (b[~torch.nn.functional.pad(mask, (0, 1))] == 0).all()
    options = {"baseline": "regression", "values": b, "gae_lambda": gpg.Args().gae_lambda}
    found = gpg.grpo_rtg.compute_advantages(rewards, mask, 0.9, norm_std=False, **options)
    expected = np.concatenate(returns) - expected
    assert found[mask].tolist() == pytest.approx(expected)
