"""What train and Run make of the options: each reaches the formula that it is for."""

import importlib
from dataclasses import replace

import pytest
import torch

import ppo
from tests.child import both_kinds, curves
from tests.envs import FromFive


def small(module, **options):
    """A few iterations of FromFive, whose episodes have ten steps that pay 0 or 1."""
    shape = {"num_envs": 4, "num_steps": 20} if module is ppo else {"group_size": 4}
    shape |= {"env_id": "tests.envs:FromFive-v0", "minibatch_size": 64, "eval_episodes": 1}
    shape |= {"total_timesteps": 500, "update_epochs": 2}
    return module.Args(**shape | options)


ADVANTAGES = [("grpo_outcome", {}), ("grpo_process", {})]
ADVANTAGES += [("grpo_rtg", {"baseline": x}) for x in ("group", "timestep", "regression")]


@pytest.mark.parametrize(("script", "own"), ADVANTAGES, ids=str)
def test_the_advantages_are_those_of_the_options(script, own, monkeypatch):
    module, seen = importlib.import_module(script), []
    make_batch = module.make_batch

    def watched(episodes, advantages, *rest):
        seen.append((episodes, advantages))
        return make_batch(episodes, advantages, *rest)

    monkeypatch.setattr(module, "make_batch", watched)
    args = small(module, gamma=0.9, norm_std=False, **own)
    if own:
        args = replace(args, gae_lambda=0.7, decay=0.3)
        regression = module.ReturnRegression(11, decay=0.3)
    points = curves(module.train(args)["run_dir"])["group/return_std"]
    spreads = [float(x.rewards.sum(-1).std(dim=1, correction=1).mean()) for x, _ in seen]
    assert list(points.values()) == pytest.approx(spreads, rel=1e-6)
    for episodes, advantages in seen:
        more = dict(own)
        if own.get("baseline") == "regression":
            more |= {"values": regression.fit(episodes, 0.9), "gae_lambda": 0.7}
        blocks = episodes.rewards, episodes.mask
        expected = module.compute_advantages(*blocks, gamma=0.9, norm_std=False, **more)
        assert torch.equal(advantages, expected) and advantages.any()
    assert len(seen) > 1


@both_kinds
def test_statistics_of_observations_wait_for_the_update(script, monkeypatch):
    """Or the policy that learns would not be the one that sampled, and its first ratio not 1."""
    module, seen = importlib.import_module(script), []
    update = module.update

    def watched(policy, optimizer, batch, *rest):
        log_probs = policy.log_probs(batch["obs"], batch["actions"])
        seen.append((torch.equal(log_probs, batch["old_log_probs"]), int(policy.obs_stats.count)))
        return update(policy, optimizer, batch, *rest)

    monkeypatch.setattr(module, "update", watched)
    args = small(module, norm_obs=True, total_timesteps=480)
    module.train(args)
    steps = 80 if script == "ppo" else 160
    assert seen == [(True, count) for count in range(0, 480, steps)]


@both_kinds
def test_no_two_start_states_of_a_run_are_alike_but_those_of_a_group(script, monkeypatch):
    """Nor do two runs have one in common, nor an evaluation and its training."""
    seeds, reset = [], FromFive.reset
    monkeypatch.setattr(FromFive, "reset", lambda *x, seed, **y: seeds.append(seed) or reset(*x))
    module = importlib.import_module(script)
    for seed in (3, 4):
        module.train(small(module, seed=seed, total_timesteps=320, eval_episodes=5))
    evaluated = list(range(10**9, 10**9 + 5))
    assert [seed for seed in seeds if seed in evaluated] == 2 * evaluated
    trained = [seed for seed in seeds if seed not in evaluated]
    if script == "ppo":  # 4 environments, 4 iterations of two episodes each
        assert len(trained) == len(set(trained)) == 2 * (4 + 4 * 2 * 4)
    else:  # 2 iterations of 4 groups of 4, and one that is dropped
        assert trained[::4] == trained[1::4] == trained[2::4] == trained[3::4]
        assert len(trained[::4]) == len(set(trained)) == 2 * 3 * 4
