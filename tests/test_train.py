"""What train, update and Run make of the options: each reaches the formula that it is for."""

import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.utils import parameters_to_vector

import grpo_rtg
import ppo
from tests.child import SCRIPTS, TINY
from tests.envs import Countdown

each_script = pytest.mark.parametrize("script", SCRIPTS)
each_grpo = pytest.mark.parametrize("script", SCRIPTS[:3])
NEIGHBORS = {"baseline": "neighbors", "num_neighbors": 2}


def args(module, **options):
    """A few iterations of FromFive, whose episodes have ten steps that pay 0 or 1."""
    shape = {"num_envs": 4, "num_steps": 20} if module is ppo else {"group_size": 4}
    shape |= {"env_id": "tests.envs:FromFive-v0", "num_minibatches": 2, "eval_episodes": 1}
    shape |= {"total_timesteps": 500, "update_epochs": 2}
    return module.Args(**shape | options)


@each_grpo
@pytest.mark.parametrize("norm_std", [True, False])
def test_the_advantages_are_those_of_the_options(script, norm_std, monkeypatch):
    module, seen = importlib.import_module(script), []
    make_batch = module.make_batch

    def watched(episodes, advantages, *rest):
        seen.append((episodes, advantages))
        return make_batch(episodes, advantages, *rest)

    monkeypatch.setattr(module, "make_batch", watched)
    own = NEIGHBORS if script == "grpo_rtg" else {}
    module.train(args(module, gamma=0.9, norm_std=norm_std, **own))
    for episodes, advantages in seen:
        rest = {"obs": module.pad(episodes.obs, episodes.mask)} | own if own else {}
        blocks = episodes.rewards, episodes.mask
        expected = module.compute_advantages(*blocks, gamma=0.9, norm_std=norm_std, **rest)
        assert torch.equal(advantages, expected) and advantages.any()
    assert len(seen) > 1


@each_script
def test_the_coefficients_are_those_of_the_options(script, cli, monkeypatch):
    module, seen = importlib.import_module(script), []
    name = "ppo_loss" if script == "ppo" else "grpo_loss"
    loss = getattr(module, name)

    def watched(*given):
        seen.append(inspect.signature(loss).bind(*given).arguments)
        return loss(*given)

    monkeypatch.setattr(module, name, watched)
    coefs = {"clip_coef": 0.11, "ent_coef": 0.12, "vf_coef" if script == "ppo" else "kl_coef": 0.13}
    flags = [x for name, value in coefs.items() for x in (f"--{name.replace('_', '-')}", value)]
    assert cli(script, *TINY[script], *flags)[0] == 0 and seen
    assert {name: seen[-1][name] for name in coefs} == coefs


@each_script
def test_statistics_of_observations_wait_for_the_update(script, monkeypatch):
    """Or the policy that learns would not be the one that sampled, and its first ratio not 1."""
    module, seen = importlib.import_module(script), []
    update = module.update

    def watched(policy, optimizer, batch, *rest):
        log_probs = policy.log_probs(batch["obs"], batch["actions"])
        seen.append(torch.equal(log_probs, batch["log_probs"]))
        return update(policy, optimizer, batch, *rest)

    monkeypatch.setattr(module, "update", watched)
    module.train(args(module, norm_obs=True))
    assert len(seen) > 1 and all(seen)


@each_script
def test_a_seed_fixes_the_first_weights_and_the_random_numbers(script):
    module = importlib.import_module(script)
    runs = [module.Run(args(module, seed=seed)) for seed in (3, 3, 4)]
    one, same, other = (parameters_to_vector(run.trained["policy"].parameters()) for run in runs)
    assert torch.equal(one, same) and not torch.equal(one, other)
    one, same, other = (run.rng.random() for run in runs)
    assert one == same != other


