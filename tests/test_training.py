"""Rollout, training, checkpoints, torchrun: what all scripts share is tested in grpo_rtg.py."""

import importlib
import os
import shutil
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grpo_rtg as grpo
from tests import child
from tests.child import TINY, both_kinds, curves, env, equal, only_run, train, weights
from tests.envs import Countdown

slow = pytest.mark.slow


def collect(**options):
    """Episodes of an untrained policy, two groups of three."""
    args = grpo.Args(**{"num_groups": 2, "group_size": 3, "minibatch_size": 1} | options)
    envs = [grpo.make_env(args) for _ in range(6)]
    torch.manual_seed(0)
    policy = grpo.Policy(envs[0].observation_space, envs[0].action_space, args)
    return grpo.collect_groups(envs, policy, args)


def starts(episodes):
    """The first observations [K, G, D]."""
    lengths = episodes.mask.sum(dim=-1)
    ends = lengths.flatten().cumsum(dim=0)
    return episodes.obs[ends - lengths.flatten()].view(*lengths.shape, -1)


def test_a_group_starts_equal_and_groups_differ():
    episodes = collect()
    first = starts(episodes)
    assert first.shape == (2, 3, 4)
    assert (first == first[:, :1]).all() and (first[0] != first[1]).all()
    apart = collect(seed_groups=False)
    assert len(starts(apart).flatten(0, 1).unique(dim=0)) == 6


def test_members_that_ignore_their_seed_are_refused_unless_that_is_meant(cli, refused, monkeypatch):
    options = TINY["grpo_rtg"] | env("Faulty", what="ignores the seed")
    with monkeypatch.context() as patch:
        patch.setattr(Countdown, "step", None)  # steps of a simulator may take seconds
        refused(r"ignores reset\(seed\), or .*--no-seed-groups", "grpo_rtg", **options)
    assert not os.listdir()
    assert cli("grpo_rtg", **options, seed_groups=False)[0] == 0


@pytest.mark.parametrize("ends", [["terminated"], ["truncated"], ["terminated", "truncated"]])
def test_steps_stand_in_order(ends):
    """Each observation says the episode's length by its seed and the steps taken."""
    episodes = collect(**env("Countdown", choose=True, ends=ends))
    lengths = episodes.mask.sum(dim=-1)  # [K, G]
    assert len(lengths.unique()) > 2
    assert torch.equal(episodes.mask, torch.arange(lengths.max()) < lengths[..., None])
    length, taken = episodes.obs.double().unbind(dim=-1)
    assert torch.equal(episodes.rewards[episodes.mask], length + (taken + 1) / 10)
    assert (episodes.rewards[~episodes.mask] == 0).all()
    columns = (length, taken, episodes.actions)
    for length, taken, action in zip(*(x.split(lengths.flatten().tolist()) for x in columns)):
        assert taken.tolist() == list(range(len(taken))) and len(length.unique()) == 1
        assert (action[:-1] == 0).all() and (action[-1] == 1 or len(taken) == length[0])
    assert (episodes.truncated == (ends == ["truncated"])).all()
    assert episodes.truncated.shape == lengths.shape
    successes = [info["is_success"] for info in episodes.infos]  # of one dict for all
    assert successes == (lengths > 4).flatten().tolist() and len(set(successes)) == 2


def test_groups_are_played_until_they_fill_a_minibatch():
    episodes = collect(**env("Stamp"), minibatch_size=20)
    assert episodes.mask.shape == (8, 3, 1) and episodes.mask.all()
    assert len(starts(episodes)[:, 0].unique()) == 2


def test_rows_of_shape_1_d_are_observations_of_shape_d(cli):
    """Or log-probabilities would be broadcast to [S, S]. Nor do odd flags matter."""
    assert collect(**env("Odd")).obs.shape == (30, 2)
    status, out, _ = cli("grpo_rtg", **TINY["grpo_rtg"] | env("Odd"))
    assert status == 0 and "return 17.90 ± 0.00" in out  # 5.1 + 1 + 5.3 + 1 + 5.5


