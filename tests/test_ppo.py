"""PPO's own parts: rollouts that go on, and GAE. Oracles are in test_oracle.py, what it shares in the other files."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo
from tests.envs import Countdown, TurnsNaN


def start(envs, seed=0):
    return ppo.start_episodes(envs, list(range(seed, seed + len(envs))), [[] for _ in envs])


def collect(num_steps=12, how_it_ends="terminated", rollouts=1):
    envs, rng = [Countdown(how_it_ends) for _ in range(3)], np.random.default_rng(0)
    policy = ppo.ActorCritic(envs[0].observation_space, envs[0].action_space, 8)
    running, collected = start(envs), []
    for _ in range(rollouts):
        steps, running = ppo.collect_steps(envs, policy, running, num_steps, rng)
        collected.append(steps)
    return collected


@pytest.mark.parametrize("how_it_ends", ["terminated", "truncated"])
def test_steps_of_known_episodes(how_it_ends):
    """Countdown's observation is (length, steps taken): each row tells what must stand beside it."""
    [steps] = collect(how_it_ends=how_it_ends)
    length, taken = steps.obs.unbind(-1)
    assert torch.equal(steps.rewards, taken + 1)
    assert torch.equal(steps.next_obs, torch.stack([length, taken + 1], -1))  # never the next episode's start
    assert torch.equal(steps.done, taken + 1 == length)
    assert torch.equal(steps.terminated, steps.done & (how_it_ends == "terminated"))
    going_on = ~steps.done[:-1]
    assert torch.equal(steps.obs[1:][going_on], steps.next_obs[:-1][going_on])
    assert (taken[1:][steps.done[:-1]] == 0).all() and steps.done.sum() > 3
    returns = {(float(sum(range(1, int(n) + 1))), int(n)) for n in length[steps.done]}
    assert set(steps.episodes) == returns and len(steps.episodes) == steps.done.sum()


def test_episodes_go_on_between_rollouts():
    """Two rollouts of six steps are one of twelve."""
    [whole], halves = collect(12), collect(6, rollouts=2)
    for name in ("obs", "rewards", "next_obs", "done"):
        assert torch.equal(torch.cat([getattr(half, name) for half in halves]), getattr(whole, name))
    assert sorted(halves[0].episodes + halves[1].episodes) == sorted(whole.episodes)


def test_truncated_bootstraps_and_terminated_does_not():
    """The published bug: a time limit treated as an end. One step, r = 1, V = 0, V(next) = 10, γ = 0.9."""
    one, ten = torch.ones(1, 1), torch.full((1, 1), 10.0)
    yes, no = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)
    for terminated, expected in ((yes, 1.0), (no, 10.0)):
        advantages, returns = ppo.compute_gae(one, torch.zeros(1, 1), ten, terminated, yes, 0.9, 0.95)
        assert advantages.item() == returns.item() == pytest.approx(expected)


def test_gae_stops_at_an_episodes_end():
    """The second episode's huge reward must not reach the first, truncated one."""
    rewards = torch.tensor([[1.0], [1.0], [1000.0]])
    done = torch.tensor([[False], [True], [False]])
    zeros = torch.zeros(3, 1)
    advantages, _ = ppo.compute_gae(rewards, zeros, zeros, torch.zeros(3, 1, dtype=torch.bool), done, 1.0, 1.0)
    assert advantages.flatten().tolist() == [2.0, 1.0, 1000.0]


def test_nan_names_the_step_and_the_seed():
    envs, rng = [TurnsNaN("reward")], np.random.default_rng(0)
    running, seed = start(envs, seed=7), 7
    policy = ppo.ActorCritic(envs[0].observation_space, envs[0].action_space, 8)
    with pytest.raises(ppo.UserError, match=rf"at step 2 .* after reset\(seed={seed}\): .* reward nan"):
        ppo.collect_steps(envs, policy, running, 10, rng)


class Halves(gym.Wrapper):
    """Changes what it is given, as no environment should."""

    def step(self, action):
        action *= 0.5
        return super().step(action)


@pytest.mark.parametrize("wrapper", [gym.Wrapper, Halves])
def test_episodes_under_way_are_found_again(wrapper):
    """A checkpoint's seeds and actions bring new environments to where the old ones are, to the bit."""
    envs, rng = [wrapper(gym.make("Pendulum-v1")) for _ in range(3)], np.random.default_rng(0)
    policy = ppo.ActorCritic(envs[0].observation_space, envs[0].action_space, 8)
    _, running = ppo.collect_steps(envs, policy, start(envs), 230, rng)  # episodes take 200 steps
    saved = running.state_dict()
    taken = [actions.clone() for actions in saved["actions"]]
    others = [wrapper(gym.make("Pendulum-v1")) for _ in envs]
    again = ppo.start_episodes(others, saved["seeds"], saved["actions"])
    assert [len(episode) for episode in again.actions] == [30, 30, 30]
    assert all(map(torch.equal, again.state_dict()["actions"], taken))
    assert np.array_equal(again.obs, running.obs) and np.array_equal(again.returns, running.returns)
    one, _ = ppo.collect_steps(envs, policy, running, 200, np.random.default_rng(1))
    other, _ = ppo.collect_steps(others, policy, again, 200, np.random.default_rng(1))
    assert torch.equal(one.rewards, other.rewards) and one.episodes == other.episodes


def test_a_failed_rollout_leaves_the_running_episodes_as_they_were():
    envs = [TurnsNaN("reward")]
    running = start(envs)
    before = [running.obs.copy(), list(running.seeds), [list(x) for x in running.actions], running.returns.copy()]
    policy = ppo.ActorCritic(envs[0].observation_space, envs[0].action_space, 8)
    with pytest.raises(ppo.UserError):
        ppo.collect_steps(envs, policy, running, 10, np.random.default_rng(0))
    assert all(np.array_equal(one, other) for one, other in zip(before, running))
