"""CPU against GPU: skipped where there is none."""

from copy import deepcopy

import numpy as np
import pytest
import torch

import grpo_rtg
import ppo
from tests.child import equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def first_batches(module, args, policies: list) -> list[dict]:
    """The same steps, which the first policy played, as each policy's device takes them."""
    if module is ppo:
        in_flight = [ppo.start_episode(ppo.make_env(args)) for _ in range(4)]
        steps = ppo.collect_steps(in_flight, policies[0], 64)
        return [ppo.make_batch(steps, policy, args) for policy in policies]
    envs = [grpo_rtg.make_env(args) for _ in range(args.num_groups * args.group_size)]
    episodes = grpo_rtg.collect_groups(envs, policies[0], args)
    advantages = grpo_rtg.compute_advantages(episodes.rewards, episodes.mask, args.gamma)
    return [grpo_rtg.make_batch(episodes, advantages, x, x, args) for x in policies]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("module", [grpo_rtg, ppo], ids=["grpo_rtg", "ppo"])
def test_an_update_is_the_cpus(module, env_id):
    """One gradient step on all steps, whose order is then of no matter."""
    torch.manual_seed(0)
    args = module.Args(env_id=env_id, update_epochs=1, norm_obs=True)
    env_ = module.make_env(args)
    policy = module.Policy(env_.observation_space, env_.action_space, args)
    policy.update_obs_stats(torch.randn(100, *env_.observation_space.shape))
    policies = [policy, deepcopy(policy).to("cuda")]
    before = [x.clone() for x in policy.state_dict().values()]
    batches = first_batches(module, args, policies)
    args.minibatch_size = 10**6
    for policy, batch in zip(policies, batches):
        assert {x.device.type for x in batch.values()} == {next(policy.parameters()).device.type}
        optimizer = torch.optim.Adam(policy.parameters(), 1e-3, eps=1e-5, fused=True)
        module.update(policy, optimizer, batch, args)
    expected, given = ([x.cpu() for x in policy.state_dict().values()] for policy in policies)
    assert not equal(before, expected)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-4)
    obs = np.ones((5, *env_.observation_space.shape), np.float32)
    expected, given = (policy.act(obs, greedy=True) for policy in policies)
    np.testing.assert_allclose(given, expected, atol=1e-3)