@pytest.mark.parametrize("kind", ["Discrete", "MultiDiscrete", "MultiBinary", "Box", "integers"])
def test_actions_of_any_kind_are_learned(kind):
    """Each lies in the space, which asserts that; 10 is the best return, at first 2 to 5."""
    options = {"learning_rate": 1e-2, "group_size": 16, "update_epochs": 8}
    run = train("grpo_rtg", **options, **env("Answer", kind=kind), total_timesteps=5000)
    assert run.best_return > 9


@both_kinds
def test_observations_keep_float64_until_they_are_normalized(script):
    """A float32 cannot tell 1.7e9 from one second later."""
    options = {"norm_obs": True, "learning_rate": 1e-2, "eval_episodes": 50}
    assert train(script, **env("Stamp"), **options, total_timesteps=3000).best_return == 1


def test_observations_are_flattened():
    env_ = grpo.make_env(grpo.Args(**env("Answer", kind="Box")))
    assert env_.reset(seed=0)[0].tolist() == [0.5] * 4 + [0, 1] + [0, 0, 1]
    with pytest.warns(UserWarning, match="1000 steps.*max_episode_steps"):
        assert grpo.make_env(grpo.Args(env_id="Blackjack-v1")).spec.max_episode_steps == 1000
    blackjack = grpo.Args(env_id="Blackjack-v1", env_kwargs='{"max_episode_steps": 7}')
    assert grpo.make_env(blackjack).spec.max_episode_steps == 7


OBSERVED = r"NaN or infinity observed in an episode of seeds [{[]\d+"
FAULTS = {"observation": OBSERVED, "reset": OBSERVED}
FAULTS |= {f"reward {x}": rf"A reward is {x}, .* of seed \d+\." for x in ("nan", "None")}


@pytest.mark.parametrize("what", FAULTS)
@both_kinds
def test_what_is_not_finite_is_named_with_its_seeds(refused, script, what):
    refused(FAULTS[what], script, **TINY[script] | env("Faulty", what=what))


def test_an_exception_of_an_environment_keeps_its_traceback(cli):
    for kind, error in (("no such kind", KeyError), ([], TypeError)):
        with pytest.raises(error, match="no such kind|unhashable"):
            cli("grpo_rtg", **env("Answer", kind=kind))


@pytest.mark.parametrize("wrong", [lambda x: x * torch.nan, lambda x: x[..., :1]])
def test_advantages_that_cannot_be_are_refused(wrong):
    """It is no fault of the update."""
    with pytest.raises(grpo.UserError, match=r"Advantages must be \[K, G, T\] and finite"):
        grpo.train(grpo.Args(), lambda episodes, _: wrong(episodes.rewards))


@both_kinds
def test_the_same_seed_gives_the_same_weights(script):
    """Whatever evaluations do, or an environment draws from Python's and NumPy's generators."""

    def end(seed, interval):
        torch.seed()
        return weights(train(script, **env("Dice"), seed=seed, eval_interval=interval))

    assert equal(end(1, 0), end(1, 1)) and not equal(end(1, 0), end(2, 0))


@both_kinds
def test_no_two_start_states_of_a_run_are_alike_but_those_of_a_group(script, monkeypatch):
    """Nor do two runs have one in common, nor an evaluation and its training."""
    seeds, reset = [], Countdown.reset
    monkeypatch.setattr(
        Countdown, "reset", lambda *x, seed, **y: seeds.append(seed) or reset(*x, seed=seed)
    )
    options = env("Countdown") | ({"num_groups": 2} if script == "grpo_rtg" else {})
    for seed in (3, 4):
        train(script, **options, seed=seed, eval_episodes=5)
    evaluated = list(range(10**9, 10**9 + 5))
    assert [seed for seed in seeds if seed in evaluated] == 2 * evaluated
    trained = [seed for seed in seeds if seed not in evaluated]
    assert min(trained) >= 0 and max(trained) < 2**31
    if script == "grpo_rtg":
        assert trained[::4] == trained[1::4] == trained[2::4] == trained[3::4]
        trained = trained[::4]
    assert len(set(trained)) == len(trained) > 20


