"""torchrun: two processes do what one would that held all the groups, and a lost one ends the run."""

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

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro

from tests import child

SMALL = ["--total-timesteps", "900", "--max-episode-steps", "30", "--eval-episodes", "2", "--update-epochs", "1"]
SMALL += ["--num-minibatches", "1", "--max-grad-norm", "1e6", "--norm-obs"]
SPLIT = {script: ["--num-groups", "4", "--group-size", "3"] for script in child.SCRIPTS} | {"ppo": ["--num-envs", "4"]}


def _train(script: str, argv: list[str], rank: int, port: int, folder: str) -> None:
    """One of two processes; what its first update got and gave, and where it ended, goes to rank.pt."""
    os.chdir(folder)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    module, seen = importlib.import_module(script), {}
    update, sizes = module.update, []

    def watched(policy, optimizer, loss_fn, batch, *rest):
        start = {name: x.clone() for name, x in policy.state_dict().items()}
        metrics = update(policy, optimizer, loss_fn, batch, *rest)
        if "batch" not in seen:
            seen.update(start=start, batch=batch, gradient=[x.grad.clone() for x in policy.parameters()])
        seen.update(end=policy.state_dict(), metrics=metrics)
        sizes.append(len(batch["obs"]))
        return metrics

    def watched_advantages(rewards, mask, *rest):
        episodes.append(list(zip(rewards.sum(-1).flatten().tolist(), mask.sum(-1).flatten().tolist())))
        return advantages(rewards, mask, *rest)

    def watched_steps(*args):
        steps, running = collect_steps(*args)
        episodes.append(steps.episodes)
        return steps, running

    module.update, episodes = watched, []
    if script == "ppo":
        collect_steps, module.collect_steps = module.collect_steps, watched_steps
    else:
        advantages, module.compute_advantages = module.compute_advantages, watched_advantages
        weights = module.step_weights
        module.step_weights = lambda mask, agg: weights(seen.setdefault("mask", mask) if not sizes else mask, agg)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        summary = module.train(tyro.cli(module.Args, args=argv))
    seen |= {
        "summary": summary,
        "sizes": sizes,
        "episodes": episodes,
        "dirs": os.listdir("runs"),
        "out": out.getvalue(),
    }
    torch.save(seen, f"{rank}.pt")


