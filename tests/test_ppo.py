"""PPO's own parts: rollouts that go on, and GAE. Oracles are in test_oracle.py, what it shares in
the other files.
"""

import json
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
from tests.child import TINY
from tests.envs import Countdown, Hostile, TurnsNaN


def make_policy(env):
    torch.manual_seed(0)
    return ppo.ActorCritic(env.observation_space, env.action_space, 8)


def collect(num_steps=12, how_it_ends="terminated", rollouts=1):
    envs, rng = [Countdown(how_it_ends) for _ in range(3)], np.random.default_rng(0)
    policy, running = make_policy(envs[0]), ppo.Running(envs, rng)
    return [ppo.collect_steps(running, policy, num_steps, rng) for _ in range(rollouts)]


@pytest.mark.parametrize("how_it_ends", ["terminated", "truncated"])
def test_steps_of_known_episodes(how_it_ends):
    """Countdown shows (length, steps taken): each row tells what must stand beside it."""
    [steps] = collect(how_it_ends=how_it_ends)
    length, taken = steps.obs.unbind(-1)
    assert torch.equal(steps.rewards, taken + 1)
    next_obs = torch.stack([length, taken + 1], -1)  # never the next episode's start
    assert torch.equal(steps.next_obs, next_obs)
    assert torch.equal(steps.done, taken + 1 == length)
    assert torch.equal(steps.terminated, steps.done & (how_it_ends == "terminated"))
    going_on = ~steps.done[:-1]
    assert torch.equal(steps.obs[1:][going_on], steps.next_obs[:-1][going_on])
    assert (taken[1:][steps.done[:-1]] == 0).all() and steps.done.sum() > 3
    returns = {(float(sum(range(1, int(n) + 1))), int(n)) for n in length[steps.done]}
    assert set(steps.episodes) == returns and len(steps.episodes) == steps.done.sum()


@pytest.mark.parametrize("ends", [1, 2])
def test_a_replay_in_which_an_episode_ends_is_given_up(ends):
    """terminated or truncated: the episode under way had not ended."""
    running = ppo.Running([Countdown("terminated")], np.random.default_rng(0))
    seeds, actions, obs = running.seeds, [[0, 0]], [[0.0, 0.0]]
    running.step = lambda n, action: (1.0, ends == 1, ends == 2)
    running.state = lambda: (seeds, actions, obs)
    assert not running.replay(seeds, actions, obs)
    running.step = lambda n, action: (1.0, False, False)
    assert running.replay(seeds, actions, obs)


def test_the_critic_sees_normalized_observations():
    env = Countdown("terminated")
    policy = ppo.ActorCritic(env.observation_space, env.action_space, 8, norm_obs=True)
    obs = 100 + 10 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    policy.update_obs_stats(obs)
    expected = policy.critic((obs - obs.mean(0)) / obs.std(0, correction=0)).squeeze(-1)
    torch.testing.assert_close(policy.value(obs), expected, rtol=1e-3, atol=1e-3)


def test_episodes_go_on_between_rollouts():
    """Two rollouts of six steps are one of twelve."""
    [whole], halves = collect(12), collect(6, rollouts=2)
    for name in ("obs", "rewards", "next_obs", "done"):
        both = torch.cat([getattr(half, name) for half in halves])
        assert torch.equal(both, getattr(whole, name))
    assert sorted(halves[0].episodes + halves[1].episodes) == sorted(whole.episodes)


def test_truncated_bootstraps_and_terminated_does_not():
    """The published bug: a time limit treated as an end. One step, r = 1, V = 0, V(next) = 10, γ =
    0.9.
    """
    one, ten = torch.ones(1, 1), torch.full((1, 1), 10.0)
    yes, no = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)
    for terminated, expected in ((yes, 1.0), (no, 10.0)):
        advantages, returns = ppo.compute_gae(
            one, torch.zeros(1, 1), ten, terminated, yes, 0.9, 0.95
        )
        assert advantages.item() == returns.item() == pytest.approx(expected)