@pytest.mark.parametrize("interval", [0, 1, 2])
def test_the_reference_is_renewed_before_sampling(interval, monkeypatch):
    """Every so many iterations it is the policy that samples (0: it stays the first one)."""
    policies, references, make_batch = [], [], grpo.make_batch

    def watched(episodes, advantages, policy, reference, args):
        for network, seen in ((policy, policies), (reference, references)):
            seen.append([x.clone() for x in network.state_dict().values()])
        return make_batch(episodes, advantages, policy, reference, args)

    monkeypatch.setattr(grpo, "make_batch", watched)
    train("grpo_rtg", ref_update_interval=interval)
    assert len(policies) >= 5 and not equal(policies[0], policies[1])
    renewed = [i - i % interval if interval else 0 for i in range(len(policies))]
    assert equal(references, [policies[i] for i in renewed])


@both_kinds
def test_statistics_of_observations_wait_for_the_update(script, monkeypatch):
    """Or the policy that learns would not be the one that sampled, and its first ratio not 1."""
    module, seen = importlib.import_module(script), []
    update = module.update

    def watched(policy, optimizer, batch, args):
        assert all(x.ndim == 1 for name, x in batch.items() if name not in ("obs", "actions"))
        ratio = policy(batch["obs"]).log_prob(batch["actions"]) - batch["old_log_probs"]
        seen.append((ratio.abs().max().item(), int(policy.obs_count)))
        return update(policy, optimizer, batch, args)

    monkeypatch.setattr(module, "update", watched)
    run = train(script, norm_obs=True)
    assert len(seen) > 3 and all(difference < 1e-6 for difference, _ in seen)
    assert [count for _, count in seen] == [0, *curves(run.dir)["losses/entropy"]][:-1]


def test_the_best_policy_is_kept_and_evaluations_come_by_iterations(monkeypatch):
    returns, known = iter([1, 5, 3, *[2] * 9]), []

    def watched(policy, envs, args):
        known.append([x.clone() for x in policy.state_dict().values()])
        return np.array([next(returns)])

    monkeypatch.setattr(grpo, "evaluate", watched)
    run = train("grpo_rtg", eval_interval=2)
    steps = list(curves(run.dir)["losses/entropy"])
    evaluated = curves(run.dir)["eval/episodic_return"]
    assert len(steps) >= 5 and list(evaluated) == sorted({*steps[1::2], steps[-1]})
    assert equal([*torch.load(run.dir / "best.pt")["policy"].values()], known[1])
    assert equal([*torch.load(run.dir / "checkpoint.pt")["policy"].values()], known[-1])
    assert run.best_return == 5


def test_the_learning_rate_falls_linearly_to_0():
    rates = curves(train("grpo_rtg", learning_rate=0.02).dir)["charts/learning_rate"]
    expected = [0.02 * (1 - step / 400) for step in [0, *rates][:-1]]
    assert len(rates) > 3 and list(rates.values()) == pytest.approx(expected)


def test_a_tracked_run_hands_over_its_options(monkeypatch):
    calls = []
    wandb = SimpleNamespace(init=lambda **x: calls.append(x), finish=lambda: calls.append({}))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = train("grpo_rtg", track=True)
    train("grpo_rtg", track=True, total_timesteps=500, resume=str(run.dir / "checkpoint.pt"))
    assert calls[::2] == [{}, {}]  # no run goes on in the one before
    calls = calls[1::2]
    assert [call["id"] for call in calls] == [call["name"] for call in calls] == [run.dir.name] * 2
    assert calls[0]["config"] == asdict(run.args) and calls[1]["config"]["total_timesteps"] == 500
    assert all(call["sync_tensorboard"] and call["resume"] == "allow" for call in calls)


def test_each_evaluation_leaves_a_video():
    run = train("grpo_rtg", capture_video=True, eval_interval=4)
    evaluations = len(curves(run.dir)["eval/episodic_return"])
    assert len(list((run.dir / "videos").glob("*.mp4"))) == evaluations > 1


LEARNED = [
    ("grpo_rtg", "CartPole-v1", 30_000, 250),
    pytest.param("grpo_outcome", "CartPole-v1", 200_000, 450, marks=slow),
    pytest.param("grpo_process", "Acrobot-v1", 500_000, -120, marks=slow),
    pytest.param("ppo", "CartPole-v1", 100_000, 450, marks=slow),
]


