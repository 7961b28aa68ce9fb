"""PPO's own parts: rollouts that go on, the critic, evaluations in environments of their own."""

import pytest
import torch

import ppo
from tests.child import TINY, env, equal, train, weights
from tests.envs import Countdown


def make_policy(env_, **options):
    torch.manual_seed(0)
    args = ppo.Args(hidden_size=8, **options)
    return ppo.Policy(env_.observation_space, env_.action_space, args)


def collect(num_steps=12, rollouts=1, **kwargs):
    """The policy and the steps of three environments."""
    envs = [Countdown(**kwargs) for _ in range(3)]
    policy = make_policy(envs[0])
    in_flight = [ppo.start_episode(env) for env in envs]
    return policy, [ppo.collect_steps(in_flight, policy, num_steps) for _ in range(rollouts)]


@pytest.mark.parametrize("ends", [["terminated"], ["truncated"], ["terminated", "truncated"]])
def test_steps_of_known_episodes(ends):
    """Countdown shows (length, steps taken): each row tells what must stand beside it."""
    _, [steps] = collect(ends=ends)
    length, taken = steps.obs.unbind(-1)
    assert steps.rewards.dtype == torch.float64
    assert torch.equal(steps.rewards, length.double() + (taken.double() + 1) / 10)
    next_obs = torch.stack([length, taken + 1], -1)  # never the next episode's start
    assert torch.equal(steps.next_obs, next_obs)
    assert torch.equal(steps.done, taken + 1 == length)
    assert torch.equal(steps.terminated, steps.done & ("terminated" in ends))
    going_on = ~steps.done[:-1]
    assert torch.equal(steps.obs[1:][going_on], steps.next_obs[:-1][going_on])
    assert (taken[1:][steps.done[:-1]] == 0).all() and steps.done.sum() > 3
    lengths = length[steps.done].long().tolist()  # in the order in which they ended
    assert steps.episode_lengths == lengths
    returns = [n * n + sum(range(1, n + 1)) / 10 for n in lengths]
    assert steps.episode_returns == pytest.approx(returns)


def test_episodes_go_on_between_rollouts():
    _, [first, second] = collect(6, rollouts=2, choose=True)
    going_on = ~first.done[-1]
    assert going_on.any()
    assert torch.equal(second.obs[0][going_on], first.next_obs[-1][going_on])
    returns = torch.cat([first.rewards, second.rewards]).sum()
    ended = sum(first.episode_returns + second.episode_returns)
    assert 0 < returns - ended < 3 * 40  # episodes that are under way


@pytest.mark.parametrize("norm_adv", [True, False])
def test_a_batch_against_a_scalar_loop(norm_adv):
    """Values of what each step led to, before any reset; truncated steps bootstrap from them."""
    policy, [steps] = collect(ends=["truncated"])
    args = ppo.Args(norm_adv=norm_adv, gamma=0.9, gae_lambda=0.8)
    batch = ppo.make_batch(steps, policy, args)
    with torch.no_grad():
        values, next_values = policy.value(steps.obs), policy.value(steps.next_obs)
        log_probs = policy(steps.obs.flatten(0, 1)).log_prob(steps.actions.flatten(0, 1))
    expected = torch.zeros(12, 3).double()
    for n in range(3):
        later = 0.0
        for t in reversed(range(12)):
            delta = float(steps.rewards[t, n] + 0.9 * next_values[t, n] - values[t, n])
            later = delta + (0 if steps.done[t, n] else 0.9 * 0.8 * later)
            expected[t, n] = later
    returns = (expected + values).flatten().float()
    if norm_adv:
        expected = (expected - expected.mean()) / expected.std(correction=0)
    torch.testing.assert_close(batch["advantages"], expected.flatten().float())
    torch.testing.assert_close(batch["returns"], returns)
    torch.testing.assert_close(batch["values"], values.flatten())
    torch.testing.assert_close(batch["old_log_probs"], log_probs)
    assert torch.equal(batch["obs"], steps.obs.flatten(0, 1))


def test_the_critic_sees_normalized_observations():
    policy = make_policy(Countdown(), norm_obs=True)
    obs = 100 + 10 * torch.randn(500, 2)
    policy.update_obs_stats(obs)
    expected = policy.critic((obs - obs.mean(0)) / obs.std(0, correction=0)).squeeze(-1)
    torch.testing.assert_close(policy.value(obs), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("explained", [0, 1])
def test_the_explained_variance_of_a_known_critic(explained):
    """One that knows nothing, or all: it adds the rewards that a countdown still pays."""

    class Known(ppo.Policy):
        def value(self, obs):
            length, taken = obs.unbind(-1)
            left = length * (length - taken) + (length * (length + 1) - taken * (taken + 1)) / 20
            return explained * left

    args = ppo.Args(**TINY["ppo"] | env("Countdown"), gamma=1.0, gae_lambda=1.0)
    for metrics in ppo.train(args, policy_type=Known).history:
        assert metrics["losses/explained_variance"] == pytest.approx(explained, abs=1e-6)


def test_a_last_observation_is_looked_at_too(refused):
    """Of a step of which there may be no next one; its value would be NaN."""
    refused("NaN or infinity.* at the end", "ppo", **TINY["ppo"] | env("Faulty", what="last"))


def test_a_run_goes_on_from_its_checkpoint():
    """With its weights and its optimizer's state; two who resume it do the same."""
    run = train("ppo", norm_obs=True)
    resume = {"norm_obs": True, "resume": str(run.dir / "checkpoint.pt")}
    before = torch.load(resume["resume"])
    same = train("ppo", **resume)  # nothing is left to train
    assert all(equal(before[x], same.saved[x].state_dict()) for x in ("policy", "optimizer"))
    ends = []
    for _ in range(2):
        torch.save(before, resume["resume"])
        ends.append(train("ppo", **resume, total_timesteps=800))
    assert equal(weights(ends[0]), weights(ends[1])) and ends[0].step == 832