def test_gae_stops_at_an_episodes_end():
    """The second episode's huge reward must not reach the first, truncated one."""
    rewards = torch.tensor([[1.0], [1.0], [1000.0]])
    done = torch.tensor([[False], [True], [False]])
    zeros = torch.zeros(3, 1)
    advantages, _ = ppo.compute_gae(
        rewards, zeros, zeros, torch.zeros(3, 1, dtype=torch.bool), done, 1.0, 1.0
    )
    assert advantages.flatten().tolist() == [2.0, 1.0, 1000.0]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_run_hands_over_what_ended_and_how(env_id, cli, monkeypatch):
    """Pendulum is only ever truncated; CartPole here falls or is truncated after twelve steps."""
    seen, compute_gae = [], ppo.compute_gae

    def watched(*args):
        seen.append((*args, *compute_gae(*args)))
        return seen[-1][-2:]

    monkeypatch.setattr(ppo, "compute_gae", watched)
    options = ["--env-id", env_id, "--max-episode-steps", 12, "--gamma", 0.8, "--gae-lambda", 0.7]
    assert cli("ppo", *TINY["ppo"], *options)[0] == 0
    [run_dir] = Path("runs").iterdir()
    explained = EventAccumulator(str(run_dir)).Reload().Scalars("losses/explained_variance")
    assert len(seen) == len(explained) > 3
    for (rewards, values, next_values, terminated, done, *options, _, returns), logged in zip(
        seen, explained
    ):
        assert options == [0.8, 0.7] and rewards.shape == (16, 4)
        assert done.any() and not (terminated & ~done).any()
        goes_on = ~done[:-1]
        torch.testing.assert_close(next_values[:-1][goes_on], values[1:][goes_on])
        assert (next_values[:-1] != values[1:])[~goes_on].all()  # V(s) of another episode
        share = 1 - (returns - values).var() / returns.var()
        assert logged.value == pytest.approx(share.item(), abs=1e-6)
    ends = torch.stack([torch.stack(call[3:5]) for call in seen]).unbind(1)  # terminated, done
    assert (ends[1] & ~ends[0]).any() and ends[0].any() == (env_id == "CartPole-v1")


def test_explained_variance_is_a_mean_over_the_processes(cli, monkeypatch):
    """As if a second process had one that is greater by 1."""
    gather, logged = ppo.gather, []

    def two(value):
        return [value, value + 1] if isinstance(value, float) else gather(value)

    for gathers in gather, two:
        monkeypatch.setattr(ppo, "gather", gathers)
        assert cli("ppo", *TINY["ppo"])[0] == 0
        [run_dir] = Path("runs").iterdir()
        points = EventAccumulator(str(run_dir)).Reload().Scalars("losses/explained_variance")
        logged.append(np.array([point.value for point in points]))
        run_dir.rename(f"run-{len(logged)}")
    np.testing.assert_allclose(logged[1], logged[0] + 0.5, atol=1e-6)


@pytest.mark.parametrize("norm_adv", [True, False])
def test_advantages_are_normalized_over_the_batch(norm_adv):
    [steps] = collect()
    policy = make_policy(Countdown())
    advantages, returns = torch.arange(36.0).view(12, 3) ** 2, torch.arange(36.0).view(12, 3)
    batch = ppo.make_batch(steps, advantages, returns, policy, ppo.Args(norm_adv=norm_adv))
    flat = advantages.flatten()
    expected = (flat - flat.mean()) / flat.std() if norm_adv else flat
    torch.testing.assert_close(batch["advantages"], expected)
    assert torch.equal(batch["returns"], returns.flatten())
    assert torch.equal(batch["obs"], steps.obs.flatten(0, 1))


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_nan_is_refused_once_a_rollout(what):
    envs, rng = [TurnsNaN(what)], np.random.default_rng(0)
    with pytest.raises(ppo.UserError, match=r"TurnsNaN.* gives numbers that are not finite"):
        ppo.collect_steps(ppo.Running(envs, rng), make_policy(envs[0]), 10, rng)


def test_what_an_environment_raises_is_noted_with_seed_step_and_action():
    envs, rng = [Hostile("step raises")], np.random.default_rng(0)
    running = ppo.Running(envs, rng)
    with pytest.raises(RuntimeError, match="the simulator") as raised:
        ppo.collect_steps(running, make_policy(envs[0]), 10, rng)
    [note] = raised.value.__notes__
    where = rf"reset\(seed={running.seeds[0]}\), step 3: [01]"
    assert re.fullmatch(rf"<Hostile.*>: {where}", note), note
    with pytest.raises(RuntimeError, match="the simulator") as raised:
        ppo.Running([Hostile("reset raises")], rng)
    assert re.search(r"reset\(seed=\d+\), step 0", raised.value.__notes__[0])


class Halves(gym.Wrapper):
    """Changes what it is given, as no environment should."""

    def step(self, action):
        action *= 0.5
        return super().step(action)


@pytest.mark.parametrize("wrapper", [gym.Wrapper, Halves])
def test_episodes_under_way_are_found_again(wrapper):
    """A checkpoint's seeds and actions bring new environments to where the old ones are."""
    envs, rng = [wrapper(gym.make("Pendulum-v1")) for _ in range(3)], np.random.default_rng(0)
    policy, running = make_policy(envs[0]), ppo.Running(envs, rng)
    ppo.collect_steps(running, policy, 230, rng)  # episodes take 200 steps
    saved = json.loads(json.dumps(running.state()))  # plain numbers
    again = ppo.Running([wrapper(gym.make("Pendulum-v1")) for _ in envs], rng)
    assert again.replay(*saved)
    assert [len(episode) for episode in again.actions] == [30, 30, 30]
    assert again.returns == running.returns
    one = ppo.collect_steps(running, policy, 200, np.random.default_rng(1))
    other = ppo.collect_steps(again, policy, 200, np.random.default_rng(1))
    assert torch.equal(one.rewards, other.rewards) and one.episodes == other.episodes
    seeds, actions, obs = saved
    assert not again.replay([seed + 1 for seed in seeds], actions, obs)  # another start: seen
