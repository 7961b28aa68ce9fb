"""CPU against GPU: skipped where there is none."""

import copy
import warnings

import numpy as np
import pytest
import torch

import grpo_rtg
import ppo
from tests import child
from tests.test_neighbors import block, compute

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_first_update_is_the_cpus(env_id):
    """The same seed: the same episodes and advantages; one pass in four minibatches moves the
    weights alike.
    """
    args = grpo_rtg.Args(update_epochs=1, num_minibatches=4, kl_coef=0.1, ent_coef=0.01)
    envs = [grpo_rtg.make_env(env_id) for _ in range(8)]
    torch.manual_seed(0)
    policy = grpo_rtg.Policy(envs[0].observation_space, envs[0].action_space)
    ends = {}
    for device in ("cpu", "cuda"):
        network, rng = copy.deepcopy(policy).to(device), np.random.default_rng(0)
        episodes = grpo_rtg.collect_groups(envs, network, 2, rng)
        advantages = grpo_rtg.compute_advantages(episodes.rewards, episodes.mask, 0.99)
        batch = grpo_rtg.make_batch(episodes, advantages, network, network, args)
        batch["ref_log_probs"] = batch["log_probs"] - 0.1
        optimizer = grpo_rtg.Adam(network.parameters(), 1e-3, eps=1e-5, fused=True)
        grpo_rtg.update(network, optimizer, batch, args, rng)
        ends[device] = advantages, [x.detach().cpu() for x in network.parameters()]
    torch.testing.assert_close(ends["cuda"][0], ends["cpu"][0], rtol=1e-3, atol=1e-3)
    for given, expected in zip(ends["cuda"][1], ends["cpu"][1]):
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("constant", [False, True])
def test_the_neighbors_are_the_cpus(constant, k):
    """49 steps of a constant coordinate, too, whose mean 49 times 1/49 of it would miss; and a
    start in one place, where with k = 2 all three others count.
    """
    rewards, mask, obs = block([9, 15, 11, 2], [3, 1, 7, 1], dims=4)
    obs[..., 0] = 0.1 if constant else obs[..., 0]
    obs[:, :, 0] = obs[:, :1, 0]
    expected = compute(rewards, mask, obs, k=k)
    given = compute(*(x.cuda() for x in (rewards, mask, obs)), k=k)
    assert given.is_cuda
    torch.testing.assert_close(given.cpu(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("network", [grpo_rtg.Policy, ppo.ActorCritic])
def test_sampling_is_the_cpus(network):
    env = grpo_rtg.make_env("Pendulum-v1")
    policy, obs = (
        network(env.observation_space, env.action_space, norm_obs=True),
        np.ones((5, 3), np.float32),
    )
    expected = policy.sampler(np.random.default_rng(0))(obs)
    given = policy.cuda().sampler(np.random.default_rng(0))(obs)
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("script", child.SCRIPTS)
def test_a_whole_run(script, cli):
    status, out, err = cli(
        script, "--cuda", "--total-timesteps", 3000, "--eval-episodes", 2, "--norm-obs"
    )
    assert status == 0 and torch.cuda.get_device_name() in out and "Trained" in out, err
    assert "WARNING" not in out + err


def test_no_minibatch_waits_for_the_gpu():
    """As many synchronizations with sixteen minibatches as with two: a pass may wait for its order,
    an update for its metrics, but no gradient step does.
    """
    env = grpo_rtg.make_env("CartPole-v1")
    waits = []
    for num_minibatches in (2, 2, 16):  # the first one warms up
        policy = grpo_rtg.Policy(env.observation_space, env.action_space).cuda()
        optimizer = grpo_rtg.Adam(policy.parameters(), 1e-3, eps=1e-5, fused=True)
        batch = {
            "obs": torch.randn(64, 4, device="cuda"),
            "actions": torch.zeros(64, dtype=torch.int64, device="cuda"),
        }
        batch |= dict.fromkeys(
            ("advantages", "weights", "log_probs", "ref_log_probs"), batch["obs"][:, 0]
        )
        args = grpo_rtg.Args(update_epochs=2, num_minibatches=num_minibatches, kl_coef=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            grpo_rtg.update(policy, optimizer, batch, args, np.random.default_rng(0))
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(warning.message) for warning in caught))
    assert 0 < waits[1] == waits[2]
