"""PPO's own parts: rollouts that go on, and GAE. Oracles are in test_oracle.py, what it shares in the other files."""

import numpy as np
import pytest
import torch

import ppo
from tests.envs import Countdown, TurnsNaN


def collect(num_steps=12, how_it_ends="terminated", rollouts=1):
    envs, rng = [Countdown(how_it_ends) for _ in range(3)], np.random.default_rng(0)
    policy = ppo.ActorCritic(envs[0].observation_space, envs[0].action_space, 8)
    running = ppo.start_episodes(envs, rng)
    return [ppo.collect_steps(envs, policy, running, num_steps, rng) for _ in range(rollouts)]


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
    running = ppo.start_episodes(envs, rng)
    seed = running.seeds[0]
    policy = ppo.ActorCritic(envs[0].observation_space, envs[0].action_space, 8)
    with pytest.raises(ppo.UserError, match=rf"the reward is NaN .* step 2 after reset\(seed={seed}\)"):
        ppo.collect_steps(envs, policy, running, 10, rng)