@pytest.mark.parametrize(("script", "env_id", "steps", "threshold"), LEARNED)
def test_scripts_learn_with_their_defaults(script, env_id, steps, threshold):
    """With a seed that neither the tuning nor a table has."""
    module = importlib.import_module(script)
    args = module.Args(env_id=env_id, total_timesteps=steps, seed=201, eval_episodes=20)
    assert module.train(args).best_return >= threshold


RUN = TINY["grpo_rtg"] | env("Dice") | {"kl_coef": 0.05, "ref_update_interval": 3}
RUN |= {"norm_obs": True, "checkpoint_interval": 0}


@pytest.mark.parametrize("interval", [5, 0])
def test_a_killed_run_resumes_to_the_bit(interval):
    """SIGKILL in an evaluation: the one of the fifth iteration, or that after training."""
    whole = train("grpo_rtg", **RUN, eval_interval=interval)
    shutil.move("runs", "whole")
    Path("die").touch()
    process = child.start(child.main, "grpo_rtg", {}, **RUN, eval_interval=interval)
    process.join()
    assert process.exitcode == -signal.SIGKILL and not (only_run() / "best.pt").exists()
    checkpoint = str(only_run() / "checkpoint.pt")
    assert torch.load(checkpoint)["progress"]["iteration"] == (4 if interval else whole.iteration)
    run = train("grpo_rtg", **RUN, eval_interval=interval, resume=checkpoint)
    names = ["policy", "reference", "optimizer"]
    assert all(equal(run.saved[x].state_dict(), whole.saved[x].state_dict()) for x in names)
    points, expected = curves(run.dir), curves("whole" / whole.dir.relative_to("runs"))
    del points["charts/SPS"], expected["charts/SPS"]
    assert points == expected


def test_a_finished_run_is_given_more_steps_but_not_less(refused):
    run = train("grpo_rtg", **RUN, anneal_lr=False)
    resume = {"resume": str(run.dir / "checkpoint.pt")}
    before = {path: path.read_bytes() for path in run.dir.iterdir()}
    refused(f"checkpoint.pt has {run.step} steps", "grpo_rtg", **resume, total_timesteps=300)
    refused("Cannot use .*size mismatch", "grpo_rtg", **resume, hidden_size=32)
    assert {path: path.read_bytes() for path in run.dir.iterdir()} == before
    longer = {"total_timesteps": 800, "anneal_lr": False}
    resumed = train("grpo_rtg", **RUN | resume | longer)
    assert resumed.dir == run.dir
    assert equal(weights(resumed), weights(train("grpo_rtg", **RUN | longer)))
    before = (run.dir / "checkpoint.pt").read_bytes()
    other = train("grpo_rtg", **RUN | longer, resume=str(run.dir / "best.pt"))
    assert other.dir != run.dir and (run.dir / "checkpoint.pt").read_bytes() == before


def test_checkpoints_come_by_time_each_after_its_curves(monkeypatch):
    """And at once after a new best.pt; the end is saved before anything is printed."""
    seen, replace, flush = [], os.replace, grpo.SummaryWriter.flush
    monkeypatch.setattr(os, "replace", lambda *x: seen.append(x[1].name) or replace(*x))
    monkeypatch.setattr(grpo.SummaryWriter, "flush", lambda x: seen.append("curves") or flush(x))
    for interval, eval_interval in ((0, 0), (1000, 0), (1000, 2)):
        seen.clear()
        monkeypatch.setattr(grpo, "evaluate", lambda *_, seen=seen: np.full(1, len(seen)))
        run = train("grpo_rtg", checkpoint_interval=interval, eval_interval=eval_interval)
        expected = ["checkpoint.pt"] * (run.iteration if interval == 0 else 1)
        expected += ["best.pt", "checkpoint.pt"] * (run.iteration // 2 if eval_interval else 0)
        expected += ["checkpoint.pt", "best.pt", "checkpoint.pt"]
        assert seen[::2] == ["curves"] * len(expected) and seen[1::2] == expected
    seen.clear()
    (run.dir / "checkpoint.pt").unlink()
    monkeypatch.setattr(os, "replace", lambda *paths: seen.append(paths))
    monkeypatch.setattr(grpo, "print", lambda *_: 1 / 0, raising=False)  # no terminal
    with pytest.raises(ZeroDivisionError):
        run.finish([])
    assert len(seen) == 2 and not (run.dir / "checkpoint.pt").exists()  # until it is renamed


@both_kinds
def test_environments_are_closed_after_the_last_file(script, monkeypatch):
    """All of them, even if one raises."""
    closed, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *x: closed.clear() or replace(*x))
    monkeypatch.setattr(Countdown, "close", lambda env: closed.append(id(env)) or 1 / 0)
    train(script, **env("Countdown"))
    assert len(set(closed)) == 4 + 2  # of training, of evaluations


