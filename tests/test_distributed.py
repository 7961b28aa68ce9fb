"""torchrun: two processes do what one would with all the groups, and a lost one ends the run."""

import contextlib
import importlib
import io
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.functional import pad

import grpo_rtg
import ppo
from tests import child

SMALL = ["--total-timesteps", "900", "--max-episode-steps", "30", "--eval-episodes", "2"]
SMALL += ["--update-epochs", "1", "--num-minibatches", "1", "--max-grad-norm", "1e6", "--norm-obs"]
SPLIT = dict.fromkeys(child.SCRIPTS, ["--num-groups", "4", "--group-size", "3"])
SPLIT["grpo_rtg"] = [*SPLIT["grpo_rtg"], "--baseline", "neighbors"]  # of the same process
SPLIT["ppo"] = ["--num-envs", "4", "--num-steps", "64"]
some = ["grpo_rtg", "ppo"]  # the other two share all of it with grpo_rtg
some += [pytest.param(x, marks=pytest.mark.slow) for x in ("grpo_outcome", "grpo_process")]


def _train(script: str, argv: list[str], rank: int, port: int, folder: str) -> None:
    """One of two processes; what its first update got and gave, and where it ended, goes to
    rank.pt.
    """
    os.chdir(folder)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    module, seen = importlib.import_module(script), {"sizes": [], "episodes": []}
    update, record = module.update, module.Run.record

    def watched(policy, optimizer, batch, *rest):
        start = {name: x.clone() for name, x in policy.state_dict().items()}
        metrics = update(policy, optimizer, batch, *rest)
        if "batch" not in seen:
            gradient = [x.grad.clone() for x in policy.parameters()]
            seen.update(start=start, batch=batch, gradient=gradient)
        seen.update(end=policy.state_dict(), metrics=dict(metrics))
        seen["sizes"].append(len(batch["obs"]))
        return metrics

    def watched_record(run, episodes, *rest):
        if script == "ppo":
            seen["episodes"].append(list(episodes))
        else:
            seen.setdefault("mask", episodes.mask)
            columns = (x.sum(-1).flatten().tolist() for x in (episodes.rewards, episodes.mask))
            seen["episodes"].append(list(zip(*columns)))
        return record(run, episodes, *rest)

    module.update, module.Run.record = watched, watched_record
    with contextlib.redirect_stdout(io.StringIO()) as out:
        summary = module.train(tyro.cli(module.Args, args=argv))
    seen |= {"summary": summary, "dirs": os.listdir("runs"), "out": out.getvalue()}
    torch.save(seen, f"{rank}.pt")


