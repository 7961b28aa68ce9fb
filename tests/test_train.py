"""What train, update and Run make of the options: each reaches the formula that it is for."""

import importlib
import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch

import grpo_rtg
import ppo
from tests.child import TINY, both_kinds, curves, only_run, read
from tests.envs import FromFive


def small(module, **options):
    """A few iterations of FromFive, whose episodes have ten steps that pay 0 or 1."""
    shape = {"num_envs": 4, "num_steps": 20} if module is ppo else {"group_size": 4}
    shape |= {"env_id": "tests.envs:FromFive-v0", "num_minibatches": 2, "eval_episodes": 1}
    shape |= {"total_timesteps": 500, "update_epochs": 2}
    return module.Args(**shape | options)


ADVANTAGES = [("grpo_outcome", {}), ("grpo_process", {})]
ADVANTAGES += [("grpo_rtg", {"baseline": x}) for x in ("group", "timestep", "regression")]


@pytest.mark.parametrize(("script", "own"), ADVANTAGES, ids=str)
@pytest.mark.parametrize("norm_std", [True, False])
def test_the_advantages_are_those_of_the_options(script, own, norm_std, monkeypatch):
    module, seen = importlib.import_module(script), []
    make_batch = module.make_batch

    def watched(episodes, advantages, *rest):
        seen.append((episodes, advantages))
        return make_batch(episodes, advantages, *rest)

    monkeypatch.setattr(module, "make_batch", watched)
    args = small(module, gamma=0.9, norm_std=norm_std, **own)
    if own:
        args = replace(args, gae_lambda=0.7, decay=0.3)
        regression = module.ReturnRegression(11, decay=0.3)
    points = curves(module.train(args)["run_dir"])["group/return_std"]
    spreads = [float(x.rewards.sum(-1).std(dim=1, correction=1).mean()) for x, _ in seen]
    assert list(points.values()) == pytest.approx(spreads, rel=1e-6)
    for episodes, advantages in seen:
        more = dict(own)
        if own.get("baseline") == "regression":
            more |= {"values": regression(episodes, 0.9), "gae_lambda": 0.7}
        blocks = episodes.rewards, episodes.mask
        expected = module.compute_advantages(*blocks, gamma=0.9, norm_std=norm_std, **more)
        assert torch.equal(advantages, expected) and advantages.any()
    assert len(seen) > 1


@both_kinds
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


@both_kinds
def test_train_returns_what_it_prints(script, capsys):
    module = importlib.import_module(script)
    summary = module.train(small(module, eval_episodes=3))
    out = capsys.readouterr().out
    names = ["run_dir", "steps", "seconds", "train_return", "eval_returns"]
    assert list(summary) == names and summary["run_dir"] == only_run()
    assert f"Trained {summary['steps']:,} steps in {summary['seconds']:.1f} s" in out
    assert f"Training return, last 100 episodes: {summary['train_return']:.2f}\n" in out
    assert f"3 episodes: return {summary['eval_returns'].mean():.2f} ±" in out
    progress = read(only_run() / "checkpoint.pt")["progress"]
    assert np.mean(progress["recent_returns"]) == summary["train_return"]


class TestUpdate:
    """Three passes over some steps in eight minibatches."""

    def steps(self, monkeypatch, num_steps=300, **options):
        """The sizes of the minibatches looked at, and how often the optimizer moved."""
        sizes, moved, loss = [], [], grpo_rtg.grpo_loss
        args = grpo_rtg.Args(update_epochs=3, num_minibatches=8, hidden_size=8, **options)
        env = grpo_rtg.make_env(args)
        policy = grpo_rtg.Policy(env.observation_space, env.action_space, args)
        ones = torch.ones(num_steps)
        batch = {"obs": torch.zeros(num_steps, 4), "actions": torch.zeros(num_steps, 1).long()}
        batch["old_log_probs"] = policy.log_probs(batch["obs"], batch["actions"])
        batch |= {"ref_log_probs": batch["old_log_probs"], "advantages": ones, "weights": ones}

        def watched(policy, batch, *coefs):
            sizes.append(len(batch["obs"]))
            return loss(policy, batch, *coefs)

        monkeypatch.setattr(grpo_rtg, "grpo_loss", watched)
        optimizer = grpo_rtg.Adam(policy.parameters(), 0.01)
        step = optimizer.step
        optimizer.step = lambda: moved.append(1) or step()
        metrics = grpo_rtg.update(policy, optimizer, batch, args, np.random.default_rng(0))
        monkeypatch.undo()
        return sizes, len(moved), metrics

    def test_a_minibatch_has_at_least_32_steps(self, monkeypatch):
        """Or all, if they are fewer."""
        for steps, sizes in (20, [20]), (63, [63]), (100, [34, 33, 33]), (9999, [1250] * 7):
            given = self.steps(monkeypatch, steps, target_kl=0)[0]
            assert given[: len(sizes)] == sizes and sum(given) == 3 * steps
            assert len(given) == 3 * (8 if steps == 9999 else len(sizes))

    def test_all_take_as_many_gradient_steps_as_the_one_with_fewest_steps_can(self, monkeypatch):
        monkeypatch.setattr(grpo_rtg, "over_processes", lambda number, op: min(number, 3))
        assert self.steps(monkeypatch, target_kl=0)[:2] == ([100] * 9, 9)

    def test_the_kl_is_looked_at_before_each_step(self, monkeypatch):
        """At the first it is 0; the step that would be taken from too far away is not."""
        sizes, moved, metrics = self.steps(monkeypatch, target_kl=1e-3)
        assert 1 < len(sizes) < 24 and moved == len(sizes) - 1
        assert metrics["losses/approx_kl"] > 1e-3 / len(sizes)

    def test_all_stop_by_their_mean_kl(self, monkeypatch):
        def another_moved_far(tensors):
            tensors[-1].fill_(1.0)

        monkeypatch.setattr(grpo_rtg, "average_over_processes", another_moved_far)
        assert self.steps(monkeypatch)[1] == 0