def test_from_python_a_run_goes_on_with_its_own_options():
    run = train("grpo_rtg", gamma=np.float64(0.9), seed=np.int64(3), total_timesteps=150)
    assert len(run.history) == run.iteration and run.history[-1]["step"] == run.step
    assert run.history[-1]["losses/entropy"] > 0
    assert repr(run) == f"Run({run.dir}: {run.step:,} steps, return {run.train_return:.2f})"
    resumed = grpo.train(grpo.saved_args(run.dir / "checkpoint.pt", total_timesteps=300))
    assert resumed.args.gamma == 0.9 and resumed.dir == run.dir and 300 <= resumed.step < 450
    assert resumed.history[0]["step"] > run.step
    with pytest.raises(TypeError, match="total_timestep'"):
        grpo.saved_args(run.dir / "checkpoint.pt", total_timestep=400)


@pytest.mark.parametrize("left", [{"RANK": "8"}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "2"}], ids=str)
def test_variables_of_processes_count_under_torchrun_alone(left):
    """What another tool left in the shell is not torchrun's."""
    process = child.start(child.main, "grpo_rtg", left, **TINY["grpo_rtg"])
    process.join(60)
    assert process.exitcode == 0 and (only_run() / "checkpoint.pt").exists()


def one_of_two(module, **options) -> None:
    """A process's part of a run: what it saw goes to a file of its rank."""
    seen = {"obs": [], "averages": []}
    update, average = module.update, module.all_reduce_mean

    def watched_update(policy, optimizer, batch, args):
        seen["obs"].append(batch["obs"])
        return update(policy, optimizer, batch, args)

    def watched_average(tensors):
        own = [x.clone() for x in tensors]
        average(tensors)
        seen["averages"].append((own, [x.clone() for x in tensors]))

    module.update, module.all_reduce_mean = watched_update, watched_average
    run = module.train(module.Args(**options))
    seen |= {"policy": weights(run), "step": run.step, "writer": "writer" in vars(run)}
    torch.save(seen, f"{module.RANK}.pt")


@pytest.mark.parametrize(("script", "minibatch_size"), [("grpo_rtg", 2), ("ppo", 32)])
def test_two_processes_average_their_gradients_and_stay_alike(script, minibatch_size):
    options = TINY[script] | env("Countdown", choose=True)
    options |= {"minibatch_size": minibatch_size, "norm_obs": True, "total_timesteps": 200}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        both = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    both |= {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}  # the latter is torchrun's mark
    environs = [both | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    processes = [child.start(one_of_two, script, x, **options) for x in environs]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    one, other = torch.load("0.pt"), torch.load("1.pt")
    assert equal(one["policy"], other["policy"])
    assert not torch.equal(one["obs"][0][:4], other["obs"][0][:4])  # of starts of its own
    assert len(one["averages"]) == len(other["averages"]) > 5
    for (own, given), (others, same) in zip(one["averages"], other["averages"]):
        assert equal(given, same)
        for x, y, mean in zip(own, others, given):
            torch.testing.assert_close(mean, (x + y) / 2)
    obs = torch.cat(one["obs"] + other["obs"]).double()
    assert one["step"] == other["step"] == len(obs)
    torch.testing.assert_close(one["policy"]["obs_mean"], obs.mean(dim=0))
    torch.testing.assert_close(one["policy"]["obs_var"], obs.var(dim=0, correction=0))
    assert one["writer"] and not other["writer"]