def train_with_two(script: str, *argv: str) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.child", *child.SCRIPTS, "torch._dynamo"])
    arguments = [*SMALL, *SPLIT[script], *argv]
    processes = [
        context.Process(target=_train, args=(script, arguments, rank, port, os.getcwd()))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return [torch.load(f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("loss_agg", ["trajectory", "step"])
def test_the_gradient_is_that_of_one_process_with_all_groups(loss_agg):
    flags = ["--loss-agg", loss_agg, "--kl-coef", "0.1", "--ent-coef", "0.1"]
    both = train_with_two("grpo_rtg", *flags)
    length = max(seen["mask"].shape[-1] for seen in both)
    masks = [pad(seen["mask"], (0, length - seen["mask"].shape[-1])) for seen in both]
    assert masks[0].shape == (2, 3, length)
    assert masks[0].sum() != masks[1].sum()  # or nothing tells sums from means
    weights = grpo_rtg.step_weights(torch.cat(masks), loss_agg).split(2)
    batch = {name: torch.cat([seen["batch"][name] for seen in both]) for name in both[0]["batch"]}
    steps = []  # the whole objective's weight of each, in the order of the flat batches
    for mask, weight in zip(masks, weights):
        t, member = mask.flatten(0, 1).T.nonzero(as_tuple=True)  # ordered by time
        steps.append(weight.flatten(0, 1)[member, t])
    batch["weights"] = torch.cat(steps).float()
    env = grpo_rtg.make_env("CartPole-v1")
    policy = grpo_rtg.Policy(env.observation_space, env.action_space, norm_obs=True)
    policy.load_state_dict(both[0]["start"])
    grpo_rtg.grpo_loss(policy, batch, 0.3, 0.1, 0.1)[0].backward()
    gradients = zip(policy.parameters(), both[0]["gradient"], both[1]["gradient"])
    for parameter, given, other in gradients:
        assert torch.equal(given, other)
        torch.testing.assert_close(given, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", some)
def test_processes_stay_equal_and_count_and_log_everyones_steps(script):
    flags = ["--target-kl", "1e-3", "--num-minibatches", "2", "--update-epochs", "3"]
    one, other = train_with_two(script, *flags, "--max-grad-norm", "1e-4")
    norm = nn.utils.get_total_norm(one["gradient"])  # clipped once averaged, or it would be less
    assert norm == pytest.approx(0 if script == "grpo_process" else 1e-4, rel=1e-3)  # no signal
    assert all(torch.equal(one["end"][name], other["end"][name]) for name in one["end"])
    assert one["end"]["obs_count"] > sum(one["sizes"])  # statistics of everyone's observations
    assert one["metrics"] == other["metrics"]
    steps = sum(one["sizes"]) + sum(other["sizes"])
    assert one["summary"]["steps"] == steps <= 900 and len(one["sizes"]) > 1
    first_of_each = one["batch"]["obs"], other["batch"]["obs"]
    assert not torch.equal(*first_of_each)  # each plays episodes of its own
    assert other["summary"] == {} and len(one["dirs"]) == 1
    assert one["out"].count("Trained") == 1 and other["out"] == ""
    episodes = [mine + others for mine, others in zip(one["episodes"], other["episodes"])]
    recent = [episode[0] for iteration in episodes for episode in iteration][-100:]
    assert one["summary"]["train_return"] == pytest.approx(np.mean(recent), rel=1e-6)
    events = EventAccumulator(str(one["summary"]["run_dir"])).Reload()
    for tag, values in zip(("return", "length"), zip(*episodes[-1])):
        logged = events.Scalars(f"charts/episodic_{tag}")[-1].value
        assert logged == pytest.approx(np.mean(values), rel=1e-6)


@pytest.mark.parametrize("script", some)
def test_resumed_processes_go_on_as_if_there_had_been_no_stop(script):
    run_dir = train_with_two(script, "--no-anneal-lr")[0]["summary"]["run_dir"]
    longer = ["--no-anneal-lr", "--total-timesteps", "1800"]
    resumed = train_with_two(script, "--resume", str(run_dir / "checkpoint.pt"), *longer)
    unbroken = train_with_two(script, *longer)
    for one, other in zip(resumed, unbroken):
        assert 0 < len(one["sizes"]) < len(other["sizes"])
        assert one["sizes"] == other["sizes"][-len(one["sizes"]) :]
        assert all(torch.equal(one["end"][name], other["end"][name]) for name in one["end"])


@pytest.mark.slow
def test_ppos_advantages_and_gradient_are_those_of_one_process():
    both = train_with_two("ppo")
    advantages = torch.cat([seen["batch"]["advantages"] for seen in both])
    assert advantages.mean().abs() < 1e-5 and advantages.std() == pytest.approx(1, abs=1e-5)
    assert all(seen["batch"]["advantages"].mean().abs() > 1e-5 for seen in both)
    batch = {name: torch.cat([seen["batch"][name] for seen in both]) for name in both[0]["batch"]}
    env, args = ppo.make_env("CartPole-v1"), ppo.Args()
    policy = ppo.ActorCritic(env.observation_space, env.action_space, norm_obs=True)
    policy.load_state_dict(both[0]["start"])
    ppo.ppo_loss(policy, batch, args.clip_coef, args.ent_coef, args.vf_coef)[0].backward()
    for parameter, given in zip(policy.parameters(), both[0]["gradient"]):
        torch.testing.assert_close(given, parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_group_without_signal_in_one_process_is_not_called_so_for_all(monkeypatch, capsys):
    """The line that says so knows the advantages of all processes."""
    args = grpo_rtg.Args(num_groups=1, group_size=2, eval_episodes=1)
    run = grpo_rtg.Run(args)
    episodes = grpo_rtg.collect_groups(run.envs, run.trained["policy"], 1, run.rng)
    metrics = {"policy_loss": 0.0, "grad_norm": 0.0, "approx_kl": 0.0}
    nothing = torch.zeros(episodes.mask.shape)
    others = (episodes.rewards.sum(-1), torch.tensor([False]), {})
    monkeypatch.setattr(grpo_rtg, "gather", lambda value: [value, others])
    run.record(episodes, nothing, 10, dict(metrics))
    assert "No signal" not in capsys.readouterr().out
    monkeypatch.setattr(grpo_rtg, "gather", lambda value: [value])
    run.iteration = 0
    run.record(episodes, nothing, 10, dict(metrics))
    assert "No signal yet" in capsys.readouterr().out


def torchrun(*argv) -> subprocess.Popen:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *launch, *map(str, argv)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


@pytest.mark.slow
def test_torchrun_prints_once_and_resumes():
    script = Path(child.ROOT, "grpo_rtg.py")
    process = torchrun(script, *SMALL, *SPLIT["grpo_rtg"])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("Trained") == out.count("Device:") == 1
    assert out.count("Greedy evaluation") == 2  # before and after training
    [run_dir] = Path("runs").iterdir()
    process = torchrun(script, "--resume", run_dir / "checkpoint.pt", "--total-timesteps", 1800)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    steps = [int(x.replace(",", "")) for x in re.findall(r"Trained ([\d,]+) steps", out)]
    assert len(steps) == 1 and 900 < steps[0] <= 1800


@pytest.mark.slow
def test_a_killed_process_ends_the_run():
    flags = [*SMALL[2:], *SPLIT["grpo_rtg"], "--total-timesteps", 10**9]
    process = torchrun(Path(child.ROOT, "grpo_rtg.py"), *flags)
    deadline = time.monotonic() + 60
    while not list(Path.cwd().glob("runs/*/checkpoint.pt")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert list(Path.cwd().glob("runs/*/checkpoint.pt"))


def test_groups_that_cannot_be_split_are_refused(cli, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for script, option in (("grpo_rtg", "--num-groups"), ("ppo", "--num-envs")):
        status, _, err = cli(script, option, 3)
        assert status == 2 and f"{option} 3 cannot be split over 2 processes" in err


def test_a_run_of_other_processes_is_not_resumed(cli):
    for script in ("grpo_rtg", "ppo"):
        assert cli(script, *SMALL, *SPLIT[script])[0] == 0
        [checkpoint] = Path("runs").glob(f"*{script}*/checkpoint.pt")
        saved = torch.load(checkpoint, weights_only=True)
        name = "kept" if script == "ppo" else "rngs"
        torch.save(saved | {name: saved[name] * 2}, checkpoint)
        status, _, err = cli(script, "--resume", checkpoint)
        assert status == 2 and "is of " in err and "processes" in err