def train_with_two(script: str, *argv: str) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.child", *child.SCRIPTS, "torch._dynamo"])
    arguments = [*SMALL, *SPLIT[script], *argv]
    processes = [context.Process(target=_train, args=(script, arguments, rank, port, os.getcwd())) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    return [torch.load(f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("loss_agg", ["trajectory", "step"])
def test_the_gradient_is_that_of_one_process_with_all_groups(loss_agg):
    import grpo_rtg as grpo

    both = train_with_two("grpo_rtg", "--loss-agg", loss_agg, "--kl-coef", "0.1", "--ent-coef", "0.1")
    length = max(seen["mask"].shape[-1] for seen in both)
    masks = [torch.nn.functional.pad(seen["mask"], (0, length - seen["mask"].shape[-1])) for seen in both]
    assert masks[0].shape == (2, 3, length) and masks[0].sum() != masks[1].sum()  # or nothing tells sums from means
    weights = grpo.step_weights(torch.cat(masks), loss_agg).split(2)
    batch = {name: torch.cat([seen["batch"][name] for seen in both]) for name in both[0]["batch"]}
    steps = []  # the whole objective's weight of every step, in the order of the processes' flat batches
    for mask, weight in zip(masks, weights):
        t, member = mask.flatten(0, 1).T.nonzero(as_tuple=True)  # ordered by time
        steps.append(weight.flatten(0, 1)[member, t])
    batch["weights"] = torch.cat(steps).float()
    policy = grpo.Policy(grpo.make_env("CartPole-v1").observation_space, grpo.gym.spaces.Discrete(2), norm_obs=True)
    policy.load_state_dict(both[0]["start"])
    grpo.grpo_loss(policy, batch, 0.2, 0.1, 0.1)[0].backward()
    for parameter, given, other in zip(policy.parameters(), both[0]["gradient"], both[1]["gradient"]):
        assert torch.equal(given, other)
        torch.testing.assert_close(given, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", child.SCRIPTS)
def test_processes_stay_equal_and_count_their_steps_once(script):
    one, other = train_with_two(script, "--target-kl", "1e-3", "--num-minibatches", "2", "--update-epochs", "3")
    assert all(torch.equal(one["end"][name], other["end"][name]) for name in one["end"])
    assert one["end"]["obs_count"] > sum(one["sizes"])  # the statistics are of everyone's observations
    assert one["metrics"] == other["metrics"]
    steps = sum(one["sizes"]) + sum(other["sizes"])
    assert one["summary"]["steps"] == steps <= 900 and len(one["sizes"]) > 1
    assert not torch.equal(one["batch"]["obs"], other["batch"]["obs"])  # each plays episodes of its own
    assert other["summary"] == {} and len(one["dirs"]) == 1


@pytest.mark.parametrize("script", child.SCRIPTS)
def test_what_is_logged_is_of_the_episodes_of_all_processes(script):
    one, other = train_with_two(script)
    episodes = [mine + others for mine, others in zip(one["episodes"], other["episodes"])]  # of each iteration
    assert len(episodes) > 1 and all(seen["episodes"][-1] for seen in (one, other))
    recent = [episode[0] for iteration in episodes for episode in iteration][-100:]
    assert one["summary"]["train_return"] == pytest.approx(np.mean(recent), rel=1e-6)
    scalars = torch.load(one["summary"]["run_dir"] / "checkpoint.pt", weights_only=True)["run"]["scalars"]
    returns, lengths = zip(*episodes[-1])
    assert scalars["charts/episodic_return"] == pytest.approx(np.mean(returns), rel=1e-6)
    assert scalars["charts/episodic_length"] == pytest.approx(np.mean(lengths), rel=1e-6)


@pytest.mark.parametrize("script", [script for script in child.SCRIPTS if script != "ppo"])
def test_resumed_processes_go_on_as_if_there_had_been_no_stop(script):
    checkpoint = train_with_two(script, "--no-anneal-lr")[0]["summary"]["run_dir"] / "checkpoint.pt"
    resumed = train_with_two(script, "--resume", str(checkpoint), "--no-anneal-lr", "--total-timesteps", "1800")
    unbroken = train_with_two(script, "--no-anneal-lr", "--total-timesteps", "1800")
    for one, other in zip(resumed, unbroken):
        assert 0 < len(one["sizes"]) < len(other["sizes"]) and one["sizes"] == other["sizes"][-len(one["sizes"]) :]
        assert all(torch.equal(one["end"][name], other["end"][name]) for name in one["end"])


def test_ppo_normalizes_advantages_over_all_processes():
    both = train_with_two("ppo")
    advantages = torch.cat([seen["batch"]["advantages"] for seen in both])
    assert advantages.mean().abs() < 1e-5 and advantages.std() == pytest.approx(1, abs=1e-5)
    assert all(seen["batch"]["advantages"].mean().abs() > 1e-5 for seen in both)


def test_resumed_processes_play_episodes_of_their_own():
    """A checkpoint has the first process's episodes under way; they must not be the other's, too."""
    train_with_two("ppo")
    [checkpoint] = Path("runs").glob("*/checkpoint.pt")
    one, other = train_with_two("ppo", "--resume", str(checkpoint), "--total-timesteps", "1800")
    starts = [seen["batch"]["obs"][:2] for seen in (one, other)]  # two environments each
    assert not torch.equal(*starts) and len(torch.cat(starts).unique(dim=0)) == 4
    assert one["out"].count("All episodes start anew") == 1 and "start anew" not in other["out"]


def torchrun(*argv) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, argv)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def test_torchrun_prints_once_and_resumes():
    script = Path(child.ROOT, "grpo_rtg.py")
    process = torchrun(script, *SMALL, *SPLIT["grpo_rtg"])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("Trained") == out.count("Device:") == out.count("Greedy evaluation") == 1
    [run_dir] = Path("runs").iterdir()
    process = torchrun(script, "--resume", run_dir / "checkpoint.pt")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err.count("Nothing is left to train") == 1, err
    process = torchrun(script, "--resume", run_dir / "checkpoint.pt", "--total-timesteps", 1800)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    steps = [int(x.replace(",", "")) for x in re.findall(r"Trained ([\d,]+) steps", out)]
    assert len(steps) == 1 and 900 < steps[0] <= 1800


def test_a_killed_process_ends_the_run():
    process = torchrun(Path(child.ROOT, "grpo_rtg.py"), *SMALL[2:], *SPLIT["grpo_rtg"], "--total-timesteps", 10**9)
    deadline = time.monotonic() + 60
    while not list(Path.cwd().glob("runs/*/checkpoint.pt")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert list(Path.cwd().glob("runs/*/checkpoint.pt"))


def test_groups_that_cannot_be_split_are_refused(cli, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for script, option in (("grpo_rtg", "--num-groups"), ("ppo", "--num-envs")):
        status, _, err = cli(script, option, 3)
        assert status == 2 and f"{option} 3 cannot be split over 2 processes" in err
    status, _, err = cli("ppo", "--num-minibatches", 513)
    assert status == 2 and "--num-minibatches 513 is more than a process's 512 steps" in err


@pytest.mark.parametrize("script", child.SCRIPTS)
def test_the_command_that_resumes_starts_as_many_processes(script, monkeypatch):
    module, path = importlib.import_module(script), Path("runs/a/checkpoint.pt")
    assert module.next_command(module.Args(), "--resume", path).startswith("python ")
    monkeypatch.setenv("WORLD_SIZE", "4")
    resume, play = (module.next_command(module.Args(), option, path) for option in ("--resume", "--evaluate"))
    assert re.fullmatch(rf"torchrun --nproc-per-node=4 \S*{script}.py --resume {path}", resume)
    assert play.startswith("python ")


@pytest.mark.parametrize("script", child.SCRIPTS)
def test_a_process_lost_in_an_update_is_one_sentence(script, monkeypatch):
    """As one lost elsewhere."""

    def reset(_):
        raise RuntimeError("Connection reset by peer")

    def loss_fn(policy, batch):
        loss = sum(parameter.sum() for parameter in policy.parameters())
        return loss, {"policy_loss": loss.detach(), "approx_kl": loss.detach()}

    module = importlib.import_module(script)
    monkeypatch.setattr(module, "share", lambda value: [value, value])  # as of two processes
    monkeypatch.setattr(module.dist, "all_reduce", reset)
    network = module.ActorCritic if script == "ppo" else module.Policy
    policy = network(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2))
    batch = {"obs": torch.zeros(8, 4), "actions": torch.zeros(8, dtype=torch.int64)}
    rng, args = np.random.default_rng(0), module.Args(num_minibatches=1)
    with pytest.raises(module.UserError, match="has ended or cannot be reached: Connection reset by peer"):
        module.update(policy, module.Adam(policy.parameters()), loss_fn, batch, args, rng)


@pytest.mark.parametrize("script", child.SCRIPTS)
def test_a_world_without_torchrun_is_one_sentence(cli, script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = cli(script, *SPLIT[script])
    assert status == 2 and err.count("\n") == 1
    assert err.startswith(f"{script}.py: WORLD_SIZE is 2, but this is no process of torchrun's: ") and "RANK" in err


@pytest.mark.parametrize("script", child.SCRIPTS)
@pytest.mark.parametrize("variable, value", [("LOCAL_WORLD_SIZE", "2"), ("LOCAL_RANK", "1")])
def test_more_processes_than_gpus_are_refused(cli, script, variable, value, monkeypatch):
    """In every process, also one that has a GPU: it would wait for the others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(variable, value)
    status, _, err = cli(script, "--cuda")
    assert status == 2 and err == f"{script}.py: --cuda needs a GPU for each process, and this machine has 1.\n"