@each_script
def test_adam_is_cleanrls(script):
    module = importlib.import_module(script)
    [group] = module.Run(args(module, learning_rate=0.01)).trained["optimizer"].param_groups
    assert group["eps"] == 1e-5 and group["lr"] == 0.01
    assert tuple(group["betas"]) == (0.9, 0.999) and group["weight_decay"] == 0


def test_every_episode_of_ppo_has_a_start_of_its_own():
    rng = np.random.default_rng(0)
    running = ppo.Running([Countdown("terminated") for _ in range(3)], rng)
    seeds, reset = list(running.seeds), running.reset
    running.reset = lambda n, seed: (seeds.append(seed), reset(n, seed))
    spaces = running.envs[0].observation_space, running.envs[0].action_space
    ppo.collect_steps(running, ppo.ActorCritic(*spaces), 30, rng)
    assert len(seeds) > 10 and len(set(seeds)) == len(seeds)


def test_the_spread_of_a_groups_returns_is_logged_with_bessels_correction(monkeypatch):
    returns, record = [], grpo_rtg.Run.record

    def watched(run, episodes, *rest):
        returns.append(episodes.rewards.sum(-1))
        return record(run, episodes, *rest)

    monkeypatch.setattr(grpo_rtg.Run, "record", watched)
    run_dir = grpo_rtg.train(args(grpo_rtg))["run_dir"]
    points = EventAccumulator(str(run_dir)).Reload().Scalars("group/return_std")
    expected = [np.std(x.numpy(), axis=1, ddof=1).mean() for x in returns]
    assert [x.value for x in points] == pytest.approx(expected, rel=1e-6) and any(expected)


@each_script
def test_a_resumed_run_counts_the_seconds_before(script, cli):
    assert cli(script, *TINY[script], "--total-timesteps", 200)[0] == 0
    [checkpoint] = Path("runs").glob("*/checkpoint.pt")
    states = torch.load(checkpoint, weights_only=True)
    torch.save(states | {"seconds": 5000.0}, checkpoint)
    status, out, err = cli(script, "--resume", checkpoint, "--total-timesteps", 400)
    assert status == 0, err
    assert 5000 <= float(re.search(r"Trained \d+ steps in ([\d.]+) s", out)[1]) < 5060


class TestProcesses:
    """update with what another process would say."""

    def sizes(self, monkeypatch, others, **options):
        """Of the minibatches of three passes over 64 steps."""
        env, seen, loss = grpo_rtg.make_env("CartPole-v1"), [], grpo_rtg.grpo_loss
        policy = grpo_rtg.Policy(env.observation_space, env.action_space, 8)
        obs, size = torch.zeros(64, len(policy.obs_mean)), torch.ones(64)
        batch = {"obs": obs, "actions": torch.zeros(64, dtype=torch.int64), "log_probs": -size}
        batch |= {"ref_log_probs": -size, "advantages": size, "weights": size}

        def watched(policy, batch, *coefs):
            seen.append(len(batch["obs"]))
            return loss(policy, batch, *coefs)

        monkeypatch.setattr(grpo_rtg, "grpo_loss", watched)
        monkeypatch.setattr(
            grpo_rtg, "gather", lambda value: [value, others.get(type(value), value)]
        )
        optimizer, rng = torch.optim.SGD(policy.parameters(), 1e-9), np.random.default_rng(0)
        options = grpo_rtg.Args(update_epochs=3, num_minibatches=8, **options)
        grpo_rtg.update(policy, optimizer, batch, options, rng)
        return seen

    def test_all_take_as_many_gradient_steps_as_the_one_with_fewest_steps_can(self, monkeypatch):
        assert self.sizes(monkeypatch, {int: 5}) == [13, 13, 13, 13, 12] * 3

    def test_all_stop_by_their_mean_kl(self, monkeypatch):
        assert self.sizes(monkeypatch, {float: 1e9}, target_kl=1e3) == [8] * 8
        assert self.sizes(monkeypatch, {}, target_kl=1e3) == [8] * 24
