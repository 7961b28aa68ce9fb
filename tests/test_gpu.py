"""CPU against GPU: skipped where there is none."""

import copy

import numpy as np
import pytest
import torch

import grpo_rtg
import ppo
from tests import child

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_first_update_is_the_cpus(env_id):
    """The same seed: the same episodes; one pass in minibatches moves the weights alike."""
    args = grpo_rtg.Args(env_id=env_id, update_epochs=1, minibatch_size=256, kl_coef=0.1)
    envs = [grpo_rtg.make_env(args) for _ in range(8)]
    torch.manual_seed(0)
    policy = grpo_rtg.Policy(envs[0].observation_space, envs[0].action_space, args)
    ends = {}
    for device in ("cpu", "cuda"):
        network = copy.deepcopy(policy).to(device)
        rng = np.random.default_rng(0)
        episodes = grpo_rtg.collect_groups(envs, network, 2, rng)
        advantages = grpo_rtg.compute_advantages(
            episodes.rewards, episodes.mask, 0.99, baseline="timestep"
        )
        batch = grpo_rtg.make_batch(episodes, advantages, network, network, args)
        batch["ref_log_probs"] = batch["old_log_probs"] - 0.1
        optimizer = grpo_rtg.Adam(network.parameters(), 1e-3, eps=1e-5, fused=True)
        grpo_rtg.update(network, optimizer, batch, args, rng)
        ends[device] = [advantages, *(x.detach().cpu() for x in network.parameters())]
    for given, expected in zip(ends["cuda"], ends["cpu"]):
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("network", [grpo_rtg.Policy, ppo.ActorCritic])
def test_sampling_is_the_cpus(network):
    args = ppo.Args(env_id="Pendulum-v1", norm_obs=True)
    env = ppo.make_env(args)
    policy = network(env.observation_space, env.action_space, args)
    obs = np.ones((5, 3), np.float32)
    expected = policy.act(obs, np.random.default_rng(0))
    given = policy.cuda().act(obs, np.random.default_rng(0))
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)


@child.both_kinds
def test_a_whole_run(script, cli):
    flags = ["--cuda", "--total-timesteps", 5000, "--eval-episodes", 2, "--norm-obs"]
    status, out, err = cli(script, *flags)
    assert status == 0 and torch.cuda.get_device_name() in out and "Trained" in out, err
    assert "WARNING" not in out + err


@child.both_kinds
def test_a_gpus_run_goes_on_there_and_on_a_cpu(script, cli):
    """On the GPU as if it had not stopped; but the running episodes of ppo.py start anew."""
    command = [*child.TINY[script], "--norm-obs", "--no-anneal-lr", "--cuda"]
    assert cli(script, *command, "--total-timesteps", 800)[0] == 0
    whole = child.only_run().rename("whole")
    assert cli(script, *command)[0] == 0
    checkpoint, model = (child.only_run() / name for name in ("checkpoint.pt", "model.pt"))
    assert "Greedy evaluation" in cli(script, "--evaluate", model)[1]
    assert cli(script, "--resume", checkpoint, "--total-timesteps", 800)[0] == 0
    resumed = child.read(model)["policy"]
    assert script == "ppo" or child.equal(resumed, child.read(whole / "model.pt")["policy"])
    status, out, err = cli(script, "--resume", checkpoint, "--total-timesteps", 1200, "--no-cuda")
    assert status == 0 and "Device: CPU" in out, err
