"""PPO's own parts: rollouts that go on, the critic, and GAE (its oracle is in test_oracle.py)."""

import numpy as np
import pytest
import torch

import ppo
from tests.child import TINY, curves, only_run
from tests.envs import Countdown


def make_policy(env, **options):
    torch.manual_seed(0)
    args = ppo.Args(hidden_size=8, **options)
    return ppo.ActorCritic(env.observation_space, env.action_space, args)


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
    lengths = length[steps.done].tolist()  # in the order in which they ended
    assert steps.episode_lengths == lengths
    assert steps.episode_returns == [sum(range(1, int(n) + 1)) for n in lengths]


def test_the_critic_sees_normalized_observations():
    policy = make_policy(Countdown(), norm_obs=True)
    obs = 100 + 10 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    policy.obs_stats.update(obs)
    expected = policy.critic((obs - obs.mean(0)) / obs.std(0, correction=0)).squeeze(-1)
    torch.testing.assert_close(policy.value(obs), expected, rtol=1e-3, atol=1e-3)
    values = policy.values(obs.view(125, 4, 2))
    torch.testing.assert_close(values, policy.value(obs).detach().view(125, 4))


def test_episodes_go_on_between_rollouts():
    """Two rollouts of six steps are one of twelve."""
    [whole], halves = collect(12), collect(6, rollouts=2)
    for name in ("obs", "rewards", "next_obs", "done"):
        both = torch.cat([getattr(half, name) for half in halves])
        assert torch.equal(both, getattr(whole, name))
    for name in ("episode_returns", "episode_lengths"):
        assert getattr(halves[0], name) + getattr(halves[1], name) == getattr(whole, name)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_run_hands_over_what_ended_and_how(env_id, cli, monkeypatch):
    """Pendulum is only ever truncated; CartPole here falls or is truncated after twelve steps."""
    seen, compute_gae = [], ppo.compute_gae

    def watched(*args, **kwargs):
        assert kwargs == {"gamma": 0.8, "gae_lambda": 0.7}
        seen.append((*args, *compute_gae(*args, **kwargs)))
        return seen[-1][-2:]

    monkeypatch.setattr(ppo, "compute_gae", watched)
    options = ["--env-id", env_id, "--max-episode-steps", 12, "--gamma", 0.8, "--gae-lambda", 0.7]
    assert cli("ppo", *TINY["ppo"], *options)[0] == 0
    explained = list(curves(only_run())["losses/explained_variance"].values())
    assert len(seen) == len(explained) > 3
    for call, logged in zip(seen, explained):
        rewards, values, next_values, terminated, done, _, returns = call
        assert rewards.shape == (16, 4)
        assert done.any() and not (terminated & ~done).any()
        goes_on = ~done[:-1]
        torch.testing.assert_close(next_values[:-1][goes_on], values[1:][goes_on])
        assert (next_values[:-1] != values[1:])[~goes_on].all()  # V(s) of another episode
        share = 1 - (returns - values).var() / returns.var()
        assert logged == pytest.approx(share.item(), abs=1e-6)
    terminated, done = torch.stack([torch.stack(call[3:5]) for call in seen]).unbind(1)
    assert (done & ~terminated).any() and terminated.any() == (env_id == "CartPole-v1")


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
    log_probs = policy.log_probs(batch["obs"], steps.actions.flatten(0, 1))
    assert torch.equal(batch["old_log_probs"], log_probs)
